"""Makes a checkpoint of Qwen3-Omni with random weights, in the published files: for tests, and for trials that need no sense.

The weights are drawn so that the model's answers are worth comparing: finite, different for different media, and not one token for ever. A
weight depends only on the seed and its own name, and is made by exact operations, so that every machine makes the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from omnistage.models.reports import ShowProgress
from omnistage.models.tiny.makers import CheckpointOrder
from omnistage.models.tiny.omni import added_gains, with_tokenizer, write_settings
from omnistage.models.tiny.qwen3_omni import parts
from omnistage.models.tiny.qwen3_omni.parts import TEMPLATE, THINKING_TEMPLATE, Ids, write_tokenizer
from omnistage.models.tiny.qwen3_omni.sizes import SIZES, Size
from omnistage.models.tiny.weights import write_weights

PREPROCESSOR = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "processor_class": "Qwen3OmniMoeProcessor"}
"""Entries of preprocessor_config.json that are added to the entries for both families."""

GAINS = (
    *(("thinker.lm_head.", 3.0), ("talker.codec_head.", 3.0), ("talker.code_predictor.lm_head.", 3.0)),
    *((".mlp.gate.", 3.0), (".self_attn.q_norm.", 2.1), (".self_attn.k_norm.", 2.1)),
)
"""By how much matrices and norms enlarge their input, by a part of their names; others by 1. Large gains in attention
keep an answer from repeating one token."""

DECODERS = {
    "thinker.model.": ("thinker_config", "text_config"),
    "talker.model.": ("talker_config", "text_config"),
    "talker.code_predictor.": ("talker_config", "code_predictor_config"),
}
"""The beginnings of the names of the decoders' weights, and the place of their sizes in the config."""


Configured = Callable[[Size, Ids, str], dict[str, Any]]
"""Makes a config.json; see `config`."""


def make(directory: Path, order: CheckpointOrder, progress: ShowProgress) -> None:
    """Fill an existing empty folder. Raises FetchError if the vocabulary of Qwen cannot be fetched."""
    _make(directory, order, progress, config, TEMPLATE)


def make_thinking(directory: Path, order: CheckpointOrder, progress: ShowProgress) -> None:
    """Do as `make` for a checkpoint that thinks before it answers and does not speak."""
    _make(directory, order, progress, thinking_config, THINKING_TEMPLATE)


def _make(directory: Path, order: CheckpointOrder, progress: ShowProgress, config: Configured, template: str) -> None:
    """Do the work of `make`. config: makes the contents of config.json. template: of chats."""
    size, dtype = SIZES[order.size], order.dtype or "float32"
    ids = with_tokenizer(directory, order, progress, partial(write_tokenizer, template=template))
    fill(directory, config(size, ids, dtype), order.seed, getattr(torch, dtype), progress)


def fill(directory: Path, values: Mapping[str, Any], seed: int, dtype: torch.dtype, progress: ShowProgress) -> None:
    """Write all files except the tokenizer's. values: the contents of config.json."""
    write_settings(directory, values, PREPROCESSOR)
    write(directory, values, seed, dtype, progress)


def config(size: Size, ids: Ids, dtype: str) -> dict[str, Any]:
    """The contents of config.json. dtype: "float32" or "bfloat16"."""
    thinker_config = parts.thinker_config(size.thinker, ids, dtype)
    repeated = {name: value for name, value in thinker_config.items() if name.endswith("_token_id")}
    return {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "assistant_token_id": ids.assistant,
        "code2wav_config": parts.code2wav_config(size.talker.groups, size.talker.codes),
        "dtype": dtype,
        "enable_audio_output": True,
        "im_end_token_id": ids.im_end,
        "im_start_token_id": ids.im_start,
        "model_type": "qwen3_omni_moe",
        "system_token_id": ids.system,
        "talker_config": parts.talker_config(size.talker, size.thinker.text.hidden, size.hidden_layer, repeated),
        "thinker_config": thinker_config,
        "transformers_version": "4.57.0.dev0",
        "tts_bos_token_id": ids.tts_bos,
        "tts_eos_token_id": ids.tts_eos,
        "tts_pad_token_id": ids.tts_pad,
        "user_token_id": ids.user,
    }


def thinking_config(size: Size, ids: Ids, dtype: str) -> dict[str, Any]:
    """The contents of config.json for a checkpoint that has a Thinker alone."""
    full_config = config(size, ids, dtype) | {"enable_audio_output": False}
    return {name: value for name, value in full_config.items() if name not in ("talker_config", "code2wav_config")}


def write(directory: Path, config: Mapping[str, Any], seed: int, dtype: torch.dtype, progress: ShowProgress) -> None:
    """Write the weights as shards with their index. Ids of the heads that are no token or no code are as likely as any other, as in
    published checkpoints: a server must ban them."""
    models = (("thinker", parts.thinker_weights), ("talker", parts.talker_weights), ("code2wav", parts.code2wav_weights))
    shapes = {
        name: shape
        for model, weights in models
        if f"{model}_config" in config
        for name, shape in weights(config[f"{model}_config"]).items()
    }
    distribution = partial(_distribution, adds=added_gains(config, DECODERS))
    write_weights(directory, shapes, seed, distribution, lambda name: dtype, progress)


def _distribution(name: str, shape: tuple[int, ...], adds: Mapping[str, float]) -> tuple[float, float]:
    """Mean and deviation of the numbers of a weight. adds: as from added_gains."""
    if name.startswith(parts.CODE2WAV_PREFIX):
        return parts.code2wav_distribution(name, shape)
    owner = name.split(".")[-2]
    gain = next((gain for part, gain in GAINS if part in name), 1.0)
    if name.endswith(".bias"):
        return 0.0, 0.1
    if len(shape) == 1:  # a norm
        return gain, 0.1
    if owner in ("embed_tokens", "pos_embed") or "embedding" in name:
        return 0.0, 1.0
    if owner in ("o_proj", "down_proj"):
        gain = next((gain for prefix, gain in adds.items() if name.startswith(prefix)), gain)
    return 0.0, gain / math.sqrt(math.prod(shape[1:]))
