"""Measures what the files of tests cost, as `tools/costs.py` has it."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Generator, Mapping
from dataclasses import asdict
from typing import Any

import pytest

from helpers.processes import FORKED
from tools.costs import Cost, Costs


class CostMeter:
    """A plugin of pytest: measures in every worker, and adds up in the process that leads them."""

    def __init__(self) -> None:
        self.costs: Costs = {}
        self._started = 0
        sys.addaudithook(self._count)

    def _count(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("subprocess.Popen", "os.posix_spawn"):
            self._started += 1

    # First of all, so that the fixtures are in it which end with the last test of a file.
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        before = self._now()
        try:
            return (yield)
        finally:
            after = self._now()
            spent = Cost(after.cpu_s - before.cpu_s, after.wall_s - before.wall_s, 1, after.processes - before.processes)
            self._add({item.path.relative_to(item.config.rootpath).as_posix(): spent})

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["costs"] = {file: asdict(cost) for file, cost in self.costs.items()}

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """A worker has ended; one that crashed has told nothing."""
        self._add({file: Cost(**cost) for file, cost in getattr(node, "workeroutput", {}).get("costs", {}).items()})

    def _add(self, costs: Mapping[str, Cost]) -> None:
        for file, cost in costs.items():
            self.costs.setdefault(file, Cost()).add(cost)

    def _now(self) -> Cost:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        cpu_s = sum(one.ru_utime + one.ru_stime for one in used) + FORKED.cpu_s
        return Cost(cpu_s, time.monotonic(), 0, self._started + FORKED.count)
