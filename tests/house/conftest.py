"""Environments that are made quickly, and a package index for each test."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.wheels import environment, take, use_only


@pytest.fixture(scope="session")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with nothing but pip."""
    return environment(tmp_path_factory.mktemp("empty") / "venv")


@pytest.fixture
def python(empty: Path, tmp_path: Path) -> str:
    """The Python of a copy: quicker than a new environment, and good enough for `python -m pip`."""
    take(empty, tmp_path / "venv")
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
