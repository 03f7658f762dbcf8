"""What a kind of stage is to its shell: a function from chunks to chunks that knows no neighbour."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from omnistage.link.ports import Output
from omnistage.v1 import chunk_pb2, stage_pb2

__all__ = ["Input", "InputPayload", "LogicLoad", "Output", "StageLogic", "Timing", "Work"]

InputPayload = (
    chunk_pb2.TextChunk | chunk_pb2.CodeChunk | chunk_pb2.AudioChunk | chunk_pb2.ImageChunk | chunk_pb2.VideoChunk | NDArray[np.generic]
)


@dataclass(frozen=True, slots=True)
class Input:
    """One piece of one input port. An array is a view into the sender's memory: valid until the next input is asked for."""

    port: str
    first: int
    count: int
    last: bool
    payload: InputPayload | None


@dataclass(frozen=True, slots=True)
class LogicLoad:
    """As in WatchResponse."""

    queued: int = 0
    kv_pages_used: int = 0
    kv_pages_total: int = 0


@dataclass(slots=True)
class Timing:
    """What only the logic knows of a session's time. queued_s: waited before its first step. cached_tokens: found in the prefix cache."""

    queued_s: float = 0.0
    cached_tokens: int = 0


Work = Callable[[AsyncIterator[Input], Timing], AsyncGenerator[Output, None]]
"""A session that was checked and can begin: from its inputs to its outputs. Closing the generator frees everything it holds."""


class StageLogic(Protocol):
    """What a kind of stage does."""

    @property
    def description(self) -> stage_pb2.DescribeResponse:
        """Kind, model, revision, ports, voices and max_sessions; the shell fills the rest."""

    def load(self) -> LogicLoad: ...

    def prepare(self, request: stage_pb2.Open) -> Work:
        """Check `params` once and for all; raise StageError(BAD_REQUEST) with the field that is bad. Nothing is computed yet."""

    async def warm_up(self) -> None: ...

    async def close(self) -> None: ...
