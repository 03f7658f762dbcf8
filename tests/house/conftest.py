"""Environments that are made quickly, and a package index of each test's own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.wheels import use_only


@pytest.fixture(scope="session")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with nothing but pip."""
    folder = tmp_path_factory.mktemp("empty") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    return folder


@pytest.fixture
def python(empty: Path, tmp_path: Path) -> str:
    """The Python of a copy: quicker than a new environment, and good enough for `python -m pip`."""
    shutil.copytree(empty, tmp_path / "venv", symlinks=True)
    return str(tmp_path / "venv" / "bin" / "python")


@pytest.fixture
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip's only configured index, in a folder of this test: empty at first."""
    index = tmp_path / "configured"
    index.mkdir()
    use_only(index, monkeypatch)
    return index


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The index in TORCH_INDEX_URL: not there at first."""
    index = tmp_path / "other"
    monkeypatch.setenv("TORCH_INDEX_URL", index.as_uri())
    return index
