"""Runs the tests in parts, and with `--again` the failed ones once more, alone:

    those without torch  |  the others, by several workers  -->  those that need the machine alone  -->  again, what failed

All random numbers of a run come from one seed. So a test that runs a second time has the same numbers, and the same drawn cells: a defect
fails both times, and a test that passes then is flaky. The last line that is printed is `N passed, N failed`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tools.costs import LAST, PART, ROOT, RUN, Cost, Costs, text_of

SEED = "OMNISTAGE_TEST_SEED"
TEMPORARY = "PYTEST_DEBUG_TEMPROOT"
WITHOUT_TORCH = ("client", "cli", "router", "link")
"""Folders whose tests import no torch, which would cost seconds and memory. One process runs them, so they are a quarter of the work, as
`make test-costs` shows it. They share stacks."""
WORKERS = 3
"""Workers for the other tests. A third of the time tests wait, so four processes keep two cores busy."""
MAX_FLAKY = 3
"""A run with more flaky tests has failed, though each of them passed the second time."""
MAX_RERUN = 12
"""If more things failed, the failures are no accident, and nothing is run a second time."""
END_S = 20
NO_TESTS = 5
"""Exit status of pytest if it found no test."""
FORMS = {"short": "not long", "long": ""}
"""By form of a run, the marks that choose its tests: those that are not long, or all."""


@dataclass(frozen=True)
class SuitePart:
    """One run of pytest. marks: chooses its tests, together with the form and the words of the command; None: `options` names the tests."""

    name: str
    marks: str | None
    options: tuple[str, ...] = ()


PARALLEL_PARTS = (
    SuitePart("without torch", "not serial", ("--torch=without",)),
    SuitePart(
        "with torch", "not serial", ("--torch=with", f"-n{WORKERS}", "--max-worker-restart=2", "--dist=loadfile", "--no-loadscope-reorder")
    ),
)
SERIAL = SuitePart("serial", "serial")


CRASHED = "???"
"""The phase that xdist names for a test whose process ended."""
STALL_LIMIT_S = 1800.0
"""Seconds in which not one test of a part ends: then it hangs, and is ended. No test may take as long."""
LOOK_EVERY_S = 1.0
STACKS_S = 2.0
"""Seconds in which a process writes its stacks."""
MAX_MESSAGE_CHARACTERS = 300
"""Largest number of characters of a message that are shown."""


@dataclass(frozen=True)
class FailedTest:
    """A failure of one test. when: setup, call, teardown, or CRASHED. fixture: the name of the fixture that raised; empty if none did.
    message: its first line."""

    when: str
    fixture: str
    message: str


@dataclass
class RunResult:
    """How runs of pytest ended. failed: failures by test. incomplete_parts: sentences, one for each part that did not come to its end.
    costs: by file. has_run: whether there was any test, though it may have been skipped."""

    passed: set[str] = field(default_factory=set)
    failed: dict[str, FailedTest] = field(default_factory=dict)
    incomplete_parts: list[str] = field(default_factory=list)
    costs: Costs = field(default_factory=dict)
    has_run: bool = True

    def add(self, other: RunResult) -> None:
        """Add the results of another run, which had other tests."""
        self.passed |= other.passed
        self.failed.update(other.failed)
        self.incomplete_parts += other.incomplete_parts
        self.has_run |= other.has_run
        for file, cost in other.costs.items():
            self.costs.setdefault(file, Cost()).add(cost)


def defects(failed: dict[str, FailedTest]) -> int:
    """The number of things that failed: tests, and fixtures, each of which counts once however many tests it failed."""
    return len({failure.fixture or test for test, failure in failed.items()})


def message_text(message: str) -> str:
    """The beginning of a test's message, without control characters, which could steer a terminal."""
    return "".join(one if one.isprintable() else "?" for one in message[:MAX_MESSAGE_CHARACTERS])


class Suite:
    """One run of the tests. root: of the repository. form: a key of FORMS. seed: of all random numbers of the run. marks: chooses tests, as
    pytest's -m does; empty: all. pytest_args: further words for pytest. folder: where each part writes how it ended, and the costs of the
    files."""

    def __init__(self, root: Path, form: str, seed: str, marks: str, pytest_args: Sequence[str]) -> None:
        self.root = root
        self.folder = root / LAST.parent.relative_to(ROOT)
        self._marks = [FORMS[form], f"({marks})" if marks else ""]
        self._form = form
        self.seed = seed
        self._pytest_args = pytest_args
        self._temporary = self.folder / "temporary"
        """A link to the folder for temporary files of this run, or of the last one that failed."""

    def begin(self) -> None:
        """Remove the results and temporary files of the last run, store the seed of this one, and print it."""
        self.tidy()  # The files of a failed run showed why it failed.
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        # The name is short, because some tests put sockets there.
        self._temporary.symlink_to(tempfile.mkdtemp(prefix="ot-"))
        (self.folder / "seed").write_text(f"{self.seed}\n", encoding="utf-8")
        print(f"{SEED}={self.seed}", flush=True)

    def run(self) -> RunResult:
        """Run all parts: two of them at the same time, then the serial one."""
        result = RunResult(has_run=False)
        begin_s = _used_s()
        with (self.folder / "first.log").open("w+b") as log:
            # The output of the first part is shown only after the run, because it would mix with the second part's output.
            first, second = PARALLEL_PARTS
            # A run of named tests takes them as they are.
            words = ["--draw-tooling"] if self._form == "short" and not self._pytest_args else []
            try:
                with self._start(first, words, log) as one, self._start(second, words) as other:
                    statuses = self._wait({first: one, second: other})
            finally:
                log.seek(0)
                shutil.copyfileobj(log, sys.stdout.buffer)
                sys.stdout.flush()
        result.add(self._read_outcomes(second, statuses[second]))
        result.add(self._read_outcomes(first, statuses[first]))
        with self._start(SERIAL, words) as process:
            result.add(self._read_outcomes(SERIAL, self._wait({SERIAL: process})[SERIAL]))
        result.costs[RUN] = Cost(_used_s() - begin_s - sum(cost.cpu_s for cost in result.costs.values()))
        for cost in result.costs.values():
            cost.form = cost.form if cost.form == PART else self._form
        return result

    def run_again(self, tests: Iterable[str]) -> RunResult:
        """Run these tests alone, one after the other."""
        part = SuitePart("again", None, tuple(tests))
        with self._start(part) as process:
            return self._read_outcomes(part, self._wait({part: process})[part])

    def _start(self, part: SuitePart, words: Sequence[str] = (), log: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
        """Start pytest for one part. words: further ones for it. log: gets the output; None: it is shown."""
        outcomes = self._outcomes(part)
        marks, pytest_args = " and ".join(filter(None, [part.marks, *self._marks])), self._pytest_args
        if part.marks is None:  # The options of the part name its tests.
            marks, pytest_args = "", ()
        command = [str(Path(sys.executable).with_name("pytest")), "-m", marks, f"--outcomes={outcomes}", f"--hypothesis-seed={self.seed}"]
        # In a folder that several runs of pytest share, two that remove old files at the same time can fail.
        folder = self._temporary / str(len([*self._temporary.iterdir()]))
        folder.mkdir()
        # Without bytecode every Python that a test starts would compile our modules anew.
        environment = {**os.environ, SEED: self.seed, "PYTHONDONTWRITEBYTECODE": "", TEMPORARY: str(folder.resolve())}
        return subprocess.Popen([*command, *part.options, *words, *pytest_args], cwd=self.root, env=environment, stdout=log, stderr=log)

    def _wait(self, parts: Mapping[SuitePart, subprocess.Popen[bytes]]) -> dict[SuitePart, int]:
        """Wait until all of these parts have ended; returns their exit statuses. One that stands still is ended, and shows its stacks."""
        start_s = time.time()
        statuses: dict[SuitePart, int] = {}
        while running := [part for part in parts if part not in statuses]:
            for part in running:
                process = parts[part]
                try:
                    statuses[part] = process.wait(LOOK_EVERY_S)
                except subprocess.TimeoutExpired:
                    path = self._outcomes(part)
                    last_write_s = path.stat().st_mtime if path.exists() else start_s
                    if time.time() - last_write_s > STALL_LIMIT_S:
                        self._show_stacks(part, process)
                        [statuses[part]] = end_parts([process])
                except KeyboardInterrupt:
                    end_parts([parts[other] for other in running])
                    self.tidy()
                    raise
        return statuses

    def _show_stacks(self, part: SuitePart, process: subprocess.Popen[bytes]) -> None:
        """Make the processes of a part, which is then ended, write where they are. Programs that tests have started may end by it."""
        print(f"{part.name}: no test has ended for {STALL_LIMIT_S / 60:.0f} minutes", flush=True)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="ascii").split()
        for pid in (process.pid, *map(int, children)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        time.sleep(STACKS_S)

    def tidy(self) -> None:
        """Remove the temporary files."""
        if self._temporary.is_symlink():
            shutil.rmtree(self._temporary.readlink(), ignore_errors=True)
            self._temporary.unlink()

    def _read_outcomes(self, part: SuitePart, status: int) -> RunResult:
        """How a part ended, by the file that it wrote. status: the exit status of pytest."""
        path = self._outcomes(part)
        if not path.exists():
            return RunResult(incomplete_parts=[part.name])
        outcomes: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        missing = outcomes["missing"]
        failed = {test: FailedTest(**failure) for test, failure in outcomes["failed"].items()}
        # If pytest failed and no test did, something outside the tests went wrong, such as a warning at the end.
        is_complete = outcomes["ended"] and not missing and (status in (0, NO_TESTS) or (status == 1 and bool(failed)))
        rest = f", {len(missing)} tests did not run, the first of them {missing[0]}" if missing else ""
        incomplete = [] if is_complete else [f"{part.name}{rest}"]
        costs = {file: Cost(**cost) for file, cost in outcomes["costs"].items()}
        return RunResult({*outcomes["passed"]}, failed, incomplete, costs, has_run=status != NO_TESTS)

    def _outcomes(self, part: SuitePart) -> Path:
        return self.folder / f"{part.name.replace(' ', '-')}.json"


def end_parts(processes: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """End running parts, by force if they take longer than END_S; returns their exit statuses."""
    for process in processes:
        process.send_signal(signal.SIGINT)  # The workers end with it.
    until_s = time.monotonic() + END_S
    for process in processes:
        try:
            process.wait(max(0.0, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
    return [process.wait() for process in processes]


def _used_s() -> float:
    """Seconds of processor time that all ended child processes of this one have used, with theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def judge(suite: Suite, result: RunResult, *, has_rerun: bool) -> int:
    """Run the failed tests a second time if `has_rerun`, print how the run ended, and return the exit status."""
    failed, flaky = result.failed, {}
    if not result.has_run:
        print("no test ran: none is chosen by these words, or all are long (make test-long)")
    if failed and has_rerun and not result.incomplete_parts and defects(failed) <= MAX_RERUN:
        print(f"again, with the same seed: {len(failed)} tests, {defects(failed)} defects", flush=True)
        tests = [test for test in failed if (suite.root / test.partition("::")[0]).is_file()]
        second = suite.run_again(tests) if tests else RunResult()
        result.incomplete_parts += second.incomplete_parts
        if not second.incomplete_parts:
            flaky = {test: failure for test, failure in failed.items() if test in second.passed and failure.when != CRASHED}
            failed = {test: failure for test, failure in failed.items() if test not in flaky}
    for test, failure in flaky.items():
        print(f"flaky: {test}, seed {suite.seed}, {message_text(failure.message)}")
    for test, failure in failed.items() if result.incomplete_parts else ():
        print(f"failed: {test}, {message_text(failure.message)}")
    for part in result.incomplete_parts:
        print(f"broken: {part}")
    if defects(flaky) > MAX_FLAKY:
        print(f"failed: more than {MAX_FLAKY} were flaky")
    print(f"{len(result.passed) + len(flaky)} passed, {len(failed)} failed", flush=True)
    return 1 if failed or result.incomplete_parts or not result.has_run or defects(flaky) > MAX_FLAKY else 0


def main() -> int:
    """Run the tests. Exit status 1 if a test failed, or a part did not come to its end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--form", choices=FORMS, default="short", help="without the long forms, or all tests")
    parser.add_argument("--again", action="store_true", help="run once more, alone, what failed; it has passed if it passes then")
    parser.add_argument("-m", dest="marks", default="", help="which tests, by their marks, as pytest has it")
    parser.add_argument("--root", type=Path, default=ROOT, help="the root of the tree whose tests are run")
    options, pytest_args = parser.parse_known_args()
    # The run measures what each file costs. With further options files run in part, and cost less.
    is_whole = not options.marks and not pytest_args and "PYTEST_ADDOPTS" not in os.environ
    suite = Suite(options.root, options.form, os.environ.get(SEED) or str(secrets.randbits(32)), options.marks, pytest_args)
    suite.begin()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        result = suite.run()
    except KeyboardInterrupt:
        return 130
    status = judge(suite, result, has_rerun=options.again)
    if status or not is_whole:
        result.costs.pop(RUN, None)
    (suite.folder / LAST.name).write_text(text_of(result.costs), encoding="utf-8")
    if not status:  # The files of a failed run show why it failed.
        suite.tidy()
    return status


if __name__ == "__main__":
    sys.exit(main())
