"""Matrix products whose rows do not depend on the other rows of the batch.

A row of `x @ W.T` is the same number whatever the batch only if the library uses one kernel for every batch size. oneDNN's
weights-first kernels do so from 4 rows on (with one row another kernel runs, and the last bits differ); `Linear` therefore never
runs fewer than `MIN_ROWS` rows, and `probe` checks the promise on this CPU when a model is loaded. Weights are re-ordered once into
the layout of those kernels: at small batches this is twice as fast as `torch.nn.functional.linear`, which re-orders at every call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as functional

MIN_ROWS = 4
"""Fewest rows of a product; smaller batches are padded by the caller with `pad_rows`."""

_PROBE_ROWS = (4, 5, 8, 13, 32, 64)


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

    __slots__ = ("_bias", "_blocked", "_packed", "_weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._packed = packing_is_viable(weight.dtype)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, MIN_ROWS) if self._packed else weight
        self._bias = bias
        key = (tuple(weight.shape), weight.dtype, bias is None)
        if key not in _INDEPENDENT:
            _INDEPENDENT[key] = rows_are_independent(self._product, weight.shape[1], weight.dtype)
        self._blocked = not _INDEPENDENT[key]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return in_blocks(self._product, x) if self._blocked else self._product(x)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed:
            product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return product
        return functional.linear(x, self._weight, self._bias)


_INDEPENDENT: dict[tuple[tuple[int, ...], torch.dtype, bool], bool] = {}
"""What `rows_are_independent` found for each shape of weight on this CPU."""


def rows_are_independent(product: Callable[[torch.Tensor], torch.Tensor], width: int, dtype: torch.dtype) -> bool:
    """Measure whether rows of `product` (input width `width`) are bit-equal for several batch sizes from `MIN_ROWS` up."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(max(_PROBE_ROWS), width, generator=generator).to(dtype)
    whole = product(x)
    return all(torch.equal(product(x[:rows].contiguous()), whole[:rows]) for rows in _PROBE_ROWS)


def in_blocks(product: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """`product(x)` in blocks of exactly `MIN_ROWS` rows: slow, and independent whatever the library does with other sizes."""
    padded = functional.pad(x, (0, 0, 0, -x.shape[0] % MIN_ROWS))
    return torch.cat([product(block.contiguous()) for block in torch.split(padded, MIN_ROWS)])[: x.shape[0]]
