"""Kills of a stage late in an answer, while other clients talk: does the gap grow with the length of the answer? The replica that has the
answer is found while no other answer runs; then the other clients begin, and each of them checks that its answers stay the same."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from benchmarks.figures import Figure, median, percentile
from benchmarks.loss import Hearing, NothingLost, hear, strike
from helpers.disturbed import holder, nothing_left, restore
from helpers.fleet import Fleet
from omnistage.v1 import omni_pb2

if TYPE_CHECKING:
    from omnistage.v1.omni_pb2_grpc import OmniServiceAsyncStub as Stub

BYSTANDERS = 8
LATE = 0.8
"""The share of the tokens that has come when the stage is killed."""

TIMEOUT_S = 300.0
ATTEMPTS = 3
"""How often to try to kill a stage before the answer is over; on a busy machine a try can be too late."""

Request = Callable[[int], omni_pb2.GenerateRequest]
"""Makes the request that has this number."""


async def measure(house: Fleet, stub: Stub, request: Request, kind: str, tokens: int, kills: int) -> Figure:
    """Measure how long a listener waits for the first chunk that was made after the loss of a stage. tokens: length of the answer."""
    undisturbed = await hear(stub, request(0))
    resumed = [1e3 * await _loss(house, stub, request, kind, tokens, undisturbed) for _ in range(kills)]
    note = f"{kills} kills, with {BYSTANDERS} others; p90 {percentile(resumed, 90):.0f}, longest {max(resumed):.0f}"
    return Figure(f"toy_{kind}_killed_in_{tokens}_tokens_first_resumed_chunk_p50", median(resumed), "ms", "<= 300", note)


async def _loss(house: Fleet, stub: Stub, request: Request, kind: str, tokens: int, undisturbed: Hearing) -> float:
    """Seconds from a kill to the first chunk made after it; tries again if the answer was over before."""
    for _ in range(ATTEMPTS - 1):
        try:
            return await _try(house, stub, request, kind, tokens, undisturbed)
        except NothingLost as error:
            print(f"once more: {error}", flush=True)
    return await _try(house, stub, request, kind, tokens, undisturbed)


async def _try(house: Fleet, stub: Stub, request: Request, kind: str, tokens: int, undisturbed: Hearing) -> float:
    """Try `_loss` once. Raises NothingLost if the answer was over before the kill."""
    try:
        hearing, at = await _ask_disturbed(house, stub, request, kind, tokens)
    finally:
        await restore(house, stub)
        await nothing_left(house)
    if hearing.content != undisturbed.content:
        raise RuntimeError(f"another answer of {tokens} tokens than without the loss of a {kind}")
    resumed_at, _ = hearing.resumed(kind)
    print(f"SIGKILL {kind} late in {tokens} tokens, ms: first chunk {1e3 * (resumed_at - at):.0f}", flush=True)
    return resumed_at - at


async def _ask_disturbed(house: Fleet, stub: Stub, request: Request, kind: str, tokens: int) -> tuple[Hearing, float]:
    """The answer, and the moment at which its stage was killed, in time.monotonic() seconds. Raises NothingLost."""
    hearing = Hearing()
    striking: asyncio.Task[tuple[float, float]] | None = None
    events = aiter(stub.Generate(request(0), timeout=TIMEOUT_S))
    hearing.events.append((time.monotonic(), await anext(events)))
    victim = await holder(house, kind)
    async with _company(stub, request) as talking:
        async for event in events:
            hearing.events.append((time.monotonic(), event))
            if striking is None and hearing.tokens >= LATE * tokens and talking():
                # In a task, so that the reading of the answer goes on meanwhile.
                striking = asyncio.create_task(strike(house, victim, signal.SIGKILL))
    if striking is None:
        raise NothingLost(f"the answer of {tokens} tokens was over before the {kind} was killed")
    at, _ = await striking
    return hearing, at


@asynccontextmanager
async def _company(stub: Stub, request: Request) -> AsyncIterator[Callable[[], bool]]:
    """Let BYSTANDERS clients ask one question each, again and again; yields a function that says whether each has got an event."""
    hearing: set[int] = set()

    async def ask(number: int) -> None:
        before: tuple[str, bytes] | None = None
        while True:
            answer = Hearing()
            async for event in stub.Generate(request(number), timeout=TIMEOUT_S):
                answer.events.append((time.monotonic(), event))
                hearing.add(number)
            if before is not None and answer.content != before:
                raise RuntimeError(f"bystander {number} got another answer than before")
            before = answer.content

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(number)) for number in range(1, 1 + BYSTANDERS)]
        yield lambda: len(hearing) == BYSTANDERS
        for task in tasks:
            task.cancel()
