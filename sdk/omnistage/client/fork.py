"""Forks of this process. gRPC's threads do not exist in a forked child, so a child cannot use gRPC if its parent has used it: its calls
would wait for these threads, and objects that it frees would write on the connections of its parent."""

from __future__ import annotations

import ctypes
import os
import threading
from weakref import WeakSet

from omnistage.client.errors import ForkedError


class _Process:
    """Records the use of gRPC. uses_grpc: this process has used it. is_child_of_user: an ancestor used it before the fork. connected:
    channels and calls that must not be freed in a forked child."""

    def __init__(self) -> None:
        self.uses_grpc = False
        self.is_child_of_user = False
        self.connected: WeakSet[object] = WeakSet()


_process = _Process()

held_off = threading.RLock()
"""While this lock is held no fork begins, so no child inherits a file descriptor that is just being opened."""


def use() -> None:
    """Note that this process uses gRPC; call it before objects of gRPC or the loop thread are made. Raises ForkedError as `check`."""
    check()
    _process.uses_grpc = True


def check() -> None:
    """Raises ForkedError in a child whose parent has used gRPC."""
    if _process.is_child_of_user:
        raise ForkedError("this process was forked from one that had used the client before, and gRPC does not work in it")


def is_child_of_user() -> bool:
    """Whether this process was forked from one that had used gRPC: then `check` raises."""
    return _process.is_child_of_user


def leave_to_parent(connected: object) -> None:
    """Note a channel or a call, so that a forked child never frees it: freeing would end a connection that the parent still uses."""
    _process.connected.add(connected)


def _in_child() -> None:
    """Runs in each child right after the fork."""
    held_off.release()
    if _process.uses_grpc:
        _process.is_child_of_user = True
    for connected in list(_process.connected):
        # Adds a reference that nobody gives back, so the object is never freed. A list is emptied when the interpreter ends.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(connected))


os.register_at_fork(before=held_off.acquire, after_in_parent=held_off.release, after_in_child=_in_child)
