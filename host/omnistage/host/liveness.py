"""Answers of the event loop to whoever asks whether it still turns: the process that started this one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

_MAX_QUESTIONS = 4096
"""Read at a time, and answered with one byte."""


@contextmanager
def answering(fd: int) -> Iterator[None]:
    """Meanwhile what comes on the socket `fd` is answered. -1: nobody asks."""
    if fd < 0:
        yield
        return
    loop = asyncio.get_running_loop()
    with socket.socket(fileno=fd) as asked:
        asked.setblocking(False)

        def answer() -> None:
            try:
                if asked.recv(_MAX_QUESTIONS):
                    asked.send(b"!")
                    return
            except BlockingIOError:  # Nobody has read the answers for long: who asks was stopped.
                return
            except OSError:
                pass
            loop.remove_reader(asked)  # Who asked is gone.

        loop.add_reader(asked, answer)
        try:
            yield
        finally:
            loop.remove_reader(asked)
