"""Packages that cannot stand in the environment beside the others: each list has a folder of its own below build/, made once.

A folder and not an environment: it is there in a second or two, and `python -S` with it on PYTHONPATH sees nothing but it.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from pathlib import Path

from tools.commands import HASHED, SetupError, pip, run

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"


def folder_of(name: str, python: str = sys.executable) -> Path:
    """The folder with what requirements/NAME.txt lists, for a Python; filled by its pip where it is not there yet. Raises SetupError."""
    wanted = REQUIREMENTS / f"{name}.txt"
    about = run([python, "-c", "import sys; print(sys.version)"]).encode()
    digest = hashlib.sha256(about + wanted.read_bytes()).hexdigest()[:12]
    folder = ROOT / "build" / f"{name}-{digest}"
    if folder.exists():
        return folder
    folder.parent.mkdir(exist_ok=True)
    # Two at once: each fills a folder of its own, and one of them gets the name.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{name}-") as made:
        pip(python, *HASHED, "--quiet", f"--target={made}/packages", f"--requirement={wanted}")
        try:
            Path(made, "packages").rename(folder)
        except OSError as error:
            if not folder.exists():
                raise SetupError(f"{folder} cannot be made: {error}") from error
    return folder


def variables(*folders: Path) -> dict[str, str]:
    """Variables for `python -S`, which then sees these folders alone."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
