"""A plugin of pytest: which files of tests are imported, and in which order several workers take them."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tools import costs

WITHOUT_TORCH = ("wire", "link", "router", "connector")
"""Folders whose tests import no torch, which takes seconds and memory of each worker."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--torch", choices=("without", "with"), help="only the folders whose tests import no torch, or only the others")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files that have no test which is asked for are not imported, which takes several times as long as importing those that have some."""
    if collection_path.parent == config.rootpath / "tests" and collection_path.is_dir() and config.option.torch is not None:
        return (collection_path.name in WITHOUT_TORCH) != (config.option.torch == "without") or None
    expression: str = config.option.markexpr
    asks_for_serial = "serial" in re.findall(r"(?:\bnot )?\w+", expression) and " or " not in expression
    if asks_for_serial and collection_path.match("test_*.py") and "mark.serial" not in collection_path.read_text(encoding="utf-8"):
        return True
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For several workers: the dearest files first, since one that began last would leave the others idle."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        known = {costs.ROOT / file: cost for file, cost in costs.read(costs.TABLE).items()}
        items.sort(key=lambda item: -known.get(item.path, costs.UNKNOWN).wall_s)
