"""The part of free memory that a model on the engine takes for keys and values, and the length of a sequence that fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from omnistage.engine.memory import PAGE_ROWS, pages_for
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
    def choose(cls, options: LoadOptions, *, row_bytes: int, context: int, user_context: int = 0, free: int | None = None) -> Self:
        """Choose the sizes. row_bytes: bytes of the keys and values of one row. context: largest number of rows for which the model was
        made. user_context: context that the user asked for; 0: none. free: free bytes after the weights are loaded; None: measure them.
        Raises LoadError if the user asked for something impossible."""
        if free is None:
            free = free_bytes(options.device, options.gpu_memory_utilization, options.memory_share)
        max_bytes = int(free * KV_SHARE[options.device.partition(":")[0]])
        rows, kv_bytes = _sizes(min(user_context or context, context), options, row_bytes, max_bytes, is_wanted=bool(user_context))
        shared = f", with {options.memory_share:g} of the memory for this server" if options.given(MEMORY_SHARE) else ""
        reasons = {
            "free_memory": f"{bytes_told(free)} after the weights{shared}",
            "kv_cache_bytes": f"{kv_bytes}, for {kv_bytes // row_bytes} tokens of {options.sessions} sessions",
            "context": f"{rows} of the {context} that the model was made for",
        }
        return cls(rows, kv_bytes, free, reasons)


def _sizes(context: int, options: LoadOptions, row_bytes: int, max_bytes: int, *, is_wanted: bool) -> tuple[int, int]:
    """(the context in rows; bytes of a cache that holds at least one sequence of this context). context: the wanted context. max_bytes:
    bytes that may be used. is_wanted: whether the user asked for this context.

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
    if rows < LEAST_CONTEXT:
        advice = "free some memory, or give it a larger memory_share" if options.given(MEMORY_SHARE) else "free some memory"
        raise LoadError(
            f"kv_cache_bytes {room}: room for {rows} tokens of one conversation, {min(context, LEAST_CONTEXT)} are the least; "
            f"{'give more' if user_bytes else advice}"
        )
    return power_of_two(rows), room


def power_of_two(limit: int) -> int:
    """The largest power of two that is at most `limit`; 0: there is none."""
    return 1 << limit.bit_length() >> 1
