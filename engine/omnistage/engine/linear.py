"""Matrix products whose rows do not depend on the other rows of the batch.

A row of `x @ W.T` is the same number whatever the batch only if the library uses one kernel for every batch size. oneDNN's
weights-first kernels give equal bits for 4 to 32 rows, with AMX and without (with one row, and with AMX from 48 rows on, another kernel
runs, and the last bits differ). `Linear` therefore runs blocks of `MIN_ROWS` to `MAX_ROWS` rows and nothing else, and checks the promise
for its own weight when it is loaded. With AMX a product of 32 rows costs hardly more than one of 4. Weights are re-ordered once into the
layout of those kernels: at small batches this is twice as fast as `torch.nn.functional.linear`, which re-orders at every call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as functional

MIN_ROWS = 4
"""Fewest rows of a product; smaller batches are padded by the caller with `pad_rows`."""

MAX_ROWS = 32
"""Most rows of one product; larger batches run in blocks."""

_PROBE_ROWS = (4, 5, 7, 8, 13, 16, 17, 24, 31)


def pad_rows(count: int) -> int:
    """Rows to run for `count` rows of interest."""
    return max(count, MIN_ROWS)


def packing_is_viable(dtype: torch.dtype) -> bool:
    """Whether this CPU has oneDNN kernels for packed weights of `dtype`."""
    if not torch._C._has_mkldnn:
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))


class Linear:
    """`x [rows, in] -> [rows, out]` for one weight `[out, in]` and an optional bias `[out]`; at least `MIN_ROWS` rows.

    The weight given is not kept when it was packed, so a memory-mapped checkpoint is read once and its pages may go.
    """

    __slots__ = ("_bias", "_block", "_packed", "_weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._packed = packing_is_viable(weight.dtype)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, MIN_ROWS) if self._packed else weight
        self._bias = bias
        self._block = MAX_ROWS if rows_are_independent(self._product, weight.shape[1], weight.dtype) else MIN_ROWS

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return in_blocks(self._product, x, self._block)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed:
            product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return product
        return functional.linear(x, self._weight, self._bias)


def rows_are_independent(product: Callable[[torch.Tensor], torch.Tensor], width: int, dtype: torch.dtype) -> bool:
    """Measure whether rows of `product` (input width `width`) are bit-equal for batches of `MIN_ROWS` to `MAX_ROWS` rows."""
    x = torch.randn(MAX_ROWS, width).to(dtype)
    whole = product(x)
    return all(torch.equal(product(x[-rows:].contiguous()), whole[-rows:]) for rows in _PROBE_ROWS)


def in_blocks(product: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, block: int) -> torch.Tensor:
    """`product(x)` in blocks of `block` rows, the last one of at least `MIN_ROWS`. x: at least `MIN_ROWS` rows; result: as many."""
    rows = x.shape[0]
    if rows <= block:
        return product(x)
    rest = rows % block
    padded = functional.pad(x, (0, 0, 0, MIN_ROWS - rest)) if 0 < rest < MIN_ROWS else x
    return torch.cat([product(part.contiguous()) for part in torch.split(padded, block)])[:rows]
