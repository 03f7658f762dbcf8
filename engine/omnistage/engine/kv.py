"""The memory of the cache: keys and values of every computed row, in pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from omnistage.engine.adapter import DecoderSpec
from omnistage.engine.pages import PAGE_ROWS
from omnistage.engine.transfer import to_device


class KVCache:
    """The memory of the pages: for each layer [pages, 2 * kv_heads, PAGE_ROWS, head_size], keys first.

    A page is zeroed when a sequence takes it: masked slots take part in products, so their numbers must be finite. poison: fill a page with
    NaN when it becomes free, so that any use of a page without a holder shows at once."""

    def __init__(self, spec: DecoderSpec, pages: int, *, poison: bool = False) -> None:
        self._data = torch.empty(spec.layers, pages, 2 * spec.kv_heads, PAGE_ROWS, spec.head_size, dtype=spec.dtype, device=spec.device)
        self._layers = tuple(self._data.unbind())
        self._heads = tuple(layer.flatten(0, 1) for layer in self._layers)
        self._poison = poison
        if poison:
            self._data.fill_(float("nan"))

    def layer(self, index: int) -> torch.Tensor:
        """Pages of a layer: [pages, 2 * kv_heads, PAGE_ROWS, head_size]."""
        return self._layers[index]

    def heads(self, index: int) -> torch.Tensor:
        """The memory of `layer` as [pages * 2 * kv_heads, PAGE_ROWS, head_size]: row page * 2 * kv_heads + n is head n of a page."""
        return self._heads[index]

    def write(self, index: int, pages: torch.Tensor, places: torch.Tensor, keys_values: torch.Tensor) -> None:
        """Store n rows in a layer. pages, places: the page of each row and its slot there, int64 [n]. keys_values: [n, 2 * kv_heads,
        head_size]."""
        self._layers[index][pages, :, places] = keys_values

    def follow(self, new: Sequence[int], freed: Sequence[int]) -> None:
        """Zero the pages that were taken since the last step; with `poison`, spoil those that became free (`PagePool.changes`)."""
        if new:
            self._data.index_fill_(1, to_device(torch.tensor(new), self._data.device), 0.0)
        if self._poison and freed:
            self._data.index_fill_(1, to_device(torch.tensor(freed), self._data.device), float("nan"))


def page_bytes(spec: DecoderSpec) -> int:
    """Bytes of one page in all layers together."""
    return spec.layers * PAGE_ROWS * 2 * spec.kv_heads * spec.head_size * spec.dtype.itemsize
