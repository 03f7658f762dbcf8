"""Measures one level of load: starts each request at its time, and keeps how it ended, with the figures of its answer or the error. In an
open loop requests do not wait for earlier answers. Times are seconds by the clock of this client."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any, ClassVar, Literal

import numpy as np

from omnistage.cli.bench.prompts import Questions
from omnistage.cli.wording import word_error
from omnistage.client.async_omni import AsyncOmni
from omnistage.client.errors import OmniError, ProtocolError, RequestError, UnavailableError
from omnistage.client.events import Done, Picture, Progress, TextDelta, ThoughtDelta

RETRY_S = 0.5
"""Seconds to wait after a refusal that names no delay."""

LONGEST_PAUSE_S = 5.0
"""Longest pause of a simulated user after a refusal, even if the server asks for a longer one."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One answer. figures: by the names of docs/bench.md, in seconds; counts and rtf have no unit. None: the answer has nothing to measure.
    itl_s: the gaps between its messages with text, in seconds."""

    figures: Mapping[str, float | None]
    itl_s: Sequence[float]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Failure:
    """Describes why there is no answer. error: name of the class of the error. request_id: as the logs name it; empty: no router was
    asked. pause_s: seconds that a user waits before the next request:
    as long as the router says, but at most LONGEST_PAUSE_S; 0 if asking again does not help. is_refusal: the request itself was wrong."""

    error: str
    reason: str
    message: str
    hint: str
    request_id: str
    pause_s: float
    is_refusal: bool

    @property
    def description(self) -> dict[str, str]:
        """The error, by the keys of docs/bench.md."""
        return {"error": self.error, "reason": self.reason, "message": self.message, "hint": self.hint, "request_id": self.request_id}

    @classmethod
    def of(cls, error: OmniError) -> Failure:
        """The failure that an error of the client stands for."""
        pause_s = 0.0
        if isinstance(error, UnavailableError):
            # Without a pause a refused user would be refused a thousand times a second.
            pause_s = min(RETRY_S if error.retry_delay_s is None else error.retry_delay_s, LONGEST_PAUSE_S)
        return cls(type(error).__name__, error.reason, *word_error(error), error.request_id, pause_s, isinstance(error, RequestError))


@dataclass(frozen=True, slots=True)
class Sample:
    """One request and its outcome. due_s, begun_s, ended_s: when it was due, began and ended, in seconds after its level began."""

    number: int
    due_s: float
    begun_s: float
    ended_s: float
    outcome: Measured | Failure


async def measure_answer(omni: AsyncOmni, questions: Questions, number: int) -> Measured | Failure:
    """Send the request of this number, and measure its answer. An error of the client or a server is a result, and is not raised."""
    tokens_at = Counter[float]()  # By arrival, because pieces that arrive at the same time are of one message.
    steps = pictures = 0
    try:
        async with aclosing(questions.stream(omni, number)) as events:
            async for event in events:
                match event:
                    case TextDelta() | ThoughtDelta() if event.token_ids:
                        tokens_at[event.arrival_s] += len(event.token_ids)
                    case Progress():
                        steps = event.done
                    case Picture() if event.preview_step is None:
                        pictures += 1
                    case Done():
                        return _measured(event, tokens_at, steps, pictures)
        raise ProtocolError("the stream ended without its account")
    except OmniError as error:
        return Failure.of(error)


def _measured(done: Done, tokens_at: Counter[float], steps: int, pictures: int) -> Measured:
    """An answer that has ended. tokens_at: number of tokens of each message, by its arrival in seconds."""
    timing = done.timing
    arrivals_s = list(tokens_at)
    later_tokens = tokens_at.total() - tokens_at[arrivals_s[0]] if arrivals_s else 0
    sounds = [chunk for chunk in timing.audio if chunk.samples]
    # The first piece was made before it arrived, so the time from its arrival to the last one made only the later pieces.
    later_audio_s = timing.audio_s - sounds[0].duration_s if sounds else 0.0
    figures = {
        "tokens": tokens_at.total(),
        "ttft_s": timing.ttft_s,
        "tpot_s": (arrivals_s[-1] - arrivals_s[0]) / later_tokens if later_tokens else None,
        "e2e_s": timing.e2e_s,
        "audio_ttfp_s": sounds[0].arrival_s if sounds else None,
        "ttfa_s": timing.ttfa_s,
        "audio_s": timing.audio_s,
        "rtf": timing.rtf if sounds else None,
        "rtf_generation": (sounds[-1].arrival_s - sounds[0].arrival_s) / later_audio_s if later_audio_s > 0 else None,
        "underrun_s": timing.underrun_s if sounds else None,
        "starved_s": timing.starved_s if sounds else None,
        "queued_s": done.usage.queued_s,
        "steps": steps,
        "pictures": pictures,
        "failovers": len(done.failovers),
    }
    return Measured(figures, [after - before for before, after in pairwise(arrivals_s)], done.finish_reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelLoad:
    """A load. Its level ends after `requests` requests or after `seconds` seconds, whichever is first. None: no such limit; one of the two
    may be None."""

    requests: int | None = None
    seconds: float | None = None

    def is_over(self, requests: int, at_s: float) -> bool:
        """Whether the level is over. requests: how many have come. at_s: when the next one would come, in seconds after the beginning."""
        return (self.requests is not None and requests >= self.requests) or (self.seconds is not None and at_s >= self.seconds)


@dataclass(frozen=True, slots=True)
class Closed(LevelLoad):
    """A load of a closed loop: `concurrency` simulated users ask at the same time, and each asks the next question after its answer."""

    concurrency: int

    loop: ClassVar = "closed"

    def __str__(self) -> str:
        return f"concurrency {self.concurrency}"


Arrivals = Literal["poisson", "constant", "burst"]


@dataclass(frozen=True, slots=True)
class Open(LevelLoad):
    """A load of an open loop: `rate` requests come a second, and do not wait for earlier answers. While `max_open` are running, further
    ones are only counted. burst: how many come at the same time."""

    rate: float
    arrivals: Arrivals
    max_open: int
    burst: int = 1
    loop: ClassVar = "open"

    def __str__(self) -> str:
        together = f" of {self.burst}" if self.arrivals == "burst" else ""
        return f"{self.rate:g} requests/s, {self.arrivals}{together}"

    def due_times_s(self, seed: int) -> Iterator[float]:
        """Yields for ever the times at which requests are due, in seconds after the beginning. On average `rate` are due in a second.

        poisson: the gaps, also the one before the first request, are drawn from the exponential distribution; the same seed gives the same
        times. constant, burst: groups of `burst` requests have the same time; the first group has 0, and all are equally far apart.
        """
        if self.arrivals == "poisson":
            rng, at_s = np.random.default_rng(seed), 0.0
            while True:
                at_s += rng.exponential(1.0 / self.rate)
                yield at_s
        # Each time comes from a division of its own: a sum of gaps would drift.
        yield from (number // self.burst * self.burst / self.rate for number in count())


Ask = Callable[[int], Coroutine[Any, Any, Measured | Failure]]
"""Sends the request of this number, and returns its outcome."""


class Level:
    """Puts `load` on a router, and keeps the samples. numbers: of the requests. seed: for the random times of an open loop."""

    def __init__(self, load: Closed | Open, ask: Ask, numbers: Iterator[int], seed: int = 0) -> None:
        self.load, self.samples = load, list[Sample]()
        self.offered = 0
        """How many requests came, started or not."""
        self.not_started = 0
        """How many requests were not started, because as many as may run were running."""
        self.running = 0  # number of requests at this moment
        self.wall_s = 0.0
        """Seconds from the beginning of the level to the end of the last request, or to the interrupt."""
        self.client_cpu_s = 0.0
        """Seconds of processor time that this process used meanwhile."""
        self._ask, self._numbers, self._seed = ask, numbers, seed
        self._t0 = time.perf_counter()

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._t0

    async def measure(self) -> None:
        """Start requests, and wait for the end of the last one. If this is cancelled, the samples so far are kept."""
        self._t0, cpu_s = time.perf_counter(), time.process_time()
        try:
            async with asyncio.TaskGroup() as group:
                if isinstance(self.load, Closed):
                    for _ in range(self.load.concurrency):
                        group.create_task(self._be_user())
                else:
                    await self._start_at_times(self.load, group)
            self.wall_s = max((sample.ended_s for sample in self.samples), default=0.0)
        except asyncio.CancelledError:
            self.wall_s = self.elapsed_s
            raise
        finally:
            self.client_cpu_s = time.process_time() - cpu_s

    async def _be_user(self) -> None:
        """Do as one user does: ask, wait for the answer, and ask the next question, until the level is over."""
        while not self.load.is_over(self.offered, due_s := self.elapsed_s):
            self.offered += 1
            outcome = await self._send(due_s)
            if isinstance(outcome, Failure) and not self.load.is_over(self.offered, self.elapsed_s):
                await asyncio.sleep(outcome.pause_s)

    async def _start_at_times(self, load: Open, group: asyncio.TaskGroup) -> None:
        """Start the requests of an open loop at their times, as tasks of the group, until the level is over."""
        for due_s in load.due_times_s(self._seed):
            if load.is_over(self.offered, due_s):
                break
            # All tasks that were made earlier begin in this pause, and count as running behind it.
            await asyncio.sleep(max(0.0, due_s - self.elapsed_s))
            self.offered += 1
            if self.running >= load.max_open:
                self.not_started += 1
            else:
                group.create_task(self._send(due_s))

    async def _send(self, due_s: float) -> Measured | Failure:
        """Send the next request, keep its sample, and return its outcome. due_s: when it is due, in seconds after the level began."""
        number, begun_s = next(self._numbers), self.elapsed_s
        self.running += 1
        try:
            outcome = await self._ask(number)
        finally:
            self.running -= 1
        self.samples.append(Sample(number, due_s, begun_s, self.elapsed_s, outcome))
        return outcome
