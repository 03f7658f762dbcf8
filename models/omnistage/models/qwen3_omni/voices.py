"""The voices of a Qwen3-Omni checkpoint: an item of the Talker for each."""

from __future__ import annotations

from collections.abc import Mapping

USUAL = "ethan"
"""Speaks where no voice is named, if the checkpoint has him: so does Transformers' `generate`."""


def in_order(speakers: Mapping[str, int]) -> dict[str, int]:
    """The voices of a checkpoint, that which speaks where none is named first."""
    return {name: speakers[name] for name in sorted(speakers, key=lambda name: name.lower() != USUAL)}
