"""Code2Wavs of Qwen3-Omni with random weights, the same net in Transformers, and codes for them."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as modeling
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig

from helpers.waves import Codes
from omnistage.engine.linear import build_exact
from omnistage.models.checkpoint.files import WEIGHTS, Config
from omnistage.models.options import LoadOptions
from omnistage.models.qwen3_omni.family import MODEL_TYPE
from omnistage.models.qwen3_omni.wave.code2wav import CausalCode2Wav, load_code2wav
from omnistage.models.qwen3_omni.wave.config import WaveConfig, wave_config
from omnistage.models.qwen3_omni.wave.net import CausalNet
from omnistage.models.tiny import qwen3_omni as tiny

OTHER: Mapping[str, Any] = {
    **tiny.code2wav_config(5, 31),
    "attention_bias": True,
    "decoder_dim": 24,
    "hidden_size": 18,
    "intermediate_size": 20,
    "num_attention_heads": 3,
    "num_hidden_layers": 2,
    "num_key_value_heads": 3,
    "rope_theta": 500.0,
    "sliding_window": 6,
    "upsample_rates": [3, 2, 5],
    "upsampling_ratios": [3],
}
"""Unlike that of make-tiny in everything that a config may say: other frames, another reach, heads that share nothing."""


def written(folder: Path, config: Mapping[str, Any], seed: int) -> Path:
    """A checkpoint of nothing but Code2Wav."""
    folder.mkdir()
    tensors = {}
    for name, weight in tiny.part_weights({"code2wav_config": config}).items():
        tensors[name] = tiny.distribution({}).draw(name, tuple(weight.shape), seed)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": MODEL_TYPE, "code2wav_config": dict(config)}))
    return folder


def section(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "config.json").read_text())["code2wav_config"]
    return values


def loaded(folder: Path, **options: int | str) -> CausalCode2Wav:
    return load_code2wav(folder, LoadOptions(path=folder, family=options))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """By their names in the module of Transformers."""
    return {name.removeprefix("code2wav."): tensor for name, tensor in load_file(folder / WEIGHTS).items()}


def reference(folder: Path, dtype: torch.dtype) -> modeling.Qwen3OmniMoeCode2Wav:
    net = modeling.Qwen3OmniMoeCode2Wav(Qwen3OmniMoeCode2WavConfig(**section(folder)))
    net.load_state_dict(weights(folder))
    return net.eval().to(dtype)


def net_of(folder: Path, dtype: torch.dtype) -> CausalNet:
    found = weights(folder)
    return CausalNet(wave_config(Config(section(folder), str(folder))), lambda name, shape: found[name].to(dtype).reshape(shape))


def norms_in_float64(patch: pytest.MonkeyPatch) -> None:
    """Those of Transformers compute in float32 whatever they are given."""

    def forward(norm: Any, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = norm.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon))
        return made

    for kind in (modeling.Qwen3OmniMoeRMSNorm, modeling.Qwen3OmniMoeCode2WavRMSNorm):
        patch.setattr(kind, "forward", forward)


def drawn(model: CausalCode2Wav, source: random.Random, count: int) -> Codes:
    width, ids = model.config.codebooks, model.config.codes
    return np.array([source.randrange(ids) for _ in range(count * width)], np.uint32).reshape(count, width)


def shrunk(scale: int) -> CausalNet:
    """In the published proportions, a part of the published width and with fewer ids; random weights."""
    config = Qwen3OmniMoeCode2WavConfig().to_dict()
    widths = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "decoder_dim", "codebook_size")
    config |= {name: config[name] // scale for name in widths}
    weights = tiny.part_weights({"code2wav_config": config})

    def weight(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return tiny.distribution({}).draw(f"code2wav.{name}", tuple(weights[f"code2wav.{name}"].shape), 1).reshape(shape)

    device = torch.device("cpu")
    return build_exact(lambda linear: CausalNet(wave_config(Config(config, "shrunk")), weight, linear), torch.float32, device)[0]


def published_config() -> WaveConfig:
    """The config with the default values of Transformers, which are those of the published checkpoints."""
    return wave_config(Config(Qwen3OmniMoeCode2WavConfig().to_dict(), "published"))
