"""A checkpoint of Qwen2.5-Omni with random weights, made once for all tests of a run."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from omnistage.models.tiny.makers import CheckpointOrder, make_tiny


def omni_checkpoint(factory: pytest.TempPathFactory, order: CheckpointOrder | None = None) -> Path:
    """Its folder, which nobody may write to. All processes of a run get the same one for the same order."""
    order = order or CheckpointOrder()
    base = factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = shared / f"omni-{order.size}-{order.seed}-{order.tokenizer}-{order.dtype or 'default'}"
    with (shared / "omni.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            make_tiny("qwen2.5-omni", folder, order)
    return folder
