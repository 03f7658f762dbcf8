"""The frame of all benchmarks. A benchmark is a list of parts, and each part measures figures: it takes turns between the ways that it
compares, and adds medians, with a goal if there is one. The frame parses the command line, gives each part a folder, writes the figures as
JSON as soon as they are there, goes on after a failed part, prints the table, and makes the exit status of missed goals and failures.

Here are also the questions and the servers that benchmarks measure, and facts of processes from the kernel."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import tempfile
import time
import traceback
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich.table import Table

from omnistage.cli.console import Console
from omnistage.cli.stack.layout import Layout, PipelineLayout, ServerOptions, StageLayout
from omnistage.cli.stack.stack import Stack
from omnistage.host.terminal import guard_standard_streams

T = TypeVar("T")

# Figures ---------------------------------------------------------------------------------------------------------------------------------

OUT = Path(__file__).parent / "out"
GOAL = re.compile(r"(<=|>=) (\d+(?:\.\d+)?)")


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number. goal: `<= NUMBER` or `>= NUMBER`; empty if the figure has none. note: how the number was made."""

    figure: str
    value: float
    unit: str
    goal: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        if self.goal and GOAL.fullmatch(self.goal) is None:
            raise ValueError(f"a goal is `<= NUMBER` or `>= NUMBER`, not {self.goal!r}")

    @property
    def missed(self) -> bool:
        """Whether there is a goal and the value misses it; NaN misses every goal."""
        match = GOAL.fullmatch(self.goal)
        if match is None:
            return False
        bound = float(match[2])
        return not (self.value <= bound if match[1] == "<=" else self.value >= bound)


def median(values: Sequence[float]) -> float:
    return float(np.median(values))


def ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """The median of the ratios of the same rounds. over, under: one value a round."""
    return median([above / below for above, below in zip(over, under, strict=True)])


# The frame -------------------------------------------------------------------------------------------------------------------------------


@dataclass
class Benchmark:
    """One run of a benchmark. Its figures are always complete in `out`/`name`.json, so that they survive a crash. folder: for files of the
    parts; it is gone after the run. is_smallest: run with the least rounds and the smallest work, to see that all parts run. failed: why
    parts failed, by name."""

    name: str
    out: Path = OUT
    folder: Path = Path()
    is_smallest: bool = False
    figures: list[Figure] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return self.out / f"{self.name}.json"

    def size(self, size: T, smallest: T) -> T:
        """The size of a part's work: `smallest` if the run is a smallest one."""
        return smallest if self.is_smallest else size

    async def by_turns(self, rounds: int, *ways: Callable[[int], Awaitable[T]], warm_ups: int = 1) -> list[list[T]]:
        """Go several ways in turn, in each second round in the reverse order, so that other load on the machine touches all alike. ways:
        called with the number of the round. Returns the results of each way, without those of the first `warm_ups` rounds; a smallest run
        has one round and no warm-up."""
        rounds, warm_ups = self.size((rounds, warm_ups), (1, 0))
        results: list[list[T]] = [[] for _ in ways]
        for number in range(warm_ups + rounds):
            order = list(zip(ways, results, strict=True))
            if number % 2:
                order.reverse()
            for way, of_way in order:
                of_way.append(await way(number))
        return [of_way[warm_ups:] for of_way in results]

    def add(self, *figures: Figure) -> None:
        """Print each figure in a line and write all to the file. A smallest run has no goals."""
        for figure in figures:
            if self.is_smallest:
                figure = replace(figure, goal="")
            self.figures.append(figure)
            goal = f" (goal {figure.goal}{', MISSED' if figure.missed else ''})" if figure.goal else ""
            print(f"{figure.figure}: {figure.value:.4g} {figure.unit}{goal}", flush=True)
        self._write()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Run a part that the other parts do not need: if it fails, the error is printed and noted, and the run goes on."""
        try:
            yield
        except Exception as error:  # As at the edge of a process: figures of the other parts count after any fault.
            self.failed[name] = f"{type(error).__name__}: {error}"
            print(f"{name} FAILED", file=sys.stderr)
            traceback.print_exc()
            self._write()

    def finish(self, *, judge: bool = True) -> int:
        """Print the table, missed goals and failures. Returns the exit status: 1 if a part failed, or if `judge` and a goal was missed."""
        Console(width=150).print(self._table())
        missed = [figure.figure for figure in self.figures if figure.missed]
        if missed:
            print(f"goals missed: {', '.join(missed)}")
        for part, reason in self.failed.items():
            print(f"failed: {part}: {reason}")
        print(f"written: {self.path}")
        return 1 if self.failed or (judge and missed) else 0

    def _write(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        contents = {"figures": [asdict(figure) | {"missed": figure.missed} for figure in self.figures], "failed": self.failed}
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
        partial.replace(self.path)

    def _table(self) -> Table:
        table = Table(title=self.name)
        for column in ("figure", "value", "unit", "goal", "note"):
            table.add_column(column, justify="right" if column == "value" else "left", overflow="fold")
        for figure in self.figures:
            style = "bold red" if figure.missed else None
            table.add_row(figure.figure, f"{figure.value:.4g}", figure.unit, figure.goal, figure.note, style=style)
        return table


Part = Callable[[Benchmark], Coroutine[Any, Any, None]]


def arguments(description: str | None) -> ArgumentParser:
    """Make the parser of a benchmark's command line, with the options that all of them have; guard the standard streams."""
    guard_standard_streams()
    parser = ArgumentParser(description=description, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="print the figures only: exit status 0 though a goal is missed")
    parser.add_argument("--only", metavar="PART", action="append", help="measure this part; may be given several times")
    parser.add_argument("--smallest", action="store_true", help="one round of the smallest work, without goals, to see that all parts run")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the figures (default: %(default)s)")
    return parser


def run(name: str, options: Namespace, parts: Mapping[str, Part]) -> int:
    """Run the parts of a benchmark, in order. name: of its file. options: as `arguments` parses them. parts: by name. Returns the exit
    status; goals are not judged with --report. Raises SystemExit if --only names no part."""
    if unknown := set(options.only or ()) - parts.keys():
        raise SystemExit(f"no part is called {', '.join(sorted(unknown))}; the parts are: {', '.join(parts)}")
    with tempfile.TemporaryDirectory() as folder:
        benchmark = Benchmark(name, options.out, Path(folder), options.smallest)
        for title in options.only or parts:
            with benchmark.part(title):
                asyncio.run(parts[title](benchmark))
    return benchmark.finish(judge=not options.report)


async def time_call(call: Awaitable[T]) -> tuple[float, T]:
    """The seconds that a call takes, and its result."""
    begin_s = time.perf_counter()
    result = await call
    return time.perf_counter() - begin_s, result


# Subjects of measurement ----------------------------------------------------------------------------------------------------------------

QUESTION = "What is a kite?"
"""Asked with max_tokens=SIX_SECONDS_TOKENS, so that every run makes the same amount of sound."""

SIX_SECONDS_TOKENS = 20
ANSWER_TOKENS = 96

QUESTIONS = (
    "Why is the sky blue?",
    "What is a kite?",
    "How do plants make food?",
    "Tell me about the moon.",
    "What is bread made of?",
    "How does a bicycle stay upright?",
    "Why do we sleep?",
    "What is a river?",
    "How do birds fly?",
    "Give me a tip for learning the guitar.",
    "What is the capital of France?",
    "Why is the sea salty?",
    "How many days are in a week?",
    "What is a volcano?",
    "Describe a forest in autumn.",
    "What do bees do?",
    "How is glass made?",
    "What is a computer?",
    "Tell me about cats.",
    "Why do leaves fall?",
    "What is the largest planet?",
    "How do I boil an egg?",
    "What is music?",
    "Why should I drink water?",
)


@asynccontextmanager
async def serving(layout: Layout) -> AsyncIterator[Stack]:
    """Start the processes of a layout; they end with the context."""
    stack = Stack(layout)
    await stack.start()
    try:
        yield stack
    finally:
        await stack.stop()


def toys(options: Mapping[str, object], **of_kind: Mapping[str, object]) -> Layout:
    """The layout of a chain of toys, which compute nothing. options: of all stages. of_kind: further options of a kind of stage."""
    stages = [StageLayout(kind, "toy", options={**options, **of_kind.get(kind, {})}) for kind in ("thinker", "talker", "code2wav")]
    return Layout([PipelineLayout("toy", "toy", stages)], ServerOptions(max_sessions=1024, settings={"client_share": 1}))


_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """User and system time of a process since its start (proc(5), stat fields 14 and 15)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


@dataclass
class CpuMeter:
    """Measures the CPU time of the processes `pids` since the meter was made."""

    pids: Sequence[int]

    def __post_init__(self) -> None:
        self._before = self._read_s()

    def _read_s(self) -> list[float]:
        return [cpu_seconds(pid) for pid in self.pids]

    def measure_s(self) -> list[float]:
        """CPU seconds of each process since the meter was made."""
        return [now_s - before_s for now_s, before_s in zip(self._read_s(), self._before, strict=True)]
