"""A plugin of pytest: writes the outcomes of a run to a file: what passed, failed and by which fixture, what did not run, what it cost.

The file is written again and again while tests end, so `tools/suite.py` sees by its age whether the run stands still. SIGUSR1 makes each
process of the run write the stacks of its threads to its standard error.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from helpers.collection import UNDRAWN
from helpers.processes import FORKED
from tools.costs import PART, Cost, Costs


class CostMeter:
    """A plugin of pytest: measures what the files of tests cost, in every worker, and adds up in the process that leads them.

    A test is not charged for what belongs to the whole run, because that would fall on whichever test comes first or last: fixtures of the
    session, the end of the last test, with which they end, and the imports of modules."""

    def __init__(self) -> None:
        self.costs: Costs = {}
        self._processes = 0
        self._of_run = Cost()  # within the present test
        self._depth = 0  # of nested measurements for the run
        sys.addaudithook(self._count)
        self._measure_imports()

    def _count(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("subprocess.Popen", "os.posix_spawn"):
            self._processes += 1

    def _measure_imports(self) -> None:
        """Charge the run for every module that the main thread imports from now on."""
        execute = SourceFileLoader.exec_module

        def exec_module(loader: SourceFileLoader, module: ModuleType) -> None:
            if threading.current_thread() is not threading.main_thread():
                return execute(loader, module)
            with self._charge_run():
                return execute(loader, module)

        SourceFileLoader.exec_module = exec_module  # type: ignore[method-assign, assignment]

    # First of all, so that the fixtures are in it which end with the last test of a file.
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._of_run, before = Cost(), self._now()
        try:
            return (yield)
        finally:
            spent = _difference(before, self._now())
            spent = _difference(self._of_run, spent)
            spent.tests = 1
            self._add({item.path.relative_to(item.config.rootpath).as_posix(): spent})

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
        if fixturedef.scope != "session":
            return (yield)
        with self._charge_run():
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, nextitem: pytest.Item | None) -> Generator[None, None, None]:
        if nextitem is not None:
            return (yield)
        with self._charge_run():
            return (yield)

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        """Note files of which another run draws tests: they cost more than what is measured now."""
        for item in items:
            if item.stash.get(UNDRAWN, False):
                self.costs.setdefault(item.path.relative_to(item.config.rootpath).as_posix(), Cost()).form = PART

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["costs"] = {file: asdict(cost) for file, cost in self.costs.items()}

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """A worker has ended; one that crashed has told nothing."""
        self._add({file: Cost(**cost) for file, cost in getattr(node, "workeroutput", {}).get("costs", {}).items()})

    @contextmanager
    def _charge_run(self) -> Iterator[None]:
        """Charge the run for what happens within the block; a block within another one counts once."""
        before = self._now() if self._depth == 0 else None
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if before is not None:
                self._of_run.add(_difference(before, self._now()))

    def _add(self, costs: Mapping[str, Cost]) -> None:
        for file, cost in costs.items():
            self.costs.setdefault(file, Cost()).add(cost)

    def _now(self) -> Cost:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        cpu_s = sum(one.ru_utime + one.ru_stime for one in used) + FORKED.cpu_s
        return Cost(cpu_s, time.monotonic(), 0, self._processes + FORKED.count)


def _difference(less: Cost, more: Cost) -> Cost:
    """`more` without `less`."""
    return Cost(more.cpu_s - less.cpu_s, more.wall_s - less.wall_s, more.tests - less.tests, more.processes - less.processes)


WRITE_EVERY_S = 20.0
FIXTURE = "failed_fixture"
"""An attribute of a report that says which fixture raised; it comes along from the workers."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, help="a file to write how the run ended to")


def pytest_configure(config: pytest.Config) -> None:
    path: Path | None = config.option.outcomes
    if path is not None:
        meter = CostMeter()
        config.pluginmanager.register(meter)
        config.pluginmanager.register(Outcomes(path, meter))
        faulthandler.register(signal.SIGUSR1, file=os.dup(2))  # pytest captures what comes later.
        config.add_cleanup(lambda: faulthandler.unregister(signal.SIGUSR1))


class Outcomes:
    """The first failure of each test, in the process that leads the run."""

    def __init__(self, path: Path, meter: CostMeter) -> None:
        self._path = path
        self._meter = meter
        self._passed: set[str] = set()
        self._skipped: set[str] = set()
        self._collected: set[str] = set()
        self._failed: dict[str, dict[str, str]] = {}
        self._raised: list[tuple[BaseException, str]] = []
        """The exceptions that fixtures raised, each with its fixture. pytest raises the same one again in every test that asks for that
        fixture."""
        self._written = time.monotonic()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> Generator[None, object, object]:
        try:
            return (yield)
        except BaseException as error:
            # One that asks for another one raises what that did, which is told first.
            self._raised.append((error, f"{fixturedef.baseid}::{fixturedef.argname}[{getattr(request, 'param_index', 0)}]"))
            raise

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        report = yield
        if report.failed and report.when == "setup" and call.excinfo is not None:
            setattr(report, FIXTURE, next((name for error, name in self._raised if error is call.excinfo.value), ""))
        return report

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._collected |= {item.nodeid for item in session.items}

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: Sequence[str]) -> None:
        self._collected |= {*ids}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = crash.message if crash is not None else str(report.longrepr)
            fixture = getattr(report, FIXTURE, "")
            if report.when == "teardown" and crash is not None:
                fixture = f"{crash.path}:{crash.lineno}"  # Which one it was, pytest does not tell, but where it failed.
            told = {"when": report.when or "", "fixture": fixture, "message": message.strip().partition("\n")[0]}
            self._failed.setdefault(report.nodeid, told)
        elif report.skipped:
            self._skipped.add(report.nodeid)
        elif report.when == "call":
            self._passed.add(report.nodeid)
        if time.monotonic() - self._written > WRITE_EVERY_S and "PYTEST_XDIST_WORKER" not in os.environ:
            self._write(ended=False)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            *_, last = str(report.longrepr).strip().splitlines()
            self._failed.setdefault(report.nodeid, {"when": "collect", "fixture": "", "message": last.removeprefix("E").strip()})

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self, config: pytest.Config) -> None:
        if not hasattr(config, "workeroutput"):
            self._write(ended=True)

    def _write(self, *, ended: bool) -> None:
        """Write all outcomes so far. ended: whether the run has come to its end."""
        self._written = time.monotonic()
        passed = self._passed - self._failed.keys()
        costs = {file: asdict(cost) for file, cost in self._meter.costs.items()}
        missing = self._collected - self._passed - self._failed.keys() - self._skipped
        told = {"passed": sorted(passed), "failed": self._failed, "missing": sorted(missing), "costs": costs, "ended": ended}
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(told), encoding="utf-8")
        partial.rename(self._path)
