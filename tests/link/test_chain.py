"""Losses in a chain of three stages: which link mends them, and what it passes on if it cannot."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest

from helpers import lengths
from helpers.link import LinkListener, StoppableReplica, chunks_of, failovers_of, link_by, opening, replicas, route_to, samples_of
from helpers.run import PLENTY, params
from helpers.servers import all_free
from omnistage.link.link import Link
from omnistage.models.toy import formulas
from omnistage.v1 import stage_pb2
from omnistage.wire.errors import StageError

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
        behind = [
            stage_pb2.Hop(
                kind=KINDS[kind],
                model=f"toy-{kind}",
                addresses=[replica.address for replica in running[kind]],
                params=params(kind),
                takes=[port],
                checkpoints=["codes"] if kind == "talker" else [],
            )
            for kind, port in TAKES.items()
        ]
        asked = params("thinker", PROMPT, max_tokens=TOKENS, ignore_eos=True)
        request = opening("thinker", {"audio": 0}, checkpoints=["text"], seed=SEED, params=asked)
        addresses = [replica.address for replica in running["thinker"]]
        route = route_to(*addresses, kind="thinker", behind=behind, places_anew=True, patience_s=5.0)
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
        assert (failover.lost, failover.replica) == (lost, replica)
        assert standing.link.failovers == (kind == "thinker")


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
