"""The parent's side of a child process that reads what strangers send: only the child can crash or hang on it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence

TAKE_LIMIT_S = 5.0
"""Seconds in which an idle process must take what it is sent."""

MESSAGE_BYTES = 1 << 16

KEPT_ENVIRONMENT = ("PATH", "HOME", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL")
"""Variables that the process needs to find its code. It gets none of the stage's tokens and keys."""

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class NotTaken(Exception):
    """The child ended or was too slow before it took a request, so the request is not at fault. The text says why."""


class HelperProcess:
    """A process of `python -m MODULE DESCRIPTOR PARENT WORDS`, with a socket of packets to it. It starts at once and first says one word,
    READY or another. work: what it does, for texts of errors. start_limit_s: in which it must say that word. Call `end` in every case, on
    the thread that made it: the process ends with that thread."""

    def __init__(self, module: str, words: Sequence[str], work: str, start_limit_s: float = 60.0) -> None:
        self._work, self._start_limit_s = work, start_limit_s
        self._ready = b""
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.setblocking(False)
        with contextlib.ExitStack() as undo, theirs:
            undo.callback(self._channel.close)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(theirs.fileno()), str(os.getpid()), *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={name: os.environ[name] for name in KEPT_ENVIRONMENT if name in os.environ} | ONE_THREAD,
                start_new_session=True,
            )
            undo.callback(self._process.wait)
            undo.callback(self._process.kill)
            self._end_descriptor = os.pidfd_open(self._process.pid)  # Can be read once the process has ended.
            undo.pop_all()

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_alive(self) -> bool:
        return self._process.poll() is None

    async def end(self) -> None:
        """Kill the process and wait until its memory is free."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        try:
            await self._wait_readable(self._end_descriptor)
        finally:  # If an event loop that ends cancels this, nobody else waits for the killed process.
            self._process.wait()
            self._channel.close()
            os.close(self._end_descriptor)

    async def wait_ready(self) -> bytes:
        """Wait until the process is ready; returns its first word. Raises NotTaken."""
        if self._ready:
            return self._ready
        try:
            async with asyncio.timeout(self._start_limit_s):
                self._ready = await self.receive()
                if not self._ready:
                    await self.kill()
        except TimeoutError:
            raise NotTaken(f"the process that {self._work} is not ready after {self._start_limit_s:g} s") from None
        if not self._ready:
            raise NotTaken(f"the process that {self._work} did not start ({self.death()}); its standard error says why")
        return self._ready

    async def send(self, request: bytes, *descriptors: int) -> None:
        """Send a request with descriptors, and wait until the process has taken it. Raises NotTaken."""
        try:
            self.post(request, *descriptors)
            async with asyncio.timeout(TAKE_LIMIT_S):
                reply = await self.receive()
        except TimeoutError:
            raise NotTaken(f"the process that {self._work} took nothing for {TAKE_LIMIT_S:g} s: ask again") from None
        except OSError as error:
            raise NotTaken(f"the process that {self._work} ended while it had nothing to do ({error}): ask again") from error
        if not reply:
            raise NotTaken(f"the process that {self._work} ended while it had nothing to do: ask again")

    def post(self, request: bytes, *descriptors: int) -> None:
        """Send a message with descriptors, whether the process takes it or not."""
        socket.send_fds(self._channel, [request], descriptors)

    async def receive(self) -> bytes:
        """The next packet from the process, without descriptors; empty when it has closed the socket, as it does when it dies."""
        while True:
            try:
                return self._channel.recv(MESSAGE_BYTES)
            except BlockingIOError:
                await self._wait_readable(self._channel.fileno())
            except ConnectionResetError:
                return b""

    async def kill(self) -> None:
        """Kill the process, which may have closed the socket and still be alive, and wait for its end."""
        self._process.kill()
        await self._wait_readable(self._end_descriptor)

    def status(self) -> int:
        """How the process has ended, as of subprocess.Popen."""
        return self._process.wait()

    def death(self) -> str:
        """The signal or exit status with which the process has ended, as text."""
        status = self.status()
        return f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"

    async def _wait_readable(self, descriptor: int) -> None:
        """Wait until the descriptor can be read."""
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        loop.add_reader(descriptor, _settle, ready)
        try:
            await ready
        finally:
            loop.remove_reader(descriptor)


def _settle(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
