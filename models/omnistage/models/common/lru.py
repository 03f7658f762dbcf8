"""A cache of results: rows of prompts and media, latents of pictures. It keeps those used last, up to a number of bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

import torch


class Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


Value = TypeVar("Value", bound=Sized)


class LruCache(Generic[Value]):
    """Keeps the most recently used values, up to `max_bytes` in all; 0: none. A key must stand for everything that its value was made from.
    Use it on one thread. bytes: of the kept values. hits: how often `find` found a value."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._values: OrderedDict[Hashable, Value] = OrderedDict()
        self.bytes = 0
        self.hits = 0

    def find(self, key: Hashable) -> Value | None:
        """The value under a key, or None. The caller must not change it."""
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
            self.hits += 1
        return value

    def can_keep(self, value: Value) -> bool:
        return value.nbytes <= self._max_bytes

    def keep(self, key: Hashable, value: Value) -> None:
        """Keep a value. It is not kept if it alone is too large; otherwise the values that were not used for the longest make room."""
        if not self.can_keep(value):
            return
        if (old := self._values.pop(key, None)) is not None:
            self.bytes -= old.nbytes
        self._values[key] = value
        self.bytes += value.nbytes
        while self.bytes > self._max_bytes:
            self.bytes -= self._values.popitem(last=False)[1].nbytes


class TensorCache(LruCache[torch.Tensor]):
    """An LruCache of tensors."""

    def get(self, key: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The tensor under a key; if it is not there, `make` makes it, and it is kept. The caller must not change it."""
        tensor = self.find(key)
        if tensor is None:
            tensor = make()
            if self.can_keep(tensor) and tensor.nbytes < tensor.untyped_storage().nbytes():
                tensor = tensor.clone()  # A view would keep all of its base.
            self.keep(key, tensor)
        return tensor
