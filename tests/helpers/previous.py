"""The whole code of the last version, for processes that run it beside those of this one."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

from tools.breaking import ROOT, last_version


def environment_of(folder: Path) -> dict[str, str]:
    """Variables with which Python imports omnistage from a checkout: its folders stand before those of the installed package, and all of
    them are portions of one namespace. Raises AssertionError if something would come from elsewhere."""
    layout = tomllib.loads((folder / "pyproject.toml").read_text())
    portions = [str(folder / portion) for portion in layout["tool"]["hatch"]["build"]["dev-mode-dirs"]]
    environment = {"PYTHONPATH": os.pathsep.join(portions)}
    imported = (
        "import sys, omnistage.router.server, omnistage.cli.main; print(*(m.__file__ for n, m in sys.modules.items() if 'omnistage.' in n))"
    )
    files = subprocess.run(
        [sys.executable, "-c", imported], env={**os.environ, **environment}, capture_output=True, text=True, check=True, timeout=60
    ).stdout.split()
    assert files and all(file == "None" or Path(file).is_relative_to(folder) for file in files), files
    return environment


def checkout(folder: Path) -> bool:
    """Write the last version into a folder; False if this clone does not have it."""
    revision = last_version()
    if revision is None:
        return False
    packed = subprocess.run(["git", "archive", "--format=tar", revision], cwd=ROOT, capture_output=True, check=True, timeout=60).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    return True
