"""One level of load while it is measured: who starts which request when, and what came of each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from omnistage.cli.bench.arrivals import Process, due_times_s
from omnistage.cli.bench.sample import Failure, Measured, Sample

LONGEST_PAUSE_S = 5.0
"""Of somebody who was told to ask again later, however late."""

Take = Callable[[int, float, float], Coroutine[Any, Any, Sample]]
"""Takes the sample of the request with a number, when it was due, and the time.perf_counter() from which that counts."""


@dataclass(frozen=True, slots=True)
class Closed:
    """So many ask at once, each again as soon as it has its answer."""

    concurrency: int

    def __str__(self) -> str:
        return f"concurrency {self.concurrency}"

    @property
    def amount(self) -> str:
        """In a column of others of its kind."""
        return str(self.concurrency)


@dataclass(frozen=True, slots=True)
class Open:
    """Requests come at their time, `rate` a second, whatever runs by then, unless `most_open` are. burst: how many at once."""

    rate: float
    process: Process
    most_open: int
    burst: int = 1

    def __str__(self) -> str:
        together = f" of {self.burst}" if self.process == "burst" else ""
        return f"{self.rate:g} requests/s, {self.process}{together}"

    @property
    def amount(self) -> str:
        """In a column of others of its kind."""
        return f"{self.rate:g}/s"


Load = Closed | Open


@dataclass(frozen=True, slots=True)
class Extent:
    """How long a level goes on: so many requests, or so many seconds in which requests are started, whichever is over first; one of them is
    given."""

    requests: int | None
    seconds: float | None

    def is_over(self, requests: int, at_s: float) -> bool:
        """requests: that came. at_s: seconds after the beginning at which the next one would."""
        return (self.requests is not None and requests >= self.requests) or (self.seconds is not None and at_s >= self.seconds)


def pause_s(outcome: Measured | Failure) -> float:
    """How long to wait before the next question. Who is turned away asks again when told to, but does not wait for minutes: at once, they
    would be turned away a thousand times a second."""
    return min(outcome.retry_s or 0.0, LONGEST_PAUSE_S) if isinstance(outcome, Failure) else 0.0


class Level:
    """Puts `load` on a router, for `extent`. first: number of its first request. seed: of a random arrival process."""

    def __init__(self, load: Load, extent: Extent, take: Take, first: int, seed: int) -> None:
        self.load, self.extent = load, extent
        self.samples: list[Sample] = []
        self.started = 0
        self.not_started = 0
        """Requests that came while as many as may be were open."""
        self.running = 0
        self.wall_s = 0.0
        """From the beginning to the end of the last request, or until it was interrupted."""
        self.client_cpu_s = 0.0
        """What this process computed meanwhile."""
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
        """To the end of the last request. Cancelled, it has what was measured by then."""
        self._t0, cpu_s = time.perf_counter(), time.process_time()
        try:
            await (self._closed(self.load) if isinstance(self.load, Closed) else self._open(self.load))
            self.wall_s = max((sample.ended_s for sample in self.samples), default=self.elapsed_s)
        except asyncio.CancelledError:
            self.wall_s = self.elapsed_s
            raise
        finally:
            self.client_cpu_s = time.process_time() - cpu_s

    async def _closed(self, load: Closed) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(load.concurrency):
                group.create_task(self._one_after_another())

    async def _one_after_another(self) -> None:
        while not self.extent.is_over(self.started, self.elapsed_s):
            sample = await self._start(self.elapsed_s)
            if (seconds := pause_s(sample.outcome)) and not self.extent.is_over(self.started, self.elapsed_s):
                await asyncio.sleep(seconds)

    async def _open(self, load: Open) -> None:
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
        """It counts from now on, though its task may begin later."""
        number = self._first + self.started
        self.started += 1
        self.running += 1
        return self._taken(number, due_s)

    async def _taken(self, number: int, due_s: float) -> Sample:
        try:
            sample = await self._take(number, due_s, self._t0)
        finally:
            self.running -= 1
        self.samples.append(sample)
        return sample
