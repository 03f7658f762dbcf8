"""Checkpoints of Qwen2.5-Omni and Qwen3-Omni with random weights, which all tests of a run share: as make-tiny makes them, and others,
which a Thinker takes for those of a whole chain; copies to be changed, and weights in fewer bits."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from omnistage.models.reports import show_nothing
from omnistage.models.tiny.makers import CheckpointOrder, make_tiny
from omnistage.models.tiny.omni import write_tokenizer
from omnistage.models.tiny.qwen3_omni import DESIGN, SIZES, config, fill
from omnistage.models.tiny.tokenizer import train


def omni_checkpoint(factory: pytest.TempPathFactory, order: CheckpointOrder | None = None) -> Path:
    """Its folder, which nobody may write to. All processes of a run get the same one for the same order."""
    order = order or CheckpointOrder()
    name = f"omni-{order.size}-{order.seed}-{order.tokenizer}-{order.dtype or 'default'}"
    return shared_folder(factory, name, lambda folder: make_tiny("qwen2.5-omni", folder, order))


def shared_folder(factory: pytest.TempPathFactory, name: str, fill: Callable[[Path], object]) -> Path:
    """A folder that all processes of a run share; the first that asks for it fills it."""
    base = factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = shared / name
    with (shared / f"{name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            (work := shared / f"{name}.making").mkdir()
            fill(work)
            work.rename(folder)
    return folder


def linked(checkpoint: Path, folder: Path, *omitted: str) -> Path:
    """A copy of a checkpoint in a folder: links, which whoever changes a file replaces. omitted: names of files."""
    folder.mkdir(exist_ok=True)
    for path in checkpoint.iterdir():
        if path.name not in omitted:
            (folder / path.name).symlink_to(path)
    return folder


def change_json(path: Path, how: Callable[[Any], object]) -> None:
    """Changes the content of a file in JSON, which may be a link."""
    values = json.loads(path.read_text())
    how(values)
    path.unlink()
    path.write_text(json.dumps(values))


Change = Mapping[str, Any]
"""Values of config.json by their paths, with points between the names."""

Weights = dict[str, torch.Tensor]

TINY = "as make-tiny makes it"

VARIANTS: Mapping[str, tuple[Mapping[str, Any], Change]] = {
    TINY: ({}, {}),
    "chunks of 104 frames, patches of 10 pixels merged by nine, rows for deeper layers by weights in another order": (
        {
            "text": {"num_hidden_layers": 3, "hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 48},
            "experts": {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 112},
            "vision": {"depth": 4, "hidden_size": 112, "intermediate_size": 176, "num_heads": 7, "deepstack_visual_indexes": [3, 0, 1]},
            "grid": 5,
            "audio": {"encoder_layers": 1, "d_model": 80, "encoder_ffn_dim": 112, "encoder_attention_heads": 5},
            "convolutions": {"downsample_hidden_size": 16, "n_window_infer": 208},
            "hidden_layer": 2,
        },
        {
            "thinker_config.audio_config.n_window": 52,
            "thinker_config.vision_config.patch_size": 10,
            "thinker_config.vision_config.spatial_merge_size": 3,
            "thinker_config.vision_config.rope_parameters": {"rope_type": "axial", "rope_theta": 300.0},
            "thinker_config.text_config.rope_scaling.mrope_section": [10, 8, 6],
            "thinker_config.text_config.norm_topk_prob": False,
            "thinker_config.position_id_per_seconds": 25,
        },
    ),
    "no rows for deeper layers, one head of keys, logits by the embedding": (
        {
            "text": {"num_hidden_layers": 2, "hidden_size": 224, "num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 32},
            "experts": {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 48},
            "vision": {"depth": 2, "hidden_size": 64, "intermediate_size": 160, "num_heads": 2, "deepstack_visual_indexes": []},
            "grid": 9,
            "audio": {"encoder_layers": 3, "d_model": 64, "encoder_ffn_dim": 96, "encoder_attention_heads": 2},
            "convolutions": {"downsample_hidden_size": 40, "n_window_infer": 100},
            "hidden_layer": 2,
        },
        {"thinker_config.text_config.rope_scaling.mrope_section": [8, 4, 4], "thinker_config.tie_word_embeddings": True},
    ),
    "rows for all layers, taken at the embedding": (
        {
            "text": {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 48},
            "experts": {"num_experts": 7, "num_experts_per_tok": 1, "moe_intermediate_size": 96},
            "vision": {"depth": 3, "hidden_size": 96, "intermediate_size": 128, "num_heads": 4, "deepstack_visual_indexes": [1, 2]},
            "grid": 11,
            "audio": {"encoder_layers": 2, "d_model": 48, "encoder_ffn_dim": 80, "encoder_attention_heads": 3},
            "convolutions": {"downsample_hidden_size": 32, "n_window_infer": 800},
            "hidden_layer": 0,
        },
        {"thinker_config.text_config.rope_scaling.mrope_section": [12, 6, 6]},
    ),
}
"""Sizes unlike those of make-tiny, and what else its config.json says."""


def changed(values: dict[str, Any], change: Change) -> dict[str, Any]:
    for path, value in change.items():
        *sections, name = path.split(".")
        reduce(dict.__getitem__, sections, values)[name] = value
    return values


def change_weights(folder: Path, how: Callable[[Weights], Weights]) -> None:
    """All of them are in one file afterwards."""
    weights = Weights()
    for path in sorted(folder.glob("*.safetensors")):
        weights |= load_file(path)
        path.unlink()
    (folder / "model.safetensors.index.json").unlink()
    save_file(how(weights), folder / "model.safetensors", {"format": "pt"})


def made(folder: Path, variant: str, seed: int) -> Path:
    size, change = VARIANTS[variant]
    values = config({**SIZES["tiny"], **size}, write_tokenizer(folder, train(), DESIGN), "float32")
    fill(folder, changed(values, change), seed, show_nothing)
    if values["thinker_config"].get("tie_word_embeddings"):
        change_weights(folder, _without_head)
    return folder


def _without_head(weights: Weights) -> Weights:
    """The embedding is the head too. It is small beside what layers add to a row: else each token would say itself again."""
    del weights["thinker.lm_head.weight"]
    weights["thinker.model.embed_tokens.weight"] *= 0.1
    return weights


def shared_checkpoint(factory: pytest.TempPathFactory, name: str = "qwen3") -> Path:
    """One of make-tiny, which nobody may write to. All processes of a run get the same."""
    return shared_folder(factory, name, lambda folder: made(folder, TINY, 0))


def in_blocks(name: str, weight: torch.Tensor, block: tuple[int, int]) -> dict[str, torch.Tensor]:
    """The weight in 8-bit floats, and the scales of its blocks."""
    grid = [range(0, size, of) for size, of in zip(weight.shape[-2:], block, strict=True)]
    rows = [[weight[..., top : top + block[0], left : left + block[1]] for left in grid[1]] for top in grid[0]]
    scales = torch.stack([torch.stack([part.abs().amax((-2, -1)) / 448 for part in parts], -1) for parts in rows], -2)
    height, width = weight.shape[-2:]
    spread = scales.repeat_interleave(min(block[0], height), -2).repeat_interleave(min(block[1], width), -1)[..., :height, :width]
    return {name: (weight / spread).to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}
