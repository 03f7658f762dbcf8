"""Both dtypes, of which the short form draws one, on one thread."""

from __future__ import annotations

import pytest
import torch

from helpers import lengths

torch.set_num_threads(1)


@pytest.fixture(params=lengths.undrawn_long(1, "dtype", [torch.bfloat16, torch.float32]), ids=["bfloat16", "float32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    value: torch.dtype = request.param
    return value
