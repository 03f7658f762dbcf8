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
from omnistage.models.tiny.omni import build_vocabulary
from omnistage.models.tiny.qwen3_omni.checkpoint import config, fill
from omnistage.models.tiny.qwen3_omni.parts import write_tokenizer
from omnistage.models.tiny.qwen3_omni.sizes import SIZES, AudioSize, Size, TalkerSize, TextSize, ThinkerSize, VisionSize


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

VARIANTS: Mapping[str, tuple[ThinkerSize, int, Change]] = {
    TINY: (SIZES["tiny"].thinker, SIZES["tiny"].hidden_layer, {}),
    "chunks of 104 frames, patches of 10 pixels merged by nine, rows for deeper layers by weights in another order": (
        ThinkerSize(
            TextSize(layers=3, hidden=96, heads=4, kv_heads=4, head_size=48, rope_sections=(10, 8, 6), experts=5, chosen=2, expert=112),
            VisionSize(layers=4, hidden=112, ffn=176, heads=7, deepstack=(3, 0, 1), grid=5),
            AudioSize(layers=1, hidden=80, ffn=112, heads=5, channels=16, window=208),
        ),
        2,
        {
            "thinker_config.audio_config.n_window": 52,
            "thinker_config.vision_config.patch_size": 10,
            "thinker_config.vision_config.spatial_merge_size": 3,
            "thinker_config.vision_config.rope_parameters": {"rope_type": "axial", "rope_theta": 300.0},
            "thinker_config.text_config.norm_topk_prob": False,
            "thinker_config.position_id_per_seconds": 25,
        },
    ),
    "no rows for deeper layers, one head of keys, logits by the embedding": (
        ThinkerSize(
            TextSize(layers=2, hidden=224, heads=7, kv_heads=1, head_size=32, rope_sections=(8, 4, 4), experts=16, chosen=4, expert=48),
            VisionSize(layers=2, hidden=64, ffn=160, heads=2, deepstack=(), grid=9),
            AudioSize(layers=3, hidden=64, ffn=96, heads=2, channels=40, window=100),
        ),
        2,
        {"thinker_config.tie_word_embeddings": True},
    ),
    "rows for all layers, taken at the embedding": (
        ThinkerSize(
            TextSize(layers=2, hidden=128, heads=4, kv_heads=2, head_size=48, rope_sections=(12, 6, 6), experts=7, chosen=1, expert=96),
            VisionSize(layers=3, hidden=96, ffn=128, heads=4, deepstack=(1, 2), grid=11),
            AudioSize(layers=2, hidden=48, ffn=80, heads=3, channels=32, window=800),
        ),
        0,
        {},
    ),
}
"""Sizes, the layer whose rows the Talker takes, and what else its config.json says."""


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
    size, layer, change = VARIANTS[variant]
    values = config(Size(size, layer, TalkerSize()), write_tokenizer(folder, build_vocabulary()), "float32")
    fill(folder, changed(values, change), seed, torch.float32, show_nothing)
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
