"""A plugin of pytest that guards the surroundings: everything that a program started by a test gets from the process of the tests. It finds
the test that changed any of them.

Between two tests nothing has changed the surroundings, neither a test nor a fixture of the whole session, such as one that makes a
checkpoint. Any difference from the beginning was then made by libraries and models, which have set it in this process for themselves. A
family of processes has surroundings of its own; its processes are found by a variable that they started with."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from helpers.processes import MARK

TESTS = str(Path(__file__).resolve().parents[1])
OURS = re.compile(rf"(?!{MARK})(OMNISTAGE|PYTEST)_.*|TERM|COLUMNS|LINES|NO_COLOR")
"""Variables that are read when a program runs, not when it is imported."""
PYTESTS = "PYTEST_CURRENT_TEST"


@dataclass
class _Surroundings:
    """begun: the variables when the run of tests began; none outside of tests. set_since: those that libraries have set since then.
    inherited: the limits of the process before the test. shared_path: of the socket where this process finds the fork servers of the whole
    run; empty if it must start its own."""

    begun: Mapping[str, str] | None = None
    set_since: Mapping[str, str] = field(default_factory=dict)
    inherited: Sequence[str] = ()
    shared_path: str = ""


_ours = _Surroundings()


def pytest_configure() -> None:
    # Where libraries may have threads, their programs begin otherwise than one that is forked.
    _ours.begun = dict(os.environ) if os.environ.get("OMP_NUM_THREADS") == "1" else None


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
    if fixturedef.scope != "session":
        return (yield)
    # Changes of the test before it belong to the test: the loop of the session is made after the fixtures of the first test that waits.
    before, inherited = dict(os.environ), _inherited()
    made = yield
    _ours.set_since = {**_ours.set_since, **{name: value for name, value in os.environ.items() if before.get(name) != value}}
    if _inherited() != inherited:
        _ours.inherited = _inherited()
    return made


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    begun = _ours.begun or {}
    _ours.set_since = {name: value for name, value in os.environ.items() if name != PYTESTS and begun.get(name) != value}
    _ours.inherited = _inherited()


def begun() -> Mapping[str, str] | None:
    """The variables of the run; None where no program can be as usual."""
    return _ours.begun


def shared_path() -> str:
    """The path of the socket where this process finds the fork servers of the whole run; empty if it must start its own."""
    return _ours.shared_path


def set_shared_path(path: str, surroundings: str) -> None:
    """Use the fork servers behind this socket if they began in the surroundings of this process. surroundings: `as_begun` there."""
    if surroundings == as_begun():
        _ours.shared_path = path


def as_begun() -> str:
    """A digest of the surroundings in which the run began, for comparison with those of another process."""
    return hashlib.sha256(json.dumps([_fixed(_ours.begun or {}), list(_inherited())], sort_keys=True).encode()).hexdigest()


def usual_variables() -> dict[str, str]:
    """Those of a program that a test starts: those of the run, and what the test has set."""
    if _ours.begun is None:
        return dict(os.environ)
    set_by_test = {name: value for name, value in os.environ.items() if _ours.set_since.get(name) != value}
    return {**{name: value for name, value in _ours.begun.items() if name in os.environ}, **set_by_test}


def are_usual(variables: Mapping[str, str]) -> bool:
    """Whether a program with these variables would find all that Python and libraries look at when they start as at the beginning."""
    return _ours.begun is not None and _fixed(variables) == _fixed(_ours.begun) and _inherited() == _ours.inherited


def _fixed(variables: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in variables.items() if not OURS.fullmatch(name)}
    # With the folder of the tests before it, Python finds the same modules of ours.
    kept["PYTHONPATH"] = os.pathsep.join(one for one in kept.get("PYTHONPATH", "").split(os.pathsep) if one not in ("", TESTS))
    return kept


def _inherited() -> Sequence[str]:
    """Further surroundings that a process has from the one that starts it: limits, processors, the mask of new files, signals that are
    ignored."""
    status = Path("/proc/thread-self/status").read_text().splitlines()
    kept = [line for line in status if line.startswith(("Umask", "SigIgn", "SigBlk", "Cpus_allowed:"))]
    return [*kept, Path("/proc/self/limits").read_text()]
