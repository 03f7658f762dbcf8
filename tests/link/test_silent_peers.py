"""Opens to peers that give no sign of life, and to peers that are only slow."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest

from helpers.link import Context, bare_peer, listen, no_beat, opening, route_to, say, steady_beat
from helpers.run import params
from helpers.servers import CREDENTIALS, local_stage, toy_logic, watch_until
from helpers.waiting import until
from omnistage.link.channels import SILENCE, Channels
from omnistage.link.link import Link
from omnistage.v1 import stage_pb2
from omnistage.wire.errors import StageError

OPENED = stage_pb2.RunResponse(opened=stage_pb2.Opened())


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


def link_of(channels: Channels, addresses: Sequence[str], **options: object) -> Link:
    return Link(channels, route_to(*addresses), opening(), deadline=time.monotonic() + 60, **options)  # type: ignore[arg-type]


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
        assert link.address == other
        assert channels.pulses.of(one).ticks >= SILENCE
        await link.close()


async def test_an_open_that_takes_long_is_waited_for_while_there_are_beats() -> None:
    """There is another replica, and it would answer at once."""
    go_on = asyncio.Event()
    notes: list[str] = []

    async def slow(request: stage_pb2.Open, context: Context) -> None:
        await go_on.wait()
        await say(context, OPENED)
        await listen(context)

    async with (
        bare_peer(slow, steady_beat) as one,
        bare_peer(NotedOpens("well", notes, True), steady_beat) as other,
        Channels(CREDENTIALS) as channels,
    ):
        link = link_of(channels, [one, other])
        waiting = asyncio.create_task(link.open())
        await until(lambda: channels.pulses.of(one).ticks >= 2 * SILENCE)
        go_on.set()
        await waiting
        assert link.address == one and not notes and not link.search.silent
        await link.close()


async def test_a_silent_peer_behind_a_stage_is_told_of_and_the_stage_is_not_blamed() -> None:
    hop = stage_pb2.Hop(kind=stage_pb2.STAGE_KIND_TALKER, model="toy-talker", takes=["hidden"], params=params("talker"))
    notes: list[str] = []
    async with (
        bare_peer(NotedOpens("hung", notes, False), no_beat) as hung,
        local_stage(toy_logic("talker")) as talker,
        local_stage(toy_logic("thinker")) as thinker,
        Channels(CREDENTIALS) as channels,
    ):
        hop.addresses.extend([hung, talker.address])
        link = Link(
            channels, route_to(thinker.address, kind="thinker", behind=[hop]), opening("thinker", credits=0), deadline=time.monotonic() + 60
        )
        await link.open()
        assert list(link.search.silent) == [hung]
        await link.close()
        await watch_until(talker.address, lambda report: not report.sessions)


async def test_the_stage_that_does_not_answer_is_blamed_by_name() -> None:
    """The only replica of the stage behind hangs until the time is over. The link waits for the Thinker, which beats, until the Thinker
    says so."""
    hop = stage_pb2.Hop(kind=stage_pb2.STAGE_KIND_TALKER, model="toy-talker", takes=["hidden"], params=params("talker"))
    async with (
        bare_peer(NotedOpens("hung", [], False), no_beat) as hung,
        local_stage(toy_logic("thinker")) as thinker,
        Channels(CREDENTIALS) as channels,
    ):
        hop.addresses.append(hung)
        link = Link(
            channels, route_to(thinker.address, kind="thinker", behind=[hop]), opening("thinker", credits=0), deadline=time.monotonic() + 3
        )
        with pytest.raises(StageError, match="DEADLINE: talker did not answer Open: no sign of life") as raised:
            await link.open()
        assert raised.value.metadata == {"stage": "talker"}
        assert not channels.pulses.is_quiet(thinker.address)
        await link.close()
