"""Bounds the memory that products need for compiled kernels and for values between two products."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

KEPT_KERNELS = 256
"""Number of compiled products that oneDNN keeps, and of their descriptions that PyTorch keeps for each thread. By default both keep 1,024,
and each takes a MB: a prompt of 24,000 tokens, whose attention has another shape for each page, took a gigabyte for good. A step of 64
sequences whose contexts all have different lengths needs 128 for attention, and some dozens for other products: with fewer, each layer
would compile all of them again, which takes five times as long as attending."""

ONEDNN_KEEPS = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"

# Both libraries read them at their first product.
os.environ.setdefault(ONEDNN_KEEPS, str(KEPT_KERNELS))
os.environ.setdefault("LRU_CACHE_CAPACITY", str(KEPT_KERNELS))


@contextmanager
def kernels_kept(count: int) -> Iterator[None]:
    """Use it around the first product of a process: oneDNN then keeps `count` compiled products, unless the environment sets another
    number. Processes that are started after this context do not inherit the number."""
    value = os.environ[ONEDNN_KEEPS]
    if value == str(KEPT_KERNELS):
        os.environ[ONEDNN_KEEPS] = str(count)
    try:
        yield
    finally:
        os.environ[ONEDNN_KEEPS] = value


class Scratch:
    """Memory that is used again and again, one piece for each use, because new memory for each product would cost more than the product.
    Memory for a prompt that grows page by page would never fit into memory that was freed before, so a process would grow by a gigabyte for
    good. Not shared between threads."""

    def __init__(self) -> None:
        self._pieces: dict[str, torch.Tensor] = {}

    def take(self, use: str, shape: Sequence[int], model: torch.Tensor) -> torch.Tensor:
        """A tensor of this shape, with the dtype and device of `model` and undefined contents. It is valid until the next call with the
        same `use`."""
        size = 1
        for length in shape:
            size *= length
        piece = self._pieces.get(use)
        if piece is None or piece.dtype != model.dtype or piece.device != model.device or piece.numel() < size:
            self._pieces.pop(use, None)
            # A quarter more than needed: a growing prompt then needs new memory a few times only, not at every page.
            del piece
            piece = self._pieces[use] = torch.empty(size + size // 4, dtype=model.dtype, device=model.device)
        return piece[:size].view(*shape)
