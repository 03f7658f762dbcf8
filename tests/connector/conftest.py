"""Pairs of a sender and a receiver, one for each transport."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from helpers.pipes import SHARED_MEMORY, names, settled
from omnistage.connector.arena import Arena, Share
from omnistage.connector.shm import READERS
from omnistage.connector.tensors import Array
from omnistage.connector.transport import Receiver, Sender, TensorView
from omnistage.v1 import tensor_pb2

MIB = 1 << 20


@dataclass
class Clock:
    """A clock that stands still unless the test moves it: so an effect that is seen at once needs no grace."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class ConnectorPair:
    """Both ends of one direction of one stream, joined by real serialisation."""

    sender: Sender
    receiver: Receiver
    arena: Arena | None

    def messages(self, array: Array, element_type: tensor_pb2.ElementType | None = None) -> list[tensor_pb2.Tensor]:
        """The messages as the receiver parses them from the wire."""
        sent = self.sender.pack(array, element_type=element_type)
        return [tensor_pb2.Tensor.FromString(tensor.SerializeToString()) for tensor in sent]

    def transfer(self, array: Array, element_type: tensor_pb2.ElementType | None = None) -> TensorView:
        """Send a tensor over. All parts but the last one give None."""
        *parts, last = self.messages(array, element_type)
        for part in parts:
            assert self.receiver.unpack(part) is None
        view = self.receiver.unpack(last)
        assert view is not None
        return view

    def give_back(self) -> int:
        """Carry releases to the sender. Returns the number of blocks."""
        release = self.receiver.take_release()
        if release is None:
            return 0
        self.sender.release(tensor_pb2.Release.FromString(release.SerializeToString()))
        return len(release.slots)


@pytest.fixture
def make_arena() -> Iterator[Callable[..., Arena]]:
    """Makes arenas and closes them after the test; then none of their files may be left, and no map of them is."""
    arenas: list[Arena] = []

    def make(*, max_bytes: int = 64 * MIB, segment_bytes: int = 4 * MIB, **settings: object) -> Arena:
        arena = Arena.create(max_bytes=max_bytes, segment_bytes=segment_bytes, **settings)  # type: ignore[arg-type]
        assert arena is not None, "the tests need 64 MiB of shared memory"
        arenas.append(arena)
        return arena

    yield make
    for arena in arenas:
        arena.close()
        assert names(arena.uuid) == []
    READERS.drop_gone()  # Else the maps of thousands of arenas fill the cache of this process.


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def arena(make_arena: Callable[..., Arena], clock: Clock) -> Arena:
    """One whose grace of 30 s ends by the clock of the test, and whose freed blocks are full of 255."""
    return make_arena(poison=True, clock=clock)


@pytest.fixture
def place() -> Iterator[Callable[[str], Path]]:
    """Paths on the mount with the name of an arena that does not exist; none of them is left after the test."""
    uuid, paths = os.urandom(16).hex(), list[Path]()

    def path(kind: str) -> Path:
        paths.append(SHARED_MEMORY / f"omnistage-{uuid}-{kind}")
        return paths[-1]

    yield path
    for leftover in paths:
        if leftover.is_dir() and not leftover.is_symlink():
            leftover.rmdir()
        leftover.unlink(missing_ok=True)


@pytest.fixture
def make_pair(make_arena: Callable[..., Arena]) -> Callable[..., ConnectorPair]:
    """A joined pair over shared memory, with the settings of the sender and receiver that a test asks for."""

    def make(
        *, arena: Arena | None = None, inline_limit: int = 0, share: Share | None = None, byte_limit: int = 1 << 30, copy: bool = False
    ) -> ConnectorPair:
        arena = arena or make_arena()
        before = settled(arena).leases
        sender = Sender(arena, inline_limit=inline_limit, share=share)
        pair = ConnectorPair(sender, Receiver(byte_limit=byte_limit, copy=copy), arena)
        pair.sender.accept(pair.receiver.answer(pair.sender.offers()))
        assert pair.sender.transport == tensor_pb2.TRANSPORT_KIND_SHARED_MEMORY, pair.sender.reason
        assert settled(arena).leases == before
        return pair

    return make


@pytest.fixture(params=["inline", "shared", "shared_default", "copied"])
def pair(request: pytest.FixtureRequest, make_pair: Callable[..., ConnectorPair]) -> ConnectorPair:
    """The same pair for every transport: each claim of the test must hold for all."""
    if request.param == "inline":
        inline_pair = ConnectorPair(Sender(None), Receiver(), None)
        inline_pair.sender.accept(inline_pair.receiver.answer(inline_pair.sender.offers()))
        return inline_pair
    return make_pair(inline_limit=65536 if request.param == "shared_default" else 0, copy=request.param == "copied")


@pytest.fixture
def random() -> np.random.Generator:
    """The same random numbers in every run."""
    return np.random.default_rng(20240229)
