"""Only memory of our own user is mapped, because the owner of a file can cut it short, which kills the processes that have it mapped."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest

from helpers.pipes import SHARED_MEMORY, names
from omnistage.connector.arena import Arena
from omnistage.connector.shm import READERS
from omnistage.connector.tensors import ForeignSegment, InvalidReference
from omnistage.connector.transport import Receiver, Sender
from omnistage.v1 import tensor_pb2

INLINE = tensor_pb2.TRANSPORT_KIND_INLINE
SHARED = tensor_pb2.TRANSPORT_KIND_SHARED_MEMORY
NOBODY = 65534
SIZE = 50_000

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file to another user")


def give_away(arena: Arena, uid: int = NOBODY) -> None:
    """Give all files of the arena to another user, who can then do anything with them."""
    for name in names(arena.uuid):
        os.chown(SHARED_MEMORY / name, uid, uid)


@needs_root
def test_memory_of_another_user_is_not_mapped(make_arena: Callable[..., Arena]) -> None:
    arena, before = make_arena(), len(READERS)
    sender, receiver = Sender(arena, inline_limit=0), Receiver()
    offers = sender.offers()
    give_away(arena)
    answer = receiver.answer(offers)
    assert answer.kind == INLINE and "another user" in answer.reason and arena.uuid.hex() not in answer.reason
    assert len(READERS) == before
    sender.accept(answer)
    assert sender.pack(np.zeros(SIZE, np.uint8))[0].WhichOneof("place") == "inline"


@needs_root
def test_a_segment_that_belongs_to_another_user_after_the_probe_is_not_mapped_either(make_pair, make_arena: Callable[..., Arena]) -> None:
    pair = make_pair(arena=make_arena(segment_bytes=1 << 20))
    (message,) = pair.messages(np.zeros(700_000, np.uint8))
    assert message.shared_memory.segment == 1
    give_away(pair.arena)
    with pytest.raises(ForeignSegment, match="another user"):
        pair.receiver.unpack(message)
    assert pair.receiver.take_release() is None


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_memory_that_others_may_write_is_not_mapped(make_arena: Callable[..., Arena], mode: int) -> None:
    arena = make_arena()
    offers = Sender(arena).offers()
    (SHARED_MEMORY / f"omnistage-{arena.uuid.hex()}-0").chmod(mode)
    answer = Receiver().answer(offers)
    assert answer.kind == INLINE and "others may write it" in answer.reason


@needs_root
def test_memory_of_a_user_that_was_named_is_copied_and_a_cut_is_an_error(make_arena: Callable[..., Arena]) -> None:
    arena, before = make_arena(), len(READERS)
    sender, receiver = Sender(arena, inline_limit=0), Receiver(owners=[NOBODY])
    offers = sender.offers()
    give_away(arena)
    answer = receiver.answer(offers)
    assert answer.kind == SHARED, answer.reason
    sender.accept(answer)
    first, second = (sender.pack(np.full(SIZE, value, np.uint8))[0] for value in (3, 4))
    view = receiver.unpack(first)
    assert view is not None and (view.array == 3).all()
    os.truncate(SHARED_MEMORY / f"omnistage-{arena.uuid.hex()}-0", 4096)
    with pytest.raises(InvalidReference):
        receiver.unpack(second)
    assert (view.array == 3).all() and len(READERS) == before
    give_away(arena, 1)
    with pytest.raises(ForeignSegment):
        receiver.unpack(second)


@needs_root
def test_our_own_memory_is_mapped_though_others_are_named(make_arena: Callable[..., Arena]) -> None:
    sender, receiver, before = Sender(make_arena(), inline_limit=0), Receiver(owners=[NOBODY]), len(READERS)
    sender.accept(receiver.answer(sender.offers()))
    view = receiver.unpack(sender.pack(np.full(SIZE, 3, np.uint8))[0])
    assert view is not None and receiver.held == 1 and len(READERS) == before + 1
