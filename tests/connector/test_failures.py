"""Shared memory when processes die, stop and lie: every case that this project knows, and where it is tested:

1   a reader is killed with views              here: a_killed_reader_gives_its_blocks_back_at_once and those after it
2   a producer is killed                       test_two_processes: a_killed_producer_leaves_views_readable_and_the_sweep_removes_its_files
3   a reader never reads                       test_parcel: a_reader_that_gives_nothing_back_has_its_share_and_no_more; credit and deadline:
                                               stage/test_run_endings: nothing_is_sent_without_credit, the_callers_deadline_ends_the_session
4   a reader is stopped, and wakes             here: a_stopped_reader...; that it is found: system/test_lost_process
5   the mount is full or too small             test_small_mount; stages: system/test_full_mount
6   stale, repeated and foreign references     test_arena: a_reference_to_memory_that_was_used_again_is_stale; test_transport_contract:
                                               repeated_and_made_up_releases; test_reader: two_streams_of_one_arena
7   every field of a message is wrong          test_reference_fuzz
8   a producer forks, then dies                test_two_processes: as 2, a_forked_child_leaves_the_files_of_its_parent_alone
9   containers that number processes alike     here: readers_with_equal_process_ids_are_told_apart
10  a sweep meets a newborn                    test_sweep: an_arena_that_is_born_under_a_sweep_is_whole_or_none
11  1000 kills                                 test_sweep: 1000_killed_producers_leave_nothing
12  a session is cancelled under a reader      here: a_stream_that_is_cut_under_a_reading_thread
13  a view outlives stream and arena           test_transport_contract: close_takes_everything_back; test_arena: close_can_come_at_any_time
14  a full arena                               test_arena: a_full_arena_goes_inline_with_the_same_bytes
15  a producer cuts its file short             test_untrusted: a_file_that_is_cut_short_is_an_error_and_no_signal
16  umask, other users                         test_arena: files_are_private_whatever_the_umask; test_two_processes: another_user;
                                               test_untrusted; a stage: hostile/test_references: another_user_cannot_kill_a_stage
17  100,000 transfers                          test_soak
18  three readers, one dies                    here: one_of_three_readers_dies
19  empty, scalar, bfloat16, strided tensors   test_transport_contract
20  an administrator removes a liveness file   test_sweep: segments_whose_liveness_file_was_removed; here: a_reader_whose_liveness_file_...
21  an idle reader has mapped what is dead     test_small_mount: MAPPED_BY_AN_IDLE_READER
"""

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest

from helpers.mounts import need_namespace
from helpers.pipes import SHARED_MEMORY, WAIT_S, age, names, receive, running, running_apart, settled
from helpers.processes import open_files
from helpers.reader import agree, ask, hand_over, read, read_without_arena, take_back
from omnistage.connector.arena import Arena
from omnistage.connector.liveness import find_peer, sweep
from omnistage.connector.transport import Receiver, Sender
from omnistage.v1 import tensor_pb2

GRACE_S = 30.0
SIZE = 50_000


def kill(process: BaseProcess) -> None:
    process.kill()
    process.join()


def number(value: int) -> np.ndarray:
    return np.full(SIZE, value, np.uint8)


# The end of a reader -------------------------------------------------------------------------------------------------------------------


def test_a_killed_reader_gives_its_blocks_back_at_once(arena: Arena) -> None:
    with running(read) as (connection, process):
        sender = agree(connection, arena)
        for value in range(20):
            assert hand_over(connection, sender.pack(number(value))) == b"held"
        kill(process)
        assert sender.outstanding == settled(arena).leases == 20
        sender.close(clean=False)
        assert sender.outstanding == settled(arena).leases == arena.bytes_used == 0
    with running(read) as (connection, process):
        sender = agree(connection, arena)
        assert hand_over(connection, sender.pack(number(7))) == b"held"
        assert ask(connection, b"sums") == str(7 * SIZE).encode()
        connection.send_bytes(b"end")
        process.join(WAIT_S)
        sender.close(clean=False)
        assert settled(arena).leases == 0, "one that ended by itself is gone too"


def test_a_reader_that_dies_after_its_stream_gives_its_blocks_back_at_the_next_look(arena: Arena, clock) -> None:
    with running(read) as (connection, process):
        sender = agree(connection, arena)
        assert hand_over(connection, sender.pack(number(1))) == b"held"
        sender.close(clean=False)
        clock.now = 1.0
        assert settled(arena).leases == 1, "it lives"
        kill(process)
        assert settled(arena).leases == 1, "one look in a while is enough"
        clock.now = 1.2
        arena.free(arena.allocate(10))
        assert settled(arena).leases == 0


def test_the_blocks_of_a_dead_reader_that_others_hold_are_kept_for_them(arena: Arena) -> None:
    with running(read) as (connection, process):
        sender = agree(connection, arena)
        parcel = sender.store(number(1))
        assert hand_over(connection, sender.post(parcel)) == b"held"
        kill(process)
        sender.close(clean=False)
        assert settled(arena).leases == 1
    with running(read) as (connection, _):
        sender = agree(connection, arena)
        assert hand_over(connection, sender.post(parcel)) == b"held"
        assert ask(connection, b"sums") == str(SIZE).encode()
        parcel.drop()
        take_back(connection, sender)
        assert settled(arena).leases == 0


def test_a_reader_without_an_arena_has_the_grace(arena: Arena, clock) -> None:
    with running(read_without_arena) as (connection, process):
        sender = agree(connection, arena)
        assert hand_over(connection, sender.pack(number(1))) == b"held"
        kill(process)
        sender.close(clean=False)
        clock.now = GRACE_S - 0.1
        assert settled(arena).leases == 1
        clock.now = GRACE_S
        assert settled(arena).leases == 0


def test_a_stopped_reader_keeps_its_bytes_for_the_grace_and_gets_no_new_ones_when_it_wakes(arena: Arena, clock) -> None:
    with running(read) as (connection, process):
        assert process.pid is not None
        sender = agree(connection, arena)
        assert hand_over(connection, held := sender.pack(number(1))) == b"held"
        (unread,) = sender.pack(number(2))
        os.kill(process.pid, signal.SIGSTOP)
        connection.send_bytes(unread.SerializeToString())
        sender.close(clean=False)
        for second in range(1, 29):
            clock.now = float(second)
            blocks = [arena.allocate(SIZE) for _ in range(30)]
            assert settled(arena).leases == 32
            for block in blocks:
                arena.free(block)
        os.kill(process.pid, signal.SIGCONT)
        assert connection.poll(WAIT_S) and connection.recv_bytes() == b"StaleReference"
        assert ask(connection, b"sums") == str(SIZE).encode(), "the view that it had is whole"
        clock.now = GRACE_S
        assert settled(arena).leases == 0
        assert ask(connection, b"sums") == str(255 * SIZE).encode(), "after the grace the memory belongs to others"
        ask(connection, b"release")
        assert hand_over(connection, held) == b"StaleReference"


def test_one_of_three_readers_dies(arena: Arena) -> None:
    with running(read) as (one, victim), running(read) as (two, _), running(read) as (three, _):
        senders = [agree(connection, arena) for connection in (one, two, three)]
        parcel = senders[0].store(number(5))
        for connection, sender in zip((one, two, three), senders, strict=True):
            assert hand_over(connection, sender.post(parcel)) == b"held"
        parcel.drop()
        kill(victim)
        senders[0].close(clean=False)
        for connection, sender in ((two, senders[1]), (three, senders[2])):
            assert settled(arena).leases == 1
            assert ask(connection, b"sums") == str(5 * SIZE).encode()
            take_back(connection, sender)
        assert settled(arena).leases == 0


def test_readers_with_equal_process_ids_are_told_apart(arena: Arena) -> None:
    """Both readers are process 1 of their namespace, as in two containers."""
    need_namespace("-p", "-f")
    with running_apart(read) as (one, kill_one), running_apart(read) as (two, _):
        senders = [agree(connection, arena) for connection in (one, two)]
        arenas = [ask(connection, b"arena") for connection in (one, two)]
        for connection, sender in zip((one, two), senders, strict=True):
            assert hand_over(connection, sender.pack(number(3))) == b"held"
        kill_one()
        for sender in senders:
            sender.close(clean=False)
        assert settled(arena).leases == 1, "the first is dead, the second lives"
        assert ask(two, b"sums") == str(3 * SIZE).encode()
        for each in arenas:
            age(each)
        command = ["unshare", "--pid", "--fork", sys.executable, "-c", "from omnistage.connector.liveness import sweep; sweep()"]
        subprocess.run(command, check=True, timeout=WAIT_S)
        assert [len(names(each)) for each in arenas] == [0, 2]
    sweep()
    assert names(arenas[1]) == []


def test_a_stream_that_is_cut_under_a_reading_thread(make_pair, arena: Arena, clock) -> None:
    """A session is cancelled while its model reads in a thread: the bytes stay unchanged until the grace ends."""
    pair = make_pair(arena=arena)
    view = pair.transfer(number(3))
    cut = threading.Event()

    def use(array: np.ndarray) -> set[int]:
        sums = {int(array.sum()) for _ in range(100)}
        cut.set()
        return sums | {int(array.sum()) for _ in range(300)}

    with ThreadPoolExecutor() as threads:
        reader = threads.submit(use, view.array)
        assert cut.wait(WAIT_S)
        view.release()
        pair.receiver.close()
        pair.sender.close(clean=False)
        while not reader.done():
            for block in [arena.allocate(SIZE) for _ in range(20)]:
                arena.free(block)
    assert reader.result() == {3 * SIZE}
    del reader
    clock.now = GRACE_S
    assert settled(arena).leases == 0


# Dead readers --------------------------------------------------------------------------------------------------------------------------


def test_a_reader_whose_liveness_file_is_removed_is_not_taken_for_dead(arena: Arena, clock) -> None:
    with running(read) as (connection, process):
        sender = agree(connection, arena)
        live = SHARED_MEMORY / f"omnistage-{ask(connection, b'arena').hex()}-live"
        assert hand_over(connection, sender.pack(number(1))) == b"held"
        live.unlink()
        sender.close(clean=False)
        clock.now = 10.0
        assert settled(arena).leases == 1
        kill(process)
        clock.now = 11.0
        assert settled(arena).leases == 0


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/etc/hostname")])
def test_a_peer_is_known_only_by_a_locked_file(place: Callable[[str], Path], make: Callable[[Path], None]) -> None:
    path = place("live")
    name = bytes.fromhex(path.name.split("-")[1])
    assert find_peer(name) is None
    make(path)
    assert find_peer(name) is None


@pytest.mark.parametrize("name", [b"", b"../../etc/passwd", b"x" * 15, b"x" * 17])
def test_a_name_that_is_none_is_no_peer(name: bytes) -> None:
    assert find_peer(name) is None


def name_of_reader(connection: Connection, offer: tensor_pb2.Offer) -> bytes:
    """The arena of a reader that gets this offer."""
    connection.send_bytes(offer.SerializeToString())
    return tensor_pb2.Offer.FromString([receive(connection), receive(connection)][1]).arena


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file to another user")
def test_a_file_of_another_user_says_nothing(arena: Arena) -> None:
    with running(read) as (connection, _):
        name = name_of_reader(connection, Sender(arena).offers()[0])
        assert find_peer(name) is not None
        gc.collect()
        os.chown(SHARED_MEMORY / f"omnistage-{name.hex()}-live", 65534, 65534)
        assert find_peer(name) is None


def look_for(connection: Connection, name: bytes) -> None:
    connection.send_bytes(b"alive" if find_peer(name) is not None else b"unknown")


def test_this_process_is_no_peer_of_itself_and_stays_locked(arena: Arena, clock, make_arena: Callable[..., Arena]) -> None:
    """If the process opened its own file, it would drop its own lock."""
    own = make_arena()
    sender, receiver = Sender(arena, inline_limit=0), Receiver()
    sender.accept(receiver.answer(sender.offers()), Sender(own).offers())
    view = receiver.unpack(sender.pack(number(1))[0])
    sender.close(clean=False)
    assert find_peer(own.uuid) is None
    with running(look_for, own.uuid) as (connection, _):
        assert receive(connection) == b"alive"
    clock.now = GRACE_S - 1
    assert settled(arena).leases == 1
    assert view is not None and (view.array == 1).all()


def test_looking_at_peers_leaves_no_open_files() -> None:
    with running(read) as (connection, _):
        name = name_of_reader(connection, tensor_pb2.Offer())
        gc.collect()
        before = open_files()
        known = find_peer(name)
        assert known is not None
        assert all(find_peer(name) is known for _ in range(100)), "one file for all streams"
        assert len(open_files() - before) == 1
        del known
        gc.collect()
        assert not open_files() - before
