"""Rows in another floating type than the port's are rounded to the nearest, as torch does it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from omnistage.models.text.engine_model import array_of
from omnistage.stage.inputs import convert_rows
from omnistage.v1 import tensor_pb2

TYPES = {
    tensor_pb2.ELEMENT_TYPE_FLOAT32: torch.float32,
    tensor_pb2.ELEMENT_TYPE_FLOAT16: torch.float16,
    tensor_pb2.ELEMENT_TYPE_BFLOAT16: torch.bfloat16,
}
AWKWARD = (
    0.0,
    -0.0,
    1.0,
    float("inf"),
    float("-inf"),
    float("nan"),
    65504.0,
    65519.9,
    65520.0,
    3.3895314e38,
    1e-40,
    1.00390625,
    1.01171875,
)
"""Next to what the types can hold, and in the middle between two of bfloat16."""


@pytest.mark.parametrize("given", TYPES)
@pytest.mark.parametrize("wanted", TYPES)
def test_rows_are_rounded_as_torch_does_it(given: tensor_pb2.ElementType, wanted: tensor_pb2.ElementType, seed: int) -> None:
    bits = np.random.default_rng(seed).integers(0, 1 << 32, 40_000, np.uint32)
    rows = torch.cat((torch.tensor(AWKWARD), torch.from_numpy(bits.view(np.float32)))).to(TYPES[given])[:, None]
    made = convert_rows(array_of(rows), given, wanted)
    expected = array_of(rows.to(TYPES[wanted]))
    assert made.dtype == expected.dtype and made.shape == expected.shape
    none = rows.isnan().numpy()
    np.testing.assert_array_equal(made[~none], expected[~none])
    seen = torch.from_numpy(made.view(np.int16).copy()).view(torch.bfloat16) if made.dtype == np.uint16 else torch.from_numpy(made.copy())
    assert bool(seen[torch.from_numpy(none)].isnan().all())
