"""Events that make a healthy process look lost, and must not: each cause that was found by a drill, one test."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from helpers import lengths
from helpers.ask import WholeAnswer, request
from helpers.disturbed import DisturbanceStep, ask_through, disturbed, text_chunks
from helpers.fleet import Fleet, fleet
from helpers.hanging import HOLD_ON
from helpers.servers import CHAIN
from omnistage.v1 import omni_pb2_grpc

SLOW = {"interval_s": 0.02}
TOKENS = 100
STOPPED_S = 5.0
LOST = ("link.lost", "link.open_failed", "replica.lost")


def lines_of(running: Fleet) -> list[str]:
    """The lines of all logs that report a lost process."""
    return [line for line in running.logs().splitlines() if any(word in line for word in LOST)]


async def answer_through(stub: omni_pb2_grpc.OmniServiceAsyncStub, step: DisturbanceStep, seed: int) -> WholeAnswer:
    """An answer that is disturbed in the middle, and right."""
    answer = await ask_through(stub, request("hello", seed, thinker={"max_tokens": TOKENS, "ignore_eos": True}), step)
    answer.check_toy(seed, "hello", TOKENS)
    return answer


@contextmanager
def stopped(running: Fleet) -> Iterator[None]:
    for name in running.names:
        running.signal(name, signal.SIGSTOP)
    try:
        yield
    finally:
        for name in running.names:
            running.signal(name, signal.SIGCONT)


@lengths.long_form("link/test_pulse.py::test_a_listener_that_comes_late_counts_one_tick_and_reads_first")
async def test_nobody_is_lost_when_all_were_stopped(tmp_path: Path, seed: int) -> None:
    """A laptop that was closed, a virtual machine that was moved: who was stopped himself has heard nobody, and holds it against nobody."""
    with fleet(tmp_path, replicas=2, options=SLOW) as running:

        async def stop() -> None:
            with stopped(running):
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
