"""The parent's side of a child process that reads what strangers send: only the child can crash or hang on it."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence

from omnistage.host.child import PIECE_BYTES, ModuleChild, describe_end

TAKE_LIMIT_S = 5.0
"""Seconds in which an idle process must take what it is sent."""

KEPT_ENVIRONMENT = ("PATH", "HOME", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL")
"""Variables that the process needs to find its code. It gets none of the stage's tokens and keys."""

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class NotTaken(Exception):
    """The child ended or was too slow before it took a request, so the request is not at fault. The text says why."""


class HelperProcess(ModuleChild):
    """A process with a socket of packets. It starts at once and first says one word, READY or another. module, words: its program and the
    arguments. work: what it does, for texts of errors. start_limit_s: in which it must say that word. Call `end` in every case, on the
    thread that made it: the process ends with that thread."""

    def __init__(self, module: str, words: Sequence[str], work: str, start_limit_s: float = 60.0) -> None:
        self._work, self._start_limit_s = work, start_limit_s
        self._ready = b""
        environment = {name: os.environ[name] for name in KEPT_ENVIRONMENT if name in os.environ} | ONE_THREAD
        super().__init__(module, words, socket.SOCK_SEQPACKET, environment=environment)
        self.channel.setblocking(False)

    async def end(self) -> None:
        """Kill the process and wait until its memory is free."""
        try:
            await self.kill_and_wait()
        finally:  # If an event loop that ends cancels this, nobody else waits for the killed process.
            self.close()

    async def wait_ready(self) -> bytes:
        """Wait until the process is ready; returns its first word. Raises NotTaken."""
        if self._ready:
            return self._ready
        try:
            async with asyncio.timeout(self._start_limit_s):
                self._ready = await self.receive()
        except TimeoutError:
            raise NotTaken(f"the process that {self._work} is not ready after {self._start_limit_s:g} s") from None
        if not self._ready:
            end = describe_end(await self.kill_and_wait())
            raise NotTaken(f"the process that {self._work} did not start ({end}); its standard error says why")
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
        socket.send_fds(self.channel, [request], descriptors)

    async def receive(self) -> bytes:
        """The next packet from the process, without descriptors; empty when it has closed the socket, as it does when it dies."""
        try:
            return await asyncio.get_running_loop().sock_recv(self.channel, PIECE_BYTES)
        except ConnectionResetError:
            return b""

    async def kill_and_wait(self) -> int:
        """Kill the process, which may have closed the socket and still be alive, and wait for its end. Returns its status, as `wait`."""
        self.kill()
        return await self.wait_on_loop()
