"""Converts rows from one floating type to another, for two neighbouring stages that compute in different types."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from omnistage.models.interface import Array
from omnistage.v1 import tensor_pb2

_DTYPES = {tensor_pb2.ELEMENT_TYPE_FLOAT32: np.float32, tensor_pb2.ELEMENT_TYPE_FLOAT16: np.float16}


def convert_rows(rows: Array, source: tensor_pb2.ElementType, target: tensor_pb2.ElementType) -> Array:
    """The rows in the wanted type, rounded to the nearest; the same array if it has that type already. A bfloat16 array is uint16 bits."""
    if source == target:
        return rows
    values = _of_bfloat16(rows) if source == tensor_pb2.ELEMENT_TYPE_BFLOAT16 else rows.astype(np.float32)
    if target == tensor_pb2.ELEMENT_TYPE_BFLOAT16:
        return _bfloat16(values)
    with np.errstate(over="ignore"):  # A value too large for float16 becomes infinite.
        return values.astype(_DTYPES[target])


def _of_bfloat16(bits: Array) -> NDArray[np.float32]:
    """The values of bfloat16 numbers, which come as uint16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of the values as bfloat16, rounded to the nearest, ties to even; NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)
