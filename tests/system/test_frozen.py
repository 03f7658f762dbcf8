"""A replica that stops (SIGSTOP) keeps its connections and says nothing. It is left, the answer goes on, and on waking it cannot speak."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import grpc
import pytest

from helpers.ask import Answer, request
from helpers.drill import Step, ask_through, drilled, found, holder, nothing_left, opening, text_chunks
from helpers.fleet import Fleet, fleet
from helpers.run import Caller
from helpers.servers import CHAIN, stage_stub
from omnistage.v1 import omni_pb2, omni_pb2_grpc, stage_pb2

TOKENS = 200
LONG = {"max_tokens": TOKENS, "ignore_eos": True}


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two of each kind, slow enough that an answer goes on for some time after a frozen stage was left. All is sent inline: shared memory
    that a sleeper may still read is kept from reuse for half a minute, which a test would have to wait for."""
    with fleet(tmp_path_factory.mktemp("logs"), replicas=2, options={"interval_s": 0.02}) as running:
        yield running


class Freeze:
    """Stops the replica of a kind that has the session."""

    def __init__(self, running: Fleet, kind: str) -> None:
        self._fleet = running
        self._kind = kind
        self.name = ""
        self.at = 0.0

    async def stop(self) -> None:
        self.name = await holder(self._fleet, self._kind)
        self.at = time.monotonic()
        self._fleet.signal(self.name, signal.SIGSTOP)

    async def wake(self) -> None:
        self._fleet.signal(self.name, signal.SIGCONT)


@asynccontextmanager
async def frozen(running: Fleet, kind: str) -> AsyncIterator[tuple[omni_pb2_grpc.OmniServiceAsyncStub, Freeze]]:
    """A drill with one replica to stop, which wakes at the end in any case."""
    freeze = Freeze(running, kind)
    async with drilled(running) as stub:
        try:
            yield stub, freeze
        finally:
            if freeze.name:
                await freeze.wake()
        await found(running, stub)


def left(answer: Answer) -> bool:
    return bool(answer.failovers)


@pytest.mark.parametrize("kind", CHAIN)
async def test_a_frozen_replica_is_left_and_the_answer_goes_on(toys: Fleet, kind: str, seed: int) -> None:
    moments = []

    async def note() -> None:
        moments.append(time.monotonic())

    async with frozen(toys, kind) as (stub, freeze):
        answer = await ask_through(stub, request("hello", seed, thinker=LONG), Step(text_chunks(10), freeze.stop), Step(left, note))
        answer.check_toy(seed, "hello", TOKENS)
        assert toys.address(freeze.name) in [failover.lost for failover in answer.failovers]
        print(f"{kind}: left after {moments[0] - freeze.at:.3f} s")


async def test_a_thinker_that_wakes_while_another_speaks_is_not_heard(toys: Fleet, seed: int) -> None:
    """Its Talker has ended the session, or has it from the other Thinker now: nothing of the sleeper arrives anywhere twice."""
    async with frozen(toys, "thinker") as (stub, freeze):
        asked = request("hello", seed, thinker=LONG)
        answer = await ask_through(stub, asked, Step(text_chunks(10), freeze.stop), Step(left, freeze.wake))
        answer.check_toy(seed, "hello", TOKENS)
        assert toys.address(freeze.name) in [failover.lost for failover in answer.failovers]
        await nothing_left(toys)
        assert "session.bug" not in toys.logs()


@pytest.mark.parametrize("number", range(3))
async def test_a_thinker_that_wakes_at_any_moment_is_not_heard(toys: Fleet, number: int, seed: int) -> None:
    """Before anybody misses it, while it is being replaced, or after that."""
    asleep_s = random.Random(seed + number).uniform(0.3, 1.8)
    waking: list[asyncio.Task[None]] = []

    async with frozen(toys, "thinker") as (stub, freeze):

        async def wake_later() -> None:
            await asyncio.sleep(asleep_s)
            await freeze.wake()

        async def doze() -> None:
            await freeze.stop()
            waking.append(asyncio.create_task(wake_later()))

        answer = await ask_through(stub, request("hello", seed, thinker=LONG), Step(text_chunks(10), doze))
        await asyncio.gather(*waking)
        answer.check_toy(seed, "hello", TOKENS)
        print(f"asleep for {asleep_s:.3f} s: {[failover.reason for failover in answer.failovers] or 'nobody missed it'}")
        assert "session.bug" not in toys.logs()


async def test_a_thinker_whose_session_was_opened_again_elsewhere_gets_aborted(toys: Fleet, seed: int) -> None:
    """Two Thinkers and one Talker for one session: the Talker listens to the one that opened it last, and the other one is told."""
    thinkers = [toys.address(name) for name in toys.of("thinker")]
    async with drilled(toys), stage_stub(thinkers[0]) as old_stub, stage_stub(thinkers[1]) as new_stub:
        old, new = Caller(old_stub), Caller(new_stub)
        await old.send(open=opening(toys, seed, TOKENS, attempts=[0]))
        await old.until(lambda heard: len(heard.of("text")) >= 10 and len(heard.of("audio")) >= 10)
        ends = {port: chunks[-1] for port, chunks in old.heard.chunks.items()}
        resume = stage_pb2.Resume(
            positions=[stage_pb2.Position(port=port, seq=end.seq + 1, first=end.first + end.count) for port, end in ends.items()],
            history=old.heard.of("text") + old.heard.of("codes"),
        )
        await new.send(open=opening(toys, seed, TOKENS, attempts=[1], resume=resume))
        await new.opened()
        await old.expect("SUPERSEDED", grpc.StatusCode.ABORTED)
        heard = await new.finish()
        held = {port: old.heard.of(port)[: end.seq + 1] for port, end in ends.items()}
        answer = Answer(omni_pb2.Started(), {port: held[port] + heard.of(port) for port in held}, omni_pb2.Usage())
        answer.check_toy(seed, "hello", TOKENS)
