"""When a peer counts as silent: which gaps a listener holds against it, and which not. The tests set the listener's time themselves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest

from helpers.servers import local_stage, toy_logic
from helpers.waiting import until
from omnistage.link import liveness as pulse_rules
from omnistage.link.liveness import HESITATION, SILENCE, TICK_S, Channels, Hedges, Pulse, Pulses, Rhythm
from omnistage.v1 import stage_pb2, stage_pb2_grpc
from omnistage.wire.channel import Credentials, server_options


def gap(rhythm: Rhythm, ticks: int, period_s: float = TICK_S) -> None:
    """Some ticks of silence, then a beat."""
    for _ in range(ticks):
        rhythm.tick()
    rhythm.beat(period_s)


def test_a_steady_peer_is_given_up_after_a_second() -> None:
    rhythm = Rhythm()
    for _ in range(100):
        gap(rhythm, 1)
    assert (rhythm.hesitation, rhythm.silence) == (1 + HESITATION, SILENCE)


def test_an_open_is_asked_elsewhere_after_three_tenths_of_a_second() -> None:
    """The time is that of docs/failover.md."""
    rhythm = Rhythm()
    gap(rhythm, 1)
    assert TICK_S * rhythm.hesitation == pytest.approx(0.3)


def test_a_slow_peer_shows_it_before_it_can_be_taken_for_dead() -> None:
    rhythm = Rhythm()
    gap(rhythm, SILENCE - 3)
    assert rhythm.silence == min(pulse_rules.GAPS * (SILENCE - 3), pulse_rules.LONGEST) > SILENCE
    for _ in range(2000):
        gap(rhythm, 1)
    assert rhythm.silence == SILENCE, "what was long ago counts no more"


@pytest.mark.parametrize("period_s", [-1.0, 0.0, 1e9, float(2**63 - 1)])
def test_a_peer_that_states_an_impossible_period_is_given_up_like_an_old_one_at_the_latest(period_s: float) -> None:
    rhythm = Rhythm()
    gap(rhythm, 1, period_s)
    assert SILENCE <= rhythm.silence <= pulse_rules.PERIODS * SILENCE


def test_the_patience_with_a_slow_peer_has_an_end() -> None:
    rhythm = Rhythm()
    for ticks in (8, 20, 29, 29):
        gap(rhythm, ticks)
    assert rhythm.silence == pulse_rules.LONGEST


def test_what_a_silent_peer_slept_is_no_gap_of_its_rhythm() -> None:
    rhythm = Rhythm()
    gap(rhythm, 1)
    gap(rhythm, 500)
    assert rhythm.silence == SILENCE


def test_an_older_peer_that_beats_once_a_second_is_not_judged_by_tenths() -> None:
    rhythm = Rhythm()
    gap(rhythm, 1, period_s=1.0)
    assert (rhythm.hesitation, rhythm.silence) == (10 + HESITATION, pulse_rules.PERIODS * 10)


def test_at_most_one_open_in_twenty_is_hedged_but_for_a_few_at_once() -> None:
    hedges = Hedges()
    taken = 0
    for _ in range(1000):
        hedges.count_open()
        taken += hedges.take()
    limit = pulse_rules.BURST + 1000 * pulse_rules.SHARE
    assert taken in (limit - 1, limit) and not hedges.take()


class Beating:
    """A stage that beats when the test says so. Without `period_s` it is an older stage."""

    def __init__(self, period_s: float | None = TICK_S) -> None:
        self._period_s = period_s
        self.watches = 0
        self.beats: asyncio.Queue[None] = asyncio.Queue()

    async def watch(self, request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> AsyncIterator[bytes]:
        self.watches += 1
        while True:
            await self.beats.get()
            report = stage_pb2.WatchResponse()
            if self._period_s is not None:
                report.period.FromMilliseconds(round(1000 * self._period_s))
            yield report.SerializeToString()


async def never(seconds: float) -> None:
    await asyncio.Event().wait()


@asynccontextmanager
async def beating(stage: Beating | None) -> AsyncIterator[tuple[Pulses, str, list[str]]]:
    """Pulses without a clock, the address of such a stage, and what is told of it to a stream; None stands for a server without Watch."""
    server = grpc.aio.server(options=server_options())
    if stage is not None:
        watch: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_stream_rpc_method_handler(stage.watch)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("omnistage.v1.StageService", {"Watch": watch}),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        async with Channels(Credentials()) as channels:
            pulses = Pulses(channels.get, sleep=never)
            try:
                yield pulses, address, []
            finally:
                await pulses.close()
    finally:
        await server.stop(0)


def ticked(pulse: Pulse, ticks: int) -> None:
    """Let the listener's time pass, all at once: the listener reads nothing meanwhile."""
    for _ in range(ticks):
        pulse.tick()


async def test_a_stream_is_told_once_when_its_peer_falls_silent() -> None:
    async with beating(Beating()) as (pulses, address, told):
        pulse = pulses.of(address)
        attendance = pulse.attend(told.append)
        ticked(pulse, SILENCE - 1)
        assert not told
        ticked(pulse, 100)
        assert len(told) == 1 and told[0].startswith("no sign of life for 1.0 s")
        attendance.leave()
        attendance.leave()
        assert pulses.is_quiet(address)


async def test_a_beat_ends_the_silence() -> None:
    stage = Beating()
    async with beating(stage) as (pulses, address, told):
        pulse = pulses.of(address)
        pulse.attend(told.append)
        ticked(pulse, SILENCE - 1)
        assert pulses.is_quiet(address)
        stage.beats.put_nowait(None)
        await until(lambda: not pulses.is_quiet(address))
        ticked(pulse, 2)
        assert not told


async def test_silence_from_before_a_stream_began_is_not_held_against_the_peer() -> None:
    async with beating(Beating()) as (pulses, address, told):
        pulse, late = pulses.of(address), list[str]()
        pulse.attend(told.append)
        ticked(pulse, SILENCE - 2)
        pulse.attend(late.append)
        ticked(pulse, 3)
        assert told and not late
        ticked(pulse, SILENCE)
        assert late


@pytest.mark.parametrize("may", [True, False])
async def test_an_open_that_is_not_answered_is_left_early_only_if_it_may(may: bool) -> None:
    asked: list[int] = []

    def may_hedge() -> bool:
        asked.append(1)
        return may

    async with beating(Beating()) as (pulses, address, told):
        pulse = pulses.of(address)
        pulse.attend(told.append, may_hedge)
        ticked(pulse, HESITATION)
        assert not asked
        ticked(pulse, 1)
        assert (len(asked), len(told)) == (1, may)
        ticked(pulse, 3)
        assert len(asked) == 1, "asked once"


async def test_what_has_opened_is_not_left_for_a_hesitation() -> None:
    async with beating(Beating()) as (pulses, address, opening):
        pulse, opened = pulses.of(address), list[str]()
        pulse.attend(opening.append, lambda: True).now_tells(opened.append)
        ticked(pulse, SILENCE - 1)
        assert not opened
        ticked(pulse, 1)
        assert opened and not opening


@pytest.mark.parametrize("stage", [None, Beating], ids=["without a watch", "older, with a period of its own"])
async def test_a_peer_that_does_not_say_its_period_is_not_silent(stage: type[Beating] | None) -> None:
    older = stage(period_s=None) if stage else None
    async with beating(older) as (pulses, address, told):
        pulse = pulses.of(address)
        pulse.attend(told.append)
        ticked(pulse, HESITATION + 1)
        if older:
            older.beats.put_nowait(None)
        await until(lambda: not pulses.is_quiet(address))
        ticked(pulse, 2 * SILENCE if older else 10 * SILENCE)
        assert not told


async def test_many_streams_to_one_address_are_one_watch() -> None:
    stage = Beating()
    async with beating(stage) as (pulses, address, told):
        for _ in range(500):
            pulses.of(address).attend(told.append)
        await until(lambda: stage.watches == 1)
        ticked(pulses.of(address), SILENCE)
        assert (len(told), stage.watches) == (500, 1)


async def test_nothing_is_listened_to_when_the_last_stream_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omnistage.link.liveness.LINGER_S", 0.05)
    stage = Beating()
    async with beating(stage) as (pulses, address, _):
        pulse = pulses.of(address)
        attendance = pulse.attend(lambda why: None)
        stage.beats.put_nowait(None)
        await until(lambda: stage.watches == 1 and stage.beats.empty())
        attendance.leave()
        await asyncio.wait({pulse.listening}, timeout=30)
        assert pulse.listening.cancelled() and pulses.of(address) is not pulse


async def test_a_real_stage_keeps_the_period_that_it_is_asked_for() -> None:
    async with local_stage(toy_logic("talker")) as stage, grpc.aio.insecure_channel(stage.address) as channel:
        stub = stage_pb2_grpc.StageServiceStub(channel)
        for asked_ms, kept_ms in ((100, 100), (1, 100), (500, 500), (60_000, 1000), (None, 1000)):
            request = stage_pb2.WatchRequest()
            if asked_ms is not None:
                request.period.FromMilliseconds(asked_ms)
            watch = stub.Watch(request, timeout=30)
            report = await watch.read()
            assert isinstance(report, stage_pb2.WatchResponse) and report.period.ToMilliseconds() == kept_ms
            watch.cancel()


async def test_a_listener_that_comes_late_counts_one_tick_and_reads_first() -> None:
    """The listener's own loop was blocked, which says nothing about the peer."""
    stage = Beating()
    slept: list[float] = []
    go_on = asyncio.Event()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) > 2:
            await go_on.wait()
        await asyncio.sleep(0)
        if seconds == TICK_S:
            time.sleep(TICK_S + 2 * pulse_rules.LATE_S)  # noqa: ASYNC251

    async with beating(stage) as (_, address, told), Channels(Credentials()) as channels:
        pulses = Pulses(channels.get, sleep=sleep)
        pulse = pulses.of(address)
        pulse.attend(told.append)
        await until(lambda: len(slept) == 3)
        assert (slept, pulse.ticks) == ([TICK_S, pulse_rules.LATE_S, TICK_S], 1)
        await pulses.close()
