"""Both dtypes, of which the short form draws one, on one thread, and the end of every engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from helpers import lengths
from helpers.engines import close_all

torch.set_num_threads(1)


@pytest.fixture(params=lengths.undrawn_long(1, "dtype", [torch.bfloat16, torch.float32]), ids=["bfloat16", "float32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    value: torch.dtype = request.param
    return value


@pytest.fixture(autouse=True)
def engines_end() -> Iterator[None]:
    yield
    close_all()
