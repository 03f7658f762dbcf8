"""Producer and consumer in two real processes, and what is left if one of them is killed. Thousands of tensors pass through one arena and
leave nothing."""

import gc
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from helpers import lengths
from helpers.pipes import SHARED_MEMORY, WAIT_S, age, names, receive, running, settled
from helpers.processes import open_files
from omnistage.connector.arena import Arena
from omnistage.connector.liveness import sweep
from omnistage.connector.shm import PAGE, READERS, ProducerSegment, ReaderSegment, copy_block
from omnistage.connector.tensors import StaleReference
from omnistage.connector.transport import Parcel, Receiver, Sender
from omnistage.v1 import tensor_pb2

MIB = 1 << 20
SIZES = [1, 1000, 70_000, 3 * MIB, 3 * MIB, 20]


def payload(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, SIZES[number % len(SIZES)], np.uint8)


def new_arena() -> Arena:
    arena = Arena.create(max_bytes=16 * MIB, segment_bytes=4 * MIB)
    assert arena is not None
    return arena


def agree(connection: Connection) -> tuple[Arena, Sender]:
    """An arena, and a sender that the other process can read from."""
    arena = new_arena()
    sender = Sender(arena, inline_limit=0)
    connection.send_bytes(arena.uuid)
    connection.send_bytes(sender.offers()[0].SerializeToString())
    sender.accept(tensor_pb2.Answer.FromString(receive(connection)))
    return arena, sender


def produce(connection: Connection, count: int) -> None:
    """Send `count` tensors, and wait for the release of each. Report what is outstanding, and wait for the end."""
    arena, sender = agree(connection)
    assert sender.reason == ""
    for number in range(count):
        (tensor,) = sender.pack(payload(number))
        connection.send_bytes(tensor.SerializeToString())
        sender.release(tensor_pb2.Release.FromString(receive(connection)))
    connection.send_bytes(f"{sender.outstanding} {arena.leases}".encode())
    receive(connection)
    sender.close(clean=True)
    arena.close()


def produce_and_hold(connection: Connection) -> None:
    """Send one tensor, fork a child that stays, and wait to be killed."""
    _, sender = agree(connection)
    connection.send_bytes(sender.pack(payload(3))[0].SerializeToString())
    child = os.fork()
    if child == 0:
        connection.poll(WAIT_S)  # until the test closes its end
        os._exit(0)
    connection.send_bytes(str(child).encode())
    receive(connection)


BUSY = 5_000
"""Rounds of a producer."""


def write_headers_again_and_again(connection: Connection, number: int) -> None:
    """One block stays published. In every round another block is published and taken back, and memory is reserved."""
    arena = receive(connection)
    segment = ProducerSegment(arena, number, 32 * MIB)
    segment.reserve(MIB)
    segment.publish(PAGE, 1, 1000)
    segment.publish(2 * PAGE, 2, 1)
    connection.send_bytes(b"made")
    for generation in range(3, BUSY):
        segment.publish(2 * PAGE, generation, generation % 2000)
        segment.retract(2 * PAGE)
        segment._reserved = PAGE  # So that the size is written again.
        segment.reserve(15 * MIB if generation % 2 else 16 * MIB)
    connection.send_bytes(b"done")
    receive(connection)
    segment.close()


def test_what_is_said_of_a_segment_is_never_read_in_parts() -> None:
    """The segment's header changes while a reader in another process checks blocks that were there before."""
    arena, looks = os.urandom(16), 0
    with running(write_headers_again_and_again, 7) as (connection, _):
        connection.send_bytes(arena)
        assert receive(connection) == b"made"
        reader = ReaderSegment(arena, 7)
        while not connection.poll():
            reader.check(PAGE, 1000, 1)
            assert len(copy_block(arena, 7, PAGE, 1000, 1)) == 1000
            with pytest.raises(StaleReference):
                reader.check(2 * PAGE, 1999, 1)
            looks += 1
        assert looks and receive(connection) == b"done"
        connection.send_bytes(b"end")
        connection.poll(WAIT_S)
    assert names(arena) == []


def receive_offer(connection: Connection) -> tuple[bytes, Receiver]:
    """The arena of the other process, and a receiver that has agreed with its sender."""
    arena, receiver = receive(connection), Receiver()
    connection.send_bytes(receiver.answer([tensor_pb2.Offer.FromString(receive(connection))]).SerializeToString())
    return arena, receiver


def test_tensors_pass_between_processes_and_all_memory_comes_back() -> None:
    count = 60
    with running(produce, count) as (connection, process):
        arena, receiver = receive_offer(connection)
        for number in range(count):
            view = receiver.unpack(tensor_pb2.Tensor.FromString(receive(connection)))
            assert view is not None
            assert np.array_equal(view.array, payload(number))
            view.release()
            release = receiver.take_release()
            assert release is not None
            connection.send_bytes(release.SerializeToString())
        assert receive(connection) == b"0 0"
        assert len(names(arena)) > 1
        connection.send_bytes(b"done")
        process.join(WAIT_S)
        assert process.exitcode == 0
        assert names(arena) == []
        receiver.close()


def test_a_killed_producer_leaves_views_readable_and_the_sweep_removes_its_files() -> None:
    with running(produce_and_hold) as (connection, process):
        arena, receiver = receive_offer(connection)
        view = receiver.unpack(tensor_pb2.Tensor.FromString(receive(connection)))
        assert view is not None
        receive(connection)  # the number of its forked child, which outlives it and must not keep its lock
        age(arena)
        sweep()
        assert len(names(arena)) > 1, "a living producer was swept"
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()  # not with a timeout: that waits for a pipe which the forked child keeps open
        assert np.array_equal(view.array, payload(3))
        sweep()  # Any server on this machine may have swept before it.
        assert names(arena) == []
        assert np.array_equal(view.array, payload(3))


@pytest.mark.parametrize("close", [True, False])
def test_an_exiting_process_leaves_no_files(close: bool) -> None:
    with running(make_and_leave, close) as (connection, process):
        arena = receive(connection)
        process.join(WAIT_S)
        assert process.exitcode == 0
        assert names(arena) == []


def make_and_leave(connection: Connection, close: bool) -> None:
    arena = new_arena()
    arena.allocate(100)
    connection.send_bytes(arena.uuid)
    if close:
        arena.close()


def close_in_forked_child(connection: Connection) -> None:
    arena = new_arena()
    arena.allocate(100)
    child = os.fork()
    if child == 0:
        arena.close()
        os._exit(0)
    os.waitpid(child, 0)
    connection.send_bytes(str(len(names(arena.uuid))).encode())
    arena.close()
    connection.send_bytes(str(len(names(arena.uuid))).encode())


def test_a_forked_child_leaves_the_files_of_its_parent_alone() -> None:
    with running(close_in_forked_child) as (connection, _):
        assert receive(connection) == b"2"
        assert receive(connection) == b"0"


def answer_as_another_user(connection: Connection) -> None:
    """Give up the rights of root, then try to read the probe."""
    offer = tensor_pb2.Offer.FromString(receive(connection))
    os.setgid(65534)
    os.setuid(65534)
    connection.send_bytes(Receiver().answer([offer]).SerializeToString())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_another_user_cannot_read_and_goes_inline(arena: Arena) -> None:
    sender = Sender(arena, inline_limit=0)
    with running(answer_as_another_user) as (connection, _):
        connection.send_bytes(sender.offers()[0].SerializeToString())
        sender.accept(tensor_pb2.Answer.FromString(receive(connection)))
    assert sender.transport == tensor_pb2.TRANSPORT_KIND_INLINE
    assert "Permission denied" in sender.reason


PER_STREAM = 500
SOAK_SIZES = (10, 3000, 8000, 8000, 20_000, 70_000)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def mounted_bytes(arena: Arena) -> int:
    return sum((SHARED_MEMORY / name).stat().st_blocks * 512 for name in names(arena.uuid))


def use_streams(make_pair, arena: Arena, count: int) -> None:
    """Use `count` streams. Each one sends, logs, replays some of its log on a second stream, and ends in one way or another."""
    arrays = [np.zeros(size, np.uint8) for size in SOAK_SIZES]
    for stream in range(count):
        pair, second = make_pair(arena=arena), make_pair(arena=arena)
        log: list[Parcel] = []
        for turn in range(PER_STREAM):
            parcel = pair.sender.store(arrays[turn % len(arrays)])
            (message,) = pair.sender.post(parcel)
            pair.receiver.unpack(message)
            pair.sender.release(pair.receiver.take_release())
            log.append(parcel)
            if len(log) == 8:
                second.sender.post(log[0])
                for kept in log:
                    kept.drop()
                log.clear()
        for kept in log:
            kept.drop()
        pair.sender.close(clean=stream % 3 > 0)
        second.sender.close(clean=stream % 5 > 0)
        pair.receiver.close()
        second.receiver.close()


@lengths.rounds(20, 180)
def test_transfers_leave_memory_files_and_descriptors_as_they_were(make_arena: Callable[..., Arena], make_pair, rounds: int) -> None:
    arena = make_arena(max_bytes=64 * MIB, segment_bytes=4 * MIB, grace_s=0.0)
    use_streams(make_pair, arena, 20)
    gc.collect()
    resident, mounted, files = resident_bytes(), mounted_bytes(arena), open_files()
    mapped = len(READERS)
    use_streams(make_pair, arena, rounds)
    gc.collect()
    assert settled(arena).leases == arena.bytes_used == 0
    assert mounted_bytes(arena) == mounted
    assert (len(READERS), open_files() - files) == (mapped, set())
    assert resident_bytes() - resident < 8 * MIB
