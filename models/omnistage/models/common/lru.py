"""Results that may be needed again: rows of prompts and media, latents of pictures. The most recently used ones are kept, up to a number of
bytes."""

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
    """Keeps values under keys that stand for everything that a value was made from. Use it on one thread. max_bytes 0: nothing is kept."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._values: OrderedDict[Hashable, Value] = OrderedDict()
        self.bytes = 0
        self.hits = 0

    def find(self, key: Hashable) -> Value | None:
        """The value of a key; nobody may change it."""
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
            self.hits += 1
        return value

    def can_keep(self, value: Value) -> bool:
        return value.nbytes <= self._max_bytes

    def keep(self, key: Hashable, value: Value) -> None:
        """Keep a value; one that is too large drives no other out."""
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
        """The tensor of a key, made if it is not there; nobody may change it."""
        tensor = self.find(key)
        if tensor is None:
            tensor = make()
            if self.can_keep(tensor) and tensor.nbytes < tensor.untyped_storage().nbytes():
                tensor = tensor.clone()  # A view would keep all of its base.
            self.keep(key, tensor)
        return tensor
