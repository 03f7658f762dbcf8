"""A connection to the router that breaks: the client goes on with the answer once, without gap or repeat, or says what is wrong."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import grpc
import numpy as np
import pytest

from helpers.peer import SAMPLES, STARTED, TEXT, USAGE, PlayingPeer, Wire, answer, event, listening, playing
from omnistage.client import AsyncOmni, AudioChunk, Done, Event, Failover, Picture, TextDelta, errors
from omnistage.client.received import Received
from omnistage.v1 import chunk_pb2, omni_pb2, omni_pb2_grpc, stage_pb2, tensor_pb2
from omnistage.wire.errors import StageError

SENT = 6
"""Events of an answer that the peer sends before it stops: Started, three of text and two of sound. Five of them are events for the user,
but for Started."""


async def hear(omni: AsyncOmni, break_after: dict[int, Callable[[], object]], **options: Any) -> list[Event]:
    """All events of an answer. break_after: what to do when so many have come."""
    events: list[Event] = []
    async with aclosing(omni.stream("Hi", **options)) as stream:
        async for heard in stream:
            events.append(heard)
            if len(events) in break_after:
                break_after[len(events)]()
    return events


def assert_whole(events: list[Event]) -> None:
    texts = [event for event in events if isinstance(event, TextDelta)]
    sounds = [event for event in events if isinstance(event, AudioChunk)]
    assert "".join(event.text for event in texts) == TEXT
    assert [token for event in texts for token in event.token_ids] == list(range(12))
    assert np.array_equal(np.concatenate([event.samples for event in sounds]) * 32768, SAMPLES)
    assert [event.first_sample for event in sounds] == [0, *np.cumsum([len(event.samples) for event in sounds])[:-1]]
    assert isinstance(events[-1], Done) and events[-1].finish_reason == "stop"


async def test_a_broken_connection_is_not_heard() -> None:
    async with playing(SENT) as (_, wire, omni):
        events = await hear(omni, {SENT - 1: wire.cut})
        address = wire.address
    assert_whole(events)
    (failover,) = [event for event in events if isinstance(event, Failover)]
    assert (failover.stage, failover.lost, failover.replica) == ("router", address, address) and failover.reason
    assert 0 < failover.pause_s <= failover.arrival_s and failover.at_s == failover.arrival_s - failover.pause_s
    assert isinstance(events[-1], Done) and events[-1].failovers == (failover,)


async def test_the_rest_is_asked_for_by_position() -> None:
    async with playing(SENT) as (peer, wire, omni):
        await hear(omni, {SENT - 1: wire.cut})
    first, second = peer.requests
    assert len(first.request_id) == 32 and not first.HasField("resume") and not first.HasField("seed")
    assert second.request_id == first.request_id
    assert (second.seed, second.model, list(second.revisions)) == (STARTED.seed, STARTED.model, list(STARTED.revisions))
    assert second.thinker == first.thinker
    assert [(position.port, position.seq, position.first) for position in second.resume.positions] == [("text", 3, 6), ("audio", 2, 12)]
    (history,) = second.resume.history
    assert (history.port, history.seq, history.first, history.count, history.last) == ("text", 0, 0, 6, False)
    assert (history.text.text, list(history.text.token_ids)) == ("w0 w1 w2 w3 w4 w5 ", list(range(6)))


def test_the_history_of_a_text_that_is_over_says_so() -> None:
    received = Received()
    received.start(STARTED)
    chunks = [message.chunk for message in answer(omni_pb2.GenerateRequest()) if message.HasField("chunk")]
    for chunk in chunks[:-1]:
        received.take(chunk)
    request = received.request(omni_pb2.GenerateRequest())
    assert [(position.port, position.ended) for position in request.resume.positions] == [("text", True), ("audio", False)]
    (history,) = request.resume.history
    assert (history.count, history.last, history.text.finish_reason) == (12, True, chunk_pb2.FINISH_REASON_STOP)


async def test_before_the_start_it_is_the_same_request_again() -> None:
    async with playing(0) as (peer, wire, omni):
        hearing = asyncio.create_task(hear(omni, {}, seed=5, request_id="mine"))
        await peer.asked(1)
        wire.cut()
        events = await hearing
    assert_whole(events)
    assert isinstance(events[0], Failover)
    assert peer.requests[0] == peer.requests[1] and peer.requests[0].request_id == "mine"


async def test_a_second_loss_is_an_error() -> None:
    async with playing(SENT, 2) as (peer, wire, omni):
        with pytest.raises(errors.RouterLostError, match=wire.address):
            await hear(omni, {SENT - 1: wire.cut, SENT + 1: wire.cut})
        assert len(peer.requests) == 2
        assert_whole(await hear(omni, {}))  # another answer is another matter


async def test_without_patience_the_first_loss_is_an_error() -> None:
    async with playing(SENT, resume_timeout_s=0) as (peer, wire, omni):
        with pytest.raises(errors.RouterLostError, match=f"{wire.address} broke: "):
            await hear(omni, {SENT - 1: wire.cut})
    assert len(peer.requests) == 1


async def test_an_error_that_the_router_tells_is_not_a_loss() -> None:
    lost = StageError("STAGE_LOST", "gone", metadata={"stage": "talker"}, retry_delay_s=0.1)
    bug, ending = StageError("", "a bug"), StageError("DRAINING", "ends", retry_delay_s=0.1)
    async with playing(lost, bug, ending, max_retries=0) as (peer, _, omni):
        for kind, words in ((errors.StageLostError, "gone"), (Exception, "a bug"), (errors.UnavailableError, "ends")):
            with pytest.raises(kind, match=words):
                await omni.generate("Hi")
    assert len(peer.requests) == 3


@pytest.mark.parametrize(
    ("refusal", "kind"),
    [
        (StageError("REVISION_MISMATCH", "other weights"), errors.StageLostError),
        (StageError("STAGE_LOST", "no talker", retry_delay_s=0.1), errors.StageLostError),
        (StageError("SUPERSEDED", "asked elsewhere"), errors.SupersededError),
        (StageError("OVERLOADED", "full for long", retry_delay_s=3600.0), errors.OverloadedError),
    ],
)
async def test_a_refusal_to_go_on_is_the_error(refusal: StageError, kind: type[Exception]) -> None:
    async with playing(SENT, refusal) as (peer, wire, omni):
        with pytest.raises(kind, match=refusal.message):
            await hear(omni, {SENT - 1: wire.cut})
    assert len(peer.requests) == 2


async def test_a_router_that_is_not_ready_yet_is_asked_again() -> None:
    waits, full = (StageError(reason, "not yet", retry_delay_s=0.01) for reason in ("DRAINING", "OVERLOADED"))
    async with playing(SENT, waits, full, 0) as (peer, wire, omni):
        hearing = asyncio.create_task(hear(omni, {SENT - 1: wire.cut}))
        await peer.asked(4)
        wire.cut()  # a loss before it goes on belongs to the first one
        events = await hearing
    assert_whole(events)
    assert sum(isinstance(event, Failover) for event in events) == 1
    assert len({request.request_id for request in peer.requests}) == 1


async def hear_without(wire: Wire, omni: AsyncOmni, away_s: float = math.inf, **options: float) -> list[Event]:
    """The events of an answer whose router goes away in the middle, and comes back after so long."""
    tasks: list[asyncio.Task[None]] = []

    async def go() -> None:
        await wire.disconnect()
        if math.isfinite(away_s):
            await asyncio.sleep(away_s)
            wire.connect()

    try:
        return await hear(omni, {SENT - 1: lambda: tasks.append(asyncio.create_task(go()))}, **options)
    finally:
        await asyncio.gather(*tasks)


async def test_a_router_that_comes_back_later_gets_the_time_that_is_left() -> None:
    away_s = 0.5  # Long enough that attempts to connect fail.
    async with playing(SENT, resume_timeout_s=60) as (peer, wire, omni):
        assert_whole(await hear_without(wire, omni, away_s, timeout_s=20.0))
    assert 0 < peer.left_s[1] < peer.left_s[0] - away_s / 2  # gRPC rounds what it sends, by about 1 %


async def test_a_router_that_does_not_come_back() -> None:
    async with playing(SENT, resume_timeout_s=0.3) as (_, wire, omni):
        with pytest.raises(errors.RouterLostError, match=r"none was there to go on within 0\.3 s"):
            await hear_without(wire, omni)


async def test_the_time_limit_is_that_of_the_whole_answer() -> None:
    async with playing(SENT, resume_timeout_s=60) as (_, wire, omni):
        with pytest.raises(errors.DeadlineError):
            await hear_without(wire, omni, timeout_s=1.0)


@pytest.mark.parametrize("is_gone", [True, False])
async def test_the_next_of_several_addresses_goes_on(free_port: int, is_gone: bool) -> None:
    first, second, nobody = PlayingPeer(SENT), PlayingPeer(), f"127.0.0.1:{free_port}"
    async with listening(first) as one, listening(second) as two, AsyncOmni(address=f"{nobody}, {one.address},{two.address}") as omni:
        events = await (hear_without(one, omni) if is_gone else hear(omni, {SENT - 1: one.cut}))
        assert_whole(events)
        assert omni.address == two.address
        assert_whole(await hear(omni, {}))  # and stays there
    (failover,) = [event for event in events if isinstance(event, Failover)]
    assert (failover.lost, failover.replica) == (one.address, two.address)
    assert (len(first.requests), len(second.requests)) == (1, 2)


async def test_none_of_several_addresses_answers(free_port: int) -> None:
    with pytest.raises(errors.UnavailableError, match=f"127.0.0.1:{free_port}, 127.0.0.1:{free_port}"):
        async with AsyncOmni(address=f"127.0.0.1:{free_port},127.0.0.1:{free_port}", connect_timeout_s=0.5):
            pass


def continued(**changes: object) -> list[omni_pb2.GenerateResponse]:
    """The events that a router might send to go on after SENT events: right except for the changes."""
    chunk = chunk_pb2.Chunk(port="text", seq=3, first=6, count=1, text=chunk_pb2.TextChunk(text="w6 ", token_ids=[6]))
    started = omni_pb2.Started()
    started.CopyFrom(STARTED)
    for name, value in changes.items():
        setattr(started if name in ("seed", "model") else chunk, name, value)
    return [event(started), event(chunk)]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"first": 7}, "gap, position 7 came, 6 is next"),
        ({"first": 5}, "repeat, position 5 came, 6 is next"),
        ({"first": 0, "seq": 0}, "chunk 0 came, 3 is next"),
        ({"seed": 8}, "seed 7 of peer was to go on"),
        ({"model": "other"}, "seed 7 of other answered"),
    ],
)
async def test_a_router_that_goes_on_elsewhere_is_caught(changes: dict[str, object], told: str) -> None:
    async with playing(SENT, continued(**changes)) as (_, wire, omni):
        with pytest.raises(errors.ProtocolError, match=told):
            await hear(omni, {SENT - 1: wire.cut})


async def test_an_answer_that_was_over_but_for_its_account() -> None:
    whole = list(answer(omni_pb2.GenerateRequest()))
    without_reason = [event(STARTED), omni_pb2.GenerateResponse(usage=omni_pb2.Usage())]
    async with playing(len(whole) - 1, without_reason) as (peer, wire, omni):
        events = await hear(omni, {len(whole) - 2: wire.cut})
    assert_whole(events)
    assert all(position.ended for position in peer.requests[1].resume.positions)


def picture(seq: int, data: bytes, offset: int, total: int, step: int | None = None) -> omni_pb2.GenerateResponse:
    last = offset + len(data) == total and step is None
    part = tensor_pb2.InlinePart(data=data, offset=offset, total_bytes=total)
    image = chunk_pb2.ImageChunk(data=part, media_type="image/png", preview_step=step)
    return event(chunk_pb2.Chunk(port="image", seq=seq, count=int(last), last=last, image=image))


def word(seq: int, *, last: bool = False) -> omni_pb2.GenerateResponse:
    reason = chunk_pb2.FINISH_REASON_STOP if last else chunk_pb2.FINISH_REASON_UNSPECIFIED
    text = chunk_pb2.TextChunk(text="w", token_ids=[seq], finish_reason=reason)
    return event(chunk_pb2.Chunk(port="text", seq=seq, first=seq, count=1, last=last, text=text))


async def test_a_picture_of_which_a_piece_had_come_begins_anew() -> None:
    # The word behind the piece tells that the piece had come.
    before = [event(STARTED), picture(0, b"old", 0, 3, 1), picture(1, b"abc", 0, 6), word(0)]
    images = [picture(2, b"old", 0, 3, 1), picture(3, b"new", 0, 3, 2), picture(4, b"abcd", 0, 6), picture(5, b"ef", 4, 6)]
    async with playing(before, [event(STARTED), *images, word(1, last=True), event(USAGE)]) as (peer, wire, omni):
        events = await hear(omni, {2: wire.cut})
    assert [event.data for event in events if isinstance(event, Picture)] == [b"old", b"new", b"abcdef"]
    positions = {position.port: (position.seq, position.first, position.ended) for position in peer.requests[1].resume.positions}
    assert positions == {"image": (2, 0, False), "text": (1, 1, False)}


async def test_stages_that_were_replaced_are_told() -> None:
    told = stage_pb2.Failover(kind=stage_pb2.STAGE_KIND_TALKER, lost="a:1", replica="b:2", reason="killed")
    told.pause.FromMilliseconds(35)
    whole = list(answer(omni_pb2.GenerateRequest()))
    whole.insert(3, omni_pb2.GenerateResponse(failover=told))
    async with playing(whole) as (_, _, omni):
        got = await omni.generate("Hi")
    (failover,) = got.failovers
    assert (failover.stage, failover.lost, failover.replica, failover.reason, failover.pause_s) == ("talker", "a:1", "b:2", "killed", 0.035)
    assert got.text == TEXT


async def test_closing_the_client_ends_its_search_for_a_router() -> None:
    async with playing(SENT, resume_timeout_s=60) as (peer, wire, omni):
        hearing = asyncio.create_task(hear_without(wire, omni))
        await peer.cancelled.wait()
        await asyncio.sleep(0.2)  # into the search
        await omni.close()
        with pytest.raises(errors.ClosedError):
            await hearing


async def test_leaving_a_stream_that_went_on_frees_the_router() -> None:
    async with playing(SENT, 4) as (peer, wire, omni):
        stream = omni.stream("Hi")
        for _ in range(SENT - 1):
            await anext(stream)
        peer.cancelled.clear()
        wire.cut()
        for _ in range(2):
            await anext(stream)
        await stream.aclose()
        async with asyncio.timeout(30):
            await peer.cancelled.wait()


async def test_what_grpc_says_of_a_server_that_stops_is_a_loss() -> None:
    """A router that is told to end cancels what is still running after its grace: for a client it is gone like any other."""
    peer = PlayingPeer(SENT)
    server = grpc.aio.server()
    omni_pb2_grpc.add_OmniServiceServicer_to_server(peer, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    tasks: list[asyncio.Task[None]] = []
    async with listening(PlayingPeer()) as wire, AsyncOmni(address=f"{address},{wire.address}") as omni:
        events = await hear(omni, {SENT - 1: lambda: tasks.append(asyncio.create_task(server.stop(0)))})
        await asyncio.gather(*tasks)
    assert_whole(events)
