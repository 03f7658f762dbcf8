"""What a config.json says of rotary positions on three axes."""

from __future__ import annotations

from dataclasses import dataclass

from omnistage.models.common.checkpoint import BadCheckpoint, Config

MOST_POSITIONS = 1 << 22
"""Of a decoder, for each of which there are angles in memory; four times as many as any published one has."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """sections: pairs of components of a head that turn by time, height and width, one behind the other."""

    theta: float
    sections: tuple[int, ...]


def rope_of(config: Config) -> RopeConfig:
    """Both spellings are read: `rope_theta` with `rope_scaling` of the published checkpoints, and `rope_parameters` of Transformers 5.
    Raises BadCheckpoint."""
    if config.has("rope_parameters"):
        rope = config.section("rope_parameters")
        theta = rope.value("rope_theta", float)
    else:
        rope = config.section("rope_scaling")
        theta = config.value("rope_theta", float)
    kind = rope.value("rope_type", str, "") or rope.value("type", str, "default")
    if kind not in ("default", "mrope"):
        raise BadCheckpoint(f"{config.place}: positions of the type {kind!r} are not supported, only the default ones")
    return RopeConfig(theta, rope.values("mrope_section", int))
