"""A cache of results (rows of prompts and media, latents of pictures), which keeps the most recently used results."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

import torch


class Sized(Protocol):
    """A value that knows its size. nbytes: in bytes."""

    @property
    def nbytes(self) -> int: ...


Value = TypeVar("Value", bound=Sized)


class LruCache(Generic[Value]):
    """Keeps the most recently used values, up to `max_bytes` in all. A key must stand for everything from which its value was made. Use it
    on one thread. max_bytes: 0: keep nothing. bytes: of the kept values together. hits: how often `find` found a value."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._values: OrderedDict[Hashable, Value] = OrderedDict()
        self.bytes = 0
        self.hits = 0

    def find(self, key: Hashable) -> Value | None:
        """The value under a key; None: there is none. The caller must not change it."""
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
            self.hits += 1
        return value

    def can_keep(self, value: Value) -> bool:
        return value.nbytes <= self._max_bytes

    def keep(self, key: Hashable, value: Value) -> None:
        """Keep a value, and drop least recently used values until all fit. A value that alone is too large is not kept."""
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
        """The tensor under a key; if there is none, `make` makes it, and it is kept. The caller must not change it."""
        tensor = self.find(key)
        if tensor is None:
            tensor = make()
            if self.can_keep(tensor) and tensor.nbytes < tensor.untyped_storage().nbytes():
                tensor = tensor.clone()  # A view would keep all of its base.
            self.keep(key, tensor)
        return tensor
