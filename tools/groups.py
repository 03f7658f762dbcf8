"""The requirements in pyproject.toml: of the core, and of each extra. An extra may name other extras and packages of this project."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CORE = "core"
PICTURES_PACKAGE = "omnistage-pictures"
"""The other package of this repository. It is built from the checkout, so no list names it."""


def read_groups(root: Path) -> dict[str, list[str]]:
    """The requirements of the core and of each extra, by name. They include the requirements of extras that an extra names."""
    project = _read(root)["project"]
    extras: Mapping[str, Sequence[str]] = project.get("optional-dependencies", {})
    name = canonicalize_name(project["name"])
    return {CORE: list(project["dependencies"]), **{extra: _expand(extra, extras, name) for extra in extras}}


def read_apart(root: Path) -> dict[str, list[str]]:
    """The packages that stand apart from the environment (tools/apart.py), by group: for each a complete list with exact versions."""
    return dict(_read(root).get("dependency-groups", {}))


def _read(root: Path) -> dict[str, Any]:
    """The contents of pyproject.toml."""
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))


def _expand(extra: str, extras: Mapping[str, Sequence[str]], project: str) -> list[str]:
    """The requirements of an extra, with those of the extras that it names. project: canonical name of this project."""
    requirements: list[str] = []
    for line in extras[extra]:
        requirement = Requirement(line)
        if canonicalize_name(requirement.name) == project:
            requirements += [one for other in sorted(requirement.extras) for one in _expand(other, extras, project)]
        elif canonicalize_name(requirement.name) != PICTURES_PACKAGE:
            requirements.append(line)
    return requirements
