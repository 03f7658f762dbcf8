"""Memory that was cut into small blocks is joined again, though its segment is never idle."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omnistage.connector.arena import Arena, Block, Extents
from omnistage.connector.tensors import ArenaFull

MIB = 1 << 20


def filled(arena: Arena, length: int) -> list[Block]:
    """Take blocks until the arena is full."""
    blocks = []
    with pytest.raises(ArenaFull):
        while True:
            blocks.append(arena.allocate(length))
    return blocks


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
    places = sorted((block.segment.number, block.offset, block.offset + 64 + block.capacity) for block in [*stay.values(), *large])
    for left, right in itertools.pairwise(places):
        assert left[0] < right[0] or left[2] <= right[1]
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
