"""What the first rank of a group tells the others, and how it travels: pickled, on a socket that only a parent and its child have."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from omnistage.engine.plan import Plan
from omnistage.engine.transfer import to_device
from omnistage.models.options import LoadOptions


@dataclass(frozen=True, slots=True)
class Load:
    """The first message. reader: "module:function" of a `rank.Reader`."""

    reader: str
    folder: Path
    options: LoadOptions
    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """The only answer, to Load. error: why it could not, empty if it could."""

    error: str = ""


@dataclass(frozen=True, slots=True)
class Meet:
    """See Distributed.connect."""

    store: str


@dataclass(frozen=True, slots=True)
class Begin:
    """See Followers.begin."""

    pages: int


@dataclass(frozen=True, slots=True)
class Follow:
    """See KVCache.follow."""

    taken: Sequence[int]
    freed: Sequence[int]


@dataclass(frozen=True, slots=True)
class Step:
    """Compute the hidden rows of a step."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Logits:
    """Compute those of the rows of the last step that an item is drawn from."""


def send(channel: Connection, message: object) -> None:
    """Raises OSError where nobody reads any more."""
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(message)
    channel.send_bytes(buffer.getbuffer())


def receive(channel: Connection) -> Any:
    """The next message. Raises EOFError or OSError where nobody writes any more."""
    return pickle.loads(channel.recv_bytes())


def moved(plan: Plan, device: torch.device) -> Plan:
    """A plan that came, on a device."""
    if device.type == "cpu":
        return plan
    rows = plan.rows
    return replace(
        plan,
        rows=replace(
            rows,
            items=to_device(rows.items, device),
            positions=to_device(rows.positions, device),
            given=None if rows.given is None else to_device(rows.given, device),
            has_given=None if rows.has_given is None else to_device(rows.has_given, device),
        ),
        pages=to_device(plan.pages, device),
        places=to_device(plan.places, device),
        drawn=to_device(plan.drawn, device),
    )


class _Pickler(pickle.Pickler):
    """Tensors as their bytes: torch would put each into a file of its own, at a tenth of a millisecond."""

    def reducer_override(self, value: object) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        data = value.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return _tensor, (str(value.dtype).removeprefix("torch."), tuple(value.shape), data)


def _tensor(dtype: str, shape: tuple[int, ...], data: bytes) -> torch.Tensor:
    kind = getattr(torch, dtype)
    return torch.frombuffer(bytearray(data), dtype=kind).view(shape) if data else torch.empty(shape, dtype=kind)
