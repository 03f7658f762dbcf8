"""Which frames of Qwen3-Omni become sound together, by profile. No torch.

The net is exact for any of them: a profile decides only how soon sound is there and what it costs. The first window can be one frame, as
nothing behind it is looked at. Sizes grow slowly: who is told to wait before he plays waits for the largest step between two of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from omnistage.models.common.speech.schedule import Schedule
from omnistage.models.interface import Profile

SCHEDULES: Mapping[str, tuple[int, ...]] = {
    Profile.LATENCY: (1, 1, 2, 3, 4, 6, 8),
    Profile.BALANCED: (2, 3, 4, 6, 8, 12),
    Profile.QUALITY: (4, 6, 8, 12),
    Profile.OFFLINE: (12,),
}
"""Frames of the windows; a frame is 80 ms. More than twelve at once cost hardly less each, and others would wait for them."""


def schedule_of(sizes: tuple[int, ...], frames_before: int) -> Schedule:
    """frames_before: see WaveConfig. No window is refreshed: each has exactly what the ones before it left."""
    return Schedule(sizes, ahead=0, block=1, context=frames_before, refresh=0)
