"""Checkpoints of the drawing pipelines with random weights, each made once in a process that asks for it."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

from omnistage.models.tiny.makers import CheckpointOrder, make_tiny

NAMES = (
    *("qwen-image", "qwen-image-edit", "qwen-image-edit-plus", "qwen-image-layered"),
    *("z-image", "longcat-image", "longcat-image-edit"),
)
"""The checkpoints of `make-tiny` that draw pictures."""
MOVING = ("wan2.2-t2v", "wan2.2-ti2v", "wan2.2-i2v", "stable-audio")
"""The checkpoints of `make-tiny` that make films and sounds."""


@cache
def checkpoint(name: str, size: str = "tiny") -> Path:
    """The folder of one of NAMES or MOVING, in float32; nobody may write to it, and it is gone when the process ends."""
    folder = _home() / f"{name}-{size}"
    if not folder.exists():  # The size may be left out.
        make_tiny(name, folder, CheckpointOrder(size=size))
    return folder


def writable(name: str, folder: Path, size: str = "tiny") -> Path:
    """A copy of a checkpoint, for who damages it. folder: it must not be there yet."""
    return Path(shutil.copytree(checkpoint(name, size), folder))


@cache
def _home() -> Path:
    return kept_folder()


def kept_folder() -> Path:
    """A new folder, which is gone when the process ends."""
    home = tempfile.mkdtemp(prefix="omnistage-drawings-")
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    return Path(home)
