"""Checkpoints of Qwen2.5-Omni with random weights: Transformers takes them for published ones."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen2_5OmniForConditionalGeneration


def test_transformers_loads_every_weight_and_misses_none(omni_checkpoint: Path) -> None:
    kind = Qwen2_5OmniForConditionalGeneration
    load = super(kind, kind).from_pretrained.__func__  # type: ignore[attr-defined]  # its own does not tell what was missing
    model, report = load(kind, omni_checkpoint, output_loading_info=True, dtype="auto")
    assert {what: sorted(names) for what, names in report.items() if names} == {}
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
