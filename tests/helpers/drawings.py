"""Checkpoints of the drawing pipelines with random weights, each made once in a process that asks for it."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

from omnistage.models.tiny.makers import Order, make_tiny

NAMES = (
    *("qwen-image", "qwen-image-edit", "qwen-image-edit-plus", "qwen-image-layered"),
    *("z-image", "longcat-image", "longcat-image-edit"),
)
"""What `make-tiny` can make that draws."""


@cache
def checkpoint(name: str) -> Path:
    """The folder of one of NAMES, of size tiny, in float32; nobody may write to it, and it is gone when the process ends."""
    folder = _home() / name
    make_tiny(name, folder, Order())
    return folder


def writable(name: str, folder: Path) -> Path:
    """A copy of a checkpoint, for who damages it. folder: it must not be there yet."""
    return Path(shutil.copytree(checkpoint(name), folder))


@cache
def _home() -> Path:
    home = tempfile.mkdtemp(prefix="omnistage-drawings-")
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    return Path(home)
