"""Tensors as arrays: the same memory, and the bits where NumPy lacks the type."""

from __future__ import annotations

import numpy as np
import torch

from omnistage.models.text.engine_model import array_of


def test_bfloat16_travels_as_its_bits() -> None:
    rows = torch.randn(5, 8).bfloat16()
    for tensor in (rows, rows[1:3], rows[:, ::2], rows[:0]):
        array = array_of(tensor)
        assert array.dtype == np.uint16 and array.shape == tuple(tensor.shape)
        assert torch.equal(torch.from_numpy(array.copy()).view(torch.bfloat16), tensor)


def test_other_types_are_what_they_are() -> None:
    rows = torch.randn(3, 4)
    assert array_of(rows).dtype == np.float32
    assert array_of(rows).ctypes.data == rows.data_ptr()
