"""The version, as the package tells it and as its source tree does."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

import omnistage.client
from helpers.bare import bare_environment, bare_python

ROOT = Path(__file__).resolve().parents[2]


def test_it_is_that_of_the_package() -> None:
    assert omnistage.client.__version__ == version("omnistage")


def test_what_is_not_there_is_still_told() -> None:
    with pytest.raises(AttributeError, match="no attribute 'versoin'"):
        omnistage.client.versoin  # type: ignore[attr-defined]  # noqa: B018


def test_a_source_tree_that_is_not_installed_tells_it_too(tmp_path: Path) -> None:
    code = """
import importlib.metadata
import omnistage.client
try:
    importlib.metadata.version("omnistage")
except importlib.metadata.PackageNotFoundError:
    print(omnistage.client.__version__)
"""
    done = subprocess.run([*bare_python(), "-c", code], env=bare_environment(tmp_path), capture_output=True, text=True, timeout=60)
    told = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert (done.stdout.strip(), done.stderr) == (told, "")


def test_looking_for_it_is_left_to_who_asks() -> None:
    code = "import omnistage.client, sys; print(sorted({'importlib.metadata', 'tomllib', 'omnistage.client.version'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
