"""An installation as `pip install omnistage` makes it: this checkout and its core dependencies, and none of the packages of an extra."""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

from tools.groups import CORE, read_groups

ROOT = Path(__file__).resolve().parents[2]


def bare_environment(folder: Path, *extras: str) -> dict[str, str]:
    """Variables for `python -S`, which then finds only what these extras (none: the core) bring. folder: gets links to the packages."""
    groups = read_groups(ROOT)
    wanted = [line for group in (CORE, *extras) for line in groups[group]]
    for name in _closure(wanted):
        for file in distribution(name).files or ():
            top = file.parts[0]
            source = Path(str(distribution(name).locate_file(top)))
            if top not in ("..", "__pycache__") and not (folder / top).exists():
                (folder / top).symlink_to(source)
    portions = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["dev-mode-dirs"]
    paths = [*(str(ROOT / portion) for portion in portions), str(folder)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def bare_python() -> list[str]:
    """The interpreter, without the packages of its environment."""
    return [sys.executable, "-S"]


def _closure(lines: Iterable[str]) -> set[str]:
    """These requirements and all that they require on this machine."""
    found: set[str] = set()
    todo = list(lines)
    while todo:
        requirement = Requirement(todo.pop())
        extras = [{"extra": extra} for extra in ("", *requirement.extras)]
        if requirement.marker is not None and not any(requirement.marker.evaluate(extra) for extra in extras):
            continue
        if requirement.name in found:
            continue
        try:
            further = distribution(requirement.name).requires or ()
        except PackageNotFoundError:
            continue
        found.add(requirement.name)
        todo += [line for line in further if "extra ==" not in line]
    return found
