"""Stages are killed in the middle of a session, alone and in a chain: some link mends the loss, and the caller gets each item once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from helpers import lengths
from helpers.link import LinkListener, StoppableReplica, chunks_of, codes_of, failovers_of, link_by, opening, replicas, route_to, samples_of
from helpers.peer import Wire
from helpers.run import PLENTY, code_chunks, params
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


async def send_rows(link: Link, begin: int = 0, end: int = len(ROWS), *, is_last: bool = True) -> None:
    """Send these rows, one by one. is_last: the last of all rows says that it is the last."""
    for n in range(begin, end):
        await link.feed.send(Output("hidden", 1, ROWS[n : n + 1], last=is_last and n == len(ROWS) - 1))


@asynccontextmanager
async def two(
    kind: str, request: stage_pb2.Open, options: Mapping[str, object], arena_bytes: int = 0, **of_link: Any
) -> AsyncIterator[tuple[StoppableReplica, StoppableReplica, Link, LinkListener]]:
    """Two replicas, an open link to the first one, and what comes out of the link."""
    async with (
        replicas(kind, options=options, arena_bytes=arena_bytes) as (first, second),
        link_by(route_to(first.address, second.address, kind=kind), request, **of_link) as link,
    ):
        await link.open()
        yield first, second, link, LinkListener(link)


@pytest.mark.parametrize("moment", [0, 1, 7, 79, 80])
async def test_a_talker_is_killed_and_the_next_one_says_the_rest(moment: int):
    """The test holds the end of the input back until the kill. Codes need no credit, so without that all of them might come before."""
    before = -(-moment // formulas.FRAMES_PER_ROW)
    async with two("talker", opening(checkpoints=["codes"]), {"max_chunk": 1}) as (first, second, link, listener):
        await send_rows(link, end=before, is_last=False)
        await listener.until(lambda events: len([event for event in events if event.HasField("chunk")]) >= moment)
        await first.kill()
        await send_rows(link, before, is_last=False)
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
    async with two("code2wav", opening("code2wav", credits=moment), options) as (first, _, link, listener):
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
    async with two("thinker", request, {"max_chunk": 2}) as (first, _, link, listener):
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
            await send_rows(link, 10 * (number - 1), 10 * number)
            await listener.chunks("codes", 20 * number)
            assert link.address == talker.address
            await talker.kill()
        await send_rows(link, 10 * number)
        events = await listener.finish()
        assert codes_of(events) == FRAMES.ravel().tolist()
        assert [failover.replica for failover in failovers_of(events)] == [talker.address for talker in talkers[1:]]


@pytest.mark.parametrize("moment", [0, 1, 30])
@pytest.mark.parametrize("replay_bytes", [1 << 20, 0], ids=["log", "no log"])
async def test_tensors_in_shared_memory_are_sent_again_and_all_free_in_the_end(arena: Arena, moment: int, replay_bytes: int):
    request = opening(credits=moment, checkpoints=["codes"])
    of_link = {"sender": lambda: Sender(arena, inline_limit=0), "replay_bytes": replay_bytes}
    async with two("talker", request, {"max_chunk": 1}, 1 << 28, **of_link) as (first, second, link, listener):
        await send_rows(link, is_last=False)
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
    async with two("talker", opening(credits=0, checkpoints=["codes"]), {"max_chunk": 1}, max_unsent=2) as (first, _, link, listener):
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
        wire = Wire(talker.address)
        wire.address = f"127.0.0.1:{port}"
        wire.connect()
        try:
            yield
        finally:
            await wire.disconnect()


async def test_without_a_replica_the_patience_ends(free_port: int):
    async with link_by(route_to(f"127.0.0.1:{free_port}", patience_s=0.1), opening()) as link:
        with pytest.raises(StageError, match="STAGE_LOST") as raised:
            await link.open()
        assert raised.value.retry_delay_s


SEED, PROMPT, TOKENS = 3, "hello", 60
TAKES = {"talker": "hidden", "code2wav": "codes"}
KINDS = {"thinker": stage_pb2.STAGE_KIND_THINKER, "talker": stage_pb2.STAGE_KIND_TALKER, "code2wav": stage_pb2.STAGE_KIND_CODE2WAV}


@dataclass
class LinkedChain:
    """Replicas of every kind, a link to a Thinker whose route has the other stages, and the output that the link gets."""

    replicas: Mapping[str, Sequence[StoppableReplica]]
    link: Link
    listener: LinkListener
    killed: set[str] = field(default_factory=set)

    async def kill(self, kind: str, number: int = 0) -> None:
        replica = self.replicas[kind][number]
        self.killed.add(replica.address)
        await replica.kill()

    async def until(self, frames: int) -> None:
        """Read this much output, with one frame of sound in a chunk."""
        await self.link.grant("audio", frames)
        await self.listener.chunks("audio", frames)

    async def finish(self) -> list[stage_pb2.Failover]:
        """Read the rest. Text and sound must be as if nothing had happened, and nothing may be left over."""
        await self.link.grant("audio", PLENTY)
        events = await self.listener.finish()
        assert "".join(chunk.text.text for chunk in chunks_of(events, "text")) == formulas.text(SEED, PROMPT, TOKENS)
        np.testing.assert_array_equal(samples_of(events), formulas.audio(SEED, PROMPT, TOKENS)[:, 0] * 32768)
        assert {report.kind for report in self.reports()} <= {1, 2, 3}
        await self.link.close()
        await all_free([one.address for several in self.replicas.values() for one in several if one.address not in self.killed])
        return failovers_of(events)

    def reports(self) -> list[stage_pb2.Report]:
        return [event.report for event in self.listener.heard if event.HasField("report")]


@asynccontextmanager
async def chain(counts: Mapping[str, int] | None = None, short: Collection[str] = ()) -> AsyncIterator[LinkedChain]:
    """An open session whose sound is not read yet. counts: replicas by kind, two by default. short: kinds that keep almost nothing of what
    they sent."""
    async with AsyncExitStack() as stack:
        running: dict[str, list[StoppableReplica]] = {}
        for kind in ("thinker", "talker", "code2wav"):
            count = (counts or {}).get(kind, 2)
            settings = {"replay_limit": 1} if kind in short else {}
            running[kind] = await stack.enter_async_context(replicas(kind, count, {"max_chunk": 1}, **settings))
        addresses = {kind: [replica.address for replica in several] for kind, several in running.items()}
        behind = [
            stage_pb2.Hop(kind=KINDS[kind], model=f"toy-{kind}", addresses=addresses[kind], params=params(kind), takes=[port])
            for kind, port in TAKES.items()
        ]
        behind[0].checkpoints.append("codes")
        asked = params("thinker", PROMPT, max_tokens=TOKENS, ignore_eos=True)
        request = opening("thinker", {"audio": 0}, checkpoints=["text"], seed=SEED, params=asked)
        route = route_to(*addresses["thinker"], kind="thinker", later_hops=behind, places_anew=True, patience_s=5.0)
        link = await stack.enter_async_context(link_by(route, request))
        await link.open()
        yield LinkedChain(running, link, LinkListener(link))


@lengths.drawn_cells(2, "frames", [0, 1, 20, 119, 120])
@pytest.mark.parametrize("kind", ["thinker", "talker", "code2wav"])
async def test_one_of_two_is_killed(kind: str, frames: int):
    async with chain() as standing:
        await standing.until(frames)
        await standing.kill(kind)
        (failover,) = await standing.finish()
        assert failover.kind == KINDS[kind]
        lost, replica = (one.address for one in standing.replicas[kind])
        assert (failover.lost, failover.replica, standing.link.failovers) == (lost, replica, kind == "thinker")


async def test_a_stage_of_each_kind_is_killed_one_after_the_other():
    async with chain() as standing:
        for frames, kind in ((5, "thinker"), (25, "talker"), (60, "code2wav")):
            await standing.until(frames)
            await standing.kill(kind)
        assert [failover.kind for failover in await standing.finish()] == [1, 2, 3]


async def test_all_first_ones_are_killed_at_once():
    async with chain() as standing:
        await standing.until(20)
        for kind in standing.replicas:
            await standing.kill(kind)
        assert await standing.finish()


@pytest.mark.parametrize(
    ("killed", "short", "again"),
    [("talker", ["thinker"], "thinker"), ("code2wav", ["talker"], "talker"), ("code2wav", ["thinker", "talker"], "thinker")],
)
async def test_a_log_that_was_cut_makes_the_caller_open_the_stage_before_again(killed: str, short: list[str], again: str):
    """The stage before the lost one says REPLAY_EXPIRED and ends. Its caller opens it again, with the history of its checkpoints. If the
    log of that caller was cut as well, the caller above does so."""
    async with chain(short=short) as standing:
        await standing.until(40)
        await standing.kill(killed)
        failovers = await standing.finish()
        same = standing.replicas[again][0].address
        assert [(failover.lost, failover.replica) for failover in failovers] == [(same, same)]


async def test_a_stage_without_a_replica_left_is_lost():
    async with chain({"talker": 1}) as standing:
        await standing.until(3)
        await standing.kill("talker")
        await standing.link.grant("audio", PLENTY)
        with pytest.raises(StageError, match="STAGE_LOST") as raised:
            await standing.listener.finish()
        assert raised.value.metadata == {"stage": "talker"} and raised.value.retry_delay_s
        await standing.link.close()
        await all_free([replica.address for kind in ("thinker", "code2wav") for replica in standing.replicas[kind]])
