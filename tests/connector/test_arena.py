"""The allocator: sizes, reuse, limits, quarantine, and the files behind it."""

import itertools
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.pipes import settled
from omnistage.connector.arena import Arena, Block, Share, class_bytes
from omnistage.connector.tensors import ArenaFull, ConnectorError, StaleReference
from omnistage.v1 import tensor_pb2

MIB = 1 << 20


def test_classes_are_four_a_power_of_two() -> None:
    assert [class_bytes(length) for length in (0, 1, 4096, 4097, 5120, 5121, 8192, 8193)] == [
        4096,
        4096,
        4096,
        5120,
        5120,
        6144,
        8192,
        10240,
    ]
    for length in range(4097, 300_000, 37):
        size = class_bytes(length)
        assert length <= size < length * 1.25 + 1
        assert size % 64 == 0
        assert class_bytes(size) == size


def test_the_block_given_back_last_is_taken_first(make_arena: Callable[..., Arena]) -> None:
    arena = make_arena()
    first, second = arena.allocate(5000), arena.allocate(5000)
    arena.free(first)
    arena.free(second)
    assert arena.allocate(5000) is second
    assert arena.allocate(5000) is first


def test_generations_never_come_again(make_arena: Callable[..., Arena]) -> None:
    arena = make_arena()
    seen = set()
    for _ in range(100):
        block = arena.allocate(100)
        seen.add(block.generation)
        arena.free(block)
    assert len(seen) == 100 and 0 not in seen
    with pytest.raises(ConnectorError, match="free already"):
        arena.free(block)


LENGTHS = [1, 5000, 60_000, 100_000, 400_000, 450_000, 600_000, 1_500_000, 3_000_000]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.tuples(st.integers(0, 2), st.sampled_from(LENGTHS)), min_size=40, max_size=120))
def test_blocks_never_overlap_and_the_limit_holds(make_arena: Callable[..., Arena], steps: list[tuple[int, int]]) -> None:
    arena = make_arena(max_bytes=6 * MIB, segment_bytes=MIB)
    held: list[Block] = []
    for take, length in steps:
        if take or not held:
            try:
                held.append(arena.allocate(length))
            except ArenaFull:
                continue
            arena.publish(held[-1])
        else:
            arena.free(held.pop(length % len(held)))
        assert arena.bytes_total <= arena.max_bytes
        assert arena.bytes_used == sum(block.capacity for block in held)
        assert settled(arena).leases == len(held)
        places = sorted((block.segment.number, block.offset, block.offset + 64 + block.capacity, block) for block in held)
        for left, right in itertools.pairwise(places):
            assert left[0] < right[0] or left[2] <= right[1]
        assert all(start >= 4096 and end <= block.segment.reserved for _, start, end, block in places)
    for block in held:
        arena.free(block)
    assert arena.bytes_used == settled(arena).leases == 0
    arena.free(arena.allocate(3 * MIB))  # whatever came before: an empty arena serves any size that fits its limit
    arena.close()


def test_memory_moves_between_classes_once_it_is_free(make_arena: Callable[..., Arena]) -> None:
    arena = make_arena(max_bytes=2 * MIB, segment_bytes=MIB)
    for length in (5_000, 400_000, 64, 700_000, 30_000):
        blocks = []
        with pytest.raises(ArenaFull):
            while True:
                blocks.append(arena.allocate(length))
        assert sum(block.capacity for block in blocks) > 0.6 * arena.max_bytes
        for block in blocks:
            arena.free(block)


def test_a_segment_that_is_cut_anew_forgets_its_old_blocks(make_arena: Callable[..., Arena]) -> None:
    arena = make_arena(max_bytes=2 * MIB, segment_bytes=MIB)
    small = [arena.allocate(5000) for _ in range(2 * MIB // 5184 - 10)]
    for block in small:
        arena.free(block)
    held = [arena.allocate(400_000) for _ in range(3)]
    with pytest.raises(ArenaFull):
        while True:
            held.append(arena.allocate(5000))
    places = sorted((block.segment.number, block.offset, block.offset + 64 + block.capacity) for block in held)
    for left, right in itertools.pairwise(places):
        assert left[0] < right[0] or left[2] <= right[1]


def test_a_large_tensor_gets_a_segment_of_its_own_that_is_kept_for_the_next(make_arena: Callable[..., Arena]) -> None:
    arena = make_arena(max_bytes=64 * MIB, segment_bytes=MIB)
    block = arena.allocate(5 * MIB)
    number = block.segment.number
    arena.free(block)
    assert arena.allocate(5 * MIB).segment.number == number
    blocks = [arena.allocate(5 * MIB) for _ in range(5)]
    taken = arena.bytes_total
    for block in blocks:
        arena.free(block)
    assert arena.bytes_total < taken - 14 * MIB


def test_memory_is_taken_as_it_is_needed(make_arena: Callable[..., Arena]) -> None:
    arena = make_arena(max_bytes=64 * MIB, segment_bytes=32 * MIB)
    assert arena.bytes_total == 0
    arena.allocate(100)
    assert arena.bytes_total == MIB
    taken = sum(path.stat().st_blocks * 512 for path in Path("/dev/shm").glob(f"omnistage-{arena.uuid.hex()}-*"))
    assert taken == MIB


def test_a_full_arena_goes_inline_with_the_same_bytes(make_arena: Callable[..., Arena], make_pair, random: np.random.Generator) -> None:
    pair = make_pair(arena=make_arena(max_bytes=2 * MIB, segment_bytes=MIB), share=Share(4 * MIB))
    arrays = [random.integers(0, 256, 300_000, np.uint8) for _ in range(10)]
    views = [pair.transfer(array) for array in arrays]
    assert 0 < pair.sender.outstanding < 10
    assert pair.sender.inline_fallbacks == 10 - pair.sender.outstanding
    for view, array in zip(views, arrays, strict=True):
        assert np.array_equal(view.array, array)
        view.release()
    del view
    pair.give_back()
    fallbacks = pair.sender.inline_fallbacks
    pair.transfer(arrays[0])
    assert pair.sender.inline_fallbacks == fallbacks


def test_a_reference_to_memory_that_was_used_again_is_stale(make_pair) -> None:
    pair = make_pair()
    (old,) = pair.messages(np.zeros(100_000, np.uint8))
    slot = old.shared_memory
    pair.sender.release(tensor_pb2.Release(slots=[tensor_pb2.Slot(segment=slot.segment, offset=slot.offset, generation=slot.generation)]))
    with pytest.raises(StaleReference):
        pair.receiver.unpack(old)
    (new,) = pair.messages(np.ones(100_000, np.uint8))
    assert (new.shared_memory.segment, new.shared_memory.offset) == (slot.segment, slot.offset)
    with pytest.raises(StaleReference) as caught:
        pair.receiver.unpack(old)
    assert slot.arena.hex() not in str(caught.value)


def test_a_broken_stream_keeps_its_blocks_from_reuse_for_the_grace(make_arena: Callable[..., Arena], make_pair) -> None:
    now = 100.0
    arena = make_arena(clock=lambda: now, grace_s=30.0, poison=True)
    pair = make_pair(arena=arena)
    (message,) = pair.messages(np.full(50_000, 3, np.int32))
    view = pair.transfer(np.full(50_000, 4, np.int32))
    pair.sender.close(clean=False)
    with pytest.raises(StaleReference):
        pair.receiver.unpack(message)
    now = 129.9
    assert settled(arena).leases == 2
    blocks = [arena.allocate(200_000) for _ in range(10)]
    assert (view.array == 4).all()
    for block in blocks:
        arena.free(block)
    now = 130.0
    assert settled(arena).leases == arena.bytes_used == 0
    assert (view.array == -1).all()


def test_freed_memory_is_poisoned_on_request(make_arena: Callable[..., Arena], make_pair) -> None:
    pair = make_pair(arena=make_arena(poison=True))
    view = pair.transfer(np.zeros(100_000, np.float32))
    pair.sender.close(clean=True)
    assert np.isnan(view.array).all()


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o777])
def test_files_are_private_whatever_the_umask(make_arena: Callable[..., Arena], umask: int) -> None:
    before = os.umask(umask)
    try:
        arena = make_arena()
        arena.allocate(100)
    finally:
        os.umask(before)
    facts = [path.stat() for path in Path("/dev/shm").glob(f"omnistage-{arena.uuid.hex()}-*")]
    assert len(facts) == 2
    assert all(stat.S_IMODE(fact.st_mode) == 0o600 for fact in facts)


def test_below_two_segments_it_is_inline_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        assert Arena.create(max_bytes=2 * MIB - 1, segment_bytes=MIB) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "connector.inline_only" in record.getMessage()
    caplog.clear()
    with caplog.at_level(logging.DEBUG):
        assert Arena.create(max_bytes=0) is None
    assert caplog.records == []


def test_the_default_share_leaves_room_for_others() -> None:
    before = os.statvfs("/dev/shm")
    arena = Arena.create(segment_bytes=64 * 1024)
    assert arena is not None
    try:
        after = os.statvfs("/dev/shm")  # others may have made room meanwhile
        free = max(mount.f_bavail * mount.f_frsize for mount in (before, after))
        assert arena.max_bytes <= min(free // 8 + MIB, 1 << 30)
    finally:
        arena.close()


def test_close_can_come_at_any_time_and_twice(make_arena: Callable[..., Arena], make_pair) -> None:
    arena = make_arena()
    pair = make_pair(arena=arena)
    view = pair.transfer(np.full(100_000, 5, np.int32))
    arena.close()
    arena.close()
    assert (view.array == 5).all()
    assert pair.sender.pack(np.zeros(100_000, np.int32))[0].WhichOneof("place") == "inline"
    view.release()
    pair.give_back()
    pair.sender.close(clean=True)
    assert pair.sender.offers() == []
    assert settled(arena).leases == arena.bytes_used == arena.bytes_total == 0


def test_an_arena_that_is_forgotten_removes_its_names() -> None:
    arena = Arena.create(max_bytes=8 * MIB, segment_bytes=MIB)
    assert arena is not None
    arena.allocate(100)
    pattern = f"omnistage-{arena.uuid.hex()}-*"
    assert len(list(Path("/dev/shm").glob(pattern))) == 2
    del arena
    assert list(Path("/dev/shm").glob(pattern)) == []
