"""The voices of a Qwen3-Omni checkpoint: each is an item of the Talker."""

from __future__ import annotations

from collections.abc import Mapping

USUAL = "ethan"
"""The default voice, as in Transformers' `generate`, if the checkpoint has it."""


def in_order(speakers: Mapping[str, int]) -> dict[str, int]:
    """The items of the voices by name, the default voice first."""
    return {name: speakers[name] for name in sorted(speakers, key=lambda name: name.lower() != USUAL)}
