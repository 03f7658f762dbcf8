"""Runs a private stack as a process, the launcher. When the pipe to it, the lifeline, closes, it ends everything that it started.

The pipe closes in `stop` and `cut`, at the exit of this process, and when this process is killed. A forked child of this process does not
hold the pipe open, and nothing that the child does ends the launcher.
"""

from __future__ import annotations

import atexit
import os
import select
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import ClassVar

from omnistage.client import fork

STOP_TIMEOUT_S = 20.0
KILL_TIMEOUT_S = 5.0


class Launcher:
    """A running `omnistage serve`. It stays in `_kept` until its process has been waited for, even if no other object refers to it."""

    _kept: ClassVar[set[Launcher]] = set()

    def __init__(self, command: Callable[[int, int], Sequence[str]]) -> None:
        """command: makes the command line from two descriptors, for the launcher's answers and for the lifeline. Make a Launcher only
        while no fork may begin."""
        for launcher in list(self._kept):
            launcher._forget_if_over()
        lifeline, ours = os.pipe()
        answers, ready = os.pipe()
        # Each list is empty while a thread uses its descriptor, and once it is closed: so `cut` needs no lock.
        self._lifeline, self._answers = [ours], [answers]
        self._is_cut = False
        self._lock = threading.Lock()
        try:
            self._process = subprocess.Popen(
                command(ready, lifeline),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(ready, lifeline),
                start_new_session=True,  # Ctrl-C in the terminal reaches only this process, which then decides
            )
        except BaseException:
            self.cut()
            raise
        finally:
            os.close(lifeline)
            os.close(ready)
        self._kept.add(self)

    @property
    def returncode(self) -> int | None:
        """The exit code; None: the process runs, or has not been waited for."""
        return self._process.returncode

    def cut(self) -> None:
        """Close the pipes, so that the launcher ends, and wait for nothing. Takes no lock: garbage collection may call this on any
        thread."""
        self._is_cut = True
        for fds in (self._lifeline, self._answers):
            with suppress(IndexError):
                os.close(fds.pop())

    def say(self, line: bytes) -> bool:
        """Write a line into the lifeline; returns False if it is closed, or the launcher has ended. One thread at a time may call this."""
        # A child forked now would not find the lifeline in its list, would not close it, and so would keep the launcher running.
        with fork.held_off:
            try:
                fd = self._lifeline.pop()
            except IndexError:
                return False
            try:
                os.write(fd, line)
            except BrokenPipeError:
                return False
            finally:
                self._lifeline.append(fd)
                if self._is_cut:
                    self.cut()
        return True

    def heard(self, timeout_s: float) -> bytes | None:
        """Read the next piece of the launcher's output. Empty: the output has ended. None: nothing came in `timeout_s`. Only one thread may
        call this at a time."""
        try:
            fd = self._answers.pop()
        except IndexError:
            return b""
        try:
            listening = select.poll()  # `select` refuses descriptors above 1023.
            listening.register(fd, select.POLLIN)
            return os.read(fd, 65536) if listening.poll(1000 * timeout_s) else None
        finally:
            self._answers.append(fd)
            if self._is_cut:
                self.cut()

    def stop(self) -> None:
        """Close the pipes and wait for the end of all processes; after `STOP_TIMEOUT_S` seconds kill them."""
        if self not in self._kept:
            return
        self.cut()
        with self._lock:
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                # The launcher's own children notice its end, and end too.
                self._process.kill()
                self._process.wait(KILL_TIMEOUT_S)
            self._kept.discard(self)

    def _forget_if_over(self) -> None:
        """Remove this launcher from `_kept` if its process has ended."""
        if self._process.poll() is not None:
            self.cut()
            self._kept.discard(self)

    @classmethod
    def stop_all(cls) -> None:
        """Stop all launchers, at the end of the interpreter."""
        with ExitStack() as exits:
            for launcher in list(cls._kept):
                exits.callback(launcher.stop)

    @classmethod
    def leave_all_to_parent(cls) -> None:
        """In a forked child: forget all launchers. They belong to the parent, and end when the parent ends."""
        for launcher in cls._kept:
            launcher.cut()
            launcher._process.returncode = 0  # no child of this process: without a code Python would warn that it still runs
        cls._kept.clear()


atexit.register(Launcher.stop_all)
os.register_at_fork(after_in_child=Launcher.leave_all_to_parent)
