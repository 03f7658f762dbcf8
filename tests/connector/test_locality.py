"""The handshake: shared memory is used only where the reader has shown the bytes of the probe."""

from collections.abc import Callable

import numpy as np
import pytest

from omnistage.connector.arena import Arena
from omnistage.connector.transport import Receiver, Sender
from omnistage.v1 import tensor_pb2

INLINE = tensor_pb2.TRANSPORT_KIND_INLINE
SHARED = tensor_pb2.TRANSPORT_KIND_SHARED_MEMORY


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
