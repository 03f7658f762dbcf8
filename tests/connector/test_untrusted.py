"""Senders that are not trusted: only memory of our own user is mapped. The handshake: shared memory is used only where the reader has shown
the bytes of the probe."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from helpers.pipes import SHARED_MEMORY, names
from omnistage.connector.arena import Arena
from omnistage.connector.shm import READERS
from omnistage.connector.tensors import ForeignSegment, InvalidReference, StaleReference
from omnistage.connector.transport import Receiver, Sender
from omnistage.v1 import tensor_pb2

INLINE = tensor_pb2.TRANSPORT_KIND_INLINE
SHARED = tensor_pb2.TRANSPORT_KIND_SHARED_MEMORY
NOBODY = 65534
SIZE = 50_000

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file to another user")


def segment(arena: Arena) -> Path:
    """The file of its first segment."""
    return SHARED_MEMORY / f"omnistage-{arena.uuid.hex()}-0"


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
def test_memory_that_others_may_write_is_not_mapped(arena: Arena, mode: int) -> None:
    offers = Sender(arena).offers()
    segment(arena).chmod(mode)
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
    os.truncate(segment(arena), 4096)
    with pytest.raises(InvalidReference):
        receiver.unpack(second)
    assert (view.array == 3).all() and len(READERS) == before
    give_away(arena, 1)
    with pytest.raises(ForeignSegment):
        receiver.unpack(second)


@needs_root
def test_our_own_memory_is_mapped_though_others_are_named(arena: Arena) -> None:
    sender, receiver, before = Sender(arena, inline_limit=0), Receiver(owners=[NOBODY]), len(READERS)
    sender.accept(receiver.answer(sender.offers()))
    view = receiver.unpack(sender.pack(np.full(SIZE, 3, np.uint8))[0])
    assert view is not None and receiver.view_count == 1 and len(READERS) == before + 1


# Files that are cut short ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 10, 4096, 4160, 20_000])
@pytest.mark.parametrize("grow", [False, True])
def test_a_file_that_is_cut_short_is_an_error_and_no_signal(arena: Arena, make_pair, length: int, grow: bool) -> None:
    """The same holds for a file that was made longer again and holds only zeros there."""
    pair = make_pair(arena=arena, copy=True)
    _, message = (pair.messages(np.full(SIZE, 7, np.uint8))[0] for _ in range(2))
    path = segment(arena)
    size = path.stat().st_size
    os.truncate(path, length)
    if grow:
        os.truncate(path, size)
    with pytest.raises((InvalidReference, StaleReference)) as caught:
        pair.receiver.unpack(message)
    assert arena.uuid.hex() not in str(caught.value)
    assert pair.receiver.take_release() is None


def test_a_file_that_is_cut_while_it_is_read_is_an_error_too(arena: Arena, make_pair) -> None:
    pair = make_pair(arena=arena, copy=True)
    (message,) = pair.messages(np.full(SIZE, 7, np.uint8))
    path = segment(arena)
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


def test_a_copy_is_given_back_at_once_and_nothing_is_mapped(arena: Arena, make_pair) -> None:
    before = len(READERS)
    pair = make_pair(arena=arena, copy=True)
    view = pair.transfer(np.full(SIZE, 7, np.uint8))
    assert pair.give_back() == 1
    assert pair.arena.leases == 0
    assert (view.array == 7).all()
    assert not view.array.flags.writeable
    assert len(READERS) == before


@pytest.mark.parametrize("gone", [False, True], ids=["given back", "arena closed"])
def test_a_block_that_is_there_no_more_is_stale(arena: Arena, make_pair, gone: bool) -> None:
    pair = make_pair(arena=arena, copy=True)
    (message,) = pair.messages(np.full(SIZE, 7, np.uint8))
    if gone:
        arena.close()
    else:
        pair.receiver.unpack(message)
        pair.give_back()
    with pytest.raises(StaleReference):
        pair.receiver.unpack(message)


def test_the_probe_of_a_file_that_is_cut_short_ends_inline(arena: Arena) -> None:
    offers = Sender(arena).offers()
    os.truncate(segment(arena), 4096)
    answer = Receiver(copy=True).answer(offers)
    assert answer.kind == INLINE
    assert "probe cannot be read" in answer.reason


def assert_goes_inline(sender: Sender, arena: Arena) -> None:
    assert sender.transport == INLINE
    assert sender.reason
    assert sender.pack(np.zeros(100_000, np.uint8))[0].WhichOneof("place") == "inline"
    assert arena.leases == 0


def name_arena(offer: tensor_pb2.Offer, name: bytes) -> None:
    offer.arena = offer.probe.shared_memory.arena = name


DAMAGES: dict[str, Callable[[tensor_pb2.Offer], None]] = {
    "other boot": lambda offer: setattr(offer, "boot_id", "another host"),
    "other device": lambda offer: setattr(offer, "device", "0"),
    "other arena": lambda offer: setattr(offer, "arena", bytes(16)),
    "odd arena everywhere": lambda offer: name_arena(offer, b"../etc"),
    "other arena everywhere": lambda offer: name_arena(offer, bytes(16)),
    "other generation": lambda offer: setattr(offer.probe.shared_memory, "generation", offer.probe.shared_memory.generation + 1),
    "no probe": lambda offer: offer.ClearField("probe"),
    "other kind": lambda offer: setattr(offer, "kind", tensor_pb2.TRANSPORT_KIND_REMOTE),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_an_offer_that_cannot_be_proven_ends_inline_with_a_reason(arena: Arena, damage: Callable[[tensor_pb2.Offer], None]) -> None:
    sender, receiver = Sender(arena), Receiver()
    offers = sender.offers()
    assert arena.leases == 1
    damage(offers[0])
    answer = receiver.answer(offers)
    assert answer.kind == INLINE and answer.reason and not answer.probe
    assert arena.uuid.hex() not in answer.reason
    sender.accept(answer)
    assert sender.reason == answer.reason
    assert_goes_inline(sender, arena)


@pytest.mark.parametrize(
    "answer",
    [
        tensor_pb2.Answer(),
        tensor_pb2.Answer(kind=INLINE),
        tensor_pb2.Answer(kind=SHARED),
        tensor_pb2.Answer(kind=SHARED, probe=bytes(32)),
        tensor_pb2.Answer(kind=tensor_pb2.TRANSPORT_KIND_CUDA_IPC),
    ],
)
def test_an_answer_without_proof_ends_inline(arena: Arena, answer: tensor_pb2.Answer) -> None:
    sender = Sender(arena)
    sender.offers()
    sender.accept(answer)
    assert_goes_inline(sender, arena)


def test_an_answer_that_nobody_asked_for_ends_inline(arena: Arena) -> None:
    sender = Sender(arena)
    sender.accept(tensor_pb2.Answer(kind=SHARED, probe=b""))
    assert_goes_inline(sender, arena)


def test_the_best_offer_that_works_is_taken(arena: Arena) -> None:
    sender = Sender(arena)
    better = tensor_pb2.Offer(kind=tensor_pb2.TRANSPORT_KIND_CUDA_IPC)
    answer = Receiver().answer([better, *sender.offers()])
    assert answer.kind == SHARED
    assert answer.reason
    sender.accept(answer)
    assert (sender.transport, sender.reason) == (SHARED, "")


def test_a_reader_may_decline(arena: Arena) -> None:
    sender = Sender(arena)
    answer = Receiver(accept_shared_memory=False).answer(sender.offers())
    assert answer.kind == INLINE
    assert "switched off" in answer.reason


def test_without_an_arena_nothing_is_offered() -> None:
    sender = Sender(None)
    assert sender.offers() == []
    sender.accept(Receiver().answer([]))
    assert sender.transport == INLINE
    assert "no arena" in sender.reason


def test_a_sender_that_is_never_answered_leaves_nothing(arena: Arena) -> None:
    sender = Sender(arena)
    assert sender.offers() == sender.offers()
    sender.close(clean=False)
    assert arena.leases == 0


def test_probes_differ_from_stream_to_stream(arena: Arena) -> None:
    answers = [Receiver().answer(Sender(arena).offers()).probe for _ in range(5)]
    assert len(set(answers)) == 5
    assert all(len(probe) == 32 for probe in answers)
