"""Measures one level of load: starts each request at its time, and stores its result."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from omnistage.cli.bench.arrivals import Process, due_times_s
from omnistage.cli.bench.sample import Failure, Measured, Sample

LONGEST_PAUSE_S = 5.0
"""Longest pause of a simulated user after a refusal, even if the server asks for a longer one."""

Take = Callable[[int, float, float], Coroutine[Any, Any, Sample]]
"""Called with (number, due_s, t0): sends the request of that number and returns its sample. due_s: when it is due, in seconds after t0, a
value of time.perf_counter()."""


@dataclass(frozen=True, slots=True)
class Closed:
    """A load of a closed loop: `concurrency` simulated users ask at the same time, and each asks the next question after its answer."""

    concurrency: int

    def __str__(self) -> str:
        return f"concurrency {self.concurrency}"

    @property
    def amount(self) -> str:
        """The load as a cell of a table."""
        return str(self.concurrency)


@dataclass(frozen=True, slots=True)
class Open:
    """A load of an open loop: `rate` requests come a second, and do not wait for earlier answers. While `most_open` are running, further
    ones are only counted. burst: how many come at the same time."""

    rate: float
    process: Process
    most_open: int
    burst: int = 1

    def __str__(self) -> str:
        together = f" of {self.burst}" if self.process == "burst" else ""
        return f"{self.rate:g} requests/s, {self.process}{together}"

    @property
    def amount(self) -> str:
        """The load as a cell of a table."""
        return f"{self.rate:g}/s"


Load = Closed | Open


@dataclass(frozen=True, slots=True)
class Extent:
    """The length of a level, which ends after `requests` requests or after `seconds` seconds, whichever is first. None: no such limit; one
    of the two may be None."""

    requests: int | None
    seconds: float | None

    def is_over(self, requests: int, at_s: float) -> bool:
        """Whether the level is over. requests: how many have come. at_s: when the next one would come, in seconds after the beginning."""
        return (self.requests is not None and requests >= self.requests) or (self.seconds is not None and at_s >= self.seconds)


def pause_s(outcome: Measured | Failure) -> float:
    """Seconds that a user waits before the next question. A refused user waits as long as the router says, but at most LONGEST_PAUSE_S;
    without a pause it would be refused a thousand times a second."""
    return min(outcome.retry_s or 0.0, LONGEST_PAUSE_S) if isinstance(outcome, Failure) else 0.0


class Level:
    """Puts `load` on a router for `extent`, and keeps the samples. take: sends one request. first: number of the first request. seed: for
    the random times of an open loop."""

    def __init__(self, load: Load, extent: Extent, take: Take, first: int, seed: int) -> None:
        self.load, self.extent = load, extent
        self.samples: list[Sample] = []
        self.started = 0  # number of requests
        self.not_started = 0
        """How many requests were not started, because as many as may run were running."""
        self.running = 0  # number of requests at this moment
        self.wall_s = 0.0
        """Seconds from the beginning of the level to the end of the last request, or to the interrupt."""
        self.client_cpu_s = 0.0
        """Seconds of processor time that this process used meanwhile."""
        self._take, self._first, self._seed = take, first, seed
        self._t0 = time.perf_counter()

    @property
    def offered(self) -> int:
        """How many requests came, started or not."""
        return self.started + self.not_started

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._t0

    async def measure(self) -> None:
        """Start requests, and wait for the end of the last one. If this is cancelled, the samples so far are kept."""
        self._t0, cpu_s = time.perf_counter(), time.process_time()
        try:
            await (self._run_closed(self.load) if isinstance(self.load, Closed) else self._run_open(self.load))
            self.wall_s = max((sample.ended_s for sample in self.samples), default=self.elapsed_s)
        except asyncio.CancelledError:
            self.wall_s = self.elapsed_s
            raise
        finally:
            self.client_cpu_s = time.process_time() - cpu_s

    async def _run_closed(self, load: Closed) -> None:
        """Run all users until the level is over."""
        async with asyncio.TaskGroup() as group:
            for _ in range(load.concurrency):
                group.create_task(self._be_user())

    async def _be_user(self) -> None:
        """Do as one user does: ask, wait for the answer, and ask the next question, until the level is over."""
        while not self.extent.is_over(self.started, self.elapsed_s):
            sample = await self._start(self.elapsed_s)
            if (seconds := pause_s(sample.outcome)) and not self.extent.is_over(self.started, self.elapsed_s):
                await asyncio.sleep(seconds)

    async def _run_open(self, load: Open) -> None:
        """Start requests at their times until the level is over."""
        async with asyncio.TaskGroup() as group:
            for due_s in due_times_s(load.process, load.rate, self._seed, load.burst):
                if self.extent.is_over(self.offered, due_s):
                    break
                await asyncio.sleep(max(0.0, due_s - self.elapsed_s))
                if self.running >= load.most_open:
                    self.not_started += 1
                else:
                    group.create_task(self._start(due_s))

    def _start(self, due_s: float) -> Coroutine[Any, Any, Sample]:
        """Count a request as running, and return the coroutine that sends it. Counted here, because its task may begin later. due_s: when
        the request is due, in seconds after the level began."""
        number = self._first + self.started
        self.started += 1
        self.running += 1
        return self._send(number, due_s)

    async def _send(self, number: int, due_s: float) -> Sample:
        """Send the request of this number, and store and return its sample. due_s: as in `_start`."""
        try:
            sample = await self._take(number, due_s, self._t0)
        finally:
            self.running -= 1
        self.samples.append(sample)
        return sample
