"""Loading model.safetensors of a converted folder: every weight present and no other."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from omnistage.models.smol.checkpoint import BadCheckpoint


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
