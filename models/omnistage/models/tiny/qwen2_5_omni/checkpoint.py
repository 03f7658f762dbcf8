"""Makes a checkpoint of Qwen2.5-Omni with random weights, in the published files: for tests, and for trials that need no sense. Its
tokenizer has any vocabulary, with the special tokens and the chat form of Qwen2.5-Omni.

The weights are drawn so that the model's answers are worth comparing: finite, different for different media, and not one token for ever. A
weight depends only on the seed and its own name, and is made by exact operations, so that every machine makes the same bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration

from omnistage.models.reports import ShowProgress
from omnistage.models.tiny.makers import CheckpointOrder, write_json
from omnistage.models.tiny.omni import QWEN_ENTRIES, QWEN_ROWS, added_gains, published_name, template_of, with_tokenizer, write_settings
from omnistage.models.tiny.qwen2_5_omni.sizes import MEL_BINS, SIZES, Ids, Size, config
from omnistage.models.tiny.tokenizer import ByteVocabulary, TokenizerDesign, write_files
from omnistage.models.tiny.weights import noise, state_of, write_weights

PREPROCESSOR = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "processor_class": "Qwen2_5OmniProcessor",
}
"""Entries of preprocessor_config.json that are added to the entries for both families."""


def make(directory: Path, order: CheckpointOrder, progress: ShowProgress) -> None:
    """Fill an existing empty folder. Raises FetchError if the vocabulary of Qwen cannot be fetched."""
    size = SIZES[order.size]
    dtype = order.dtype or size.dtype
    ids = with_tokenizer(directory, order, progress, write_tokenizer)
    values = config(size, ids, dtype)
    write_settings(directory, values, PREPROCESSOR)
    torch.save(_speakers(size, ids, order.seed), directory / "spk_dict.pt")
    write_shards(directory, values, order.seed, getattr(torch, dtype), progress)


def _speakers(size: Size, ids: Ids, seed: int) -> dict[str, dict[str, Any]]:
    """The contents of spk_dict.pt: for each voice its token, vector [1, speaker], and an example's mel frames [1, frames, 80], float32."""
    return {
        name: {
            "bos_token": number,
            "cond": noise(f"{name} cond", (1, size.dit.speaker), seed),
            "ref_mel": noise(f"{name} ref_mel", (1, size.voice_frames, MEL_BINS), seed, 2.0) - 5.0,
        }
        for name, number in ids.speakers.items()
    }


# The tokenizer -----------------------------------------------------------------------------------------------------------------------


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


# The weights -------------------------------------------------------------------------------------------------------------------------


GAINS = (
    ("thinker.lm_head.", 3.0),
    ("talker.codec_head.", 3.0),
    (".self_attn.q_proj.", 2.1),
    (".self_attn.k_proj.", 2.1),
    (".resblocks.", 0.5),
    (".conv_post.", 0.2),
)
"""By how much matrices enlarge their input, by a part of their names; others by 1. Large gains in attention make it sharp, so an answer
does not repeat one token; small gains in the vocoder keep its sound below full scale."""

DECODERS = {"thinker.model.": ("thinker_config", "text_config"), "talker.model.": ("talker_config",)}
"""The beginnings of the names of the decoders' weights, and the place of their sizes in the config."""


def weight_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of every weight of a checkpoint with this config.json, by published name."""
    state = state_of(lambda: Qwen2_5OmniForConditionalGeneration(Qwen2_5OmniConfig(**config)))
    return {published_name(name): tuple(value.shape) for name, value in state.items()}


def write_shards(directory: Path, config: Mapping[str, Any], seed: int, dtype: torch.dtype, progress: ShowProgress) -> None:
    """Write the weights as shards with their index. Code2Wav is always float32, as published. Ids of the heads that are no token or no code
    are as likely as any other, as in published checkpoints: a server must ban them."""
    distribution = partial(_distribution, adds=added_gains(config, DECODERS))
    write_weights(directory, weight_shapes(config), seed, distribution, partial(_dtype, dtype=dtype), progress)


def _dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if name.startswith("token2wav.") else dtype


def _distribution(name: str, shape: tuple[int, ...], adds: Mapping[str, float]) -> tuple[float, float]:
    """Mean and deviation of the numbers of a weight. adds: as from added_gains."""
    owner = name.split(".")[-2]
    if name.endswith(".bias"):
        return 0.0, 0.1
    if owner == "act":  # the snakes of the vocoder: logarithms of their frequencies and inverse heights
        return 0.0, 0.1
    if len(shape) == 1:  # a norm
        return 1.0, 0.1
    if owner in ("embed_tokens", "audio_bos_eos_token", "codec_embed"):
        return 0.0, 1.0
    inputs = shape[0] * 2 if ".ups." in name else math.prod(shape[1:])  # two steps of a transposed convolution meet in each sample
    gain = next((gain for part, gain in GAINS if part in name), 1.0)
    if owner in ("o_proj", "down_proj"):
        gain = next((gain for prefix, gain in adds.items() if name.startswith(prefix)), gain)
    return 0.0, gain / math.sqrt(inputs)
