"""Finds the version of omnistage: of the installed package, or of the source tree that this file lies in."""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path

NAME = "omnistage"


def version() -> str:
    """A version such as 0.1.0. Raises PackageNotFoundError if neither an installed package nor the source tree has it."""
    try:
        return installed_version(NAME)
    except PackageNotFoundError:
        project = Path(__file__).resolve().parents[3] / "pyproject.toml"
        try:
            about = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
        except (OSError, tomllib.TOMLDecodeError, KeyError):
            about = {}
        if about.get("name") != NAME:
            raise
        declared: str = about["version"]
        return declared
