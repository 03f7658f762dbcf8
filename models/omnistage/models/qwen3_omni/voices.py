"""The voices of a Qwen3-Omni checkpoint: an item of the Talker for each."""

from __future__ import annotations

from collections.abc import Mapping

USUAL = "ethan"
"""The default voice, as in Transformers' `generate`, if the checkpoint has it."""


def in_order(speakers: Mapping[str, int]) -> dict[str, int]:
    """The voices of a checkpoint, the default first."""
    return {name: speakers[name] for name in sorted(speakers, key=lambda name: name.lower() != USUAL)}
