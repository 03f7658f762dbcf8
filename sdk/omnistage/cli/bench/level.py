"""Measures one level of load: starts each request at its time, and stores its result, the figures of its answer or the error. In an open
loop requests do not wait for earlier answers. Times are seconds by the clock of this client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from omnistage.cli.bench.prompts import BenchQuestion
from omnistage.cli.wording import word_error
from omnistage.client.async_omni import AsyncOmni
from omnistage.client.errors import OmniError, ProtocolError, RequestError, UnavailableError
from omnistage.client.events import CONTINUITY_LIMIT_S, Done, Picture, Progress, TextDelta, ThoughtDelta

RETRY_S = 0.5
"""Seconds to wait after a refusal that names no delay."""


@dataclass(frozen=True, slots=True)
class TokenArrival:
    """The arrival of a message with text. arrival_s: in seconds after t0. tokens: how many tokens the message has."""

    arrival_s: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Measured:
    """The figures of one answer, as docs/bench.md explains them, in seconds; counts and rtf have no unit. None: the answer has nothing to
    measure."""

    tokens: int
    ttft_s: float | None
    tpot_s: float | None
    itl_s: tuple[float, ...]
    e2e_s: float
    audio_ttfp_s: float | None
    ttfa_s: float | None
    audio_s: float
    rtf: float | None
    rtf_generation: float | None
    underrun_s: float | None
    starved_s: float | None
    queued_s: float
    steps: int
    pictures: int
    failovers: int
    finish_reason: str

    @property
    def is_continuous(self) -> bool | None:
        """Whether a listener who plays the sound as it comes hears no noticeable gap; None without sound."""
        return None if self.underrun_s is None else self.underrun_s <= CONTINUITY_LIMIT_S


@dataclass(frozen=True, slots=True)
class Failure:
    """Describes why there is no answer. error: name of the class of the error. retry_s: seconds after which to ask again; None: asking
    again does not help. is_refusal: the request itself was wrong."""

    error: str
    reason: str
    message: str
    hint: str
    retry_s: float | None
    is_refusal: bool

    @classmethod
    def of(cls, error: OmniError) -> Failure:
        """The failure that an error of the client stands for."""
        retry_s = None
        if isinstance(error, UnavailableError):
            retry_s = RETRY_S if error.retry_delay_s is None else error.retry_delay_s
        return cls(type(error).__name__, error.reason, *word_error(error), retry_s, isinstance(error, RequestError))


@dataclass(frozen=True, slots=True)
class Sample:
    """One request and its outcome. due_s, begun_s, ended_s: when it was due, began and ended, in seconds after its level began."""

    number: int
    seed: int
    due_s: float
    begun_s: float
    ended_s: float
    outcome: Measured | Failure

    @property
    def late_s(self) -> float:
        """Seconds by which this client began the request too late."""
        return self.begun_s - self.due_s


async def take(omni: AsyncOmni, question: BenchQuestion, due_s: float, t0: float) -> Sample:
    """Send a request, and measure its answer. due_s: when it was due. t0: time.perf_counter() at the beginning of the level. An error of
    the client or a server is a result, and is not raised."""
    begun_s = time.perf_counter() - t0
    outcome: Measured | Failure
    try:
        outcome = await _measure(omni, question)
    except OmniError as error:
        outcome = Failure.of(error)
    return Sample(question.number, question.seed, due_s, begun_s, time.perf_counter() - t0, outcome)


async def _measure(omni: AsyncOmni, question: BenchQuestion) -> Measured:
    """The figures of the answer to a question. Raises OmniError."""
    pieces: list[TokenArrival] = []
    steps = pictures = 0
    async with aclosing(question.stream(omni)) as events:
        async for event in events:
            match event:
                case TextDelta() | ThoughtDelta() if event.token_ids:
                    _add_piece(pieces, event.arrival_s, len(event.token_ids))
                case Progress():
                    steps = event.done
                case Picture() if event.preview_step is None:
                    pictures += 1
                case Done():
                    return _figures(event, pieces, steps, pictures)
    raise ProtocolError("the stream ended without its account")


def _add_piece(pieces: list[TokenArrival], arrival_s: float, tokens: int) -> None:
    """Add a piece of text to those that have come; pieces with the same time are of one message, and are joined."""
    if pieces and pieces[-1].arrival_s == arrival_s:
        tokens += pieces.pop().tokens
    pieces.append(TokenArrival(arrival_s, tokens))


def _figures(done: Done, pieces: list[TokenArrival], steps: int, pictures: int) -> Measured:
    """The figures of an answer that has ended. pieces: arrivals of its text."""
    timing = done.timing
    sounds = [chunk for chunk in timing.audio if chunk.samples]
    # The first piece was made before it arrived, so the time from its arrival to the last one made only the later pieces.
    later_audio_s = timing.audio_s - sounds[0].duration_s if sounds else 0.0
    return Measured(
        tokens=sum(piece.tokens for piece in pieces),
        ttft_s=timing.ttft_s,
        tpot_s=per_token_s(pieces),
        itl_s=tuple(after.arrival_s - before.arrival_s for before, after in pairwise(pieces)),
        e2e_s=timing.e2e_s,
        audio_ttfp_s=sounds[0].arrival_s if sounds else None,
        ttfa_s=timing.ttfa_s,
        audio_s=timing.audio_s,
        rtf=timing.rtf if sounds else None,
        rtf_generation=(sounds[-1].arrival_s - sounds[0].arrival_s) / later_audio_s if later_audio_s > 0 else None,
        underrun_s=timing.underrun_s if sounds else None,
        starved_s=timing.starved_s if sounds else None,
        queued_s=done.usage.queued_s,
        steps=steps,
        pictures=pictures,
        failovers=len(done.failovers),
        finish_reason=done.finish_reason,
    )


def per_token_s(pieces: list[TokenArrival]) -> float | None:
    """Seconds per token from the first arrival to the last, without the tokens of the first message. None if there was only one message."""
    later_tokens = sum(piece.tokens for piece in pieces[1:])
    return (pieces[-1].arrival_s - pieces[0].arrival_s) / later_tokens if later_tokens else None


Process = Literal["poisson", "constant", "burst"]

_GAPS_PER_DRAW = 256
"""How many gaps are drawn at once."""


def due_times_s(process: Process, rate: float, seed: int = 0, burst: int = 1) -> Iterator[float]:
    """Yields for ever the times at which requests are due, in seconds after the beginning. On average `rate` requests are due in a second.

    constant: the first time is 0, and all are equally far apart. poisson: the gaps, also the one before the first request, are drawn from
    the exponential distribution; the same seed gives the same times. burst: groups of `burst` requests have the same time; the first group
    has 0, and the groups are equally far apart.
    """
    match process:
        case "constant":
            return _constant(rate, 1)
        case "burst":
            return _constant(rate, burst)
        case "poisson":
            return _poisson(rate, seed)


def _constant(rate: float, group_size: int) -> Iterator[float]:
    """Yields times in seconds. Each is yielded `group_size` times, for the requests of a group: 0, then group_size / rate, and so on."""
    number = 0
    while True:
        first_of_group = number // group_size * group_size
        # Each time comes from a division of its own: a sum of gaps would drift.
        yield first_of_group / rate
        number += 1


def _poisson(rate: float, seed: int) -> Iterator[float]:
    """Yields times in seconds, with random gaps of 1 / rate seconds on average."""
    rng = np.random.default_rng(seed)
    at_s = 0.0
    while True:
        for gap_s in rng.exponential(1.0 / rate, _GAPS_PER_DRAW):
            at_s += float(gap_s)
            yield at_s


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
