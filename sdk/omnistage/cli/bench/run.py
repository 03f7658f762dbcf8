"""Runs a benchmark from its first warm-up to its last level."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from omnistage.cli.bench.level import Closed, Extent, Level, Load
from omnistage.cli.bench.objectives import Objectives
from omnistage.cli.bench.question import Questions
from omnistage.cli.bench.sample import Failure, Sample, take
from omnistage.cli.bench.stop import Stop
from omnistage.cli.bench.summary import Summary
from omnistage.cli.bench.watching import watch_level
from omnistage.cli.connect import connect_client
from omnistage.cli.interruptible import Interrupted
from omnistage.cli.where import Where
from omnistage.client.async_omni import AsyncOmni
from omnistage.client.connection import Replica
from omnistage.client.errors import RequestError, UnknownModelError

LISTED_S = 10.0
"""How long a router may take to list its pipelines or its servers."""


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """The plan of a benchmark. extent_of: returns the length of the level with this load. warmup: number of requests before each level that
    no figure counts. timeout_s: of each request. is_quiet: print only the JSON object."""

    where: Where
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
        async with connect_client(plan.where, plan.timeout_s, verbose, is_quiet=True) as omni:
            return await _measure(plan, omni, stop, audience)
    except asyncio.CancelledError:
        if not stop.came:
            raise
        raise Interrupted(stop.number) from None


async def _measure(plan: BenchPlan, omni: AsyncOmni, stop: Stop, audience: Audience | None) -> Result:
    """Check the pipeline, and measure level after level until the last one or a signal."""
    await _check_pipeline(omni, plan.questions.options.get("pipeline", ""))
    result = Result(plan, _stages(await omni.replicas(timeout_s=LISTED_S)), [])
    if audience is not None:
        audience.begin(result)
    number = 0

    async def ask(number: int, due_s: float, t0: float) -> Sample:
        return await take(omni, plan.questions.at(number), due_s, t0)

    for load in plan.loads:
        level = Level(load, plan.extent_of(load), ask, number + plan.warmup, plan.questions.seed)
        async with watch_level(level, is_quiet=plan.is_quiet):
            await stop.unless_stopped(_level(plan, omni, level, number))
        number += plan.warmup + level.started
        if level.offered:
            result.levels.append(Summary.of(level, plan.objectives))
            if audience is not None:
                audience.level(result.levels[-1])
        if stop.came:
            result.interrupted_by = stop.number
            break
    if stop.came and not result.levels:
        raise Interrupted(stop.number)
    return result


async def _level(plan: BenchPlan, omni: AsyncOmni, level: Level, first: int) -> None:
    """Warm up, and measure one level. first: number of the first request."""
    at_once = level.load.concurrency if isinstance(level.load, Closed) else 1
    await _warm_up(plan, omni, range(first, first + plan.warmup), at_once)
    await level.measure()


async def _warm_up(plan: BenchPlan, omni: AsyncOmni, numbers: range, at_once: int) -> None:
    """Send requests that no figure counts, at_once at the same time. Raises RequestError if the router refuses them, because it would
    refuse all of the load. Other errors are ignored here."""
    remaining: Iterator[int] = iter(numbers)

    async def one_after_another() -> None:
        """Send requests with the numbers that are left, until none is or one is refused."""
        for number in remaining:
            sample = await take(omni, plan.questions.at(number), 0.0, 0.0)
            if isinstance(sample.outcome, Failure) and sample.outcome.is_refusal:
                refused.append(sample.outcome)
                return

    refused: list[Failure] = []
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
    settings = {(replica.pipeline, replica.stage, replica.model): dict(replica.settings) for replica in reversed(serving)}
    return tuple(MeasuredStage(*which, count, settings[which]) for which, count in counts.items())
