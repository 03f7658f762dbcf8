"""Small checkpoints are drawn fastest by one thread, which also adds numbers in one order."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
