"""The tokenizer of `make-tiny qwen2.5-omni`: any vocabulary, with the special tokens and the chat form of Qwen2.5-Omni."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from omnistage.models.tiny.files import write_json
from omnistage.models.tiny.omni import QWEN_ROWS, template_of
from omnistage.models.tiny.qwen2_5_omni.sizes import Ids
from omnistage.models.tiny.qwen_vocabulary import QWEN_ENTRIES
from omnistage.models.tiny.tokenizer import ByteVocabulary, TokenizerDesign, write_files

SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>", "<|box_end|>", "<|quad_start|>"),
    *("<|quad_end|>", "<|vision_bos|>", "<|vision_eos|>", "<|vision_pad|>", "<|IMAGE|>", "<|VIDEO|>"),
)
ROLES = {
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
"""The names by which Transformers' processor asks for tokens."""

SPEAKERS = ("Chelsie", "Ethan")
QWEN_TTS = 151859
QWEN_SPEAKERS = 151872

TEMPLATE = """\
{%- if messages and messages[0]['role'] != 'system' -%}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}
{%- endif -%}
""" + template_of("<|vision_bos|><|IMAGE|><|vision_eos|>", "<|audio_bos|><|AUDIO|><|audio_eos|>", "<|vision_bos|><|VIDEO|><|vision_eos|>")

MAX_TOKENS = 32768
DESIGN = TokenizerDesign(SPECIAL, MAX_TOKENS, roles=ROLES, template=TEMPLATE, processor="Qwen2_5OmniProcessor")


def write_tokenizer(directory: Path, vocabulary: ByteVocabulary) -> Ids:
    """Write the tokenizer's files in the published layout. Returns the ids that the config must name."""
    added = write_files(directory, vocabulary, DESIGN)
    write_json(directory / "chat_template.json", {"chat_template": TEMPLATE})
    return _ids(vocabulary.entries, added)


def _ids(entries: Mapping[str, int], added: Mapping[str, int]) -> Ids:
    """The ids for the config. The Talker has some that are no tokens: as published in Qwen's vocabulary, otherwise after the last token."""
    last = max(added.values())
    published = len(entries) == QWEN_ENTRIES
    tts = QWEN_TTS if published else last + 1
    speakers = QWEN_SPEAKERS if published else tts + 3
    return Ids(
        pad=added["<|endoftext|>"],
        im_start=added["<|im_start|>"],
        im_end=added["<|im_end|>"],
        audio=added["<|AUDIO|>"],
        audio_bos=added["<|audio_bos|>"],
        audio_eos=added["<|audio_eos|>"],
        vision_bos=added["<|vision_bos|>"],
        vision_eos=added["<|vision_eos|>"],
        vision_pad=added["<|vision_pad|>"],
        image=added["<|IMAGE|>"],
        video=added["<|VIDEO|>"],
        user=entries["user"],
        tts_pad=tts,
        tts_bos=tts + 1,
        tts_eos=tts + 2,
        speakers={name: speakers + index for index, name in enumerate(SPEAKERS)},
        rows=QWEN_ROWS if published else -(-(speakers + len(SPEAKERS)) // 64) * 64,
    )
