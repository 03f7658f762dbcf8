"""A plugin of pytest: which files of tests are imported, and in which order several workers take them."""

from __future__ import annotations

import gc
import os
import random
import re
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from tools import costs
from tools.suite import SEED, WITHOUT_TORCH

LONG_TIMEOUT_S = 600.0
UNDRAWN = pytest.StashKey[bool]()
"""Marks tests of tools that this run does not draw."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--torch", choices=("without", "with"), help="only the folders whose tests import no torch, or only the others")
    parser.addoption("--draw-tooling", action="store_true", help="of the files with tests of tools, run those of one, drawn by the seed")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Folders and files without a test that is asked for are not imported, which takes several times as long as importing the others."""
    return _is_left_out(collection_path, config) or None


class _LeftOut(pytest.File):
    def collect(self) -> list[pytest.Item]:
        return []


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> _LeftOut | None:
    """A file that the command line names bypasses pytest_ignore_collect: if it is left out, it is collected empty. A file of which
    single tests are named is imported."""
    named = any("::" in word for word in parent.config.args)
    if named or not _is_left_out(module_path, parent.config):
        return None
    return _LeftOut.from_parent(parent, path=module_path)


def _is_left_out(path: Path, config: pytest.Config) -> bool:
    tests = config.rootpath / "tests"
    if config.option.torch is not None and tests in path.parents:
        is_light = path.relative_to(tests).parts[0] in WITHOUT_TORCH
        if is_light != (config.option.torch == "without"):
            return True
    expression: str = config.option.markexpr
    asks_for_serial = "serial" in re.findall(r"(?:\bnot )?\w+", expression) and " or " not in expression
    return asks_for_serial and not any(map(_says_serial, path.rglob("test_*.py") if path.is_dir() else [path]))


def _undrawn(items: list[pytest.Item], config: pytest.Config) -> list[pytest.Item]:
    """The tests of tools that this run leaves out, if it draws."""
    if not config.option.draw_tooling:
        return []
    # The list has all files with such tests, so that each part of a run draws the same one.
    files = sorted(path for path in (config.rootpath / "tests").glob("**/test_*.py") if b"lengths.TOOLING" in path.read_bytes())
    drawn = random.Random(os.environ[SEED]).choice(files) if files else None
    return [item for item in items if item.get_closest_marker("tooling") and item.path != drawn]


def _lengthen(item: pytest.Item, config: pytest.Config) -> None:
    """Give a long test more time, unless it has its own. A test that the command line names with its cell runs in each form: a cell that
    failed can be named again, whatever the seed draws."""
    if item.get_closest_marker("long") and not item.get_closest_marker("timeout"):
        item.add_marker(pytest.mark.timeout(LONG_TIMEOUT_S))
    if item.nodeid in config.args:
        item.own_markers = [mark for mark in item.own_markers if mark.name != "long"]


def _says_serial(path: Path) -> bool:
    return b"mark.serial" in path.read_bytes()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Nothing that is imported or collected becomes garbage: the collector looks through it neither now, which took a fifth of the time,
    nor later, which took 0.7 s of each `gc.collect()` of a test, nor do tests that look through all objects of the process."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without those that are left out. For several workers the dearest files first: one that began last would leave the others idle."""
    for item in items:
        if item.get_closest_marker("serial") and not _says_serial(item.path):
            # The serial part would not import its file, and no part run the test.
            raise pytest.UsageError(f"{item.nodeid} is serial by a mark of another file: write pytest.mark.serial in its own")
        _lengthen(item, config)
    for item in _undrawn(items, config):
        item.stash[UNDRAWN] = True
    left_out = [item for item in items if _is_left_out(item.path, config) or UNDRAWN in item.stash]
    if left_out:
        gone = {*left_out}
        items[:] = [item for item in items if item not in gone]
        config.hook.pytest_deselected(items=left_out)
    if config.option.torch == "without" and "torch" in sys.modules and config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        # Where files are named, the conftest.py beside one of another part may have imported it.
        raise pytest.UsageError(f"a test of {', '.join(WITHOUT_TORCH)} imports torch: take its folder out of WITHOUT_TORCH")
    if "PYTEST_XDIST_WORKER" in os.environ:
        table = {config.rootpath / file: cost for file, cost in costs.stored_costs(config.rootpath).items()}
        items.sort(key=lambda item: -table.get(item.path, costs.UNKNOWN).wall_s)
