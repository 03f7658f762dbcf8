"""Replicas are lost at moments at which real stages do not stop: the caller gets each item once, or a typed error."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import Any

import grpc
import numpy as np
import pytest

from helpers import link as links
from helpers.link import ENDED, Context, bare_peer, chunk, codes_of, hear, heard, link_by, listen, opening, route_to, say, says
from helpers.run import PLENTY
from omnistage.connector.arena import Arena
from omnistage.connector.transport import Receiver, Sender
from omnistage.link.link import MAX_LOSSES, MAX_LOSSES_IN_A_ROW, Link
from omnistage.models.toy import formulas
from omnistage.v1 import chunk_pb2, stage_pb2
from omnistage.wire.chunks import Output
from omnistage.wire.errors import StageError

ROWS = np.stack([formulas.row(token) for token in range(8)])
OPENED = stage_pb2.RunResponse(opened=stage_pb2.Opened(credits=[stage_pb2.Credit(port="hidden", total=PLENTY)], revisions=["7"]))


def ended(reason: str) -> stage_pb2.RunResponse:
    return stage_pb2.RunResponse(ended=StageError(reason, "so it is").to_ended())


class Attempts:
    """The Opens that a peer got, and the peer's behaviour for each of them in turn; the last behaviour is repeated."""

    def __init__(self, *behaviours: links.Behaviour) -> None:
        self._behaviours = behaviours
        self.requests: list[stage_pb2.Open] = []

    async def __call__(self, request: stage_pb2.Open, context: Context) -> None:
        self.requests.append(request)
        await self._behaviours[min(len(self.requests), len(self._behaviours)) - 1](request, context)


def goes_on(total: int, end: bool = True) -> links.Behaviour:
    """Send the missing frames up to `total`; without `end`, break off then."""

    async def behave(request: stage_pb2.Open, context: Context) -> None:
        begin = next((position.seq for position in request.resume.positions if position.port == "codes"), 0)
        await say(context, OPENED, *[chunk(n, last=end and n == total - 1) for n in range(begin, total)])
        if end:
            await say(context, ENDED)
            await listen(context)

    return behave


def tells(*messages: stage_pb2.RunResponse) -> links.Behaviour:
    """Send these and wait for the end of the call."""

    async def behave(request: stage_pb2.Open, context: Context) -> None:
        await say(context, *messages)
        await listen(context)

    return behave


@asynccontextmanager
async def linked(
    peer: links.Behaviour, request: stage_pb2.Open | None = None, *, places_anew: bool = False, **options: Any
) -> AsyncIterator[Link]:
    """An open link to a peer. options: of the link."""
    request = request or opening(checkpoints=["codes"])
    async with bare_peer(peer) as address, link_by(route_to(address, places_anew=places_anew), request, **options) as link:
        await link.open()
        yield link


async def test_credit_counts_the_chunks_of_the_new_stream():
    seen: list[stage_pb2.RunRequest] = []

    async def takes_credit(request: stage_pb2.Open, context: Context) -> None:
        await say(context, OPENED, chunk(3))
        seen.append(await heard(context))
        await say(context, chunk(4, last=True), ENDED)
        await listen(context)

    peer = Attempts(goes_on(3, end=False), takes_credit)
    async with linked(peer, opening(credits=4, checkpoints=["codes"])) as link:
        listener = links.LinkListener(link)
        await listener.chunks("codes", 4)
        await link.grant("codes", 5)
        assert len(codes_of(await listener.finish())) == 5
    assert [{credit.port: credit.total for credit in request.credits} for request in peer.requests] == [{"codes": 4}, {"codes": 1}]
    assert seen == [stage_pb2.RunRequest(credit=stage_pb2.Credit(port="codes", total=2))]


async def test_credit_of_a_link_that_itself_goes_on_counts_from_its_own_beginning():
    """The caller's earlier credit was granted on another link."""
    resume = stage_pb2.Resume(positions=[stage_pb2.Position(port="codes", seq=10, first=10)])
    peer = Attempts(goes_on(13, end=False), goes_on(14))
    async with linked(peer, opening(credits=6, resume=resume)) as link:
        events = await hear(link)
        assert [event.chunk.seq for event in events if event.HasField("chunk")] == [10, 11, 12, 13]
    assert [[credit.total for credit in request.credits] for request in peer.requests] == [[6], [3]]
    assert [position.seq for position in peer.requests[1].resume.positions] == [13]


async def test_what_is_granted_or_interrupted_while_the_next_replica_opens_reaches_it():
    came, go_on = asyncio.Event(), asyncio.Event()
    seen: list[stage_pb2.RunRequest] = []

    async def opens_late(request: stage_pb2.Open, context: Context) -> None:
        came.set()
        await go_on.wait()
        await say(context, OPENED)
        seen.extend([await heard(context) for _ in range(4)])
        await say(context, chunk(2, last=True), ENDED)
        await listen(context)

    peer = Attempts(goes_on(2, end=False), opens_late)
    async with linked(peer, opening(credits=2, checkpoints=["codes"])) as link:
        hearing = asyncio.create_task(hear(link))
        async with asyncio.timeout(30):
            await came.wait()
            await link.grant("codes", 9)
            await link.grant("audio", 5)
            await link.interrupt(stage_pb2.Interrupt(heard_samples=4))
            await link.feed.send(Output("hidden", 1, ROWS[:1]))
            go_on.set()
            assert codes_of(await hearing) == [0, 1, 2]
    assert [(credit.port, credit.total) for credit in peer.requests[1].credits] == [("codes", 0)]
    credits = {event.credit.port: event.credit.total for event in seen if event.HasField("credit")}
    assert credits == {"codes": 7, "audio": 5}
    assert [event.interrupt.heard_samples for event in seen if event.HasField("interrupt")] == [4]
    assert [event.chunk.seq for event in seen if event.HasField("chunk")] == [0]


async def test_granting_while_credit_is_caught_up_does_no_harm():
    """A caller may name a new port at any moment, even while the link goes through the ports that it knows."""
    async with linked(Attempts(goes_on(2, end=False), goes_on(3)), opening(credits=2, checkpoints=["codes"])) as link:

        async def grant() -> None:
            for n in range(60):
                await link.grant(f"port{n}", 1)
                await asyncio.sleep(0)

        granting = asyncio.create_task(grant())
        assert codes_of(await hear(link)) == [0, 1, 2]
        await granting


async def test_the_number_of_ports_that_may_be_granted_is_bounded():
    async with linked(goes_on(1), opening()) as link:
        with pytest.raises(StageError, match="PROTOCOL"):
            for n in range(10_000):
                await link.grant(f"port{n}", 1)


async def test_a_stale_reference_is_sent_again_inline(arena: Arena):
    """If something is wrong with the memory, the next stream does without it."""
    peer = Attempts(tells(OPENED, ended("STALE_REFERENCE")), goes_on(1))
    async with linked(peer, sender=lambda: Sender(arena, inline_limit=0)) as link:
        await link.feed.send(Output("hidden", 1, ROWS[:1]))
        assert codes_of(await hear(link)) == [0]
    assert ([bool(request.offers) for request in peer.requests], arena.leases) == ([True, False], 0)


@pytest.mark.parametrize("code", [grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL, grpc.StatusCode.RESOURCE_EXHAUSTED])
async def test_a_call_that_ends_without_a_word_is_a_loss_whatever_its_status(code: grpc.StatusCode):
    """Another replica goes on. Memory that the lost replica may still read is not used again before its time: the process that cancels a
    call from the other end may be a living stage, or a proxy before one."""

    async def reads_and_leaves(request: stage_pb2.Open, context: Context) -> None:
        opened = stage_pb2.Opened(credits=OPENED.opened.credits, revisions=["7"], answer=Receiver().answer(request.offers))
        await say(context, stage_pb2.RunResponse(opened=opened), chunk(0))
        await heard(context)
        await context.abort(code)

    peer = Attempts(reads_and_leaves, goes_on(3))
    patient = Arena.create(max_bytes=1 << 22, segment_bytes=1 << 18, grace_s=600.0)
    assert patient is not None
    async with linked(peer, sender=lambda: Sender(patient, inline_limit=0)) as link:
        await link.feed.send(Output("hidden", 1, ROWS[:1]))
        events = await hear(link)
        assert codes_of(events) == [0, 1, 2] and len(links.failovers_of(events)) == 1
    assert patient.leases == 1
    patient.close()


@pytest.mark.parametrize("reason", ["REPLAY_EXPIRED", "DRAINING"])
async def test_a_session_that_its_stage_gives_up_is_opened_again(reason: str):
    peer = Attempts(tells(OPENED, chunk(0), chunk(1), ended(reason)), goes_on(4))
    async with linked(peer) as link:
        events = await hear(link)
        assert (codes_of(events), len(links.failovers_of(events))) == ([0, 1, 2, 3], 1)
    (history,) = peer.requests[1].resume.history
    assert (list(history.codes.codes), history.count, history.first) == ([0, 1], 2, 0)


@pytest.mark.parametrize("places_anew", [True, False])
async def test_a_stage_behind_that_is_lost_is_placed_anew_only_by_who_can(places_anew: bool):
    peer = Attempts(tells(OPENED, chunk(0), ended("STAGE_LOST")), goes_on(2))
    async with linked(peer, places_anew=places_anew) as link:
        if places_anew:
            assert codes_of(await hear(link)) == [0, 1]
        else:
            with pytest.raises(StageError, match="STAGE_LOST"):
                await hear(link)
            assert len(peer.requests) == 1


@pytest.mark.parametrize(
    "reason", ["BAD_REQUEST", "PROTOCOL", "CREDIT_EXCEEDED", "HALF_CLOSED", "DEADLINE", "SUPERSEDED", "OVERLOADED", ""]
)
async def test_other_ends_are_not_repeated(reason: str):
    peer = Attempts(tells(OPENED, chunk(0), ended(reason)))
    async with linked(peer, places_anew=True) as link:
        with pytest.raises(StageError) as raised:
            await hear(link)
        assert (raised.value.reason, len(peer.requests)) == (reason, 1)


async def test_a_loss_after_every_port_ended_is_no_loss():
    async def ends_and_dies(request: stage_pb2.Open, context: Context) -> None:
        audio = stage_pb2.RunResponse(chunk=chunk_pb2.Chunk(port="audio", last=True))
        await say(context, OPENED, chunk(0, last=True), audio)

    peer = Attempts(ends_and_dies)
    request = opening(credits={"audio": 1}, checkpoints=["codes"])
    async with linked(peer, request) as link:
        events = await hear(link)
        assert codes_of(events) == [0] and not links.failovers_of(events) and len(peer.requests) == 1


async def test_a_loss_before_a_port_of_a_later_hop_began_is_one():
    """Credit for the sound was granted after the Open, and no sound has come yet."""

    async def ends_codes_and_dies(request: stage_pb2.Open, context: Context) -> None:
        await say(context, OPENED)
        assert (await heard(context)).credit.port == "audio"
        await say(context, chunk(0, last=True))

    sings = tells(OPENED, stage_pb2.RunResponse(chunk=chunk_pb2.Chunk(port="audio", last=True)), ENDED)
    peer = Attempts(ends_codes_and_dies, sings)
    async with linked(peer, opening(credits={}, checkpoints=["codes"])) as link:
        await link.grant("audio", 3)
        events = await hear(link)
        assert [part.last for part in links.chunks_of(events, "audio")] == [True]
    assert [(position.port, position.ended) for position in peer.requests[1].resume.positions] == [("codes", True)]


async def one_more(request: stage_pb2.Open, context: Context) -> None:
    """Send the next code and break off."""
    await say(context, OPENED, chunk(sum(position.seq for position in request.resume.positions)))


@pytest.mark.parametrize(("behave", "losses"), [(says(OPENED), MAX_LOSSES_IN_A_ROW), (one_more, MAX_LOSSES)], ids=["fast", "slowly"])
async def test_a_session_that_kills_its_replicas_ends(behave: links.Behaviour, losses: int):
    peer = Attempts(behave)
    async with linked(peer) as link:
        listener = links.LinkListener(link)
        with pytest.raises(StageError, match="STAGE_LOST"):
            await listener.finish()
        assert codes_of(listener.heard) == ([*range(1 + losses)] if behave is one_more else [])
    assert len(peer.requests) == 1 + losses


async def test_a_replica_that_was_lost_is_asked_last():
    """Among several lost replicas, the one that was lost first is asked first."""

    async def one_more(request: stage_pb2.Open, context: Context) -> None:
        seq = sum(position.seq for position in request.resume.positions)
        await say(context, OPENED, chunk(seq, last=seq == 5), *([ENDED] if seq == 5 else []))

    async with bare_peer(one_more) as one, bare_peer(one_more) as two, bare_peer(one_more) as three:
        async with link_by(route_to(one, two, three), opening(checkpoints=["codes"])) as link:
            await link.open()
            events = await hear(link)
        assert codes_of(events) == [0, 1, 2, 3, 4, 5]
        assert [failover.replica for failover in links.failovers_of(events)] == [two, three, one, two, three]


async def test_another_revision_may_answer_until_something_is_out():
    hops = [stage_pb2.Hop(kind=stage_pb2.STAGE_KIND_CODE2WAV, checkpoints=["words"])]
    two = stage_pb2.RunResponse(opened=stage_pb2.Opened(revisions=["7", "8"]))
    peer = Attempts(says(two), says(two, chunk(0)), says(two, chunk(1, last=True), ENDED))
    async with bare_peer(peer) as address, link_by(route_to(address, later_hops=hops), opening(checkpoints=["codes"])) as link:
        await link.open()
        assert (codes_of(await hear(link)), list(link.revisions)) == ([0, 1], ["7", "8"])
    assert [request.revision for request in peer.requests] == ["", "", "7"]
    assert [request.route[0].revision for request in peer.requests] == ["", "", "8"]


async def test_a_caller_that_goes_on_says_the_revisions_itself():
    peer = Attempts(goes_on(1))
    async with bare_peer(peer) as address, link_by(route_to(address), opening(resume=stage_pb2.Resume()), revisions=["3"]) as link:
        await link.open()
    assert peer.requests[0].revision == "3"


async def test_input_is_replayed_from_the_keep():
    """The first replica says that it needs nothing before row 2, the second one that it needs row 1. No two replicas of one revision may
    disagree so."""
    seen: list[chunk_pb2.Chunk] = []

    async def keeps(request: stage_pb2.Open, context: Context) -> None:
        await say(context, OPENED)
        for _ in range(3):
            await heard(context)
        await say(context, stage_pb2.RunResponse(keep=stage_pb2.Keep(port="hidden", first=2)), chunk(0))

    async def takes(request: stage_pb2.Open, context: Context) -> None:
        needs = stage_pb2.Opened(credits=OPENED.opened.credits, needs=[stage_pb2.Position(port="hidden", first=1)])
        await say(context, stage_pb2.RunResponse(opened=needs))
        seen.append((await heard(context)).chunk)
        await say(context, chunk(1, last=True), ENDED)
        await listen(context)

    async with linked(Attempts(keeps, takes)) as link:
        for n in range(3):
            await link.feed.send(Output("hidden", 1, ROWS[n : n + 1]))
        assert codes_of(await hear(link)) == [0, 1]
    assert [(part.seq, part.first, part.count) for part in seen] == [(0, 2, 1)]


async def test_a_sender_in_the_middle_of_a_write_survives_the_end_of_its_stream():
    """The peer reads nothing, so a write waits. Then the peer breaks a rule, so this side ends the stream."""
    go_on = asyncio.Event()

    async def breaks_a_rule(request: stage_pb2.Open, context: Context) -> None:
        await say(context, OPENED)
        await go_on.wait()
        await say(context, chunk(5))
        await context.read()
        await asyncio.sleep(0.5)

    wide = np.zeros((64, 65536), np.float32)
    async with linked(breaks_a_rule, max_unsent=1000) as link:
        sending = asyncio.create_task(link.feed.send(Output("hidden", len(wide), wide)))
        assert not (await asyncio.wait({sending}, timeout=0.5))[0], "the write did not wait"
        go_on.set()
        with pytest.raises(StageError, match="PROTOCOL"):
            await hear(link)
        async with asyncio.timeout(30):
            await sending


async def test_a_deaf_address_is_left_for_the_next(monkeypatch: pytest.MonkeyPatch):
    """The same holds in the middle of a session. A process may be frozen: its kernel finishes the TCP handshake, and nobody finishes the
    one of HTTP/2."""
    monkeypatch.setattr("omnistage.link.stream.CONNECT_TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        nobody = f"127.0.0.1:{deaf.getsockname()[1]}"
        async with bare_peer(Attempts(goes_on(1, end=False))) as first, bare_peer(goes_on(2)) as third:
            for before in ([first, nobody], [nobody]):
                async with link_by(route_to(*before, third), opening(checkpoints=["codes"])) as link:
                    await link.open()
                    events = await hear(link)
                    assert (codes_of(events), link.address) == ([0, 1], third)
                    assert [failover.replica for failover in links.failovers_of(events)] == [third] * (len(before) - 1)


async def test_the_search_for_a_replica_has_an_end_however_many_do_not_answer(monkeypatch: pytest.MonkeyPatch):
    """Eight hosts are down. The first one is always asked, and then as many as there is time for."""
    monkeypatch.setattr("omnistage.link.search.SEARCH_S", 0.0)
    monkeypatch.setattr("omnistage.link.stream.CONNECT_TIMEOUT_S", 0.3)
    accepted: list[socket.socket] = []
    with ExitStack() as exits:
        deaf = [exits.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(8)]
        for server in deaf:
            server.setblocking(False)
        async with link_by(route_to(*[f"127.0.0.1:{server.getsockname()[1]}" for server in deaf]), opening()) as link:
            with pytest.raises(StageError, match="STAGE_LOST"):
                await link.open()
        for server in deaf:
            with suppress(BlockingIOError):
                accepted.append(exits.enter_context(server.accept()[0]))
    assert len(accepted) == 1


async def test_a_deadline_in_the_middle_of_a_failover_is_no_loss():
    async def waits(request: stage_pb2.Open, context: Context) -> None:
        await listen(context)

    async with linked(Attempts(goes_on(1, end=False), waits), within_s=3.0) as link:
        with pytest.raises(StageError, match="DEADLINE"):
            await hear(link)
