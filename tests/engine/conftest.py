"""Both dtypes, on one thread."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    value: torch.dtype = request.param
    return value
