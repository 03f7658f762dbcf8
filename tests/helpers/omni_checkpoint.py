"""A checkpoint of Qwen2.5-Omni with random weights, made once for all tests of a run; and copies of checkpoints, to be changed."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from omnistage.models.tiny.makers import CheckpointOrder, make_tiny


def omni_checkpoint(factory: pytest.TempPathFactory, order: CheckpointOrder | None = None) -> Path:
    """Its folder, which nobody may write to. All processes of a run get the same one for the same order."""
    order = order or CheckpointOrder()
    name = f"omni-{order.size}-{order.seed}-{order.tokenizer}-{order.dtype or 'default'}"
    return shared_folder(factory, name, lambda folder: make_tiny("qwen2.5-omni", folder, order))


def shared_folder(factory: pytest.TempPathFactory, name: str, fill: Callable[[Path], object]) -> Path:
    """A folder that all processes of a run share; the first that asks for it fills it."""
    base = factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = shared / name
    with (shared / f"{name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            (work := shared / f"{name}.making").mkdir()
            fill(work)
            work.rename(folder)
    return folder


def linked(checkpoint: Path, folder: Path, *omitted: str) -> Path:
    """A copy of a checkpoint in a folder: links, which whoever changes a file replaces. omitted: names of files."""
    folder.mkdir(exist_ok=True)
    for path in checkpoint.iterdir():
        if path.name not in omitted:
            (folder / path.name).symlink_to(path)
    return folder


def change_json(path: Path, how: Callable[[Any], object]) -> None:
    """Changes the content of a file in JSON, which may be a link."""
    values = json.loads(path.read_text())
    how(values)
    path.unlink()
    path.write_text(json.dumps(values))
