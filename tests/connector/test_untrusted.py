"""A reader that copies gets bytes or a typed error, never a signal, whatever the sender does to its files."""

import os
import threading
from collections.abc import Callable

import numpy as np
import pytest

from helpers.pipes import SHARED_MEMORY
from omnistage.connector.arena import Arena
from omnistage.connector.shm import READERS
from omnistage.connector.tensors import InvalidReference, StaleReference
from omnistage.connector.transport import Receiver, Sender
from omnistage.v1 import tensor_pb2

SIZE = 50_000


@pytest.mark.parametrize("length", [0, 10, 4096, 4160, 20_000])
@pytest.mark.parametrize("grow", [False, True])
def test_a_file_that_is_cut_short_is_an_error_and_no_signal(make_arena: Callable[..., Arena], make_pair, length: int, grow: bool) -> None:
    """The same holds for a file that was made longer again and holds only zeros there."""
    arena = make_arena()
    pair = make_pair(arena=arena, copy=True)
    messages = [pair.messages(np.full(SIZE, 7, np.uint8))[0] for _ in range(2)]
    path = SHARED_MEMORY / f"omnistage-{arena.uuid.hex()}-0"
    size = path.stat().st_size
    os.truncate(path, length)
    if grow:
        os.truncate(path, size)
    for message in messages[1:]:
        with pytest.raises((InvalidReference, StaleReference)) as caught:
            pair.receiver.unpack(message)
        assert arena.uuid.hex() not in str(caught.value)
    assert pair.receiver.take_release() is None


def test_a_file_that_is_cut_while_it_is_read_is_an_error_too(make_arena: Callable[..., Arena], make_pair) -> None:
    arena = make_arena()
    pair = make_pair(arena=arena, copy=True)
    (message,) = pair.messages(np.full(SIZE, 7, np.uint8))
    path = SHARED_MEMORY / f"omnistage-{arena.uuid.hex()}-0"
    whole = path.read_bytes()
    over = threading.Event()

    def cut_and_mend() -> None:
        while not over.is_set():
            os.truncate(path, 5000)
            path.write_bytes(whole)

    other = threading.Thread(target=cut_and_mend)
    other.start()
    ends: set[object] = set()
    try:
        for attempt in range(1_000_000):
            if attempt >= 3000 and len(ends) > 1:  # on a busy machine the file may stay cut for as long as all of these take
                break
            try:
                view = pair.receiver.unpack(message)
                ends.add(frozenset(view.array.tolist()))
            except (InvalidReference, StaleReference) as error:
                ends.add(str(error)[-20:])
    finally:
        over.set()
        other.join()
    assert len(ends) > 1


def test_a_copy_is_given_back_at_once_and_nothing_is_mapped(make_arena: Callable[..., Arena], make_pair) -> None:
    before = len(READERS)
    pair = make_pair(arena=make_arena(poison=True), copy=True)
    view = pair.transfer(np.full(SIZE, 7, np.uint8))
    assert pair.give_back() == 1
    assert pair.arena.leases == 0
    assert (view.array == 7).all()
    assert not view.array.flags.writeable
    assert len(READERS) == before


def test_a_block_that_was_given_back_is_stale(make_pair) -> None:
    pair = make_pair(copy=True)
    (message,) = pair.messages(np.full(SIZE, 7, np.uint8))
    pair.receiver.unpack(message)
    pair.give_back()
    with pytest.raises(StaleReference):
        pair.receiver.unpack(message)


def test_an_arena_that_is_gone_is_stale(make_arena: Callable[..., Arena], make_pair) -> None:
    arena = make_arena()
    pair = make_pair(arena=arena, copy=True)
    (message,) = pair.messages(np.full(SIZE, 7, np.uint8))
    arena.close()
    with pytest.raises(StaleReference):
        pair.receiver.unpack(message)


def test_the_probe_of_a_file_that_is_cut_short_ends_inline(make_arena: Callable[..., Arena]) -> None:
    arena = make_arena()
    offers = Sender(arena).offers()
    os.truncate(SHARED_MEMORY / f"omnistage-{arena.uuid.hex()}-0", 4096)
    answer = Receiver(copy=True).answer(offers)
    assert answer.kind == tensor_pb2.TRANSPORT_KIND_INLINE
    assert "probe cannot be read" in answer.reason
