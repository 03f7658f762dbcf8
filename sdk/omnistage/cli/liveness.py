"""Asks whether a server process still answers. A call of native code that keeps Python's lock stops the whole process, with any watchdog in
it: only another process can notice that.

The questions go over a socket of their own and not by gRPC, whose threads would be awake for seconds after each question.
"""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

PERIOD_S = 5.0
"""Seconds between two questions, and the time for an answer. All servers are asked at the same moments, so that this process wakes up
once."""

MAX_UNANSWERED = 6
"""After this many unanswered questions in a row the process counts as hung. Questions are counted and not seconds, so that a time in which
this process itself did not run counts as one question at most."""

_MAX_ANSWERS = 4096
"""Bytes read at a time: the answers of a slow process may come together."""


async def wait_until_silent(connection: socket.socket) -> str:
    """Ask until the process at the other end has not answered MAX_UNANSWERED questions in a row; return a text that says so. connection: a
    socket that does not block."""
    loop = asyncio.get_running_loop()
    unanswered = 0
    next_at = _moment_after(loop.time())
    while unanswered < MAX_UNANSWERED:
        await asyncio.sleep(next_at - loop.time())
        # If this process itself is late, the other one still gets at least half a period.
        next_at = _moment_after(loop.time() + PERIOD_S / 2)
        unanswered = 0 if await _answers(connection, next_at) else unanswered + 1
    return f"did not answer for {MAX_UNANSWERED * PERIOD_S:g} s"


async def wait_until_stopped(pid: int) -> str:
    """Look at a process that cannot answer yet until it was stopped by a signal, and not continued, at MAX_UNANSWERED looks in a row;
    return a text that says so."""
    looks = 0
    while looks < MAX_UNANSWERED:
        await asyncio.sleep(PERIOD_S)
        looks = looks + 1 if _is_stopped(pid) else 0
    return f"was stopped by a signal for {MAX_UNANSWERED * PERIOD_S:g} s while it started"


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("T")
    except OSError:  # It has ended.
        return False


def _moment_after(time_s: float) -> float:
    """The next multiple of PERIOD_S by the clock of the loop."""
    return (time_s // PERIOD_S + 1) * PERIOD_S


async def _answers(connection: socket.socket, until_s: float) -> bool:
    """Ask, and return whether an answer comes before until_s; an answer to an earlier question counts as well."""
    loop = asyncio.get_running_loop()
    try:
        connection.send(b"?")
        async with asyncio.timeout_at(until_s):
            return bool(await loop.sock_recv(connection, _MAX_ANSWERS))
    except (OSError, TimeoutError):  # The socket was closed, or is full of questions that the process has not read.
        return False
