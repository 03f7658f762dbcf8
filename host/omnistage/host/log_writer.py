"""Writes log lines from a thread of its own: a terminal that was stopped, or a pipe that nobody reads, must not stop the event loop."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable

from omnistage.host.spare import start_spare

MAX_WAITING = 10_000
"""Lines that may wait to be written. Further lines are dropped and counted."""

AGAIN_S = 1.0
"""Seconds of pause after an error that does not concern the file, for example if memory is short; the line is lost."""

FLUSH_S = 1.0
"""Seconds that an ending process waits at most for its last lines."""


def plain_words(lines: int) -> str:
    """The text of the log that stands for dropped lines."""
    return f"{lines} log lines were dropped here: nobody read them"


class LogWriter:
    """A file for loggers whose `write` never waits. A process has one such file, from start to end.

    It writes to a descriptor, because the interpreter cannot end while a thread waits in a file object of Python.
    """

    def __init__(self, descriptor: int, max_waiting: int = MAX_WAITING) -> None:
        self.words: Callable[[int], str] = plain_words
        """Makes the line that stands for dropped lines, without its end, from their number. It must have the form of the other lines."""
        self._descriptor = descriptor
        self._lines: queue.Queue[str] = queue.Queue(max_waiting)
        self._dropped = 0
        self._counting = threading.Lock()
        start_spare("omnistage-log", self._write_for_ever, again_s=AGAIN_S)

    def write(self, line: str) -> int:
        """Queue a line that ends with a line break; drop it if `max_waiting` lines wait. Returns its length, as files do."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            with self._counting:
                self._dropped += 1
        return len(line)

    def flush(self) -> None:
        """Do nothing: loggers call this after every line."""

    def drain(self, limit_s: float = FLUSH_S) -> None:
        """Wait until all earlier lines are written, at most `limit_s`."""
        until = time.monotonic() + limit_s
        with self._lines.all_tasks_done:
            while self._lines.unfinished_tasks and (left_s := until - time.monotonic()) > 0:
                self._lines.all_tasks_done.wait(left_s)

    def _write_for_ever(self) -> None:
        while True:
            line = self._lines.get()
            try:
                self._write(line)
            finally:
                self._lines.task_done()

    def _write(self, line: str) -> None:
        """Write a line, after the line that stands for dropped lines if there are any."""
        with self._counting:
            dropped, self._dropped = self._dropped, 0
        if dropped:
            line = f"{self.words(dropped)}\n{line}"
        data = line.encode(errors="backslashreplace")
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError:  # The reader is gone or the disk is full, which is no reason for a process to end.
            return
