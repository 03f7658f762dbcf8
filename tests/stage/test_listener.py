"""A Code2Wav's account of its listener counts the sound that came too late, and no pause of the listener."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np
import pytest

from omnistage.code2wav.stage import Code2WavStage
from omnistage.models.interface import Content, Load, ModelInfo, Piece, PortSpec, Sound, Wanted, WaveRequest
from omnistage.stage.logic import SessionTiming, Start
from omnistage.v1 import stage_pb2

RATE_HZ = 8000
SOUND_S = 0.1


@dataclass
class SteppedClock:
    """Seconds that pass when a test says so: a busy machine adds none."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Late:
    """A Code2WavModel that makes four sounds, the third one late by `late_s`."""

    clock: SteppedClock
    late_s: float
    prebuffer_s: float | None
    threads = ()

    @property
    def info(self) -> ModelInfo:
        codes, audio = PortSpec("codes", Content.CODES, 50, 1), PortSpec("audio", Content.AUDIO, RATE_HZ, 1)
        return ModelInfo("late", "1", (codes,), (audio,), max_sessions=1)

    def load(self) -> Load:
        return Load()

    async def prepare(self, request: WaveRequest) -> WaveRequest:
        return request

    def first_frame(self, prepared: WaveRequest, sample: int) -> int:
        return 0

    async def decode(self, prepared: WaveRequest, inputs: AsyncIterator[Piece], ports: Wanted) -> AsyncGenerator[Sound, None]:
        for number in range(4):
            if number == 2:
                self.clock.now_s += 2 * SOUND_S + self.late_s
            yield Sound(np.zeros((round(SOUND_S * RATE_HZ), 1), np.float32), 0, None if number else self.prebuffer_s)

    async def warm_up(self) -> None: ...

    async def close(self) -> None: ...


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


async def test_a_listener_who_was_told_to_wait_long_enough_lacks_nothing() -> None:
    timing = await heard(0.5, 0, 60.0)
    assert (timing.audio_underruns, timing.audio_starved_s) == (0, 0)


async def test_a_listener_who_pauses_lacks_nothing() -> None:
    """Much longer than all of the sound."""
    timing = await heard(-2 * SOUND_S, 0.3)
    assert (timing.audio_underruns, timing.audio_starved_s) == (0, 0)
