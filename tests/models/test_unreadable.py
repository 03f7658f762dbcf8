"""Caches and checkpoints of another user, who lets nobody read them: the error names the file and says what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from helpers import lengths

LOAD = """
import sys
from pathlib import Path
from omnistage.models.reports import LoadError
from omnistage.models.options import LoadOptions
from omnistage.models.registry import load
try:
    load("smol", "talker", LoadOptions(path=Path(sys.argv[1]) if sys.argv[1] else None))
except LoadError as error:
    print(error)
"""


def told(path: Path | None = None, cache: Path | None = None) -> str:
    """The error of a program that loads a Talker, in a process which the rights of files bind, as they do not bind root."""
    bound = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    environment = {**os.environ, **({"OMNISTAGE_CACHE": str(cache)} if cache else {})}
    command = [*bound, sys.executable, "-c", LOAD, str(path or "")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@lengths.drawn_cells(1, "name", ["config.json", "model.safetensors"])
def test_a_file_of_a_checkpoint(default_model: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(default_model / "talker", tmp_path / "talker")
    file = tmp_path / "talker" / name
    file.chmod(0)
    assert told(tmp_path) == f"{file} cannot be read: Permission denied\n"


def test_the_folder_of_the_cache(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir(mode=0)
    said = told(cache=cache)
    assert said.startswith(f"{cache}/smol-")
    assert said.endswith(" cannot be read or written: set OMNISTAGE_CACHE to a folder of yours\n")
    cache.chmod(0o700)
