"""What pyproject.toml asks for: of the core, and of each extra, which may name others of this project."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CORE = "core"


def read_groups(root: Path) -> dict[str, list[str]]:
    """The requirements of each group; what an extra has of another one stands in it."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras: Mapping[str, Sequence[str]] = project.get("optional-dependencies", {})
    name = canonicalize_name(project["name"])
    return {CORE: list(project["dependencies"]), **{extra: _expanded(extra, extras, name) for extra in extras}}


def _expanded(extra: str, extras: Mapping[str, Sequence[str]], project: str) -> list[str]:
    found: list[str] = []
    for line in extras[extra]:
        requirement = Requirement(line)
        if canonicalize_name(requirement.name) == project:
            found += [one for other in sorted(requirement.extras) for one in _expanded(other, extras, project)]
        else:
            found.append(line)
    return found
