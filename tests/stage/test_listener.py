"""The listener that Code2Wav imagines: its account counts the sound that came too late, and no pause of the listener."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np
import pytest

from omnistage.code2wav.stage import GRACE_S, Code2WavStage, Playhead
from omnistage.models.interface import Piece, Sound, Wanted, WaveRequest
from omnistage.models.toy.formulas import SAMPLE_RATE_HZ
from omnistage.models.toy.stages import ToyCode2Wav, ToyOptions
from omnistage.stage.logic import SessionTiming, Start
from omnistage.v1 import stage_pb2


def test_who_always_has_something_to_play_is_not_starved() -> None:
    player = Playhead()
    for now, seconds in ((1.0, 0.5), (1.4, 0.2), (1.7 + GRACE_S / 2, 0.3)):
        player.hear(now, seconds)
    assert (player.underruns, player.starved_s) == (0, 0.0)


def test_silence_is_counted_as_often_and_as_long_as_it_is(seed: int) -> None:
    """Beside a player that asks at every millisecond whether there is something to play."""
    source = random.Random(seed)
    for _ in range(50):
        wait_s, now = source.choice([0.0, 0.3]), 0
        sounds = [(now := now + source.randint(1, 500), source.randint(1, 500)) for _ in range(30)]
        player = Playhead()
        for at, length in sounds:
            player.hear(at / 1000, length / 1000, wait_s)
        begins, held, silences = sounds[0][0] + round(1000 * wait_s), 0, list[int]()
        came = dict(sounds)
        silent = 0
        for at in range(sounds[0][0], sounds[-1][0] + 1):
            if at in came:
                held += came[at]
                silences += [silent] * (silent > 0)
                silent = 0
            if at >= begins:
                silent += held == 0
                held -= held > 0
        counted = [length for length in silences if length > 1000 * GRACE_S]
        assert player.underruns == pytest.approx(len(counted), abs=2)
        assert player.starved_s == pytest.approx(sum(counted) / 1000, abs=0.002 * len(sounds) + 0.04)


SOUND_S = 0.1


@dataclass
class SteppedClock:
    """Seconds that pass when a test says so: a busy machine adds none."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


class Late(ToyCode2Wav):
    """Makes four sounds, the third one late by `late_s`."""

    def __init__(self, clock: SteppedClock, late_s: float, prebuffer_s: float | None) -> None:
        super().__init__(ToyOptions())
        self.clock, self.late_s, self.prebuffer_s = clock, late_s, prebuffer_s

    async def decode(self, prepared: WaveRequest, inputs: AsyncIterator[Piece], ports: Wanted) -> AsyncGenerator[Sound, None]:
        for number in range(4):
            if number == 2:
                self.clock.now_s += 2 * SOUND_S + self.late_s
            yield Sound(np.zeros((round(SOUND_S * SAMPLE_RATE_HZ), 1), np.float32), 0, None if number else self.prebuffer_s)


async def nothing() -> AsyncIterator[object]:
    return
    yield


async def heard(late_s: float, pause_s: float, prebuffer_s: float | None = None) -> SessionTiming:
    """pause_s: before each sound is taken."""
    clock, timing = SteppedClock(), SessionTiming()
    stage = Code2WavStage(Late(clock, late_s, prebuffer_s), clock)
    opened = stage_pb2.Open(params=stage_pb2.StageParams(code2wav=stage_pb2.Code2WavParams()))
    work = await stage.prepare(opened, Start())
    async with aclosing(work.run(nothing(), timing, Start())) as outputs:  # type: ignore[arg-type]
        async for _ in outputs:
            clock.now_s += pause_s
    return timing


@pytest.mark.parametrize("prebuffer_s", [None, 0.0, 0.2])
async def test_sound_that_is_made_late_is_counted(prebuffer_s: float | None) -> None:
    timing = await heard(0.5, 0, prebuffer_s)
    assert timing.audio_underruns == 1
    assert timing.audio_starved_s == pytest.approx(0.5 - (prebuffer_s or 0))


@pytest.mark.parametrize(
    ("late_s", "pause_s", "prebuffer_s"), [(0.5, 0, 60.0), (-2 * SOUND_S, 0.3, None)], ids=["told to wait long enough", "pauses"]
)
async def test_such_a_listener_lacks_nothing(late_s: float, pause_s: float, prebuffer_s: float | None) -> None:
    """A pause that is much longer than all of the sound."""
    timing = await heard(late_s, pause_s, prebuffer_s)
    assert (timing.audio_underruns, timing.audio_starved_s) == (0, 0)
