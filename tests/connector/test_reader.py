"""The reading side: which memory it maps, for how long, and which it refuses to map."""

import os
import resource
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from helpers import lengths
from omnistage.connector.arena import Arena
from omnistage.connector.shm import READERS, ReaderCache, ReaderSegment, copy_block
from omnistage.connector.tensors import ConnectorError, InvalidReference, StaleReference
from omnistage.connector.transport import Receiver, Sender

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


@lengths.long_form("connector/test_soak.py::test_transfers_leave_memory_files_and_descriptors_as_they_were")
def test_100_000_tensors_take_no_more_memory_than_one(arena: Arena, make_pair) -> None:
    pair = make_pair(arena=arena)
    array = np.zeros(2000, np.int32)
    for _ in range(100_000):
        (tensor,) = pair.sender.pack(array)
        pair.receiver.unpack(tensor)
        pair.sender.release(pair.receiver.take_release())
    assert arena.bytes_total == MIB
    assert arena.leases == pair.receiver.view_count == 0
    assert Sender(arena).offers()[0].probe.shared_memory.generation == 100_002


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
