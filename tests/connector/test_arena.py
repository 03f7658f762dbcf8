"""The allocator: sizes, reuse, joining, limits, quarantine, the files behind it, and its figures."""

import itertools
import logging
import os
import stat
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.pipes import SHARED_MEMORY, names, settled
from omnistage.connector.arena import Arena, Block, Extents, Share, class_bytes
from omnistage.connector.tensors import ArenaFull, ConnectorError, StaleReference
from omnistage.v1 import tensor_pb2

MIB = 1 << 20


def test_classes_are_four_a_power_of_two() -> None:
    sizes = {0: 4096, 1: 4096, 4096: 4096, 4097: 5120, 5120: 5120, 5121: 6144, 8192: 8192, 8193: 10240}
    assert {length: class_bytes(length) for length in sizes} == sizes
    for length in range(4097, 300_000, 37):
        size = class_bytes(length)
        assert length <= size < length * 1.25 + 1 and size % 64 == 0
        assert class_bytes(size) == size


def test_the_block_given_back_last_is_taken_first(arena: Arena) -> None:
    first, second = arena.allocate(5000), arena.allocate(5000)
    arena.free(first)
    arena.free(second)
    assert arena.allocate(5000) is second
    assert arena.allocate(5000) is first


def test_generations_never_come_again(arena: Arena) -> None:
    seen = set()
    for _ in range(100):
        block = arena.allocate(100)
        seen.add(block.generation)
        arena.free(block)
    assert len(seen) == 100 and 0 not in seen
    with pytest.raises(ConnectorError, match="free already"):
        arena.free(block)


def check_apart(blocks: Iterable[Block]) -> None:
    """Checks that no two blocks overlap."""
    places = sorted((block.segment.number, block.offset, block.offset + 64 + block.capacity) for block in blocks)
    for left, right in itertools.pairwise(places):
        assert left[0] < right[0] or left[2] <= right[1]


def filled(arena: Arena, length: int) -> list[Block]:
    """Take blocks until the arena is full."""
    blocks = []
    with pytest.raises(ArenaFull):
        while True:
            blocks.append(arena.allocate(length))
    return blocks


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
        check_apart(held)
        assert all(4096 <= block.offset <= block.segment.reserved - 64 - block.capacity for block in held)
    for block in held:
        arena.free(block)
    assert arena.bytes_used == settled(arena).leases == 0
    arena.free(arena.allocate(3 * MIB))  # whatever came before: an empty arena serves any size that fits its limit
    arena.close()


def test_memory_moves_between_classes_once_it_is_free(make_arena: Callable[..., Arena]) -> None:
    arena = make_arena(max_bytes=2 * MIB, segment_bytes=MIB)
    for length in (5_000, 400_000, 64, 700_000, 30_000):
        blocks = filled(arena, length)
        assert sum(block.capacity for block in blocks) > 0.6 * arena.max_bytes
        for block in blocks:
            arena.free(block)


def test_a_segment_that_is_cut_anew_forgets_its_old_blocks(make_arena: Callable[..., Arena]) -> None:
    arena = make_arena(max_bytes=2 * MIB, segment_bytes=MIB)
    small = [arena.allocate(5000) for _ in range(2 * MIB // 5184 - 10)]
    for block in small:
        arena.free(block)
    check_apart([*(arena.allocate(400_000) for _ in range(3)), *filled(arena, 5000)])


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
    assert sum((SHARED_MEMORY / name).stat().st_blocks * 512 for name in names(arena.uuid)) == MIB


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
    given = tensor_pb2.Slot(segment=slot.segment, offset=slot.offset, generation=slot.generation)
    pair.sender.release(tensor_pb2.Release(slots=[given]))
    with pytest.raises(StaleReference):
        pair.receiver.unpack(old)
    (new,) = pair.messages(np.ones(100_000, np.uint8))
    assert (new.shared_memory.segment, new.shared_memory.offset) == (slot.segment, slot.offset)
    with pytest.raises(StaleReference) as caught:
        pair.receiver.unpack(old)
    assert slot.arena.hex() not in str(caught.value)


def test_a_broken_stream_keeps_its_blocks_from_reuse_for_the_grace(arena: Arena, clock, make_pair) -> None:
    pair = make_pair(arena=arena)
    (message,) = pair.messages(np.full(50_000, 3, np.int32))
    view = pair.transfer(np.full(50_000, 4, np.int32))
    pair.sender.close(clean=False)
    with pytest.raises(StaleReference):
        pair.receiver.unpack(message)
    clock.now = 29.9
    assert settled(arena).leases == 2
    blocks = [arena.allocate(200_000) for _ in range(10)]
    assert (view.array == 4).all()
    for block in blocks:
        arena.free(block)
    clock.now = 30.0
    assert settled(arena).leases == arena.bytes_used == 0
    assert (view.array == -1).all()


def test_freed_memory_is_poisoned_on_request(arena: Arena, make_pair) -> None:
    pair = make_pair(arena=arena)
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
    modes = [stat.S_IMODE((SHARED_MEMORY / name).stat().st_mode) for name in names(arena.uuid)]
    assert modes == [0o600] * 2


def test_below_two_segments_it_is_inline_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        assert Arena.create(max_bytes=2 * MIB - 1, segment_bytes=MIB) is None
        assert Arena.create(max_bytes=0) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "connector.inline_only" in record.getMessage()


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


def test_close_can_come_at_any_time_and_twice(arena: Arena, make_pair) -> None:
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
    uuid = arena.uuid
    assert len(names(uuid)) == 2
    del arena
    assert names(uuid) == []


# Small blocks become large ones, though their segment is never idle --------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, -1], ids=["the first stays", "the last stays"])
def test_small_blocks_make_room_for_large_ones_while_one_is_in_use(make_arena: Callable[..., Arena], first: int) -> None:
    arena = make_arena(max_bytes=2 * MIB, segment_bytes=MIB)
    for length in (5_000, 60_000, 20_000):
        blocks = filled(arena, length)
        kept = {block.segment.number: block for block in blocks[:: 1 if first else -1]}
        for block in blocks:
            if kept[block.segment.number] is not block:
                arena.free(block)
        large = [arena.allocate(450_000) for _ in range(2)]
        for block in [*large, *kept.values()]:
            arena.free(block)
    assert arena.leases == arena.bytes_used == 0


def test_a_split_block_is_whole_again(make_arena: Callable[..., Arena]) -> None:
    """One large block was split into small ones. The last of these is still in use when another large block is asked for."""
    arena = make_arena(max_bytes=2 * MIB, segment_bytes=MIB)
    large = filled(arena, 300_000)
    arena.free(large.pop())
    small = filled(arena, 5_000)
    assert len(small) > 40
    for block in small[1:]:
        arena.free(block)
    assert arena.allocate(250_000)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(1, 300_000), min_size=5, max_size=80), order=st.randoms())
def test_after_any_story_a_large_block_fits_beside_one_that_is_in_use(
    make_arena: Callable[..., Arena], lengths: list[int], order: object
) -> None:
    arena = make_arena(max_bytes=2 * MIB, segment_bytes=MIB)
    held: list[Block] = []
    for length in lengths * 2:
        try:
            held.append(arena.allocate(length))
        except ArenaFull:
            order.shuffle(held)  # type: ignore[attr-defined]
            while len(held) > 2:
                arena.free(held.pop())
    order.shuffle(held)  # type: ignore[attr-defined]
    stay = {block.segment.number: block for block in held}
    for block in held:
        if stay[block.segment.number] is not block:
            arena.free(block)
    # A block of 300,000 bytes at most stands somewhere in a segment of 1 MiB: a third of it is free in one piece, on one of the sides.
    large = [arena.allocate(327_680) for _ in range(2)]
    check_apart([*stay.values(), *large])
    arena.close()


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5)), max_size=60), st.integers(1, 6))
def test_ranges_are_joined_as_a_list_of_flags_says(steps: list[tuple[int, int]], size: int) -> None:
    """The comparison is with the simplest implementation: one flag for each byte."""
    extents, free = Extents(), [False] * 36
    for start, length in steps:
        if any(free[start : start + length]):
            found = extents.take(size)
            runs = [run for run in "".join(" x"[flag] for flag in free).split() if len(run) >= size]
            assert (found is None) == (not runs)
            if found is not None:
                assert all(free[found[1] : found[1] + size])
                free[found[1] : found[1] + size] = [False] * size
            continue
        free[start : start + length] = [True] * length
        begin, end = extents.add(7, start, start + length)
        assert all(free[begin:end]) and not (begin and free[begin - 1]) and not free[end]
    extents.forget(7)
    assert extents.take(1) is None


# Figures --------------------------------------------------------------------------------------------------------------------------------


def test_reading_the_figures_changes_nothing(arena: Arena, clock) -> None:
    """As a scrape of the metrics does, from another thread."""
    arena.quarantine(arena.allocate(10))
    clock.now = 31.0
    assert arena.leases == 1 and arena.bytes_used > 0, "who only looks ends no grace"
    arena.settle()
    assert arena.leases == arena.bytes_used == 0


def test_a_thread_that_reads_the_figures_does_not_disturb_the_arena(make_arena: Callable[..., Arena]) -> None:
    """Every block is in quarantine, with a grace that ends at once: the reading thread must not take a block that the owner is about to
    free."""
    arena = make_arena(grace_s=0.0)
    over = threading.Event()

    def scrape() -> int:
        looks = 0
        while not over.is_set():
            looks += arena.leases + arena.bytes_used >= 0
        return looks

    with ThreadPoolExecutor() as threads:
        scraper = threads.submit(scrape)
        try:
            for _ in range(3000):
                for block in [arena.allocate(100) for _ in range(5)]:
                    arena.quarantine(block)
                arena.settle()
        finally:
            over.set()
    assert scraper.result()
    assert arena.leases == arena.bytes_used == 0
