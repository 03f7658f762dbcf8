"""The part of free memory that a model on the engine takes for keys and values, and the length of a sequence that fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from omnistage.engine.pages import PAGE_ROWS, pages_for
from omnistage.models.common.memory import free_bytes
from omnistage.models.errors import LoadError
from omnistage.models.humans import bytes_told
from omnistage.models.options import MEMORY_SHARE, LoadOptions

KV_SHARE = {"cpu": 0.4, "cuda": 0.8}
"""Part of the free memory for keys and values, by the type of device. On a CPU it is smaller, because other programs need memory too."""

USUAL_ROWS = 4096
"""Rows of a usual sequence. The cache is no larger than this many rows of each session, or one sequence of the context."""

LEAST_CONTEXT = 1024


@dataclass(frozen=True, slots=True)
class CacheSize:
    """The memory of a model on the engine. context: rows that a sequence may have. kv_bytes: bytes of all keys and values. free: bytes that
    were free before the keys and values were allocated. why: name of each setting -> its reason, for the user."""

    context: int
    kv_bytes: int
    free: int
    why: dict[str, str]

    @classmethod
    def choose(cls, options: LoadOptions, *, row_bytes: int, context: int, wanted: int = 0, free: int | None = None) -> Self:
        """Choose the sizes. row_bytes: bytes of the keys and values of one row. context: largest number of rows for which the model was
        made. wanted: context that the user asked for; 0: none. free: free bytes after the weights are loaded; None: measure them. Raises
        LoadError if the user asked for something impossible."""
        if free is None:
            free = free_bytes(options.device, options.gpu_memory_utilization, options.memory_share)
        most = int(free * KV_SHARE[options.device.partition(":")[0]])
        rows, kv_bytes = _sizes(min(wanted or context, context), options, row_bytes, most, is_wanted=bool(wanted))
        shared = f", with {options.memory_share:g} of the memory for this server" if options.given(MEMORY_SHARE) else ""
        why = {
            "free_memory": f"{bytes_told(free)} after the weights{shared}",
            "kv_cache_bytes": f"{kv_bytes}, for {kv_bytes // row_bytes} tokens of {options.sessions} sessions",
            "context": f"{rows} of the {context} that the model was made for",
        }
        return cls(rows, kv_bytes, free, why)


def _sizes(whole: int, options: LoadOptions, row_bytes: int, most: int, *, is_wanted: bool) -> tuple[int, int]:
    """(the context in rows; bytes of a cache that holds at least one sequence of this context). whole: the wanted context. most: bytes that
    may be used. is_wanted: whether the user asked for this context.

    A context that does not fit is reduced to a power of two: the context decides when an answer ends, so replicas whose free memory differs
    a little must choose the same."""
    least = pages_for(whole) * PAGE_ROWS * row_bytes
    if given := options.kv_cache_bytes:
        if given < least and is_wanted:
            raise LoadError(f"kv_cache_bytes {given}: one context of {whole} tokens takes {least}; give more, or a smaller context")
        room = given
    else:
        room = min(max(least, options.sessions * min(USUAL_ROWS, whole) * row_bytes), most)
    if room >= least:
        return whole, room
    rows = room // row_bytes // PAGE_ROWS * PAGE_ROWS
    if rows < LEAST_CONTEXT:
        more = "free some memory, or give it a larger memory_share" if options.given(MEMORY_SHARE) else "free some memory"
        raise LoadError(
            f"kv_cache_bytes {room}: room for {rows} tokens of one conversation, {min(whole, LEAST_CONTEXT)} are the least; "
            f"{'give more' if given else more}"
        )
    return power_of_two(rows), room


def power_of_two(most: int) -> int:
    """The largest power of two that is at most `most`; 0: there is none."""
    return 1 << most.bit_length() >> 1
