"""The loss of the only process of a kind, and events that make a healthy process look lost, and must not. One that stops (SIGSTOP) keeps
its connections and answers nothing. The loss of one with another beside it is in test_frozen.py."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from helpers import lengths
from helpers.ask import GenerateCall, WholeAnswer, ask, read, read_all, refusal, request
from helpers.disturbed import DisturbanceStep, ask_through, disturbed, found, killed_holder, nothing_left, text_chunks
from helpers.fleet import Fleet, fleet
from helpers.hanging import HOLD_ON
from helpers.servers import CHAIN, LOOK_S, ServerProcess, all_free
from omnistage.v1 import omni_pb2, omni_pb2_grpc
from omnistage.wire.proto_values import kind_name

SLOW = {"interval_s": 0.02}
ENDLESS = {"max_tokens": 20000, "ignore_eos": True}
TOKENS = 100
LONG = {"max_tokens": TOKENS, "ignore_eos": True}


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
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
async def test_the_only_replica_is_waited_for_while_it_is_stopped(toys: Fleet, kind: str, seed: int) -> None:
    """In the middle of an answer, and by one that is asked meanwhile. The router has found long before that it gives no sign of life."""
    name = f"{lengths.draw(kind, CHAIN, seed)}-0"
    async with disturbed(toys) as stub:
        asked: list[asyncio.Task[WholeAnswer]] = []

        async def doze() -> None:
            with stopped(toys.server(name)):
                await told_lost(stub, toys.address(name))
                asked.append(asyncio.create_task(ask(stub, request("meanwhile", seed), timeout_s=60)))

        answer = await ask_through(stub, request("hello", seed, thinker=LONG), DisturbanceStep(text_chunks(10), doze))
        answer.check_toy(seed, "hello", TOKENS)
        assert toys.address(name) not in [failover.lost for failover in answer.failovers]
        (await asked[0]).check_toy(seed, "meanwhile")
        await all_free([toys.address(name) for name in toys.stages])
        await found(toys, stub)


@lengths.one_or_all("kind", CHAIN)
async def test_who_was_waited_for_is_said_at_the_end(toys: Fleet, kind: str, seed: int) -> None:
    """The only replica does not wake within the time of the request. The stages that go on are free; the one that wakes takes sessions
    again."""
    kind = lengths.draw(kind, CHAIN, seed)
    others = [toys.address(name) for name in toys.stages if name != f"{kind}-0"]
    async with disturbed(toys) as stub:
        with stopped(toys.server(f"{kind}-0")):
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await ask(stub, request("hello", seed), timeout_s=4)
            told = refusal(failed.value)
            assert (told.reason, told.metadata) == ("DEADLINE", {"stage": kind}) and f"{kind} " in told.message, told
            assert "no sign of life" in told.message
            await all_free(others)
        await all_free([toys.address(name) for name in toys.stages])
        await found(toys, stub)
        answer = await ask(stub, request("hello", 2))
        answer.check_toy(2, "hello")


async def test_stages_free_the_session_of_a_router_that_stops(toys: Fleet) -> None:
    async with disturbed(toys) as stub:
        call = await under_way(stub)
        with stopped(toys.server("router")):
            await all_free([toys.address(name) for name in toys.stages])
        call.cancel()


@lengths.drawn_cells(1, "kind", CHAIN)
async def test_the_only_replica_is_killed_and_comes_back(toys: Fleet, kind: str, seed: int) -> None:
    """The answer ends with an error that names the stage and says to ask again, and so does the next one; `status` says which stage is
    lost. Whoever asks again when the stage is back is answered."""
    async with disturbed(toys) as stub:
        call = stub.Generate(request("hello", seed, thinker=LONG), timeout=60)
        for _ in range(20):
            await read(call)
        await killed_holder(toys, kind)
        at = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            async for _ in read_all(call):
                pass
        print(f"{kind}: told after {time.monotonic() - at:.3f} s")
        told = refusal(failed.value)
        assert (told.code, told.reason, told.metadata) == (grpc.StatusCode.UNAVAILABLE, "STAGE_LOST", {"stage": kind})
        assert told.retry_delay_s
        await nothing_left(toys)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await ask(stub, request())
        assert refusal(failed.value).reason == "STAGE_LOST"
        listed = await stub.ListReplicas(omni_pb2.ListReplicasRequest(), timeout=10)
        states = {kind_name(replica.kind): replica.state for replica in listed.replicas}
        assert states.pop(kind) == omni_pb2.REPLICA_STATE_LOST
        assert set(states.values()) == {omni_pb2.REPLICA_STATE_SERVING}

        toys.begin(f"{kind}-0")
        await asyncio.to_thread(toys.ready, f"{kind}-0")
        at = time.monotonic()
        await found(toys, stub)
        print(f"{kind}: found again after {time.monotonic() - at:.3f} s")
        (await ask(stub, request("again", seed))).check_toy(seed, "again")


# Processes that are not lost -----------------------------------------------------------------------------------------------------------


STOPPED_S = 5.0
LOST = ("link.lost", "link.open_failed", "replica.lost")


def lines_of(running: Fleet) -> list[str]:
    """The lines of all logs that report a lost process."""
    return [line for line in running.logs().splitlines() if any(word in line for word in LOST)]


async def answer_through(stub: omni_pb2_grpc.OmniServiceAsyncStub, step: DisturbanceStep, seed: int) -> WholeAnswer:
    """An answer that is disturbed in the middle, and right."""
    answer = await ask_through(stub, request("hello", seed, thinker=LONG), step)
    answer.check_toy(seed, "hello", TOKENS)
    return answer


@lengths.long_form("link/test_pulse.py::test_a_listener_that_comes_late_counts_one_tick_and_reads_first")
async def test_nobody_is_lost_when_all_were_stopped(tmp_path: Path, seed: int) -> None:
    """A laptop that was closed, a virtual machine that was moved: who was stopped himself has heard nobody, and holds it against nobody."""
    with fleet(tmp_path, replicas=2, options=SLOW) as running:

        async def stop() -> None:
            with stopped(*map(running.server, running.names)):
                await asyncio.sleep(STOPPED_S)

        async with disturbed(running) as stub:
            answer = await answer_through(stub, DisturbanceStep(text_chunks(10), stop), seed)
        assert not answer.failovers and not lines_of(running)


@lengths.long_form(
    "link/test_alone.py::test_it_is_waited_for_on_the_same_stream",
    "system/test_lost_process.py::test_the_only_replica_is_waited_for_while_it_is_stopped",
    "host/test_watchdog.py::test_a_call_that_keeps_pythons_lock_makes_nobody_hang",
)
@lengths.one_or_all("kind", CHAIN)
async def test_a_lone_process_whose_python_is_held_for_seconds_is_waited_for(tmp_path: Path, kind: str, seed: int) -> None:
    """By a native call that keeps the lock of the interpreter: no part of the process that is Python goes on, its beats neither."""
    name = f"{lengths.draw(kind, CHAIN, seed)}-0"
    with fleet(tmp_path, replicas=1, options=SLOW, can_hang=True) as running:

        async def hold() -> None:
            running.signal(name, HOLD_ON)

        async with disturbed(running) as stub:
            answer = await answer_through(stub, DisturbanceStep(text_chunks(10), hold), seed)
        assert not answer.failovers
        assert not [line for line in lines_of(running) if "link." in line]
