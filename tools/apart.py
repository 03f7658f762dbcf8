"""Packages that conflict with the environment's own: each list of them has a folder of its own below build/, which is made once.

A folder is enough, because it is made in a second or two, and `python -S` with the folder on PYTHONPATH sees nothing else. `make setup-dev`
fills all folders, so that tests need no index; otherwise the first user of a missing folder fills it.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from pathlib import Path

from tools.commands import HASHED, SetupError, pip, run, step

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
LISTS = ("build", "oldest", "protos")


def folder_of(name: str, python: str = sys.executable) -> Path:
    """The folder with the packages of requirements/NAME.txt for the interpreter `python`, whose pip fills it if it is missing. Raises
    SetupError."""
    folder = _place(name, python)
    if folder.exists():
        return folder
    folder.parent.mkdir(exist_ok=True)
    # If two processes do this at once, each fills a folder of its own, and one folder gets the name.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{name}-") as temporary_folder:
        pip(python, *HASHED, "--quiet", "--no-compile", f"--target={temporary_folder}/packages", f"--requirement={REQUIREMENTS / name}.txt")
        try:
            Path(temporary_folder, "packages").rename(folder)
        except OSError as error:
            if not folder.exists():
                raise SetupError(f"{folder} cannot be made: {error}") from error
    return folder


def _place(name: str, python: str) -> Path:
    """The path of a list's folder. It depends on the contents of the list and the version of Python."""
    version = sys.version if python == sys.executable else run([python, "-c", "import sys; print(sys.version, end='')"])
    digest = hashlib.sha256(version.encode() + (REQUIREMENTS / f"{name}.txt").read_bytes()).hexdigest()
    return ROOT / "build" / f"{name}-{digest[:12]}"


def variables(*folders: Path) -> dict[str, str]:
    """An environment in which `python -S` sees these folders alone."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}


def main() -> int:
    """Fill all folders. Prints a line only if there is something to do."""
    missing = [name for name in LISTS if not _place(name, sys.executable).exists()]
    if not missing:
        return 0
    try:
        with step(f"apart from the environment: {', '.join(missing)}"):
            for name in missing:
                folder_of(name)
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
