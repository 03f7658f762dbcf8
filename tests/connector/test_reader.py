"""The reading side: which memory it maps, for how long, and which it refuses to map."""

import os
import resource
import threading
from collections.abc import Callable, Iterator
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
    seen: list[int] = []
    box = [view.array]
    view.release()
    assert pair.give_back() == 0

    def use() -> None:
        seen.append(int(box.pop().sum()))

    worker = threading.Thread(target=use)
    worker.start()
    worker.join()
    assert seen == [700_000]
    assert pair.give_back() == 1
    assert pair.sender.outstanding == pair.receiver.held == 0


def test_maps_of_an_arena_that_is_gone_are_dropped_when_no_view_uses_them(make_arena: Callable[..., Arena], make_pair) -> None:
    arena = make_arena()
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


def test_the_map_of_a_living_arena_is_kept_for_its_next_stream(make_arena: Callable[..., Arena], make_pair) -> None:
    arena = make_arena()
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


@pytest.fixture
def place() -> Iterator[tuple[bytes, Path]]:
    """The id of an arena that does not exist, and the place where its segment 0 would be."""
    arena = os.urandom(16)
    path = Path("/dev/shm") / f"omnistage-{arena.hex()}-0"
    yield arena, path
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)


@pytest.mark.parametrize("content", [b"", b"x" * 4095, bytes(4096), b"omniseg\0" + bytes(8184)])
def test_a_file_that_is_not_a_segment_is_refused(place: tuple[bytes, Path], content: bytes) -> None:
    arena, path = place
    path.write_bytes(content)
    with pytest.raises(InvalidReference) as caught:
        ReaderSegment(arena, 0)
    assert arena.hex() not in str(caught.value)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/etc/hostname")])
def test_what_is_not_a_file_is_refused_without_waiting(place: tuple[bytes, Path], make: Callable[[Path], None]) -> None:
    arena, path = place
    make(path)
    with pytest.raises(InvalidReference):
        ReaderSegment(arena, 0)


def test_a_segment_that_is_not_there_is_stale(place: tuple[bytes, Path]) -> None:
    with pytest.raises(StaleReference):
        ReaderSegment(place[0], 0)


def test_a_segment_of_another_number_or_arena_is_refused(make_arena: Callable[..., Arena], place: tuple[bytes, Path]) -> None:
    arena, path = place
    real = make_arena()
    block = real.allocate(10)
    path.hardlink_to(Path("/dev/shm") / f"omnistage-{real.uuid.hex()}-{block.segment.number}")
    with pytest.raises(InvalidReference, match="header"):
        ReaderSegment(arena, 0)


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


def test_two_streams_of_one_arena_do_not_touch_each_other(make_arena: Callable[..., Arena], make_pair) -> None:
    arena = make_arena()
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
def test_100_000_tensors_take_no_more_memory_than_one(make_arena: Callable[..., Arena], make_pair) -> None:
    arena = make_arena()
    pair = make_pair(arena=arena)
    array = np.zeros(2000, np.int32)
    for _ in range(100_000):
        (tensor,) = pair.sender.pack(array)
        pair.receiver.unpack(tensor)
        pair.sender.release(pair.receiver.take_release())
    assert arena.bytes_total == MIB
    assert arena.leases == pair.receiver.held == 0
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
