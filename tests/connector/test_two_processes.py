"""Producer and consumer in two real processes, and what is left when one of them is killed."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest

from omnistage.connector.arena import Arena
from omnistage.connector.sweep import sweep
from omnistage.connector.transport import Receiver, Sender, TensorView
from omnistage.v1 import tensor_pb2

MIB = 1 << 20
WAIT_S = 60.0
SIZES = [1, 1000, 70_000, 3 * MIB, 3 * MIB, 20]
spawn = multiprocessing.get_context("spawn")


def receive(connection: Connection) -> bytes:
    assert connection.poll(WAIT_S), "the other process does not answer"
    return connection.recv_bytes()


def payload(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, SIZES[number % len(SIZES)], np.uint8)


def agree(connection: Connection) -> tuple[Arena, Sender]:
    """An arena, and a sender that the other process can read from."""
    arena = Arena.create(max_bytes=16 * MIB, segment_bytes=4 * MIB)
    assert arena is not None
    sender = Sender(arena, inline_limit=0)
    connection.send_bytes(arena.uuid)
    connection.send_bytes(sender.offers()[0].SerializeToString())
    sender.accept(tensor_pb2.Answer.FromString(receive(connection)))
    return arena, sender


def produce(connection: Connection, count: int) -> None:
    """Send `count` tensors, waiting for the release of each; report what is outstanding, wait for the end."""
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


def consume_and_hold(connection: Connection) -> None:
    """Take tensors and never give them back."""
    receiver = Receiver()
    offer = tensor_pb2.Offer.FromString(receive(connection))
    connection.send_bytes(receiver.answer([offer]).SerializeToString())
    views: list[TensorView | None] = []
    while True:
        views.append(receiver.unpack(tensor_pb2.Tensor.FromString(receive(connection))))
        connection.send_bytes(b"held")


@contextmanager
def running(target: Callable[..., None], *arguments: object) -> Iterator[tuple[Connection, BaseProcess]]:
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=target, args=(theirs, *arguments))
    process.start()
    theirs.close()
    try:
        yield ours, process
    finally:
        ours.close()
        process.kill()
        process.join()
        process.close()


def names(arena: bytes) -> list[str]:
    return [path.name for path in Path("/dev/shm").glob(f"omnistage-{arena.hex()}-*")]


def test_tensors_pass_between_processes_and_all_memory_comes_back() -> None:
    count = 60
    with running(produce, count) as (connection, process):
        arena = receive(connection)
        receiver = Receiver()
        connection.send_bytes(receiver.answer([tensor_pb2.Offer.FromString(receive(connection))]).SerializeToString())
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


def age(arena: bytes) -> None:
    """A sweep leaves files of the last seconds alone."""
    then = time.time() - 60
    os.utime(Path("/dev/shm") / f"omnistage-{arena.hex()}-live", (then, then))


def test_a_killed_producer_leaves_views_readable_and_the_sweep_removes_its_files() -> None:
    with running(produce_and_hold) as (connection, process):
        arena = receive(connection)
        receiver = Receiver()
        connection.send_bytes(receiver.answer([tensor_pb2.Offer.FromString(receive(connection))]).SerializeToString())
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
        assert len(names(arena)) > 1
        assert sweep() >= 1
        assert names(arena) == []
        assert np.array_equal(view.array, payload(3))


def test_a_young_liveness_file_is_left_alone() -> None:
    path = Path("/dev/shm") / f"omnistage-{os.urandom(16).hex()}-live"
    path.touch(mode=0o600)
    try:
        sweep()
        assert path.exists()
        os.utime(path, (1, 1))
        assert sweep() >= 1
        assert not path.exists()
    finally:
        path.unlink(missing_ok=True)


def test_a_sweep_leaves_the_arenas_of_its_own_process_alone(make_arena: Callable[..., Arena]) -> None:
    arena = make_arena()
    age(arena.uuid)
    sweep()
    with running(sweep_elsewhere, arena.uuid) as (connection, _):
        assert int(receive(connection)) == 1, "the lock was lost"


def sweep_elsewhere(connection: Connection, arena: bytes) -> None:
    sweep()
    connection.send_bytes(str(len(names(arena))).encode())


def test_a_killed_consumer_gives_all_its_blocks_back_after_the_grace(make_arena: Callable[..., Arena]) -> None:
    now = 0.0
    arena = make_arena(clock=lambda: now)
    with running(consume_and_hold) as (connection, process):
        sender = Sender(arena, inline_limit=0)
        connection.send_bytes(sender.offers()[0].SerializeToString())
        sender.accept(tensor_pb2.Answer.FromString(receive(connection)))
        for number in range(20):
            (tensor,) = sender.pack(payload(number))
            connection.send_bytes(tensor.SerializeToString())
            assert receive(connection) == b"held"
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(WAIT_S)
        assert sender.outstanding == arena.leases == 20
        sender.close(clean=False)
        assert (sender.outstanding, arena.leases) == (0, 20)
        now = 30.0
        assert arena.leases == 0


@pytest.mark.parametrize("close", [True, False])
def test_an_exiting_process_leaves_no_files(close: bool) -> None:
    with running(make_and_leave, close) as (connection, process):
        arena = receive(connection)
        process.join(WAIT_S)
        assert process.exitcode == 0
        assert names(arena) == []


def make_and_leave(connection: Connection, close: bool) -> None:
    arena = Arena.create(max_bytes=16 * MIB, segment_bytes=4 * MIB)
    assert arena is not None
    arena.allocate(100)
    connection.send_bytes(arena.uuid)
    if close:
        arena.close()


def close_in_forked_child(connection: Connection) -> None:
    arena = Arena.create(max_bytes=16 * MIB, segment_bytes=4 * MIB)
    assert arena is not None
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
def test_another_user_cannot_read_and_goes_inline(make_arena: Callable[..., Arena]) -> None:
    sender = Sender(make_arena(), inline_limit=0)
    with running(answer_as_another_user) as (connection, _):
        connection.send_bytes(sender.offers()[0].SerializeToString())
        sender.accept(tensor_pb2.Answer.FromString(receive(connection)))
    assert sender.transport == tensor_pb2.TRANSPORT_KIND_INLINE
    assert "Permission denied" in sender.reason
