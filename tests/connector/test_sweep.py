"""The sweep: which files it removes, which it must not touch, and how long it may take."""

import fcntl
import os
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from helpers.mounts import run_on_mount
from helpers.pipes import SHARED_MEMORY, age, names, receive, running
from omnistage.connector.arena import Arena
from omnistage.connector.liveness import sweep

MIB = 1 << 20
OLD = (1, 1)


def make_old(path: Path) -> Path:
    path.touch(mode=0o600)
    os.utime(path, OLD)
    return path


def hold_arena(connection: Connection) -> None:
    """Have an arena with a segment until killed. When asked, report whether it can be used."""
    arena = Arena.create(max_bytes=16 * MIB, segment_bytes=4 * MIB)
    assert arena is not None
    arena.allocate(100)
    connection.send_bytes(arena.uuid)
    while True:
        receive(connection)
        arena.allocate(3 * MIB)
        connection.send_bytes(b"fine")


# Orphans -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["live", "0"], ids=["liveness file", "segment"])
def test_a_young_file_is_left_alone(place: Callable[[str], Path], kind: str) -> None:
    path = place(kind)
    path.touch(mode=0o600)
    sweep()
    assert path.exists()
    os.utime(path, OLD)
    sweep()
    assert not path.exists()


def test_a_file_from_the_future_is_no_newborn(place: Callable[[str], Path]) -> None:
    """The clock was set back: that must not protect an orphan for years."""
    path = place("live")
    path.touch(mode=0o600)
    os.utime(path, (4e9, 4e9))
    sweep()
    assert not path.exists()


def test_the_arenas_of_this_process_are_left_alone_and_stay_locked(arena: Arena) -> None:
    arena.allocate(100)
    age(arena.uuid)
    sweep()
    thread = threading.Thread(target=sweep)
    thread.start()
    thread.join()
    with running(sweep_elsewhere, arena.uuid) as (connection, _):
        assert int(receive(connection)) == 2, "the lock was lost"


def sweep_elsewhere(connection: Connection, arena: bytes) -> None:
    sweep()
    connection.send_bytes(str(len(names(arena))).encode())


def test_segments_whose_liveness_file_was_removed_live_as_long_as_their_producer() -> None:
    """An administrator removes the liveness file. The producer notices nothing, none of its segments is swept, and none leaks in the
    end."""
    with running(hold_arena) as (connection, process):
        arena = receive(connection)
        (SHARED_MEMORY / f"omnistage-{arena.hex()}-live").unlink()
        age(arena)
        sweep()
        assert names(arena) == [f"omnistage-{arena.hex()}-0"], "a living producer was swept"
        connection.send_bytes(b"allocate")
        assert receive(connection) == b"fine"
        age(arena)
        sweep()
        assert len(names(arena)) == 2
        process.kill()
        process.join()
        sweep()
        assert names(arena) == []


# Files that stay -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["live", "0"])
@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/etc/hostname")], ids=["folder", "pipe", "link"])
def test_what_is_not_a_file_is_left_alone(place: Callable[[str], Path], make: Callable[[Path], None], kind: str) -> None:
    """The other object lies alone, or beside the liveness file of a dead producer."""
    path = place(kind)
    make(path)
    os.utime(path, OLD, follow_symlinks=False)
    sweep()
    assert os.path.lexists(path)
    if kind != "live":
        live = make_old(place("live"))
        sweep()
        assert os.path.lexists(path)
        assert not live.exists()


def test_the_target_of_a_link_is_left_alone(place: Callable[[str], Path], tmp_path: Path) -> None:
    target = make_old(tmp_path / "file")
    place("live").symlink_to(target)
    place("0").symlink_to(target)
    sweep()
    assert target.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make files of another user")
def test_files_of_another_user_are_left_alone(place: Callable[[str], Path]) -> None:
    """Root may remove such files, and must not: another user's lock would say nothing about them."""
    live, segment = make_old(place("live")), make_old(place("0"))
    for path in (live, segment):
        os.chown(path, 65534, 65534)
    sweep()
    assert live.exists() and segment.exists()
    os.chown(live, 0, 0)
    sweep()
    assert segment.exists() and not live.exists()


def test_other_names_are_left_alone(place: Callable[[str], Path]) -> None:
    kept = [make_old(place(kind)) for kind in ("backup", "0.old", "live2", "-1", "00000000000")]
    live = make_old(place("live"))
    sweep()
    assert all(path.exists() for path in kept) and not live.exists()


# Races and limits ----------------------------------------------------------------------------------------------------------------------


NEWBORNS = """
    import os
    import signal
    from omnistage.connector import liveness as sweeping
    from omnistage.connector.arena import Arena

    MIB = 1 << 20
    parent = os.getpid()
    sweeper = os.fork()
    if sweeper == 0:
        sweeping._NEWBORN_S = 0.0
        while os.getppid() == parent:  # also when a failing test ends without killing it
            sweeping.sweep()
        os._exit(0)
    born = 0
    for _ in range(1000):
        arena = Arena.create(max_bytes=2 * MIB, segment_bytes=MIB)
        if arena is None:
            continue
        born += 1
        block = arena.allocate(100)
        found = sorted(os.listdir("/dev/shm"))
        assert found == [f"omnistage-{arena.uuid.hex()}-0", f"omnistage-{arena.uuid.hex()}-live"], found
        arena.free(block)
        arena.close()
        assert os.listdir("/dev/shm") == []
    os.kill(sweeper, signal.SIGKILL)
    os.waitpid(sweeper, 0)
    print(born)
"""


def test_an_arena_that_is_born_under_a_sweep_is_whole_or_none() -> None:
    """The ten seconds keep a sweep from new files. Even without them no arena loses its files once it exists: it draws another name
    instead."""
    assert int(run_on_mount("16m", NEWBORNS)) > 500


def test_a_sweep_without_time_removes_nothing_and_the_next_one_the_rest(place: Callable[[str], Path]) -> None:
    path = make_old(place("live"))
    assert sweep(limit_s=0.0) == 0
    assert path.exists()
    sweep()
    assert not path.exists()


def test_a_file_that_is_locked_by_another_sweep_is_left_to_it(place: Callable[[str], Path]) -> None:
    path = make_old(place("0"))
    with path.open("rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        sweep()
        assert path.exists()
    sweep()
    assert not path.exists()


KILLS = """
    import os
    import random
    import select
    import signal
    from omnistage.connector.arena import Arena
    from omnistage.connector.liveness import sweep

    MIB = 1 << 20
    SHM = "/dev/shm"
    random.seed({seed})

    def live(ready):
        arena = Arena.create(max_bytes=8 * MIB, segment_bytes=MIB)
        for size in (100, 5000, 2 * MIB):
            arena.publish(arena.allocate(size))
        os.write(ready, b"x")
        signal.pause()

    most = 0
    for batch in range(50):
        ours, theirs = os.pipe()
        children = []
        for _ in range(20):
            child = os.fork()
            if child == 0:
                live(theirs)
            children.append(child)
        os.close(theirs)
        ready = 0
        while batch % 2 and ready < 20:
            ready += len(os.read(ours, 20))
        if not batch % 2:
            select.select([ours], [], [], random.uniform(0.001, 0.01))  # in the middle of what they do
        for child in children:
            os.kill(child, signal.SIGKILL)
        for child in children:
            assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        os.close(ours)
        most = max(most, len(os.listdir(SHM)))
        for name in os.listdir(SHM):
            os.utime(SHM + "/" + name, (1, 1))
        sweep()
        assert os.listdir(SHM) == [], os.listdir(SHM)
    used = os.statvfs(SHM)
    assert used.f_blocks == used.f_bfree
    print(most)
"""


def test_1000_killed_producers_leave_nothing(seed: int) -> None:
    """Half of the producers are killed while they make their files. The test makes the files older, because a sweep leaves new ones
    alone."""
    assert int(run_on_mount("256m", KILLS.format(seed=seed), timeout_s=110)) >= 20 * 3


MANY = """
    import os
    from omnistage.connector.liveness import sweep

    for number in range(5000):
        name = f"/dev/shm/omnistage-{os.urandom(16).hex()}"
        for kind in ("live", "0", "1"):
            os.close(os.open(f"{name}-{kind}", os.O_CREAT | os.O_RDWR, 0o600))
            os.utime(f"{name}-{kind}", (1, 1))
    before = len(os.listdir("/proc/self/fd"))
    part = sweep(limit_s=0.002)
    assert part < 5000, part
    assert part + sweep() == 5000
    assert os.listdir("/dev/shm") == []
    assert len(os.listdir("/proc/self/fd")) == before
"""


def test_a_sweep_ends_at_its_limit_on_a_mount_with_thousands_of_orphans() -> None:
    run_on_mount("64m", MANY)
