"""The memory of a machine, and what a model takes of it: measures what is free and what this process has taken, chooses the part for keys
and values and the length of a sequence that fits, and has a cache of results (rows of prompts and media, latents of pictures), which keeps
the most recently used results."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, Self, TypeVar

import torch

from omnistage.engine.memory import PAGE_ROWS, pages_for
from omnistage.models.options import MEMORY_SHARE, LoadOptions
from omnistage.models.reports import LoadError, bytes_told

_MEMINFO = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")
_ROLLUP = Path("/proc/self/smaps_rollup")
_MAPS = Path("/proc/self/maps")

FILLED = 0.9
"""Part of a GPU's memory, from 0 to 1, that processes fill by default."""


def free_bytes(device: str, filled: float = 0.0, share: float = 1.0) -> int:
    """Number of bytes that a model may still take on a device after its weights are loaded.

    On a GPU: the bytes that its driver reports as free, less the part of the GPU that must stay empty. filled: part of the GPU that may be
    filled, above 0 to 1; 0: FILLED. On a CPU: the bytes that the kernel can give without swapping, or less if a control group (a container)
    has a limit. share: see LoadOptions."""
    if device != "cpu":
        free, total = torch.cuda.mem_get_info(device)
        return part_of_gpu(free, total, torch.cuda.memory_reserved(device), filled or FILLED, share)
    free = _kilobytes(_MEMINFO, "MemAvailable")
    limit_file, usage_file = _GROUP / "memory.max", _GROUP / "memory.current"
    if limit_file.is_file() and usage_file.is_file() and (limit := limit_file.read_text().strip()).isdigit():
        free = min(free, int(limit) - int(usage_file.read_text()))
    return part_of_cpu(max(free, 0), private_bytes(), share)


def part_of_gpu(free: int, total: int, own_bytes: int, filled: float, share: float) -> int:
    """Bytes that this process may still take on a GPU. free, total: bytes of the GPU. own_bytes: those that this process has taken. filled:
    part of the GPU that all processes may fill. share: part of those bytes for this process. It is a share of the whole, because with a
    share of the free bytes the first of two equal servers would get more than the second, which finds less free."""
    return max(min(int(free - (1 - filled) * total), int(share * filled * total) - own_bytes), 0)


def part_of_cpu(free: int, own_bytes: int, share: float) -> int:
    """Bytes that this process may still take on a CPU: its share of the memory that was free before it took `own_bytes`, minus these bytes.
    It is no share of the whole memory, because other work of the machine uses a part of that."""
    return max(int(share * (free + own_bytes)) - own_bytes, 0)


def private_bytes() -> int:
    """Bytes of memory that belong to this process alone: those that no file backs ("Anonymous"). Dirty pages are no measure: a page of a
    file that was just written is dirty and still shared."""
    return _kilobytes(_ROLLUP, "Anonymous")


def mapped_bytes(folder: Path) -> int:
    """Bytes of the files in a folder that this process has mapped, whether they are in memory now or not."""
    files = {str(path.resolve()) for path in folder.iterdir()}
    # Six fields: addresses, permissions, offset, device, inode, and the path, which memory without a file lacks.
    lines = (line.split(maxsplit=5) for line in _MAPS.read_text().splitlines())
    spans = [fields[0].split("-") for fields in lines if len(fields) == 6 and fields[5] in files]
    return sum(int(end, 16) - int(begin, 16) for begin, end in spans)


def memory_texts(folder: Path) -> dict[str, str]:
    """Name -> text on the memory that a model has taken, for its info. folder: its checkpoint; weights may be mapped from its files."""
    mapped = mapped_bytes(folder)
    shared = f"{bytes_told(mapped)} of weights as they are in the files, once for all replicas of this machine"
    return {
        "private_memory": f"{bytes_told(private_bytes())} of this process alone, the cache as far as it was touched",
        "shared_memory": shared if mapped else "none: all weights were packed or converted",
    }


def _kilobytes(path: Path, name: str) -> int:
    """Bytes from the line of this name, such as "MemAvailable: 123 kB", in a file of the kernel. Raises OSError if there is none."""
    for line in path.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise OSError(f"{path} has no line {name}")


KV_SHARE = {"cpu": 0.4, "cuda": 0.8}
"""Part of the free memory for keys and values, by the type of device. On a CPU it is smaller, because other programs need memory too."""

USUAL_ROWS = 4096
"""Rows of a usual sequence. The cache is no larger than this many rows of each session, or one sequence of the context."""

MIN_CONTEXT = 1024


@dataclass(frozen=True, slots=True)
class CacheSize:
    """The memory of a model on the engine. context: rows that a sequence may have. kv_bytes: bytes of all keys and values. free: bytes that
    were free before the keys and values were allocated. reasons: name of each setting -> its reason, for the user."""

    context: int
    kv_bytes: int
    free: int
    reasons: dict[str, str]

    @classmethod
    def choose(cls, options: LoadOptions, *, row_bytes: int, context: int, user_context: int = 0, free: int | None = None) -> Self:
        """Choose the sizes. row_bytes: bytes of the keys and values of one row. context: largest number of rows for which the model was
        made. user_context: context that the user asked for; 0: none. free: free bytes after the weights are loaded; None: measure them.
        Raises LoadError if the user asked for something impossible."""
        if free is None:
            free = free_bytes(options.device, options.gpu_memory_utilization, options.memory_share)
        max_bytes = int(free * KV_SHARE[options.device.partition(":")[0]])
        rows, kv_bytes = _sizes(min(user_context or context, context), options, row_bytes, max_bytes, is_wanted=bool(user_context))
        shared = f", with {options.memory_share:g} of the memory for this server" if options.is_set(MEMORY_SHARE) else ""
        reasons = {
            "free_memory": f"{bytes_told(free)} after the weights{shared}",
            "kv_cache_bytes": f"{kv_bytes}, for {kv_bytes // row_bytes} tokens of {options.sessions} sessions",
            "context": f"{rows} of the {context} that the model was made for",
        }
        return cls(rows, kv_bytes, free, reasons)


def _sizes(context: int, options: LoadOptions, row_bytes: int, max_bytes: int, *, is_wanted: bool) -> tuple[int, int]:
    """(the context in rows; bytes of a cache that holds at least one sequence of this context). context: the context before it is reduced,
    in rows. max_bytes: bytes that may be used. is_wanted: whether the user asked for this context. By default the cache has room for as
    many conversations of usual length as there are sessions, at least for one whole context, and takes at most max_bytes.

    A context that does not fit is reduced to a power of two: the context decides when an answer ends, so replicas whose free memory differs
    a little must choose the same."""
    min_bytes = pages_for(context) * PAGE_ROWS * row_bytes
    if user_bytes := options.kv_cache_bytes:
        if user_bytes < min_bytes and is_wanted:
            raise LoadError(
                f"kv_cache_bytes {user_bytes}: one context of {context} tokens takes {min_bytes}; give more, or a smaller context"
            )
        room = user_bytes
    else:
        room = min(max(min_bytes, options.sessions * min(USUAL_ROWS, context) * row_bytes), max_bytes)
    if room >= min_bytes:
        return context, room
    rows = room // row_bytes // PAGE_ROWS * PAGE_ROWS
    if rows < MIN_CONTEXT:
        advice = "free some memory, or give it a larger memory_share" if options.is_set(MEMORY_SHARE) else "free some memory"
        raise LoadError(
            f"kv_cache_bytes {room}: room for {rows} tokens of one conversation, {min(context, MIN_CONTEXT)} are the least; "
            f"{'give more' if user_bytes else advice}"
        )
    return power_of_two(rows), room


def power_of_two(limit: int) -> int:
    """The largest power of two that is at most `limit`; 0: there is none."""
    return (1 << limit.bit_length()) >> 1


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
