"""Decides by profile which codes of Qwen2.5-Omni become sound together. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from omnistage.models.interface import Profile
from omnistage.models.qwen2_5_omni.wave.config import BACK_LAYERS
from omnistage.models.speech.schedule import Schedule

CONTEXT = BACK_LAYERS
"""Number of earlier blocks on which a block depends in one evaluation of the net."""

REFRESH_BLOCKS = 24
"""Least number of blocks between two refreshes, 5.8 s; each refresh computes CONTEXT blocks once more."""

SCHEDULES: Mapping[str, tuple[tuple[int, ...], int]] = {
    Profile.LATENCY: ((1, 1, 2, 3), 1),
    Profile.BALANCED: ((1, 2, 3, 6), 1),
    Profile.QUALITY: ((2, 3, 6), 2),
    Profile.OFFLINE: ((), 0),
}
"""Profile -> (numbers of blocks of the chunks, number of blocks that a window looks ahead)."""


def schedule_of(sizes: tuple[int, ...], blocks_ahead: int, block: int) -> Schedule:
    """The schedule of a profile. sizes, blocks_ahead: as in SCHEDULES. block: number of codes in a block."""
    return Schedule(sizes, blocks_ahead if sizes else 0, block, CONTEXT, REFRESH_BLOCKS)
