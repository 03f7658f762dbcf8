"""A replica that stops (SIGSTOP), or whose event loop is blocked, keeps its connections and says nothing: another one goes on. The loss of
the only process of a kind, and events that make a healthy process look lost, and must not."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from helpers import lengths
from helpers.ask import GenerateCall, WholeAnswer, ask, read, read_all, refusal, request
from helpers.disturbed import (
    MOMENTS,
    DisturbanceStep,
    ask_through,
    disturbed,
    found,
    holder,
    killed_holder,
    nothing_left,
    opening,
    text_chunks,
)
from helpers.fleet import Fleet, fleet
from helpers.hanging import HANG, WAKE
from helpers.run import RunStream
from helpers.servers import CHAIN, LOOK_S, ServerProcess, all_free, stage_stub
from omnistage.v1 import omni_pb2, omni_pb2_grpc, stage_pb2
from omnistage.wire.proto_values import kind_name

TOKENS = 200
LONG = {"max_tokens": TOKENS, "ignore_eos": True}
WAYS = {"stopped": (signal.SIGSTOP, signal.SIGCONT), "hung": (HANG, WAKE)}
"""To freeze a process, and to wake it: all of it, or only the thread of its event loop."""
WAKES = {"after 0.3 s": 0.3, "after 0.8 s": 0.8, "after 1.3 s": 1.3, "as another speaks": None}
"""When a sleeper wakes, or half a second later at most."""
HOW = {f"{moment}-{way}": (moment, way) for moment in ("in mid text", "in mid speech") for way in WAYS}


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two of each kind, slow enough that an answer goes on for some time after a frozen stage was left. All is sent inline: shared memory
    that a sleeper may still read is kept from reuse for half a minute, which a test would have to wait for."""
    with fleet(tmp_path_factory.mktemp("logs"), replicas=2, options={"interval_s": 0.02}, can_hang=True) as running:
        yield running


class Freeze:
    """Freezes the replica of a kind that has the session, or one by name."""

    def __init__(self, running: Fleet, kind: str, way: str = "stopped") -> None:
        self._fleet = running
        self._kind = kind
        self._freeze, self._wake = WAYS[way]
        self.name = ""
        self.at = 0.0

    async def stop(self) -> None:
        self.freeze(await holder(self._fleet, self._kind))

    def freeze(self, name: str) -> None:
        self.name, self.at = name, time.monotonic()
        self._fleet.signal(name, self._freeze)

    async def wake(self) -> None:
        self._fleet.signal(self.name, self._wake)


@asynccontextmanager
async def frozen(running: Fleet, kind: str, way: str = "stopped") -> AsyncIterator[tuple[omni_pb2_grpc.OmniServiceAsyncStub, Freeze]]:
    """A test with one replica to freeze, which wakes at the end in any case."""
    freeze = Freeze(running, kind, way)
    async with disturbed(running) as stub:
        try:
            yield stub, freeze
        finally:
            if freeze.name:
                await freeze.wake()
        await found(running, stub)


def left(answer: WholeAnswer) -> bool:
    return bool(answer.failovers)


@lengths.one_or_all("how", HOW)
@pytest.mark.parametrize("kind", CHAIN)
async def test_a_frozen_replica_is_left_and_the_answer_goes_on(toys: Fleet, kind: str, how: str, seed: int) -> None:
    """Once, and nobody else is blamed. A Thinker that froze after the text was whole has its history, and may be asked for nothing more."""
    moment, way = HOW[lengths.draw(how, HOW, seed)]
    moments = []

    async def note() -> None:
        moments.append(time.monotonic())

    async with frozen(toys, kind, way) as (stub, freeze):
        asked = request("hello", seed, thinker=LONG)
        answer = await ask_through(stub, asked, DisturbanceStep(MOMENTS[moment], freeze.stop), DisturbanceStep(left, note))
        answer.check_toy(seed, "hello", TOKENS)
        assert [failover.lost for failover in answer.failovers] == [toys.address(freeze.name)]
        print(f"{kind}, {way}, {moment}: left after {moments[0] - freeze.at:.3f} s")


@lengths.long_form(
    "stage/test_resume.py::test_what_the_older_end_still_sends_reaches_nobody",
    "link/test_alone.py::test_it_is_waited_for_on_the_same_stream",
    unkept="A process that wakes while it is being replaced is not heard.",
)
@lengths.one_or_all("moment", WAKES)
async def test_a_thinker_that_wakes_at_any_moment_is_not_heard(toys: Fleet, moment: str, seed: int) -> None:
    """Before anybody misses it, while it is being replaced, after that, or as soon as another speaks: its Talker has ended the session, or
    has it from the other Thinker now, and nothing of the sleeper arrives anywhere twice."""
    asleep_s = WAKES[lengths.draw(moment, WAKES, seed)]
    waking: list[asyncio.Task[None]] = []

    async with frozen(toys, "thinker") as (stub, freeze):

        async def wake_later(pause_s: float) -> None:
            await asyncio.sleep(pause_s)
            await freeze.wake()

        async def doze() -> None:
            await freeze.stop()
            if asleep_s is not None:
                waking.append(asyncio.create_task(wake_later(asleep_s + random.Random(seed).uniform(0, 0.5))))

        steps = [DisturbanceStep(text_chunks(10), doze)] + [DisturbanceStep(left, freeze.wake)] * (asleep_s is None)
        answer = await ask_through(stub, request("hello", seed, thinker=LONG), *steps)
        await asyncio.gather(*waking)
        answer.check_toy(seed, "hello", TOKENS)
        print(f"{[failover.reason for failover in answer.failovers] or 'nobody missed it'}")
        assert asleep_s is not None or toys.address(freeze.name) in [failover.lost for failover in answer.failovers]
        assert "session.bug" not in toys.logs()


async def test_a_thinker_whose_session_was_opened_again_elsewhere_gets_aborted(toys: Fleet, seed: int) -> None:
    """Two Thinkers and one Talker for one session: the Talker listens to the one that opened it last, and the other one is told."""
    thinkers = [toys.address(name) for name in toys.of("thinker")]
    async with disturbed(toys), stage_stub(thinkers[0]) as old_stub, stage_stub(thinkers[1]) as new_stub:
        old, new = RunStream(old_stub), RunStream(new_stub)
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
        answer = WholeAnswer(omni_pb2.Started(), {port: held[port] + heard.of(port) for port in held}, omni_pb2.Usage())
        answer.check_toy(seed, "hello", TOKENS)


SLOW = {"interval_s": 0.02}
ENDLESS = {"max_tokens": 20000, "ignore_eos": True}
FEW_TOKENS = 100
SHORTER = {"max_tokens": FEW_TOKENS, "ignore_eos": True}


@pytest.fixture(scope="module")
def single_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One of each kind."""
    with fleet(tmp_path_factory.mktemp("logs"), replicas=1, options=SLOW) as running:
        yield running


@contextmanager
def stopped(*servers: ServerProcess) -> Iterator[None]:
    for server in servers:
        os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for server in servers:
            os.kill(server.pid, signal.SIGCONT)


async def under_way(stub: omni_pb2_grpc.OmniServiceAsyncStub) -> GenerateCall:
    """An answer that has begun and goes on for long."""
    call = stub.Generate(request("hello", 1, thinker=ENDLESS), timeout=60)
    await read(call)
    await read(call)
    return call


async def told_lost(stub: omni_pb2_grpc.OmniServiceAsyncStub, address: str) -> None:
    """Return when the router says of a replica that it is lost; it has no stream of changes."""
    async with asyncio.timeout(30):
        while True:
            listed = await stub.ListReplicas(omni_pb2.ListReplicasRequest(), timeout=5)
            if {replica.state for replica in listed.replicas if replica.address == address} == {omni_pb2.REPLICA_STATE_LOST}:
                return
            await asyncio.sleep(LOOK_S)


@lengths.one_or_all("kind", CHAIN)
async def test_the_only_replica_is_waited_for_while_it_is_stopped(single_fleet: Fleet, kind: str, seed: int) -> None:
    """In the middle of an answer, and by one that is asked meanwhile. The router has found long before that it gives no sign of life."""
    name = f"{lengths.draw(kind, CHAIN, seed)}-0"
    async with disturbed(single_fleet) as stub:
        asked: list[asyncio.Task[WholeAnswer]] = []

        async def doze() -> None:
            with stopped(single_fleet.server(name)):
                await told_lost(stub, single_fleet.address(name))
                asked.append(asyncio.create_task(ask(stub, request("meanwhile", seed), timeout_s=60)))

        answer = await ask_through(stub, request("hello", seed, thinker=SHORTER), DisturbanceStep(text_chunks(10), doze))
        answer.check_toy(seed, "hello", FEW_TOKENS)
        assert single_fleet.address(name) not in [failover.lost for failover in answer.failovers]
        (await asked[0]).check_toy(seed, "meanwhile")
        await all_free([single_fleet.address(name) for name in single_fleet.stages])
        await found(single_fleet, stub)


@lengths.one_or_all("kind", CHAIN)
async def test_who_was_waited_for_is_said_at_the_end(single_fleet: Fleet, kind: str, seed: int) -> None:
    """The only replica does not wake within the time of the request. The stages that go on are free; the one that wakes takes sessions
    again."""
    kind = lengths.draw(kind, CHAIN, seed)
    others = [single_fleet.address(name) for name in single_fleet.stages if name != f"{kind}-0"]
    async with disturbed(single_fleet) as stub:
        with stopped(single_fleet.server(f"{kind}-0")):
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await ask(stub, request("hello", seed), timeout_s=4)
            told = refusal(failed.value)
            assert (told.reason, told.metadata) == ("DEADLINE", {"stage": kind}) and f"{kind} " in told.message, told
            assert "no sign of life" in told.message
            await all_free(others)
        await all_free([single_fleet.address(name) for name in single_fleet.stages])
        await found(single_fleet, stub)
        answer = await ask(stub, request("hello", 2))
        answer.check_toy(2, "hello")


async def test_stages_free_the_session_of_a_router_that_stops(single_fleet: Fleet) -> None:
    async with disturbed(single_fleet) as stub:
        call = await under_way(stub)
        with stopped(single_fleet.server("router")):
            await all_free([single_fleet.address(name) for name in single_fleet.stages])
        call.cancel()


@lengths.drawn_cells(1, "kind", CHAIN)
async def test_the_only_replica_is_killed_and_comes_back(single_fleet: Fleet, kind: str, seed: int) -> None:
    """The answer ends with an error that names the stage and says to ask again, and so does the next one; `status` says which stage is
    lost. Whoever asks again when the stage is back is answered."""
    async with disturbed(single_fleet) as stub:
        call = stub.Generate(request("hello", seed, thinker=SHORTER), timeout=60)
        for _ in range(20):
            await read(call)
        await killed_holder(single_fleet, kind)
        at = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            async for _ in read_all(call):
                pass
        print(f"{kind}: told after {time.monotonic() - at:.3f} s")
        told = refusal(failed.value)
        assert (told.code, told.reason, told.metadata) == (grpc.StatusCode.UNAVAILABLE, "STAGE_LOST", {"stage": kind})
        assert told.retry_delay_s
        await nothing_left(single_fleet)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await ask(stub, request())
        assert refusal(failed.value).reason == "STAGE_LOST"
        listed = await stub.ListReplicas(omni_pb2.ListReplicasRequest(), timeout=10)
        states = {kind_name(replica.kind): replica.state for replica in listed.replicas}
        assert states.pop(kind) == omni_pb2.REPLICA_STATE_LOST
        assert set(states.values()) == {omni_pb2.REPLICA_STATE_SERVING}

        single_fleet.begin(f"{kind}-0")
        await asyncio.to_thread(single_fleet.ready, f"{kind}-0")
        at = time.monotonic()
        await found(single_fleet, stub)
        print(f"{kind}: found again after {time.monotonic() - at:.3f} s")
        (await ask(stub, request("again", seed))).check_toy(seed, "again")


# Processes that are not lost -----------------------------------------------------------------------------------------------------------


STOPPED_S = 5.0
LOST = ("link.lost", "link.open_failed", "replica.lost")


def lines_of(running: Fleet) -> list[str]:
    """The lines of all logs that report a lost process."""
    return [line for line in running.logs().splitlines() if any(word in line for word in LOST)]


@lengths.long_form("link/test_pulse.py::test_a_listener_that_comes_late_counts_one_tick_and_reads_first")
async def test_nobody_is_lost_when_all_were_stopped(tmp_path: Path, seed: int) -> None:
    """A laptop that was closed, a virtual machine that was moved: who was stopped himself has heard nobody, and holds it against nobody."""
    with fleet(tmp_path, replicas=2, options=SLOW) as running:

        async def stop() -> None:
            with stopped(*map(running.server, running.names)):
                await asyncio.sleep(STOPPED_S)

        async with disturbed(running) as stub:
            answer = await ask_through(stub, request("hello", seed, thinker=SHORTER), DisturbanceStep(text_chunks(10), stop))
        answer.check_toy(seed, "hello", FEW_TOKENS)
        assert not answer.failovers and not lines_of(running)
