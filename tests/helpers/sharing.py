"""A plugin of pytest: the workers of a run share their fork servers, because each imports torch and the models: 10 s of a processor."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

from helpers import program, surroundings

_SHARED = "omnistage_fork_servers"
_ROOT = pytest.StashKey[tuple[program.ForkServer, Path]]()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """A worker is about to start."""
    begun = surroundings.begun()
    if begun is None:
        return
    stash = node.config.stash
    if _ROOT not in stash:
        # In the folder for the files of this run, if there is one: whoever removes that removes this, too.
        folder = Path(tempfile.mkdtemp(prefix="forks-", dir=os.environ.get("PYTEST_DEBUG_TEMPROOT")))
        try:
            stash[_ROOT] = program.begin((), begun, str(folder / "forks")), folder
        except OSError:  # The path of the folder is too long for a socket: each worker starts its own.
            shutil.rmtree(folder)
            return
    node.workerinput[_SHARED] = [str(stash[_ROOT][1] / "forks"), surroundings.as_begun()]


@pytest.hookimpl(trylast=True)  # After that of surroundings.
def pytest_configure(config: pytest.Config) -> None:
    if _SHARED in getattr(config, "workerinput", {}):
        surroundings.set_shared_path(*config.workerinput[_SHARED])  # type: ignore[attr-defined]  # xdist sets it


def pytest_unconfigure(config: pytest.Config) -> None:
    if _ROOT in config.stash:
        root, folder = config.stash[_ROOT]
        try:
            root.close()
        finally:
            shutil.rmtree(folder, ignore_errors=True)
