"""Runs a benchmark from its typed options and its first warm-up to its last level. A line on stderr shows progress. The first Ctrl-C ends
the measuring, and the results so far are printed; the second one ends the command."""

from __future__ import annotations

import asyncio
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import typer
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from omnistage.cli import interrupt
from omnistage.cli.bench.level import Closed, Extent, Failure, Level, Load, Open, Process, Sample, take
from omnistage.cli.bench.prompts import NumberRange, Prompts, Questions, RandomWords, built_in_prompts, of_file
from omnistage.cli.bench.summary import Objectives, Summary
from omnistage.cli.console import Notices
from omnistage.cli.report import Interrupted
from omnistage.cli.targets import Where, connect_client
from omnistage.client.async_omni import AsyncOmni
from omnistage.client.connection import Replica
from omnistage.client.errors import RequestError, UnknownModelError

MAX_LEVELS, MAX_CONCURRENCY, HIGHEST_RATE = 32, 4096, 10_000.0
MAX_WORDS = 100_000
CONCURRENCY = "1,4"
MAX_OPEN = 256
REQUESTS_EACH = 10
"""Default number of requests for each user of a closed loop."""
SECONDS = 30.0
"""Default length of a level of an open loop, in seconds."""


def loads_of(concurrency: str | None, rate: str | None, arrivals: Process | None, burst: int | None, max_open: int | None) -> list[Load]:
    """The levels of a run, by the typed options: a closed loop for each --concurrency, or an open loop for each --rate."""
    if rate is None:
        for option, value in (("--arrivals", arrivals), ("--burst-size", burst), ("--max-open", max_open)):
            if value is not None:
                raise typer.BadParameter(f"{option} is for requests that come by themselves; say how many in a second with --rate")
        counts = _numbers("--concurrency", concurrency if concurrency is not None else CONCURRENCY, MAX_CONCURRENCY, "1,4,16")
        if any(count != int(count) for count in counts):
            raise typer.BadParameter(f"--concurrency {concurrency}: give whole numbers, such as 1,4,16")
        return [Closed(int(count)) for count in counts]
    if concurrency is not None:
        raise typer.BadParameter("--concurrency and --rate are two kinds of load; give one of them")
    process = arrivals or "poisson"
    if (process == "burst") != (burst is not None):
        raise typer.BadParameter("--arrivals burst and --burst-size N go together; give both or none")
    rates = _numbers("--rate", rate, HIGHEST_RATE, "0.5,1,2")
    return [Open(requests_per_s, process, max_open or MAX_OPEN, burst or 1) for requests_per_s in rates]


def _numbers(option: str, text: str, maximum: float, example: str) -> list[float]:
    """The numbers in a text such as 1,4,16, each above 0 and at most `maximum`. example: for errors."""
    try:
        values = [float(one) for one in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{option} {text}: give numbers with commas between, such as {example}") from None
    if not all(0 < value <= maximum for value in values):
        raise typer.BadParameter(f"{option} {text}: give numbers above 0, at most {maximum:g}, such as {example}")
    if len(values) > MAX_LEVELS:
        raise typer.BadParameter(f"{option}: {len(values)} levels; give {MAX_LEVELS} at most")
    return values


def span_of(option: str, text: str, maximum: int) -> NumberRange:
    """The range in a text such as 100, or 100-900; its numbers must be from 1 to `maximum`. option: for errors."""
    match = re.fullmatch(r"(\d{1,7})(?:-(\d{1,7}))?", text)
    low_text, high_text = match.groups() if match else ("0", "")  # The 0 is refused below.
    low, high = int(low_text), int(high_text or low_text)
    if not 1 <= low <= high <= maximum:
        raise typer.BadParameter(f"{option} {text}: give a number from 1 to {maximum}, or two such as 100-900")
    return NumberRange(low, high)


def prompts_of(file: Path | None, input_words: str | None, seed: int, *, to_draw: bool) -> Prompts:
    """The prompts of the run: of a file, or random words, or the built-in ones. to_draw: they are to be drawn. Raises RequestError for a
    file without prompts."""
    if file is not None and input_words is not None:
        raise typer.BadParameter("--prompts and --input-words both say what is asked; give one of them")
    if input_words is not None:
        return RandomWords(span_of("--input-words", input_words, MAX_WORDS), seed)
    return of_file(file) if file is not None else built_in_prompts(to_draw=to_draw)


def extent_of(load: Load, requests: int | None, seconds: float | None) -> Extent:
    """The length of a level: as typed, or else the default for its load."""
    if requests is not None or seconds is not None:
        return Extent(requests, seconds)
    return Extent(REQUESTS_EACH * load.concurrency, None) if isinstance(load, Closed) else Extent(None, SECONDS)


LISTED_S = 10.0
"""How long a router may take to list its pipelines or its servers."""


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """The plan of a benchmark. extent_of: returns the length of the level with this load. warmup: number of requests before each level that
    no figure counts. timeout_s: of each request. is_quiet: print only the JSON object."""

    target: Where
    questions: Questions
    loads: Sequence[Load]
    extent_of: Callable[[Load], Extent]
    warmup: int
    timeout_s: float
    objectives: Objectives | None = None
    is_quiet: bool = False


@dataclass(frozen=True, slots=True)
class MeasuredStage:
    """A stage whose replicas served when the benchmark began. replicas: their number. settings: of the first of them."""

    pipeline: str
    stage: str
    model: str
    replicas: int
    settings: dict[str, str]


@dataclass(slots=True)
class Result:
    """The measurements so far. interrupted_by: number of the signal that ended it early; 0: none did."""

    plan: BenchPlan
    stages: tuple[MeasuredStage, ...]
    levels: list[Summary]
    interrupted_by: int = 0

    @property
    def completed(self) -> int:
        return sum(level.completed for level in self.levels)


class Audience(Protocol):
    """An object that shows the benchmark while it runs."""

    def begin(self, result: Result) -> None:
        """Called when the router has answered, before anything is measured."""

    def level(self, summary: Summary) -> None:
        """Called when one more level has been measured."""


async def run(plan: BenchPlan, audience: Audience | None, verbose: bool) -> Result:
    """Measure level after level. Raises OmniError if nothing can be measured. A first signal ends the measuring early, and the result so
    far is returned. Raises Interrupted at a second signal, or at the first if nothing was measured yet."""
    stop = Stop()
    try:
        async with connect_client(plan.target, plan.timeout_s, verbose, is_quiet=True) as omni:
            return await _measure(plan, omni, stop, audience)
    except asyncio.CancelledError:
        if not stop.has_come:
            raise
        raise Interrupted(stop.last_signal) from None


async def _measure(plan: BenchPlan, omni: AsyncOmni, stop: Stop, audience: Audience | None) -> Result:
    """Check the pipeline, and measure level after level until the last one or a signal."""
    await _check_pipeline(omni, plan.questions.options.get("pipeline", ""))
    result = Result(plan, _stages(await omni.replicas(timeout_s=LISTED_S)), [])
    if audience is not None:
        audience.begin(result)
    next_number = 0

    async def ask(number: int, due_s: float, t0: float) -> Sample:
        return await take(omni, plan.questions.at(number), due_s, t0)

    for load in plan.loads:
        level = Level(load, plan.extent_of(load), ask, next_number + plan.warmup, plan.questions.seed)
        async with watch_level(level, is_quiet=plan.is_quiet):
            await stop.unless_stopped(_level(plan, omni, level, next_number))
        next_number += plan.warmup + level.started
        if level.offered:
            result.levels.append(Summary.of(level, plan.objectives))
            if audience is not None:
                audience.level(result.levels[-1])
        if stop.has_come:
            result.interrupted_by = stop.last_signal
            break
    if stop.has_come and not result.levels:
        raise Interrupted(stop.last_signal)
    return result


async def _level(plan: BenchPlan, omni: AsyncOmni, level: Level, first: int) -> None:
    """Warm up, and measure one level. first: number of the first request."""
    at_once = level.load.concurrency if isinstance(level.load, Closed) else 1
    await _warm_up(plan, omni, range(first, first + plan.warmup), at_once)
    await level.measure()


async def _warm_up(plan: BenchPlan, omni: AsyncOmni, numbers: range, at_once: int) -> None:
    """Send requests that no figure counts, at_once at the same time. Raises RequestError if the router refuses them, because it would
    refuse all of the load. Other errors are ignored here."""
    remaining: Iterator[int] = iter(numbers)  # All tasks take their numbers from it.
    refused: list[Failure] = []

    async def one_after_another() -> None:
        """Send one request after the other, until there are no more numbers or one of these requests is refused."""
        for number in remaining:
            sample = await take(omni, plan.questions.at(number), 0.0, 0.0)
            if isinstance(sample.outcome, Failure) and sample.outcome.is_refusal:
                refused.append(sample.outcome)
                return

    async with asyncio.TaskGroup() as group:
        for _ in range(min(len(numbers), at_once)):
            group.create_task(one_after_another())
    if refused:
        raise RequestError(refused[0].message, hint=refused[0].hint, reason=refused[0].reason)


async def _check_pipeline(omni: AsyncOmni, name: str) -> None:
    """Raises UnknownModelError for the name of a pipeline that the router does not serve."""
    if not name:
        return
    served = [pipeline.name for pipeline in await omni.pipelines(timeout_s=LISTED_S)]
    if name not in served:
        raise UnknownModelError(f"--pipeline {name}: this router has no such pipeline", hint=f"It has {', '.join(served) or 'none'}.")


def _stages(replicas: Sequence[Replica]) -> tuple[MeasuredStage, ...]:
    """The stages that serve, with the number of their replicas."""
    serving = [replica for replica in replicas if replica.state == "serving"]
    counts = Counter((replica.pipeline, replica.stage, replica.model) for replica in serving)
    # Reversed, so that the settings of the first replica stay.
    settings = {(replica.pipeline, replica.stage, replica.model): dict(replica.settings) for replica in reversed(serving)}
    return tuple(MeasuredStage(*stage_key, count, settings[stage_key]) for stage_key, count in counts.items())


class Stop:
    """Handles signals as soon as it is made; make it in the task that measures. last_signal: its number; 0: no signal has come."""

    def __init__(self) -> None:
        self.last_signal = 0
        self._task = asyncio.current_task()
        self._measuring: asyncio.Task[None] | None = None
        loop = asyncio.get_running_loop()
        for number in interrupt.heeded_signals():
            loop.add_signal_handler(number, self._signalled, number)

    @property
    def has_come(self) -> bool:
        return self.last_signal != 0

    async def unless_stopped(self, measuring: Coroutine[Any, Any, None]) -> None:
        """Await `measuring` to its end, or until the first signal, which ends it without an error. A second signal, and any signal that
        comes while this does not run, cancels the task in which this object was made."""
        self._measuring = asyncio.create_task(measuring)
        try:
            await self._measuring
        except asyncio.CancelledError:
            # It is no error if the first signal cancelled the measuring, and nobody cancels this task itself.
            task = asyncio.current_task()
            if not self.has_come or (task is not None and task.cancelling()):
                raise
        finally:
            self._measuring.cancel()
            self._measuring = None

    def _signalled(self, number: signal.Signals) -> None:
        is_first = not self.has_come
        self.last_signal = number
        if is_first and self._measuring is not None:
            self._measuring.cancel()
        elif self._task is not None:
            self._task.cancel()


SHOWN_S = 0.25
"""Seconds between two updates of the display. Each takes about a millisecond from the event loop that also measures."""

BAR = 24


@asynccontextmanager
async def watch_level(level: Level, *, is_quiet: bool) -> AsyncIterator[None]:
    """A context in which a line shows how far the level is. is_quiet: show nothing."""
    notices = Notices()
    if is_quiet or not notices.is_terminal:
        yield
        return
    label, bar = TextColumn("{task.description}"), BarColumn(None, table_column=Column(max_width=BAR))
    # No auto_refresh, because rich's thread would hold up the thread that measures, at any moment.
    with Progress(label, bar, TextColumn("{task.fields[told]}"), console=notices, transient=True, auto_refresh=False) as progress:
        task = progress.add_task(str(level.load), total=1.0, told="")
        showing = asyncio.create_task(_show(level, progress, task))
        try:
            yield
        finally:
            showing.cancel()
            await asyncio.wait({showing})


async def _show(level: Level, progress: Progress, task: int) -> None:
    """Refresh the display again and again, until this is cancelled."""
    while True:
        progress.update(task, completed=_done_share(level), told=_progress_text(level))  # type: ignore[arg-type]
        progress.refresh()
        await asyncio.sleep(SHOWN_S)


def _done_share(level: Level) -> float:
    """The finished part of the level, 0 to 1: by requests or by time, whichever is larger."""
    extent = level.extent
    shares = [
        (level.offered - level.running) / extent.requests if extent.requests else 0.0,
        level.elapsed_s / extent.seconds if extent.seconds else 0.0,
    ]
    return min(1.0, max(shares))


def _progress_text(level: Level) -> str:
    """A line of text for the display: how the requests of the level have ended so far."""
    failed = sum(isinstance(sample.outcome, Failure) for sample in level.samples)
    parts = [f"{len(level.samples) - failed} done", f"{level.running} run"]
    parts += [f"{failed} failed"] if failed else []
    parts += [f"{level.not_started} not started"] if level.not_started else []
    return " · ".join(parts)
