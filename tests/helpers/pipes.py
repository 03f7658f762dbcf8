"""Functions of a test in processes of their own, with a pipe between, and what arenas have left on the mount of shared memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from omnistage.connector.arena import Arena

WAIT_S = 60.0
SHARED_MEMORY = Path("/dev/shm")
spawn = multiprocessing.get_context("spawn")


def receive(connection: Connection) -> bytes:
    assert connection.poll(WAIT_S), "the other process does not answer"
    return connection.recv_bytes()


@contextmanager
def running(target: Callable[..., None], *arguments: object) -> Iterator[tuple[Connection, BaseProcess]]:
    """A new interpreter that runs `target(connection, *arguments)`; killed at the end, whatever it does then."""
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


_APART = """
import importlib, multiprocessing.connection, sys
target = getattr(importlib.import_module(sys.argv[2]), sys.argv[3])
target(multiprocessing.connection.Connection(int(sys.argv[1])))
"""


@contextmanager
def running_apart(target: Callable[[Connection], None]) -> Iterator[tuple[Connection, Callable[[], None]]]:
    """A new interpreter in a namespace of process ids of its own, where it is number 1; and a function that kills it with SIGKILL.

    target: of a module that can be imported by name. Needs root and unshare (`helpers.mounts.need_namespace`).
    """
    mine, yours = socket.socketpair()
    command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", _APART]
    process = subprocess.Popen(
        [*command, str(yours.fileno()), target.__module__, target.__qualname__],
        pass_fds=[yours.fileno()],
        stderr=subprocess.DEVNULL,  # unshare complains when its child is killed
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    yours.close()
    connection = Connection(mine.detach())

    def kill() -> None:
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)
        process.wait(WAIT_S)  # unshare ends when it has seen the end of its child

    try:
        yield connection, kill
    finally:
        connection.close()
        if process.poll() is None:
            kill()


def names(arena: bytes) -> list[str]:
    return sorted(path.name for path in SHARED_MEMORY.glob(f"omnistage-{arena.hex()}-*"))


def age(arena: bytes) -> None:
    """Make the files of an arena a minute older: a sweep leaves those of the last seconds alone."""
    then = time.time() - 60
    for path in SHARED_MEMORY.glob(f"omnistage-{arena.hex()}-*"):
        os.utime(path, (then, then))


def settled(arena: Arena) -> Arena:
    """The arena, after it has freed what it kept for readers who have had their grace or are dead."""
    arena.settle()
    return arena
