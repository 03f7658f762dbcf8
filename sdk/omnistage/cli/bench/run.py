"""Runs a benchmark, from its first warm-up to its last level. A line on stderr shows progress. The first Ctrl-C ends the measuring, and the
results so far are kept; the second one ends the command."""

from __future__ import annotations

import asyncio
import json
import math
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

from rich.live import Live

from omnistage.cli import interrupt
from omnistage.cli.bench.level import Ask, Closed, Failure, Level, Measured, Open, measure_answer
from omnistage.cli.bench.prompts import Questions
from omnistage.cli.bench.results import BenchScreen, Summary
from omnistage.cli.console import Notices
from omnistage.cli.report import Interrupted
from omnistage.cli.targets import Where, connect_client
from omnistage.client.async_omni import AsyncOmni
from omnistage.client.connection import Pipeline, Replica
from omnistage.client.errors import RequestError, UnknownModelError
from omnistage.client.version import version

LISTED_S = 10.0
"""How long a router may take to list its pipelines or its servers."""

REFRESHES_PER_S = 4.0
"""Updates of the display. Each holds up the event loop that measures for about a millisecond."""

DIGITS = 6
"""Digits after the point of seconds and shares in the object: microseconds."""


@dataclass
class BenchRun:
    """A benchmark: what is to be measured, and what has been. warmup: number of requests before each level that no figure counts.
    timeout_s: of each request. limits: of `--slo`, as typed. is_quiet: print nothing.

    stages: those that served when it began. interrupted_by: number of the signal that ended it early; 0: none did.
    """

    target: Where
    questions: Questions
    loads: Sequence[Closed | Open]
    warmup: int
    timeout_s: float
    limits: Mapping[str, float] | None
    is_quiet: bool
    stages: Sequence[Mapping[str, Any]] = ()
    levels: list[Summary] = field(default_factory=list)
    interrupted_by: int = 0

    async def run(self, verbose: bool) -> None:
        """Measure level after level. Raises OmniError if nothing can be measured. A first signal ends the measuring early, and the levels
        so far are kept. Raises Interrupted at a second signal, or at the first if nothing was measured yet."""
        signals, task = list[int](), asyncio.current_task()

        def stop(number: int) -> None:
            signals.append(number)
            if task is not None:
                task.cancel()

        for number in interrupt.heeded_signals():
            asyncio.get_running_loop().add_signal_handler(number, stop, number)
        screen = BenchScreen(is_quiet=self.is_quiet)
        try:
            async with connect_client(self.target, self.timeout_s, verbose, is_quiet=True) as omni:
                await self._measure(omni, screen)
        except asyncio.CancelledError:
            if not signals:
                raise
            if len(signals) > 1 or not self.levels:
                raise Interrupted(signals[-1]) from None
            self.interrupted_by = signals[0]
            screen.line("\ninterrupted: this is what was measured by then", "yellow")
        if len(self.levels) > 1:
            screen.levels(self.levels)

    async def _measure(self, omni: AsyncOmni, screen: BenchScreen) -> None:
        """Check the pipeline, and measure level after level until the last one. A level that is cut short is kept too."""
        pipeline = self.questions.options.get("pipeline", "")
        served = await omni.pipelines(timeout_s=LISTED_S) if pipeline else []
        called = [one.name for one in Pipeline.find_called(pipeline, served)]
        if pipeline and len(called) != 1:
            hint = f"It has {', '.join(one.label for one in served) or 'none'}."
            reason = f"{' and '.join(called)} are both called so" if called else "this router has no such pipeline"
            raise UnknownModelError(f"--pipeline {pipeline}: {reason}", hint=hint)
        pipeline = "".join(called)
        self.stages = _stages(await omni.replicas(timeout_s=LISTED_S))
        models = dict.fromkeys(stage["model"] for stage in self.stages if stage["pipeline"] == pipeline or not pipeline)
        lengths = f"answers of {self.questions.tokens} tokens" if self.questions.tokens is not None else ""
        parts = (f"asking {self.target.address}", pipeline, ", ".join(models), self.questions.description, lengths)
        screen.line(" · ".join(filter(None, parts)), "dim")
        numbers, notices = count(), Notices()

        async def ask(number: int) -> Measured | Failure:
            return await measure_answer(omni, self.questions, number)

        for load in self.loads:
            level = Level(load, ask, numbers, self.questions.seed)
            # No auto_refresh, because rich's thread would hold up the thread that measures, at any moment.
            line = Live(get_renderable=partial(_progress, level), console=notices, transient=True, auto_refresh=False)
            refreshing = None if self.is_quiet else asyncio.create_task(_refresh(line))
            try:
                with nullcontext() if self.is_quiet else line:
                    at_once = load.concurrency if isinstance(load, Closed) else 1
                    await _warm_up(Closed(at_once, requests=self.warmup), ask, numbers)
                    await level.measure()
            finally:
                if refreshing is not None:
                    refreshing.cancel()
                if level.offered:
                    self.levels.append(Summary(level, self.limits))
                    screen.level(self.levels[-1])

    def as_object(self) -> dict[str, Any]:
        """The object, with the keys of docs/bench.md. Its numbers are rounded to DIGITS."""
        questions = self.questions
        record = {
            "version": version(),
            "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "client": {"python": platform.python_version(), "cpus": os.cpu_count()},
            "address": self.target.address,
            "stages": self.stages,
            "task": questions.task,
            "prompts": questions.description,
            "output_tokens": None if questions.tokens is None else str(questions.tokens),
            "options": questions.options,
            "seed": questions.seed,
            "warmup": self.warmup,
            "slo": self.limits,
            "interrupted": bool(self.interrupted_by),
            "levels": [level.as_object(questions) for level in self.levels],
        }
        text = json.dumps(record, default=asdict)
        rounded: dict[str, Any] = json.loads(text, parse_float=lambda number: round(float(number), DIGITS))
        return rounded


async def _refresh(line: Live) -> None:
    """Refresh the display again and again, until this is cancelled."""
    while True:
        line.refresh()
        await asyncio.sleep(1 / REFRESHES_PER_S)


async def _warm_up(load: Closed, ask: Ask, numbers: Iterator[int]) -> None:
    """Send requests that no figure counts. Raises RequestError as soon as the router refuses one of them, because it would refuse all of
    the load. After other errors the next request is sent at once."""

    async def ask_at_once(number: int) -> Measured | Failure:
        outcome = await ask(number)
        if not isinstance(outcome, Failure):
            return outcome
        if outcome.is_refusal:
            raise RequestError(outcome.message, hint=outcome.hint, reason=outcome.reason)
        return replace(outcome, pause_s=0.0)

    try:
        await Level(load, ask_at_once, numbers).measure()
    except ExceptionGroup as group:  # It has the error of one task; the other tasks were cancelled.
        raise group.exceptions[0] from None


def _stages(replicas: Sequence[Replica]) -> list[dict[str, Any]]:
    """The stages that serve: each with the number of its replicas, and the settings of the first of them."""
    stages: dict[tuple[str, str, str], dict[str, Any]] = {}
    for replica in replicas:
        if replica.state == "serving":
            names = {"pipeline": replica.pipeline, "stage": replica.stage, "model": replica.model}
            new_stage = names | {"replicas": 0, "settings": dict(replica.settings)}
            stages.setdefault((replica.pipeline, replica.stage, replica.model), new_stage)["replicas"] += 1
    return list(stages.values())


def _progress(level: Level) -> str:
    """A line of text for the display: how far the level is, by requests or by time, and how its requests have ended so far."""
    load, failed = level.load, sum(isinstance(sample.outcome, Failure) for sample in level.samples)
    share = max((len(level.samples) + level.not_started) / (load.requests or math.inf), level.elapsed_s / (load.seconds or math.inf))
    counts = {"done": len(level.samples) - failed, "run": level.running, "failed": failed, "not started": level.not_started}
    parts = [f"{number} {name}" for name, number in counts.items() if number or name in ("done", "run")]
    return " · ".join((str(load), f"{min(1.0, share):.0%}", *parts))
