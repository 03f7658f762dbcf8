"""Measures what the files of tests cost, as `tools/costs.py` has it.

A test is not charged for what belongs to the whole run, because that would fall on whichever test comes first or last: fixtures of the
session, the end of the last test, with which they end, and the imports of modules.
"""

from __future__ import annotations

import resource
import sys
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any

import pytest

from helpers.collection import UNDRAWN
from helpers.processes import FORKED
from tools.costs import PART, Cost, Costs


class CostMeter:
    """A plugin of pytest: measures in every worker, and adds up in the process that leads them."""

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
