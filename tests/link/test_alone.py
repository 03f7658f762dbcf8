"""Peers that give no sign of life, and peers that are only slow. Another replica is asked instead; an only one is waited for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest
import structlog
from structlog.testing import capture_logs
from structlog.typing import EventDict

from helpers import link as links
from helpers.link import ENDED, Context, bare_peer, chunk, codes_of, hear, link_by, listen, no_beat, opening, route_to, say, steady_beat
from helpers.run import params
from helpers.servers import CREDENTIALS, local_stage, toy_logic, watch_until
from helpers.waiting import until
from omnistage.link.link import Link
from omnistage.link.liveness import SILENCE, TICK_S, Channels
from omnistage.link.search import Outlook
from omnistage.v1 import stage_pb2
from omnistage.wire.errors import StageError
from omnistage.wire.proto_values import duration

OPENED = stage_pb2.RunResponse(opened=stage_pb2.Opened())
LONG = 2 * SILENCE
"""Ticks of silence after which a link leaves a replica that is not alone."""
WHEN = ["open", "answer"]


class Sleeper:
    """A peer that sends two codes. It falls asleep, with all its beats, before it answers an Open or after its first code, until
    `wakes`."""

    def __init__(self, when: str) -> None:
        self._when = when
        self.wakes = asyncio.Event()
        self._asleep = False
        self.requests: list[stage_pb2.Open] = []

    async def beats(self, request: bytes, context: Context) -> AsyncIterator[bytes]:
        while True:
            if self._asleep:
                await self.wakes.wait()
            yield stage_pb2.WatchResponse(period=duration(TICK_S)).SerializeToString()
            await asyncio.sleep(TICK_S)

    async def __call__(self, request: stage_pb2.Open, context: Context) -> None:
        self.requests.append(request)
        await self._sleep("open")
        await say(context, OPENED, chunk(0))
        await self._sleep("answer")
        await say(context, chunk(1, last=True), ENDED)
        await listen(context)

    async def _sleep(self, when: str) -> None:
        if when == self._when:
            self._asleep = True
            await self.wakes.wait()


@dataclass
class GrowingRoute:
    """A route that finds another replica while an answer runs, as the router's route does."""

    addresses: list[str]
    kind: stage_pb2.StageKind = stage_pb2.STAGE_KIND_TALKER
    places_anew: bool = True
    patience_s: float = 1.0

    def place(self, revisions: Sequence[str]) -> tuple[Sequence[str], Sequence[stage_pb2.Hop]]:
        return self.addresses, []

    def others(self, address: str, revisions: Sequence[str]) -> Sequence[str]:
        return [other for other in self.addresses if other != address]

    def outlook(self, revisions: Sequence[str]) -> Outlook:
        return Outlook.COMPLETE

    def note_loss(self, address: str) -> None:
        """The route keeps the lost address."""

    def describe_process(self, address: str) -> Mapping[str, object]:
        return {"process": {"state": "T"}}


async def answer(link: Link) -> list[stage_pb2.RunResponse]:
    await link.open()
    return await hear(link)


async def quiet_for(link: Link, address: str, ticks: int) -> None:
    """Wait until this much of the listener's time has passed since the address fell silent."""
    pulse = link.search._channels.pulses.of(address)
    await until(lambda: pulse.is_quiet)
    since = pulse.ticks
    await until(lambda: pulse.ticks >= since + ticks)


@pytest.mark.parametrize("when", WHEN)
async def test_it_is_waited_for_on_the_same_stream(when: str) -> None:
    peer = Sleeper(when)
    async with bare_peer(peer, peer.beats) as address, link_by(route_to(address), opening(checkpoints=["codes"])) as link:
        hearing = asyncio.create_task(answer(link))
        await quiet_for(link, address, LONG)
        assert not hearing.done() and len(peer.requests) == 1
        peer.wakes.set()
        events = await hearing
    assert codes_of(events) == [0, 1] and not links.failovers_of(events)
    assert len(peer.requests) == 1 and not link.search.silent


def waits_in(lines: Sequence[EventDict]) -> list[EventDict]:
    return [line for line in lines if line["event"] in ("link.waits", "link.waited")]


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("wakes", [True, False])
async def test_the_log_tells_where_the_wait_begins_and_where_it_ends(when: str, wakes: bool) -> None:
    """The log has the known facts about the replica, and its lines belong to the waiting session: the check for silence is shared by all
    sessions. When the time of the request is over the replica is named; it is not asked again, and is not reported as lost."""
    peer = Sleeper(when)
    with capture_logs(processors=[structlog.contextvars.merge_contextvars]) as lines:
        async with (
            bare_peer(peer, peer.beats) as address,
            link_by(GrowingRoute([address]), opening(checkpoints=["codes"]), within_s=30.0 if wakes else 2.5) as link,
        ):
            link.search._channels.pulses.of(address).attend(lambda why: None)  # Another session was there before.
            structlog.contextvars.bind_contextvars(session_id="this one")
            hearing = asyncio.create_task(answer(link))
            if wakes:
                await quiet_for(link, address, LONG)
                peer.wakes.set()
                await hearing
            else:
                with pytest.raises(StageError, match=r"DEADLINE: talker .*no sign of life for .* s, until the time") as raised:
                    await hearing
                assert raised.value.metadata == {"stage": "talker"} and raised.value.retry_delay_s is None
    assert len(peer.requests) == 1
    begin, end = waits_in(lines)
    assert begin["event"] == "link.waits" and begin["why"].startswith("no sign of life for ")
    assert (end["event"], end["answers"]) == ("link.waited", wakes) and end["waited_s"] > 0
    for line in (begin, end):
        assert (line["stage"], line["address"], line["session_id"]) == ("talker", address, "this one")
        assert line["process"] == {"state": "T"}


@pytest.mark.parametrize("when", WHEN)
async def test_it_is_left_as_soon_as_there_is_another_one(when: str) -> None:
    sleeper = Sleeper(when)
    async with bare_peer(sleeper, sleeper.beats) as one, bare_peer(goes_on, steady_beat) as other:
        route = GrowingRoute([one])
        async with link_by(route, opening(checkpoints=["codes"])) as link:
            hearing = asyncio.create_task(answer(link))
            await quiet_for(link, one, LONG)
            assert not hearing.done()
            route.addresses.append(other)
            assert (codes_of(await hearing), link.address) == ([0, 1], other)
    assert len(sleeper.requests) == 1


async def goes_on(request: stage_pb2.Open, context: Context) -> None:
    """Send the code that follows those which the caller has."""
    have = sum(position.seq for position in request.resume.positions)
    await say(context, OPENED, *[chunk(number, last=number == 1) for number in range(have, 2)], ENDED)
    await listen(context)


async def test_of_two_that_are_silent_the_last_one_asked_is_waited_for() -> None:
    first, last = Sleeper("open"), Sleeper("open")
    async with (
        bare_peer(first, first.beats) as one,
        bare_peer(last, last.beats) as other,
        link_by(route_to(one, other), opening(checkpoints=["codes"])) as link,
    ):
        hearing = asyncio.create_task(answer(link))
        await quiet_for(link, other, LONG)
        assert not hearing.done()
        last.wakes.set()
        assert (codes_of(await hearing), link.address) == ([0, 1], other)
    assert (len(first.requests), len(last.requests)) == (1, 1)


async def test_one_that_beats_and_takes_long_to_open_is_waited_for_too() -> None:
    """The replica may have a long prompt to read. If another replica were there, the link would leave this one."""
    peer = Sleeper("open")
    async with bare_peer(peer, steady_beat) as address:
        with capture_logs() as lines:
            async with link_by(route_to(address), opening(checkpoints=["codes"]), open_timeout_s=0.1) as link:
                hearing = asyncio.create_task(answer(link))
                await until(lambda: link.search._channels.pulses.of(address).ticks >= SILENCE)
                assert not hearing.done()
                peer.wakes.set()
                assert codes_of(await hearing) == [0, 1]
        assert len(peer.requests) == 1
        begin, end = waits_in(lines)
        assert (begin["why"], end["answers"]) == ("no answer within 0.1 s", True)
        quick = Sleeper("never")
        slow = Sleeper("open")
        async with (
            bare_peer(slow, steady_beat) as one,
            bare_peer(quick, steady_beat) as other,
            link_by(route_to(one, other), opening(checkpoints=["codes"]), open_timeout_s=0.1) as link,
        ):
            assert (codes_of(await answer(link)), link.address) == ([0, 1], other)


@pytest.mark.parametrize("when", WHEN)
async def test_its_end_is_a_loss_at_once(when: str) -> None:
    """The link does not wait for a process that is gone."""
    peer = Sleeper(when)
    async with AsyncExitStack() as serving:
        address = await serving.enter_async_context(bare_peer(peer, peer.beats))
        async with link_by(route_to(address), opening(checkpoints=["codes"])) as link:
            hearing = asyncio.create_task(answer(link))
            await quiet_for(link, address, SILENCE)
            assert not hearing.done()
            await serving.aclose()
            with pytest.raises(StageError, match="STAGE_LOST"):
                await hearing


class NotedOpens:
    """The Run of a peer. It notes every Open, in a list that peers share, and whether the Open was withdrawn. It answers only if it may."""

    def __init__(self, name: str, notes: list[str], answers: bool) -> None:
        self._name = name
        self._notes = notes
        self._answers = answers
        self.requests: list[stage_pb2.Open] = []

    async def __call__(self, request: stage_pb2.Open, context: Context) -> None:
        self.requests.append(request)
        self._notes.append(f"{self._name} asked")
        try:
            if self._answers:
                await say(context, OPENED)
            await listen(context)
        finally:
            self._notes.append(f"{self._name} left")


def link_of(channels: Channels, addresses: Sequence[str]) -> Link:
    return Link(channels, route_to(*addresses), opening(), deadline=time.monotonic() + 60)


def link_before(channels: Channels, thinker: str, talkers: Sequence[str], within_s: float) -> Link:
    """A link to a Thinker with Talkers behind it."""
    hop = stage_pb2.Hop(kind=stage_pb2.STAGE_KIND_TALKER, model="toy-talker", takes=["hidden"], params=params("talker"), addresses=talkers)
    route = route_to(thinker, kind="thinker", later_hops=[hop])
    return Link(channels, route, opening("thinker", credits=0), deadline=time.monotonic() + within_s)


async def test_an_open_without_a_beat_is_asked_elsewhere_and_nobody_asks_there_again() -> None:
    notes: list[str] = []
    hung, well = NotedOpens("hung", notes, False), NotedOpens("well", notes, True)
    async with bare_peer(hung, no_beat) as one, bare_peer(well, steady_beat) as other, Channels(CREDENTIALS) as channels:
        for number in range(4):
            link = link_of(channels, [one, other])
            await link.open()
            assert link.address == other
            if not number:
                assert list(link.search.silent) == [one]
            await link.close()
        await until(lambda: len(notes) >= 2 + 2 * 4)
    assert [list(request.attempts) for request in hung.requests] == [[0]]
    assert [list(request.attempts) for request in well.requests] == [[1], [0], [0], [0]], "the newer one ends what they share"


async def test_a_silent_peer_is_left_even_if_no_open_may_be_hedged_any_more() -> None:
    hung, well = NotedOpens("hung", [], False), NotedOpens("well", [], True)
    async with bare_peer(hung, no_beat) as one, bare_peer(well, steady_beat) as other, Channels(CREDENTIALS) as channels:
        while channels.hedges.take():
            pass
        link = link_of(channels, [one, other])
        await link.open()
        assert link.address == other and channels.pulses.of(one).ticks >= SILENCE
        await link.close()


async def test_an_open_that_takes_long_is_waited_for_while_there_are_beats() -> None:
    """There is another replica, and it would answer at once."""
    go_on = asyncio.Event()
    notes: list[str] = []

    async def slow(request: stage_pb2.Open, context: Context) -> None:
        await go_on.wait()
        await say(context, OPENED)
        await listen(context)

    well = NotedOpens("well", notes, True)
    async with bare_peer(slow, steady_beat) as one, bare_peer(well, steady_beat) as other, Channels(CREDENTIALS) as channels:
        link = link_of(channels, [one, other])
        waiting = asyncio.create_task(link.open())
        await until(lambda: channels.pulses.of(one).ticks >= 2 * SILENCE)
        go_on.set()
        await waiting
        assert link.address == one and not notes and not link.search.silent
        await link.close()


async def test_a_silent_peer_behind_a_stage_is_told_of_and_the_stage_is_not_blamed() -> None:
    async with (
        bare_peer(NotedOpens("hung", [], False), no_beat) as hung,
        local_stage(toy_logic("talker")) as talker,
        local_stage(toy_logic("thinker")) as thinker,
        Channels(CREDENTIALS) as channels,
    ):
        link = link_before(channels, thinker.address, [hung, talker.address], 60)
        await link.open()
        assert list(link.search.silent) == [hung]
        await link.close()
        await watch_until(talker.address, lambda report: not report.sessions)


async def test_the_stage_that_does_not_answer_is_blamed_by_name() -> None:
    """The only replica of the stage behind hangs until the time is over. The link waits for the Thinker, which beats, until the Thinker
    says so."""
    async with (
        bare_peer(NotedOpens("hung", [], False), no_beat) as hung,
        local_stage(toy_logic("thinker")) as thinker,
        Channels(CREDENTIALS) as channels,
    ):
        link = link_before(channels, thinker.address, [hung], 3)
        with pytest.raises(StageError, match="DEADLINE: talker did not answer Open: no sign of life") as raised:
            await link.open()
        assert raised.value.metadata == {"stage": "talker"} and not channels.pulses.is_quiet(thinker.address)
        await link.close()
