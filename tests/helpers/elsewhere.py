"""A device that is not there: tensors that say they are on a GPU, whose numbers this processor computes.

Operations that a real device would refuse are refused here too: those on tensors of both devices, and NumPy. Operations that would wait for
a real device are counted: copies to the device that are not left to it, and numbers that are fetched. This device does not show which
kernel a GPU would take.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

GPU = torch.device("cuda:0")
MIXED = ("copy_", "_to_copy", "to")
"""Operations that take tensors of both devices."""


class Elsewhere(torch.Tensor):
    """A tensor of the device. here: its numbers."""

    here: torch.Tensor

    @staticmethod
    def __new__(cls, here: torch.Tensor) -> Elsewhere:
        made: Elsewhere = torch.Tensor._make_wrapper_subclass(
            cls, here.shape, strides=here.stride(), storage_offset=here.storage_offset(), dtype=here.dtype, device=torch.device("meta")
        )
        made.here = here
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """torch itself believes in a device without memory, as for its FakeTensor: it would guard one that it is not built for."""
        return GPU

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError("a tensor of the device was used after it was gone")

    def tolist(self) -> Any:
        return self.cpu().tolist()


class Device(TorchDispatchMode):
    """While it is entered, cuda is there. waits: how often the thread waited for it, by what it did."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self._pinned: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()

    @contextmanager
    def there(self) -> Iterator[Device]:
        # Else torch would look for the device itself: to begin with, and for torch.tensor(..., device="cuda").
        before, torch.cuda._initialized = torch.cuda._initialized, True
        torch._C._set_only_lift_cpu_tensors(True)
        try:
            with self:
                yield self
        finally:
            torch._C._set_only_lift_cpu_tensors(False)
            torch.cuda._initialized = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        name, given = func._schema.name.removeprefix("aten::"), dict(kwargs or {})
        flat = tree_flatten((args, given))[0]
        wrapped = {id(value.here): value for value in flat if isinstance(value, Elsewhere)}
        plain = [value for value in flat if isinstance(value, torch.Tensor) and not isinstance(value, Elsewhere)]
        device = next((value for value in flat if isinstance(value, torch.device)), None)
        if name in ("is_pinned", "pin_memory", "_pin_memory"):
            return self._pin(name, plain[0])
        if wrapped and name not in MIXED and any(value.ndim for value in plain):
            raise RuntimeError(f"{name}: tensors of {GPU} and of the CPU")
        is_there = bool(wrapped) if device is None else device.type != "cpu"
        self._count(func, name, args, given, is_there)
        result = func(*tree_map(_unwrapped, args), **tree_map(_unwrapped, given))
        if name == "copy_":
            is_there = isinstance(args[0], Elsewhere)
        return tree_map(lambda value: _wrapped(value, wrapped) if is_there and isinstance(value, torch.Tensor) else value, result)

    def _pin(self, name: str, tensor: torch.Tensor) -> bool | torch.Tensor:
        if name == "is_pinned":
            return id(tensor) in self._pinned
        pinned = tensor.clone()
        self._pinned[id(pinned)] = pinned
        return pinned

    def _count(self, func: Any, name: str, args: Sequence[Any], given: Mapping[str, Any], is_there: bool) -> None:
        """Write down what is waited for."""
        source = args[1] if name == "copy_" else args[0] if name in MIXED else None
        if name in ("_local_scalar_dense", "nonzero", "equal") and isinstance(args[0], Elsewhere):
            self.waits[name] += 1
        elif source is not None and isinstance(source, Elsewhere) and not (isinstance(args[0], Elsewhere) and is_there):
            self.waits["fetched"] += 1
        elif source is not None and not isinstance(source, Elsewhere) and (is_there or isinstance(args[0], Elsewhere)) and source.ndim:
            named = {each.name: value for each, value in zip(func._schema.arguments, args, strict=False)} | dict(given)
            if not (named.get("non_blocking") and id(source) in self._pinned):
                self.waits["sent"] += 1


def _unwrapped(value: Any) -> Any:
    if isinstance(value, Elsewhere):
        return value.here
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _wrapped(value: torch.Tensor, known: Mapping[int, Elsewhere]) -> Elsewhere:
    return known[id(value)] if id(value) in known else Elsewhere(value)


Weights = Callable[[str], torch.Tensor | None]


def on_the_device(weight: Weights) -> Weights:
    """Weights by name, put there when they are asked for."""

    def put(name: str) -> torch.Tensor | None:
        tensor = weight(name)
        return None if tensor is None else tensor.to(GPU)

    return put
