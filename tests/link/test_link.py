"""A link against real stages, and against peers that break the contract."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AbstractAsyncContextManager
from typing import Any

import numpy as np
import pytest

from helpers import link as links
from helpers.link import ENDED, Behaviour, Context, bare_peer, codes_of, hear, link_by, listen, opening, route_to, say, says
from helpers.run import PLENTY, params
from helpers.servers import all_free, local_stage, toy_logic, watch_until
from omnistage.connector.arena import Arena
from omnistage.connector.transport import Sender
from omnistage.link.link import Link
from omnistage.models.toy import formulas
from omnistage.stage.inputs import WINDOW
from omnistage.v1 import chunk_pb2, stage_pb2
from omnistage.wire.chunks import Output
from omnistage.wire.errors import StageError

ROWS = np.stack([formulas.row(token) for token in range(8)])


def link_to(*addresses: str, request: stage_pb2.Open | None = None, **options: Any) -> AbstractAsyncContextManager[Link]:
    return link_by(route_to(*addresses), request or opening(), **options)


async def test_a_session_from_open_to_the_end():
    async with local_stage(toy_logic("talker")) as talker, link_to(talker.address) as link:
        opened = await link.open()
        assert (link.address, list(opened.revisions)) == (talker.address, ["1"])
        await link.feed.send(Output("hidden", 3, ROWS[:3]))
        await link.feed.send(Output("hidden", 5, ROWS[3:], last=True))
        events = await hear(link)
        assert codes_of(events) == formulas.frames(ROWS).ravel().tolist() and events[-1].HasField("report")
        await all_free([talker.address])


async def test_send_waits_when_as_much_as_may_be_is_unsent_and_goes_on_with_credit():
    """The stage takes WINDOW chunks on credit and at most one out of its queue. Further chunks stay here, up to the bound."""
    async with local_stage(toy_logic("talker")) as talker, link_to(talker.address, request=opening(credits=0), max_unsent=10) as link:
        await link.open()
        hearing = asyncio.create_task(hear(link))
        sent = 0

        async def send() -> None:
            nonlocal sent
            for n in range(200):
                await link.feed.send(Output("hidden", 1, formulas.row(n)[None], last=n == 199))
                sent += 1

        sending = asyncio.create_task(send())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await asyncio.shield(sending)
        assert WINDOW <= sent + 1 <= WINDOW + 1 + 10
        await link.grant("codes", PLENTY)
        async with asyncio.timeout(10):
            await sending
        assert codes_of(await hearing) == formulas.frames(np.stack([formulas.row(n) for n in range(200)])).ravel().tolist()


async def test_the_next_replica_is_asked_when_one_is_full_draining_or_not_there(free_port: int):
    async with (
        local_stage(toy_logic("talker"), max_sessions=1) as full,
        local_stage(toy_logic("talker")) as draining,
        local_stage(toy_logic("talker")) as good,
        link_to(full.address) as holder,
    ):
        await holder.open()
        await draining.service.drain(5)
        async with link_to(f"127.0.0.1:{free_port}", full.address, draining.address, good.address) as link:
            await link.open()
            assert link.address == good.address
            await link.feed.send(Output("hidden", 8, ROWS, last=True))
            assert codes_of(await hear(link))


async def test_a_refusal_that_another_replica_would_repeat_ends_the_search():
    async with (
        local_stage(toy_logic("talker")) as first,
        local_stage(toy_logic("talker")) as second,
        link_to(first.address, second.address, request=opening(params=params("talker", voice="nobody"))) as link,
    ):
        with pytest.raises(StageError, match="BAD_REQUEST") as raised:
            await link.open()
        assert raised.value.metadata == {"field": "talker.voice"}


async def test_no_replica_at_all():
    async with link_to() as link:
        with pytest.raises(StageError, match="STAGE_LOST"):
            await link.open()


async def test_all_replicas_full_says_so():
    async with local_stage(toy_logic("talker"), max_sessions=1) as full, link_to(full.address) as holder:
        await holder.open()
        async with link_to(full.address) as link:
            with pytest.raises(StageError, match="OVERLOADED") as raised:
                await link.open()
        assert raised.value.retry_delay_s


async def test_closing_a_link_frees_the_stage():
    async with local_stage(toy_logic("talker")) as talker, link_to(talker.address) as link:
        await link.open()
        await watch_until(talker.address, lambda report: report.sessions == 1)
        await link.close()
        await link.close()
        await all_free([talker.address])


async def test_a_stage_that_has_ended_costs_nothing_more(arena: Arena):
    """The producer of the input may still be at work: input that is sent now is not kept, and earlier input is given back."""
    short = opening(credits=0, params=params("talker", max_frames=2))
    async with (
        local_stage(toy_logic("talker")) as talker,
        link_to(talker.address, request=short, sender=lambda: Sender(arena, inline_limit=0), max_unsent=1000) as link,
    ):
        await link.open()
        for _ in range(10):
            await link.feed.send(Output("hidden", 8, ROWS))
        assert arena.leases >= 10
        await link.grant("codes", PLENTY)
        await hear(link)
        assert arena.leases == 0
        piece = chunk_pb2.CodeChunk()
        held = sys.getrefcount(piece)
        for _ in range(1000):
            await link.feed.send(Output("hidden", 1, piece))
        assert sys.getrefcount(piece) == held


async def test_interrupt_ends_well():
    async with local_stage(toy_logic("thinker", {"interval_s": 0.01})) as thinker:
        request = opening("thinker", params=params("thinker", max_tokens=10_000, ignore_eos=True))
        async with link_to(thinker.address, request=request) as link:
            await link.open()
            hearing = asyncio.create_task(hear(link))
            await link.interrupt(stage_pb2.Interrupt())
            events = await hearing
            assert {event.chunk.port for event in events if event.chunk.last} == {"text", "hidden"}


async def test_the_stage_behind_is_told_when_its_deadline_is_and_what_trace_it_is_in():
    seen: dict[str, object] = {}

    async def peer(request: stage_pb2.Open, context: Context) -> None:
        seen["remaining"] = context.time_remaining()
        seen["metadata"] = dict(context.invocation_metadata() or ())
        await say(context, stage_pb2.RunResponse(ended=StageError("OVERLOADED", "full").to_ended()))
        await listen(context)

    async with bare_peer(peer) as address, link_to(address, within_s=7, metadata=[("traceparent", "00-a-b-01")]) as link:
        with pytest.raises(StageError, match="OVERLOADED"):
            await link.open()
    assert isinstance(seen["remaining"], float) and 0 < seen["remaining"] <= 7 * 1.05  # gRPC rounds it up on the wire
    assert isinstance(seen["metadata"], dict) and seen["metadata"]["traceparent"] == "00-a-b-01"


OPENED = stage_pb2.RunResponse(opened=stage_pb2.Opened())
CHUNK = stage_pb2.RunResponse(chunk=chunk_pb2.Chunk(port="codes"))


def ends(ended: stage_pb2.Ended) -> stage_pb2.RunResponse:
    return stage_pb2.RunResponse(ended=ended)


@pytest.mark.parametrize(
    ("is_open", "behave", "reason"),
    [
        pytest.param(False, says(), "STAGE_LOST", id="nothing"),
        pytest.param(False, links.abort, "STAGE_LOST", id="status without Ended"),
        pytest.param(False, says(CHUNK), "PROTOCOL", id="a chunk before Opened"),
        pytest.param(False, says(b"\xff\xff\xff"), "PROTOCOL", id="bytes"),
        pytest.param(False, says(stage_pb2.RunResponse()), "PROTOCOL", id="an empty message"),
        pytest.param(True, says(OPENED), "STAGE_LOST", id="nothing more"),
        pytest.param(True, says(OPENED, CHUNK), "PROTOCOL", id="the same chunk again by the replica that goes on"),
        pytest.param(True, says(OPENED, OPENED), "PROTOCOL", id="Opened twice"),
        pytest.param(True, says(OPENED, b"\xff\xff\xff"), "PROTOCOL", id="bytes after Opened"),
        pytest.param(True, says(OPENED, ends(StageError("STALE_REFERENCE", "late").to_ended())), "STALE_REFERENCE", id="Ended at once"),
        pytest.param(True, says(OPENED, ends(stage_pb2.Ended(code=13))), "INTERNAL", id="a bug of the stage"),
    ],
)
async def test_a_peer_that_breaks_the_contract_or_breaks_off(is_open: bool, behave: Behaviour, reason: str):
    async with bare_peer(behave) as address, link_to(address) as link:
        if is_open:
            await link.open()
        with pytest.raises(StageError, match=reason):
            await (hear(link) if is_open else link.open())


async def test_ended_well_counts_even_when_the_peer_does_not_wait_for_the_half_close():
    for _ in range(20):
        async with bare_peer(says(OPENED, CHUNK, ENDED)) as address, link_to(address) as link:
            await link.open()
            assert len(await hear(link)) == 1


async def test_events_of_a_newer_stage_are_ignored():
    unknown = b"\xf2\x06\x03new"  # field 110, length-delimited
    keep = stage_pb2.RunResponse(keep=stage_pb2.Keep(port="hidden", first=3))
    peer = says(OPENED, unknown, keep, CHUNK, ENDED)
    async with bare_peer(peer) as address, link_to(address) as link:
        await link.open()
        assert [event.WhichOneof("event") for event in await hear(link)] == ["chunk"]


async def test_a_deadline_is_not_a_loss():
    async with bare_peer(links.silence) as address, link_to(address, within_s=0.3) as link:
        with pytest.raises(StageError, match="DEADLINE"):
            await link.open()

    async def opened_and_silent(request: stage_pb2.Open, context: Context) -> None:
        await say(context, OPENED)
        await listen(context)

    async with bare_peer(opened_and_silent) as address, link_to(address, within_s=0.3) as link:
        await link.open()
        with pytest.raises(StageError, match="DEADLINE"):
            await hear(link)


@pytest.mark.parametrize("unwanted", [["hidden"], []])
async def test_a_stage_that_is_lost_when_only_unwanted_ports_are_left(unwanted: list[str]):
    """The caller grants credit for the port all the same, for stages that do not know of unwanted ports."""
    text = chunk_pb2.TextChunk(text="all", token_ids=[1], finish_reason=chunk_pb2.FINISH_REASON_STOP)
    whole = stage_pb2.RunResponse(chunk=chunk_pb2.Chunk(port="text", count=1, last=True, text=text))
    request = opening("thinker", checkpoints=["text"], unwanted=unwanted)
    async with (
        bare_peer(says(OPENED, whole)) as one,
        bare_peer(says(OPENED, ENDED)) as other,
        link_by(route_to(one, other, kind="thinker"), request) as link,
    ):
        await link.open()
        events = await hear(link)
    assert [event.chunk.text.text for event in events if event.HasField("chunk")] == ["all"]
    assert len(links.failovers_of(events)) == (0 if unwanted else 1)
