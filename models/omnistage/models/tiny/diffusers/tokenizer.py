"""The tokenizer of checkpoints with random weights: byte-level as Qwen's, trained in place, with the special tokens of Qwen2.5-VL.

The pipelines cut a constant number of tokens off an encoded prompt, as many as their instruction has in Qwen's own vocabulary. There each
of its words is one token, so each is one here too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from omnistage.models.tiny.qwen2_5_omni.tokenizer import ORDINARY, SPLIT, TRAINING

SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>"),
    *("<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
MAX_TOKENS = 131072
VOCABULARY = 800
REPEATS = 20
"""How often the words below are read: often enough that each becomes one token before anything else is merged."""

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
{{- '<think>\\n\\n</think>\\n\\n' -}}
{%- endif -%}
{%- endif -%}
"""
VISION_TEMPLATE = "{%- set system_prompt = 'You are a helpful assistant.' -%}\n" + TEMPLATE
"""Qwen2.5-VL says what it is where nobody else does; Qwen3 does not."""


@dataclass(frozen=True, slots=True)
class Ids:
    """What configs must name. rows: of the embedding, with some that no token has."""

    pad: int
    im_start: int
    im_end: int
    vision_start: int
    vision_end: int
    image: int
    video: int
    rows: int


@dataclass(frozen=True, slots=True)
class Trained:
    """A trained tokenizer: its entries and merges, and the ids of what is added to them."""

    tokenizer: Tokenizer
    entries: Mapping[str, int]
    merges: list[tuple[str, str]]
    added: Mapping[str, int]

    def ids(self) -> Ids:
        """The ids that configs must name."""
        return Ids(
            pad=self.added["<|endoftext|>"],
            im_start=self.added["<|im_start|>"],
            im_end=self.added["<|im_end|>"],
            vision_start=self.added["<|vision_start|>"],
            vision_end=self.added["<|vision_end|>"],
            image=self.added["<|image_pad|>"],
            video=self.added["<|video_pad|>"],
            rows=-(-(max(self.added.values()) + 1) // 64) * 64,
        )


def trained() -> Trained:
    """The same each time."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False)
    tokenizer.train_from_iterator([*INSTRUCTIONS.splitlines() * REPEATS, *PROMPTS.splitlines(), *TRAINING.splitlines()], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in _ordinary()])
    added = {token: len(model["vocab"]) + index for index, token in enumerate((*SPECIAL, *_ordinary()))}
    return Trained(tokenizer, model["vocab"], [(left, right) for left, right in model["merges"]], added)


def write(directory: Path, trained: Trained, template: str, processor: str = "") -> None:
    """Write the files of a tokenizer in the published layout. processor: the class of the processor it belongs to, if any."""
    directory.mkdir(exist_ok=True)
    trained.tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "merges.txt").write_text(
        "#version: 0.2\n" + "".join(f"{left} {right}\n" for left, right in trained.merges), encoding="utf-8"
    )
    _json(directory / "vocab.json", dict(trained.entries), indent=None)
    _json(directory / "added_tokens.json", dict(trained.added))
    _json(
        directory / "special_tokens_map.json",
        {"additional_special_tokens": list(SPECIAL[1:]), "eos_token": _token("<|im_end|>"), "pad_token": _token("<|endoftext|>")},
    )
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    _json(
        directory / "tokenizer_config.json",
        {
            "add_bos_token": False,
            "add_prefix_space": False,
            "added_tokens_decoder": {str(number): _token(token) | {"special": token in SPECIAL} for token, number in trained.added.items()},
            "additional_special_tokens": list(SPECIAL[1:]),
            "bos_token": None,
            "clean_up_tokenization_spaces": False,
            "eos_token": "<|im_end|>",
            "errors": "replace",
            "extra_special_tokens": {},
            "model_max_length": MAX_TOKENS,
            "pad_token": "<|endoftext|>",
            **({"processor_class": processor} if processor else {}),
            "split_special_tokens": False,
            "tokenizer_class": "Qwen2Tokenizer",
            "unk_token": None,
        },
    )


def _ordinary() -> tuple[str, ...]:
    """Added too, but text: who leaves special tokens out keeps them."""
    return (*ORDINARY, "<think>", "</think>")


def _token(text: str) -> dict[str, Any]:
    return {"content": text, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}


def _json(path: Path, value: Any, indent: int | None = 2) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=indent) + "\n", encoding="utf-8")
