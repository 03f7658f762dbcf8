"""The tokenizer of the drawing checkpoints with random weights, with the special tokens of Qwen2.5-VL.

The pipelines cut a constant number of tokens off an encoded prompt, as many as their instruction has in Qwen's own vocabulary. There each
word of the instruction is one token, so it is one token here too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from omnistage.models.text.answer import CLOSES, OPENS
from omnistage.models.tiny.tokenizer import ORDINARY, TRAINING, VISION_SPECIAL, ByteVocabulary, TokenizerDesign, train, write_files

MAX_TOKENS = 131072
VOCABULARY = 800
REPEATS = 20
"""How often the training reads the instructions: so often that each of their words becomes one token before other merges."""

INSTRUCTIONS = """\
system
user
assistant
Describe the key features of an input image by detailing its shape, size, texture, quantity, color, objects and background:
The text. Generate a new image that meets the user's requirements while maintaining consistency with the original input where appropriate.
Describe (color, spatial relationships of text, background), then explain how the instruction should alter or modify it.
"""

PROMPTS = """\
A red circle on a blue background. A small green triangle above a large yellow square. A photo of a cat that sleeps on a wooden chair.
Make the sky darker. Remove the house from the picture. Put the letters "OPEN" on the door. A watercolour of a lighthouse at night.
Picture 1: a white dog. Picture 2: an orange fish in a glass bowl. Low quality, blurred, distorted.
"""

TEMPLATE = """\
{%- if messages and messages[0]['role'] != 'system' and system_prompt -%}
{{- '<|im_start|>system\\n' + system_prompt + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' or 'image' in part or 'image_url' in part -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif 'text' in part -%}
{{- part['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and not enable_thinking -%}
{{- 'OPENS\\n\\nCLOSES\\n\\n' -}}
{%- endif -%}
{%- endif -%}
""".replace("OPENS", OPENS).replace("CLOSES", CLOSES)
VISION_TEMPLATE = "{%- set system_prompt = 'You are a helpful assistant.' -%}\n" + TEMPLATE
"""Qwen2.5-VL has a default system prompt; Qwen3 has none."""


@dataclass(frozen=True, slots=True)
class WordIds:
    """Token ids that configs must name. rows: number of rows of the embedding; some belong to no token."""

    pad: int
    im_start: int
    im_end: int
    vision_start: int
    vision_end: int
    image: int
    video: int
    rows: int


def build_vocabulary() -> ByteVocabulary:
    """A small vocabulary that knows the words of the instructions."""
    return train([*INSTRUCTIONS.splitlines() * REPEATS, *PROMPTS.splitlines(), *TRAINING.splitlines()], VOCABULARY)


def write_tokenizer(directory: Path, vocabulary: ByteVocabulary, template: str, processor: str = "") -> WordIds:
    """Write the files of a tokenizer in the published layout. processor: the class of the processor it belongs to, if any."""
    added = write_files(directory, vocabulary, TokenizerDesign(VISION_SPECIAL, MAX_TOKENS, (*ORDINARY, OPENS, CLOSES), processor=processor))
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    return WordIds(
        pad=added["<|endoftext|>"],
        im_start=added["<|im_start|>"],
        im_end=added["<|im_end|>"],
        vision_start=added["<|vision_start|>"],
        vision_end=added["<|vision_end|>"],
        image=added["<|image_pad|>"],
        video=added["<|video_pad|>"],
        rows=-(-(max(added.values()) + 1) // 64) * 64,
    )
