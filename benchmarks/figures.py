"""The frame of all benchmarks: figures, which are written as JSON when they are measured, printed in a table at the end, and compared with
their goals; the questions; and facts of processes from the kernel."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from omnistage.cli.console import Console
from omnistage.host.terminal import guard_standard_streams

QUESTION = "What is a kite?"
"""Asked with max_tokens=SIX_SECONDS_TOKENS, so that every run makes the same amount of sound."""

SIX_SECONDS_TOKENS = 20

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


_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """User and system time of a process since its start (proc(5), stat fields 14 and 15)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


def peak_bytes(pid: int) -> int:
    """Peak resident memory of a process in bytes (proc(5), VmHWM)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"no VmHWM for process {pid}")


def wakeups(pid: int) -> int:
    """How often the threads that a process has now went to sleep by themselves since they began (proc(5), voluntary_ctxt_switches)."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    lines = [line for thread in threads for line in (thread / "status").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches:"))


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


@dataclass
class Report:
    """The figures of one run, always complete in `folder`/`name`.json, so that they survive a crash. failed: why parts failed, by name."""

    name: str
    folder: Path = OUT
    figures: list[Figure] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return self.folder / f"{self.name}.json"

    def add(self, *figures: Figure) -> None:
        """Print each figure in a line and write all to the file."""
        for figure in figures:
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
        self.folder.mkdir(parents=True, exist_ok=True)
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


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Make the parser of a benchmark's command line, with the options that all of them have; guard the standard streams."""
    guard_standard_streams()
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="print the figures only: exit status 0 though a goal is missed")
    return parser


def run(name: str, description: str | None, parts: Mapping[str, Callable[[Report], Coroutine[Any, Any, None] | None]]) -> int:
    """Run the parts of a benchmark that has no options of its own, in order. parts: functions by name. Returns the exit status."""
    options, report = arguments(description).parse_args(), Report(name)
    for title, measure in parts.items():
        with report.part(title):
            if (measuring := measure(report)) is not None:
                asyncio.run(measuring)
    return report.finish(judge=not options.report)


def median(values: Sequence[float]) -> float:
    return float(np.median(values))


def percentile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent))
