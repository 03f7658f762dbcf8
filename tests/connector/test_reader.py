"""The reading side: which memory it maps, for how long, and which it refuses to map. For any message of a peer the reader gets the right
bytes or a typed error."""

import os
import resource
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers import lengths
from omnistage.connector.arena import Arena
from omnistage.connector.shm import READERS, ReaderCache, ReaderSegment, copy_block
from omnistage.connector.tensors import ConnectorError, InvalidReference, StaleReference
from omnistage.connector.transport import Receiver, Sender
from omnistage.v1 import tensor_pb2

MIB = 1 << 20


def test_the_last_alias_may_die_in_another_thread(make_pair) -> None:
    pair = make_pair()
    view = pair.transfer(np.full(100_000, 7, np.int32))
    box = [view.array]
    view.release()
    assert pair.give_back() == 0
    with ThreadPoolExecutor() as threads:
        assert threads.submit(lambda: int(box.pop().sum())).result() == 700_000
    assert pair.give_back() == 1
    assert pair.sender.outstanding == pair.receiver.view_count == 0


def test_maps_of_an_arena_that_is_gone_are_dropped_when_no_view_uses_them(arena: Arena, make_pair) -> None:
    READERS.drop_gone()
    before = len(READERS)
    pair = make_pair(arena=arena)
    view = pair.transfer(np.full(100_000, 7, np.int32))
    assert len(READERS) == before + 1
    arena.close()
    Receiver().close()
    assert len(READERS) == before + 1, "a view lives"
    assert (view.array == 7).all()
    del view
    Receiver().close()
    assert len(READERS) == before


def test_the_map_of_a_living_arena_is_kept_for_its_next_stream(arena: Arena, make_pair) -> None:
    first = make_pair(arena=arena)
    mapped = READERS.get(arena.uuid, 0)
    first.receiver.close()
    make_pair(arena=arena)
    assert READERS.get(arena.uuid, 0) is mapped


def test_a_full_cache_gives_up_the_map_that_was_not_used_for_longest(make_arena: Callable[..., Arena]) -> None:
    arena = make_arena(segment_bytes=MIB)
    blocks = [arena.allocate(MIB) for _ in range(3)]
    cache = ReaderCache(limit=2)
    numbers = [block.segment.number for block in blocks]
    first = cache.get(arena.uuid, numbers[0])
    second = cache.get(arena.uuid, numbers[1])
    assert cache.get(arena.uuid, numbers[0]) is first
    cache.get(arena.uuid, numbers[2])
    assert second.map.closed and not first.map.closed
    views = [np.frombuffer(cache.get(arena.uuid, number).map, np.uint8) for number in (numbers[0], numbers[2])]
    # This is the reader's own lack of room, not a fault of its sender, so the sender is asked to send the tensor inline.
    with pytest.raises(StaleReference, match="2 segments"):
        cache.get(arena.uuid, numbers[1])
    assert len(views) == len(cache) == 2


def open_segment(path: Path) -> ReaderSegment:
    """Map a file of that name, as a segment 0."""
    return ReaderSegment(bytes.fromhex(path.name.split("-")[1]), 0)


CONTENTS = {"empty": b"", "short": b"x" * 4095, "zeros": bytes(4096), "no header": b"omniseg\0" + bytes(8184)}
FILES: dict[str, Callable[[Path], object]] = {
    **{name: partial(Path.write_bytes, data=content) for name, content in CONTENTS.items()},
    "folder": Path.mkdir,
    "pipe": os.mkfifo,
    "link": lambda path: path.symlink_to("/etc/hostname"),
}


@pytest.mark.parametrize("make", FILES.values(), ids=FILES)
def test_what_is_not_a_segment_is_refused_without_waiting(place: Callable[[str], Path], make: Callable[[Path], object]) -> None:
    make(path := place("0"))
    with pytest.raises(InvalidReference) as caught:
        open_segment(path)
    assert path.name.split("-")[1] not in str(caught.value)


def test_a_segment_that_is_not_there_is_stale(place: Callable[[str], Path]) -> None:
    with pytest.raises(StaleReference):
        open_segment(place("0"))


def test_a_segment_of_another_number_or_arena_is_refused(arena: Arena, place: Callable[[str], Path]) -> None:
    block = arena.allocate(10)
    (path := place("0")).hardlink_to(Path("/dev/shm") / f"omnistage-{arena.uuid.hex()}-{block.segment.number}")
    with pytest.raises(InvalidReference, match="header"):
        open_segment(path)


def test_memory_that_was_not_reserved_is_never_read(make_arena: Callable[..., Arena], make_pair) -> None:
    pair = make_pair(arena=make_arena(segment_bytes=8 * MIB))
    (message,) = pair.messages(np.zeros(5000, np.uint8))
    message.shared_memory.offset = 4 * MIB
    with pytest.raises(InvalidReference, match="end of its segment"):
        pair.receiver.unpack(message)


@pytest.mark.parametrize("copy", [False, True])
def test_views_count_against_the_limit_until_they_are_released(make_pair, copy: bool) -> None:
    """The limit counts views of the sender's memory, and copies of it whose blocks the sender has back."""
    pair = make_pair(byte_limit=250_000, copy=copy)
    array = np.zeros(100_000, np.uint8)
    views = [pair.transfer(array), pair.transfer(array)]
    for _ in range(5):
        with pytest.raises(InvalidReference, match="250000 bytes"):
            pair.transfer(array)
        views.pop().release()
        views.append(pair.transfer(array))


def test_a_reader_that_is_closed_takes_nothing(make_pair) -> None:
    pair = make_pair()
    (message,) = pair.messages(np.zeros(5000, np.uint8))
    pair.receiver.close()
    pair.receiver.close()
    with pytest.raises(ConnectorError, match="closed"):
        pair.receiver.unpack(message)


def test_two_streams_of_one_arena_do_not_touch_each_other(arena: Arena, make_pair) -> None:
    one, two = make_pair(arena=arena), make_pair(arena=arena)
    kept = two.transfer(np.full(50_000, 2, np.int32))
    given = one.transfer(np.full(50_000, 1, np.int32))
    given.release()
    release = one.receiver.take_release()
    two.sender.release(release)
    assert (two.sender.ignored_releases, two.sender.outstanding, one.sender.outstanding) == (1, 1, 1)
    one.sender.close(clean=True)
    assert arena.leases == 1
    assert (kept.array == 2).all()


@pytest.fixture
def no_descriptors() -> Iterator[None]:
    """Let this process open no more files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("read", [ReaderSegment, lambda arena, number: copy_block(arena, number, 4096, 100, 1)])
def test_a_reader_without_descriptors_does_not_blame_the_sender(no_descriptors: None, read: Callable[[bytes, int], object]) -> None:
    """An invalid reference would end the session. After a stale one the sender goes on inline."""
    with pytest.raises(StaleReference, match="Too many open files"):
        read(os.urandom(16), 0)


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
