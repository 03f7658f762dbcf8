"""Talks to the owner of a stack: the process that started this launcher. It gets lines of JSON from one pipe. Into another one, the
lifeline, it writes which pipelines it wants; the lifeline ends with the owner, and then the stack ends."""

from __future__ import annotations

import asyncio
import json
import os
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from omnistage.client.errors import OmniError, StackError

MAX_LINE_BYTES = 4096
"""The most bytes of a request: the name of a pipeline."""


class Owner:
    """The pipes to the owner. is_there: whether an owner waits for a line. is_private: whether it has a lifeline, to ask for pipelines."""

    def __init__(self, ready_fd: int, lifeline_fd: int) -> None:
        """Descriptors: to ready_fd lines of JSON are written, from lifeline_fd requests are read. -1: there is no such pipe."""
        self.is_there = ready_fd >= 0
        self.is_private = lifeline_fd >= 0
        self._ready_fd = ready_fd
        self._lifeline_fd = lifeline_fd
        self._has_been_told = False
        self._asked = b""  # the beginning of a line whose rest has not come

    def tell_first(self, line: dict[str, str]) -> bool:
        """Write the first line, which says that the stack serves, or an error. Returns whether an owner waited for it."""
        if self._ready_fd < 0 or self._has_been_told:
            return False
        self._has_been_told = True
        self.tell(line)
        if not self.is_private:
            os.close(self._ready_fd)
            self._ready_fd = -1
        return True

    def tell(self, line: dict[str, str]) -> None:
        """Write a line. An owner that has ended meanwhile does not get it."""
        if self._ready_fd >= 0:
            with suppress(BrokenPipeError):
                os.write(self._ready_fd, json.dumps(line).encode() + b"\n")

    def listen(self, on_pipeline: Callable[[str], object], on_end: Callable[[], object]) -> None:
        """Listen to the lifeline on the running loop. on_pipeline: called with the name of each pipeline that the owner asks for. on_end:
        called once, when the owner has ended."""
        if self.is_private:
            asyncio.get_running_loop().add_reader(self._lifeline_fd, self._readable, on_pipeline, on_end)

    def _readable(self, on_pipeline: Callable[[str], object], on_end: Callable[[], object]) -> None:
        """Read from the lifeline, and call `on_pipeline` for each line, or `on_end` at its end or for a line that is too long."""
        data = os.read(self._lifeline_fd, MAX_LINE_BYTES)
        *lines, self._asked = (self._asked + data).split(b"\n")
        if not data or len(self._asked) > MAX_LINE_BYTES:
            asyncio.get_running_loop().remove_reader(self._lifeline_fd)
            on_end()
            return
        for line in lines:
            try:
                name = str(json.loads(line)["start"])
            except (ValueError, TypeError, KeyError):
                self.tell({"pipeline": "", "error": f"{line[:64]!r} asks for nothing", "hint": 'Write {"start": NAME}, a line each.'})
            else:
                on_pipeline(name)

    @contextmanager
    def ends_all(self) -> Iterator[None]:
        """Inside this block the end of the lifeline ends this process at once. This process may be fetching gigabytes for which nobody
        waits any more. A later fetch goes on from there, and nothing else needs a clean-up."""
        if not self.is_private:
            yield
            return
        over, end = os.pipe()

        def watch() -> None:
            listening = select.poll()
            for fd in (self._lifeline_fd, over):
                listening.register(fd, select.POLLIN)
            if self._lifeline_fd in dict(listening.poll()):
                os._exit(1)

        watching = threading.Thread(target=watch, daemon=True)
        watching.start()
        try:
            yield
        finally:
            os.close(end)
            watching.join()
            os.close(over)


def error_line(error: OmniError) -> dict[str, str]:
    """An error as a line for the owner."""
    return {"error": error.message, "hint": error.advice, "log": error.log if isinstance(error, StackError) else ""}
