"""A plugin of pytest: which files of tests are imported, and in which order several workers take them."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tools import costs
from tools.suite import WITHOUT_TORCH


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--torch", choices=("without", "with"), help="only the folders whose tests import no torch, or only the others")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Folders and files without a test that is asked for are not imported, which takes several times as long as importing the others."""
    return _is_left_out(collection_path, config) or None


class _LeftOut(pytest.File):
    def collect(self) -> list[pytest.Item]:
        return []


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> _LeftOut | None:
    """pytest asks nobody whether a file that is named on the command line is left out. Where single tests are named, it is imported."""
    named = any("::" in word for word in parent.config.args)
    if named or not _is_left_out(module_path, parent.config):
        return None
    return _LeftOut.from_parent(parent, path=module_path)


def _is_left_out(path: Path, config: pytest.Config) -> bool:
    tests = config.rootpath / "tests"
    if config.option.torch is not None and tests in path.parents:
        first = path.relative_to(tests).parts[0]
        if (first in WITHOUT_TORCH) != (config.option.torch == "without"):
            return True
    expression: str = config.option.markexpr
    asks_for_serial = "serial" in re.findall(r"(?:\bnot )?\w+", expression) and " or " not in expression
    return asks_for_serial and path.match("test_*.py") and not _says_serial(path)


def _says_serial(path: Path) -> bool:
    return b"mark.serial" in path.read_bytes()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without those that are left out. For several workers the dearest files first: one that began last would leave the others idle."""
    for item in items:
        if item.get_closest_marker("serial") and not _says_serial(item.path):
            # The serial part would not import its file, and no part run the test.
            raise pytest.UsageError(f"{item.nodeid} is serial by a mark of another file: write pytest.mark.serial in its own")
    left_out = [item for item in items if _is_left_out(item.path, config)]
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)
    elif config.option.torch == "without" and "torch" in sys.modules and config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        # Where files are named, the conftest.py beside one of another part may have imported it.
        raise pytest.UsageError(f"a test of {', '.join(WITHOUT_TORCH)} imports torch: take its folder out of WITHOUT_TORCH")
    if "PYTEST_XDIST_WORKER" in os.environ:
        try:
            table = costs.read(costs.TABLE)
        except costs.CostsError:  # A merge may have left its marks there.
            table = {}
        known = {costs.ROOT / file: cost for file, cost in table.items()}
        items.sort(key=lambda item: -known.get(item.path, costs.UNKNOWN).wall_s)
