"""For any message of a peer the reader gets the right bytes or a typed error; never another exception, a signal, or bytes of another
process."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers import lengths
from omnistage.connector.tensors import InvalidReference, StaleReference
from omnistage.connector.transport import Receiver, Sender
from omnistage.v1 import tensor_pb2

U32 = (1 << 32) - 1
U64 = (1 << 64) - 1
CLEAN = (InvalidReference, StaleReference)


def fuzz(examples: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)


def near(limit: int) -> st.SearchStrategy[int]:
    """Whole numbers of every size, mostly near borders of pages, blocks and words."""
    edges = [0, 1, 63, 64, 4095, 4096, 4160, 1 << 20, (1 << 20) - 64, (1 << 31) - 1, 1 << 31, (1 << 63) - 1, 1 << 63, limit - 63, limit]
    return st.one_of(st.sampled_from([edge for edge in edges if edge <= limit]), st.integers(0, 100_000), st.integers(0, limit))


element_types = st.one_of(st.integers(0, 9), st.sampled_from([-1, -(1 << 31), (1 << 31) - 1]))
shapes = st.one_of(st.lists(st.integers(0, 2000), max_size=4), st.lists(near(U64), max_size=10))
shared_changes = st.fixed_dictionaries(
    {},
    optional={
        "element_type": element_types,
        "shape": shapes,
        "arena": st.one_of(st.binary(max_size=20), st.just(bytes(16))),
        "segment": st.one_of(st.integers(0, 3), near(U32)),
        "offset": st.one_of(st.integers(0, 40_000).map(lambda number: number * 64), near(U64)),
        "length": near(U64),
        "generation": st.one_of(st.integers(0, 10), near(U64)),
    },
)


@pytest.fixture
def filled(make_pair):
    """A pair whose arena holds three live blocks and one that was freed."""
    pair = make_pair()
    pair.kept = [pair.messages(np.full(size, 0x41, np.uint8))[0] for size in (20_000, 300, 20_000)]
    view = pair.transfer(np.full(20_000, 0x42, np.uint8))
    view.release()
    del view
    pair.give_back()
    return pair


@lengths.rounds(400, 10_000)
def test_every_field_of_a_shared_memory_reference(filled, rounds: int) -> None:
    @fuzz(rounds)
    @given(number=st.integers(0, 2), changes=shared_changes)
    def play(number: int, changes: dict[str, Any]) -> None:
        take_changed_reference(filled, number, changes)

    play()


def change(tensor: tensor_pb2.Tensor, place: str, changes: dict[str, Any]) -> None:
    for field, value in changes.items():
        if field == "shape":
            tensor.shape[:] = value
        else:
            setattr(tensor if field == "element_type" else getattr(tensor, place), field, value)


def take_changed_reference(filled, number: int, changes: dict[str, Any]) -> None:
    tensor = tensor_pb2.Tensor.FromString(filled.kept[number].SerializeToString())
    change(tensor, "shared_memory", changes)
    try:
        view = filled.receiver.unpack(tensor)
    except CLEAN as error:
        assert filled.arena.uuid.hex() not in str(error)
        assert "omnistage" not in str(error)
        return
    assert view.array.nbytes == tensor.shared_memory.length
    assert set(view.array.tobytes()) <= {0x41}
    view.release()
    filled.receiver.take_release()
    assert filled.receiver.view_count == 0


inline_changes = st.lists(
    st.fixed_dictionaries(
        {"part": st.integers(0, 2)},
        optional={
            "element_type": element_types,
            "shape": shapes,
            "data": st.binary(max_size=64),
            "offset": near(U64),
            "total_bytes": near(U64),
        },
    ),
    min_size=1,
    max_size=5,
)
INLINE_PARTS = Sender(None).pack(np.zeros((5, 1 << 18), np.int16))


@lengths.rounds(400, 10_000)
def test_every_field_of_inline_parts(rounds: int) -> None:
    @fuzz(rounds)
    @given(steps=inline_changes)
    def play(steps: list[dict[str, Any]]) -> None:
        take_changed_parts(steps)

    play()


def take_changed_parts(steps: list[dict[str, Any]]) -> None:
    receiver = Receiver(byte_limit=1 << 32)
    try:
        for step in steps:
            tensor = tensor_pb2.Tensor()
            tensor.CopyFrom(INLINE_PARTS[step.pop("part")])
            change(tensor, "inline", step)
            view = receiver.unpack(tensor)
            assert view is None or view.array.nbytes == tensor.inline.total_bytes
    except CLEAN:
        return


@fuzz(1000)
@given(
    changes=st.dictionaries(st.sampled_from(["arena", "segment", "offset", "length", "generation"]), near(U32)),
    arena=st.binary(max_size=17),
)
def test_every_field_of_an_offer(filled, changes: dict[str, int], arena: bytes) -> None:
    sender, receiver = Sender(filled.arena), Receiver()
    offers = sender.offers()
    for field, value in changes.items():
        if field == "arena":
            offers[0].arena = arena
        else:
            setattr(offers[0].probe.shared_memory, field, value)
    sender.accept(receiver.answer(offers))
    sender.close(clean=True)
    assert sender.reason


@fuzz(1000)
@given(data=st.binary(max_size=120))
def test_arbitrary_messages(filled, data: bytes) -> None:
    try:
        tensor = tensor_pb2.Tensor.FromString(data)
    except DecodeError:
        return
    try:
        filled.receiver.unpack(tensor)
    except CLEAN:
        return
    assert tensor.WhichOneof("place") == "inline"


def test_a_reference_cannot_be_sent_twice_while_its_view_lives(filled) -> None:
    view = filled.receiver.unpack(filled.kept[0])
    with pytest.raises(InvalidReference, match="sent before"):
        filled.receiver.unpack(filled.kept[0])
    assert view.array.size == 20_000


def test_a_reference_without_an_agreed_arena_is_refused(filled) -> None:
    with pytest.raises(InvalidReference, match="agreed"):
        Receiver().unpack(filled.kept[0])


@pytest.mark.parametrize("place", ["cuda_ipc", "remote", None])
def test_a_place_that_was_not_agreed_is_refused(filled, place: str | None) -> None:
    tensor = tensor_pb2.Tensor(element_type=tensor_pb2.ELEMENT_TYPE_UINT8)
    if place is not None:
        getattr(tensor, place).SetInParent()
    with pytest.raises(InvalidReference, match="agreed"):
        filled.receiver.unpack(tensor)


def test_a_reference_to_a_part_of_a_block_is_refused(filled) -> None:
    tensor = filled.kept[0]
    tensor.shape[:] = [100]
    tensor.shared_memory.length = 100
    with pytest.raises(InvalidReference, match="holds 20000 bytes"):
        filled.receiver.unpack(tensor)
