"""LoRA files with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from omnistage.models.diffusers.lora import METADATA


def random_lora(pipe: Any, part: str, path: Path, *, rank: int = 4, seed: int = 0, said: dict[str, Any] | None = None) -> Path:
    """Of the queries of one part, which it changes by much. said: of itself."""
    draws, weights = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    for name, module in getattr(pipe, part).named_modules():
        if name.endswith("to_q"):
            weights[f"{part}.{name}.lora_A.weight"] = torch.randn(rank, module.in_features, generator=draws)
            weights[f"{part}.{name}.lora_B.weight"] = torch.randn(module.out_features, rank, generator=draws)
    save_file(weights, path, {} if said is None else {METADATA: json.dumps({f"{part}.{name}": value for name, value in said.items()})})
    return path
