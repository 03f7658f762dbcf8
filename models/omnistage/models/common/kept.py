"""What was computed once and is asked for again: the rows of prompts, the latents of pictures. As many bytes of it as are allowed, those
that were used last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch


class Kept:
    """Tensors by what they were made from. Used on one thread. max_bytes 0: nothing is kept."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._tensors: OrderedDict[Hashable, torch.Tensor] = OrderedDict()
        self.bytes = 0
        self.hits = 0

    def get(self, key: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The tensor of a key, made if it is not there. Nobody may change it."""
        tensor = self._tensors.get(key)
        if tensor is not None:
            self._tensors.move_to_end(key)
            self.hits += 1
            return tensor
        tensor = make()
        if tensor.nbytes <= self._max_bytes:
            # A view would keep all that it is a part of.
            tensor = tensor.clone() if tensor.nbytes < tensor.untyped_storage().nbytes() else tensor
            self._tensors[key] = tensor
            self.bytes += tensor.nbytes
            while self.bytes > self._max_bytes:
                self.bytes -= self._tensors.popitem(last=False)[1].nbytes
        return tensor
