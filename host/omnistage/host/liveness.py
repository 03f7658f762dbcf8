"""Answers the process that started this one and asks whether the event loop still runs. The loop itself gives the answer."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

_MAX_QUESTIONS = 4096
"""Largest number of bytes read at a time. Each byte is a question; one byte answers all of them."""


@contextmanager
def answering(fd: int) -> Iterator[None]:
    """Answer questions on the socket with the descriptor `fd` while the block runs. If `fd` is negative, nobody asks."""
    if fd < 0:
        yield
        return
    loop = asyncio.get_running_loop()
    with socket.socket(fileno=fd) as connection:
        connection.setblocking(False)

        def answer() -> None:
            try:
                if connection.recv(_MAX_QUESTIONS):
                    connection.send(b"!")
                    return
            except BlockingIOError:  # Nobody has read the answers for long: the asking process was stopped.
                return
            except OSError:
                pass
            loop.remove_reader(connection)  # The asking process is gone.

        loop.add_reader(connection, answer)
        try:
            yield
        finally:
            loop.remove_reader(connection)
