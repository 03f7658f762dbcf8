"""Decides by profile which frames of Qwen3-Omni become sound together. No torch.

The net makes the same samples with every schedule, so a profile decides only how soon there is sound and how much it costs. The first
window can be one frame, because no window looks ahead. Sizes grow slowly: the largest step between two sizes decides how long a player must
wait before it plays."""

from __future__ import annotations

from collections.abc import Mapping

from omnistage.models.interface import Profile
from omnistage.models.speech.schedule import Schedule

SCHEDULES: Mapping[str, tuple[int, ...]] = {
    Profile.LATENCY: (1, 1, 2, 3, 4, 6, 8),
    Profile.BALANCED: (2, 3, 4, 6, 8, 12),
    Profile.QUALITY: (4, 6, 8, 12),
    Profile.OFFLINE: (12,),
}
"""Profile -> numbers of frames of the windows; a frame is 80 ms. With more than twelve frames at once a frame costs hardly less, and other
speeches would wait longer."""


def schedule_of(sizes: tuple[int, ...], frames_before: int) -> Schedule:
    """The schedule of a profile. sizes: as in SCHEDULES. frames_before: see WaveConfig. No window is refreshed: each gets the exact state
    of the windows before it."""
    return Schedule(sizes, ahead=0, block=1, context=frames_before, refresh=0)
