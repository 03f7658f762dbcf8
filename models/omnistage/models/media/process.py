"""One decoding process, as its parent sees it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import asdict
from typing import Any

import structlog

from omnistage.models.humans import bytes_told
from omnistage.models.media.errors import BadMedia, NotTaken
from omnistage.models.media.limits import MediaLimits

log = structlog.get_logger(__name__)

START_LIMIT_S = 60.0
TAKE_LIMIT_S = 5.0
"""Seconds in which an idle process must take a medium."""

OUT_OF_MEMORY = errno.ENOMEM
"""The exit status of a process whose memory is short; child.py, which loads only modules that decoding needs, has the same."""

TIME_IS_UP = signal.SIGPROF
"""The signal that ends the process when it has used the processor time that its medium may have."""

LIFE = 200
"""The number of media after which a process is replaced: the memory that libraries leak is freed with it."""

MESSAGE_BYTES = 1 << 16
UNCONFINED = b"unconfined"
"""The word that the process sends in place of "ready" if the kernel has no filter of calls; child.py has the same."""

KEPT_ENVIRONMENT = ("PATH", "HOME", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL")
"""Variables that the process needs to find its code. It gets none of the stage's tokens and keys."""

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class DecodingProcess:
    """A process that decodes one medium at a time. It starts at once, and `decode` waits until it is ready. Call `end` in every case."""

    def __init__(self, limits: MediaLimits) -> None:
        self._ready = False
        self._decoded = 0  # Number of media.
        self._memory_bytes = limits.memory_bytes
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.setblocking(False)
        words = (str(theirs.fileno()), str(os.getpid()), json.dumps(asdict(limits)))
        with contextlib.ExitStack() as undo, theirs:
            undo.callback(self._channel.close)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "omnistage.models.media.child", *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={name: os.environ[name] for name in KEPT_ENVIRONMENT if name in os.environ} | ONE_THREAD,
                start_new_session=True,
            )
            undo.callback(self._process.wait)
            undo.callback(self._process.kill)
            self._ended = os.pidfd_open(self._process.pid)  # Can be read once the process has ended.
            undo.pop_all()

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def is_spent(self) -> bool:
        """Whether another process is to decode the next medium."""
        return self._decoded >= LIFE

    async def decode(self, request: dict[str, Any], file: int, result: int, limit_s: float) -> bytes:
        """Decode one medium. file, result: descriptors to read from and to write into. Returns the answer, as JSON. Raises NotTaken if the
        process ends or is too slow before it takes the medium, else BadMedia; after these or a cancellation, end the process."""
        await self._wait_ready()
        await self._send(json.dumps(request | {"limit_s": limit_s}).encode(), file, result)
        try:
            async with asyncio.timeout(limit_s):
                answer = await self._receive()
        except TimeoutError:
            raise BadMedia(f"decoding it takes longer than {limit_s:g} s: send a part of it, or a smaller one") from None
        if not answer:
            self._process.kill()  # the process may have closed the socket and still be alive
            await self._wait_readable(self._ended)
            raise BadMedia(self._fault())
        self._decoded += 1
        return answer

    async def end(self) -> None:
        """Kill the process and wait until its memory is free."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        try:
            await self._wait_readable(self._ended)
        finally:  # If an event loop that ends cancels this, nobody else waits for the killed process.
            self._process.wait()
            self._channel.close()
            os.close(self._ended)

    async def _wait_ready(self) -> None:
        """Wait until the process is ready. Raises NotTaken."""
        if self._ready:
            return
        try:
            async with asyncio.timeout(START_LIMIT_S):
                first = await self._receive()
                if not first:
                    self._process.kill()  # the process may have closed the socket and still be alive
                    await self._wait_readable(self._ended)
        except TimeoutError:
            raise NotTaken(f"the process that decodes media is not ready after {START_LIMIT_S:g} s") from None
        if not first:
            raise NotTaken(f"the process that decodes media did not start ({self._death()}); its standard error says why")
        if first == UNCONFINED:
            log.warning("media.unconfined", pid=self.pid)
        self._ready = True

    async def _send(self, request: bytes, file: int, result: int) -> None:
        """Send a request, and wait until the process has taken it. Raises NotTaken."""
        try:
            socket.send_fds(self._channel, [request], [file, result])
            async with asyncio.timeout(TAKE_LIMIT_S):
                taken = await self._receive()
        except TimeoutError:
            raise NotTaken(f"the process that decodes media took none for {TAKE_LIMIT_S:g} s: ask again") from None
        except OSError as error:
            raise NotTaken(f"the process that decodes media ended while it had nothing to do ({error}): ask again") from error
        if not taken:
            raise NotTaken("the process that decodes media ended while it had nothing to do: ask again")

    async def _receive(self) -> bytes:
        """The next packet from the process, without descriptors; empty when it has closed the socket, as it does when it dies."""
        while True:
            try:
                return self._channel.recv(MESSAGE_BYTES)
            except BlockingIOError:
                await self._wait_readable(self._channel.fileno())
            except ConnectionResetError:
                return b""

    async def _wait_readable(self, descriptor: int) -> None:
        """Wait until the descriptor can be read."""
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        loop.add_reader(descriptor, _settle, ready)
        try:
            await ready
        finally:
            loop.remove_reader(descriptor)

    def _fault(self) -> str:
        """The text of the error for a medium whose process has ended."""
        match self._process.wait():
            case status if status == OUT_OF_MEMORY:
                return f"decoding it takes more memory than the {bytes_told(self._memory_bytes)} there are: send a smaller one"
            case status if status == -TIME_IS_UP:
                return "decoding it takes longer than any of its size should: encode it anew, or send a part of it"
        return f"decoding it ended the process that does it ({self._death()}): it is damaged or too large, encode it anew"

    def _death(self) -> str:
        """The signal or exit status with which the process has ended, as text."""
        status = self._process.wait()
        return f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"


def _settle(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
