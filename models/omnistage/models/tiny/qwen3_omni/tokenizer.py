"""The tokenizer of `make-tiny qwen3-omni`: any vocabulary, with the special tokens and the chat form of Qwen3-Omni."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from omnistage.models.text.answer import CLOSES, OPENS
from omnistage.models.tiny.files import write_json
from omnistage.models.tiny.omni import QWEN_ROWS, template_of
from omnistage.models.tiny.qwen_vocabulary import QWEN_ENTRIES
from omnistage.models.tiny.tokenizer import ORDINARY, VISION_SPECIAL, ByteVocabulary, TokenizerDesign, write_files

WRITTEN = (*ORDINARY, "<tool_response>", "</tool_response>", OPENS, CLOSES)
SPOKEN = (*("<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>", "<tts_text_bos_single>", "<|audio_pad|>"),)
"""Special tokens that stand last in the published vocabulary."""

ROLES = {
    "image_token": "<|image_pad|>",
    "audio_token": "<|audio_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
"""The names by which Transformers' processor asks for tokens."""

TEMPLATE = template_of(
    "<|vision_start|><|image_pad|><|vision_end|>",
    "<|audio_start|><|audio_pad|><|audio_end|>",
    "<|vision_start|><|video_pad|><|vision_end|>",
)

THINKING_TEMPLATE = TEMPLATE.replace(
    "{{- message['content'] -}}",
    """\
{%- if message['role'] == 'assistant' -%}
{{- message['content'].split('CLOSES')[-1].lstrip('\\n') -}}
{%- else -%}
{{- message['content'] -}}
{%- endif -%}""".replace("CLOSES", CLOSES),
).replace("assistant\\n' -}}", f"assistant\\n{OPENS}\\n' -}}}}")
"""The template of Thinking: an answer begins within a thought, and the thoughts of earlier answers are left out."""

MAX_TOKENS = 131072
DESIGN = TokenizerDesign(VISION_SPECIAL, MAX_TOKENS, WRITTEN, SPOKEN, ROLES, TEMPLATE, "Qwen3OmniMoeProcessor", repeats=False)


@dataclass(frozen=True, slots=True)
class Ids:
    """Token ids that the config names. rows: number of rows of the embedding."""

    im_start: int
    im_end: int
    system: int
    user: int
    assistant: int
    image: int
    video: int
    audio: int
    vision_start: int
    vision_end: int
    audio_start: int
    audio_end: int
    tts_pad: int
    tts_bos: int
    tts_eos: int
    rows: int


def write_tokenizer(directory: Path, vocabulary: ByteVocabulary, template: str = TEMPLATE) -> Ids:
    """Write the tokenizer's files in the published layout. Returns the ids that the config must name."""
    added = write_files(directory, vocabulary, replace(DESIGN, template=template))
    write_json(directory / "chat_template.json", {"chat_template": template})
    words = {name: vocabulary.entries[name] for name in ("system", "user", "assistant")}
    marks = {
        **{name: f"<|{name}|>" for name in ("im_start", "im_end", "vision_start", "vision_end", "audio_start", "audio_end")},
        **{name: f"<|{name}_pad|>" for name in ("image", "video", "audio")},
        "tts_pad": "<tts_pad>",
        "tts_bos": "<tts_text_bos>",
        "tts_eos": "<tts_text_eod>",
    }
    # The last rows of the embedding belong to no token, as in the published embedding.
    rows = QWEN_ROWS if len(vocabulary.entries) == QWEN_ENTRIES else (max(added.values()) // 64 + 2) * 64
    return Ids(**words, **{name: added[mark] for name, mark in marks.items()}, rows=rows)
