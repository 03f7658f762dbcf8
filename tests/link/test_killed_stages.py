"""Real stages are killed in the middle of a session: the next replica makes the rest, and the caller gets each item once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from helpers.link import LinkListener, chunks_of, codes_of, failovers_of, link_by, opening, replicas, route_to, samples_of
from helpers.run import PLENTY, code_chunks
from helpers.servers import all_free, local_stage, toy_logic
from omnistage.connector.arena import Arena
from omnistage.connector.transport import Sender
from omnistage.link.link import Link
from omnistage.models.toy import formulas
from omnistage.v1 import stage_pb2
from omnistage.wire.chunks import Output
from omnistage.wire.errors import StageError

ROWS = np.stack([formulas.row(token) for token in range(40)])
FRAMES = formulas.frames(ROWS)
SOUND = formulas.samples(FRAMES)[:, 0] * 32768


async def send_rows(link: Link, rows: int = len(ROWS)) -> None:
    for n in range(rows):
        await link.feed.send(Output("hidden", 1, ROWS[n : n + 1], last=n == rows - 1))


@pytest.mark.parametrize("moment", [0, 1, 7, 79, 80])
async def test_a_talker_is_killed_and_the_next_one_says_the_rest(moment: int):
    """The test holds the end of the input back until the kill. Codes need no credit, so without that all of them might come before."""
    before = -(-moment // formulas.FRAMES_PER_ROW)
    async with (
        replicas("talker", options={"max_chunk": 1}) as (first, second),
        link_by(route_to(first.address, second.address), opening(checkpoints=["codes"])) as link,
    ):
        await link.open()
        listener = LinkListener(link)
        for n in range(before):
            await link.feed.send(Output("hidden", 1, ROWS[n : n + 1]))
        await listener.until(lambda events: len([event for event in events if event.HasField("chunk")]) >= moment)
        await first.kill()
        for n in range(before, len(ROWS)):
            await link.feed.send(Output("hidden", 1, ROWS[n : n + 1]))
        await link.feed.send(Output("hidden", 0, None, last=True))
        events = await listener.finish()
        assert codes_of(events) == FRAMES.ravel().tolist()
        (failover,) = failovers_of(events)
        assert (failover.kind, failover.lost, failover.replica) == (stage_pb2.STAGE_KIND_TALKER, first.address, second.address)
        assert failover.reason and link.failovers == 1
        await all_free([second.address])


async def send_codes(link: Link) -> None:
    for number, part in enumerate(code_chunks(FRAMES, [1] * len(FRAMES))):
        await link.feed.send(Output("codes", 1, part.codes, last=number == len(FRAMES) - 1))


@pytest.mark.parametrize("moment", [0, 1, 20, 60, 79])
@pytest.mark.parametrize("context", [0, 2, 50])
async def test_a_code2wav_is_killed_and_the_next_one_gets_the_window_that_it_needs(moment: int, context: int):
    options: dict[str, object] = {"max_chunk": 1, "context": context}
    async with (
        replicas("code2wav", options=options) as (first, second),
        link_by(route_to(first.address, second.address, kind="code2wav"), opening("code2wav", credits=moment)) as link,
    ):
        await link.open()
        listener = LinkListener(link)
        sending = asyncio.create_task(send_codes(link))
        await listener.chunks("audio", moment)
        await first.kill()
        await link.grant("audio", PLENTY)
        events = await listener.finish()
        await sending
        np.testing.assert_array_equal(samples_of(events), SOUND)
        (report,) = [event.report for event in events if event.HasField("report")]
        assert report.input_items["codes"] == len(FRAMES) - max(moment - context, 0)
        assert link.feed.needs == {"codes": max(moment - context, 0)}


@pytest.mark.parametrize("moment", [0, 1, 5])
async def test_a_thinker_is_killed_and_the_next_one_has_the_same_text_and_rows(moment: int):
    request = opening("thinker", {"hidden": moment}, checkpoints=["text"], seed=3)
    async with (
        replicas("thinker", options={"max_chunk": 2}) as (first, second),
        link_by(route_to(first.address, second.address, kind="thinker"), request) as link,
    ):
        await link.open()
        listener = LinkListener(link)
        await listener.chunks("hidden", moment)
        await first.kill()
        await link.grant("hidden", PLENTY)
        events = await listener.finish()
        assert "".join(part.text.text for part in chunks_of(events, "text")) == formulas.text(3, "hello", formulas.NATURAL_LENGTH)
        rows = np.frombuffer(b"".join(part.tensor.inline.data for part in chunks_of(events, "hidden")), "<f4")
        expected = [formulas.row(formulas.token(3, "hello", n)) for n in range(formulas.NATURAL_LENGTH)]
        np.testing.assert_array_equal(rows.reshape(-1, formulas.WIDTH), expected)


async def test_every_replica_is_lost_in_turn_and_each_item_comes_once():
    async with (
        replicas("talker", 4, {"max_chunk": 1}) as talkers,
        link_by(route_to(*[talker.address for talker in talkers]), opening(checkpoints=["codes"])) as link,
    ):
        await link.open()
        listener = LinkListener(link)
        for number, talker in enumerate(talkers[:-1], start=1):
            for n in range(10 * (number - 1), 10 * number):
                await link.feed.send(Output("hidden", 1, ROWS[n : n + 1]))
            await listener.chunks("codes", 20 * number)
            assert link.address == talker.address
            await talker.kill()
        for n in range(10 * number, len(ROWS)):
            await link.feed.send(Output("hidden", 1, ROWS[n : n + 1], last=n == len(ROWS) - 1))
        events = await listener.finish()
        assert codes_of(events) == FRAMES.ravel().tolist()
        assert [failover.replica for failover in failovers_of(events)] == [talker.address for talker in talkers[1:]]


@pytest.mark.parametrize("moment", [0, 1, 30])
@pytest.mark.parametrize("replay_bytes", [1 << 20, 0], ids=["log", "no log"])
async def test_tensors_in_shared_memory_are_sent_again_and_all_free_in_the_end(arena: Arena, moment: int, replay_bytes: int):
    async with (
        replicas("talker", options={"max_chunk": 1}, arena_bytes=1 << 28) as (first, second),
        link_by(
            route_to(first.address, second.address),
            opening(credits=moment, checkpoints=["codes"]),
            sender=lambda: Sender(arena, inline_limit=0),
            replay_bytes=replay_bytes,
        ) as link,
    ):
        await link.open()
        listener = LinkListener(link)
        for n in range(len(ROWS)):
            await link.feed.send(Output("hidden", 1, ROWS[n : n + 1]))
        await listener.chunks("codes", moment)
        assert arena.leases > 0 or not replay_bytes, "nothing went through shared memory"
        await first.kill()
        await link.feed.send(Output("hidden", 0, None, last=True))
        if replay_bytes:
            assert codes_of(await listener.finish()) == FRAMES.ravel().tolist()
        else:
            with pytest.raises(StageError, match="REPLAY_EXPIRED") as raised:
                await listener.finish()
            assert raised.value.metadata == {"port": "hidden"}
        await link.close()
        assert arena.leases == 0
        await all_free([second.address])


async def test_a_sender_that_waits_for_room_goes_on_with_the_next_replica():
    async with (
        replicas("talker", options={"max_chunk": 1}) as (first, second),
        link_by(route_to(first.address, second.address), opening(credits=0, checkpoints=["codes"]), max_unsent=2) as link,
    ):
        await link.open()
        listener = LinkListener(link)
        sending = asyncio.create_task(send_rows(link))
        await link.grant("codes", 1)
        await listener.chunks("codes", 1)
        assert not sending.done()
        await first.kill()
        await link.grant("codes", PLENTY)
        assert codes_of(await listener.finish()) == FRAMES.ravel().tolist()
        await sending


async def test_a_replica_that_comes_back_in_time_is_waited_for(free_port: int):
    """The route has one address. A stage that its supervisor starts again is found within the patience of the route."""
    route = route_to(f"127.0.0.1:{free_port}", patience_s=20.0)
    async with link_by(route, opening(checkpoints=["codes"])) as link:
        opening_it = asyncio.create_task(link.open())
        while not opening_it.done():
            async with local_stage_at(free_port):
                await asyncio.wait({opening_it}, timeout=5)
        await opening_it


@asynccontextmanager
async def local_stage_at(port: int) -> AsyncIterator[None]:
    async with local_stage(toy_logic("talker")) as talker:
        host, _, there = talker.address.rpartition(":")

        ends: list[asyncio.StreamWriter] = []
        relays: set[asyncio.Task[None]] = set()

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            relays.add(task)
            ends.append(writer)
            back, forth = await asyncio.open_connection(host, int(there))
            ends.append(forth)

            async def pump(one: asyncio.StreamReader, other: asyncio.StreamWriter) -> None:
                while data := await one.read(65536):
                    other.write(data)
                other.close()

            await asyncio.gather(pump(reader, forth), pump(back, writer), return_exceptions=True)

        server = await asyncio.start_server(relay, "127.0.0.1", port)
        try:
            yield
        finally:
            server.close()
            for end in ends:
                end.transport.abort()
            if relays:
                await asyncio.wait(relays, timeout=5)
            await asyncio.gather(*(end.wait_closed() for end in ends), return_exceptions=True)


async def test_without_a_replica_the_patience_ends(free_port: int):
    async with link_by(route_to(f"127.0.0.1:{free_port}", patience_s=0.1), opening()) as link:
        with pytest.raises(StageError, match="STAGE_LOST") as raised:
            await link.open()
        assert raised.value.retry_delay_s
