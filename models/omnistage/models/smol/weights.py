"""Loading a converted folder: config.json and model.safetensors, every weight present and no other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn


class BadCheckpoint(ValueError):
    """A folder that is not a complete converted model. The text says which file or weight."""


def read_config(directory: Path, model_type: str) -> dict[str, Any]:
    """config.json of the folder. Raises BadCheckpoint if it is missing or of another model."""
    path = directory / "config.json"
    if not path.is_file():
        raise BadCheckpoint(f"{path} is missing: give the folder of a converted model, or run `omnistage fetch-default`")
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if config.get("model_type") != model_type:
        raise BadCheckpoint(f"{path} is a {config.get('model_type')!r}, not a {model_type!r}")
    return config


def load_weights(net: nn.Module, directory: Path) -> None:
    """Put model.safetensors of the folder into `net`. Raises BadCheckpoint for a missing, unexpected or misshapen weight."""
    from safetensors.torch import load_file

    path = directory / "model.safetensors"
    if not path.is_file():
        raise BadCheckpoint(f"{path} is missing: run `omnistage fetch-default`")
    stored = load_file(path)
    wanted = {name: tuple(value.shape) for name, value in net.state_dict().items()}
    if missing := sorted(wanted.keys() - stored.keys()):
        raise BadCheckpoint(f"{path} lacks {len(missing)} weights, the first is {missing[0]}")
    if unexpected := sorted(stored.keys() - wanted.keys()):
        raise BadCheckpoint(f"{path} holds {len(unexpected)} weights this model does not have, the first is {unexpected[0]}")
    for name, shape in wanted.items():
        if tuple(stored[name].shape) != shape:
            raise BadCheckpoint(f"{path}: {name} is {tuple(stored[name].shape)}, not {shape}")
    net.load_state_dict(stored, assign=True)
    net.eval().requires_grad_(False)
