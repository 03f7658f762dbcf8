"""Messages of the first rank of a group to the others. They are pickled, and sent over a socket that only parent and child have."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from omnistage.engine.plan import StepPlan
from omnistage.models.options import LoadOptions


@dataclass(frozen=True, slots=True)
class ReadPart:
    """The first message: read your part of a model. reader: "module:function" of a `rank.RankReader`. folder: the checkpoint. rank: number
    of the receiver. size: number of ranks."""

    reader: str
    folder: Path
    options: LoadOptions
    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class PartRead:
    """The answer to ReadPart; other messages get no answer. error: why the part could not be read; empty: it was read."""

    error: str = ""


@dataclass(frozen=True, slots=True)
class Connect:
    """Meet the other ranks; see Distributed.connect."""

    store: str


@dataclass(frozen=True, slots=True)
class NewCache:
    """Replace the cache; see Followers.new_cache."""

    pages: int
    poison: bool


@dataclass(frozen=True, slots=True)
class PagesChanged:
    """Note which pages were taken and freed; see KVCache.follow."""

    taken: Sequence[int]
    freed: Sequence[int]


@dataclass(frozen=True, slots=True)
class ComputeHidden:
    """Compute the hidden rows of a step."""

    plan: StepPlan


@dataclass(frozen=True, slots=True)
class ComputeLogits:
    """Compute the logits of the rows of the last step from which an item is drawn."""


def send(channels: Iterable[Connection], message: object) -> None:
    """Send a message through each of the channels. Raises OSError if the reader of a channel has ended."""
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(message)
    for channel in channels:
        channel.send_bytes(buffer.getbuffer())


def receive(channel: Connection) -> Any:
    """Wait for the next message. Raises EOFError or OSError if the sender has ended."""
    return pickle.loads(channel.recv_bytes())


class _Pickler(pickle.Pickler):
    """Pickles a tensor as its bytes. torch itself would put each tensor into a file, which takes a tenth of a millisecond."""

    def reducer_override(self, value: object) -> Any:
        """Called for each object: how to pickle a tensor; NotImplemented: as usual."""
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        data = value.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return _tensor, (str(value.dtype).removeprefix("torch."), tuple(value.shape), data)


def _tensor(dtype: str, shape: tuple[int, ...], data: bytes) -> torch.Tensor:
    kind = getattr(torch, dtype)
    return torch.frombuffer(bytearray(data), dtype=kind).view(shape) if data else torch.empty(shape, dtype=kind)
