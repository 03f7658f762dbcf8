"""A plugin of pytest: writes how a run ended to a file: what passed, what failed and by which fixture, what it cost.

`tools/suite.py` goes on from there.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from helpers.meter import CostMeter

FIXTURE = "failed_fixture"
"""An attribute of a report that says which fixture raised; it comes along from the workers."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, help="a file to write how the run ended to")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.outcomes is not None:
        meter = CostMeter()
        config.pluginmanager.register(meter)
        config.pluginmanager.register(Outcomes(config.option.outcomes, meter))


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

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            *_, last = str(report.longrepr).strip().splitlines()
            self._failed.setdefault(report.nodeid, {"when": "collect", "fixture": "", "message": last.removeprefix("E").strip()})

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self, config: pytest.Config) -> None:
        if hasattr(config, "workeroutput"):
            return
        passed = self._passed - self._failed.keys()
        costs = {file: asdict(cost) for file, cost in self._meter.costs.items()}
        missing = self._collected - self._passed - self._failed.keys() - self._skipped
        told = {"passed": sorted(passed), "failed": self._failed, "missing": sorted(missing), "costs": costs}
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(told), encoding="utf-8")
        partial.rename(self._path)
