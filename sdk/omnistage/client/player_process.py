"""A running loudspeaker and the pipe into it: the sound that was put in, the part that the player has not taken yet, and how much can have
been heard."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from typing import ClassVar
from weakref import WeakSet

from omnistage.client import fork
from omnistage.client.errors import PlayerLostError
from omnistage.client.loudspeaker import Loudspeaker, reason

if sys.platform == "linux":
    import fcntl
    import termios

SAMPLE_BYTES = 4

PIPE_S = 1.0
"""Seconds of sound that lie ready in the pipe: this process may stand still for so long, and the listener does not notice."""

PATIENCE = 2
"""How many times slower than real time a player may be before it counts as hung."""

STALL_S = 5.0
"""A player that takes nothing for so long has hung. Players on PulseAudio need up to 2 s for the end of a sound."""

SAID_BYTES = 4096
"""Bytes kept of the end of a player's standard error, from which one line is shown."""


class PlayerProcess:
    """One run of a loudspeaker at one sample rate. One thread writes; `stop` and `heard` may be called from anywhere."""

    _running: ClassVar[WeakSet[PlayerProcess]] = WeakSet()

    def __init__(self, loudspeaker: Loudspeaker, sample_rate_hz: int) -> None:
        """Raises PlayerLostError if the program cannot be started."""
        self._name = loudspeaker.name
        self.sample_rate_hz = sample_rate_hz
        self._lock = threading.RLock()
        self._written = 0
        self._dry_at = 0.0
        self._meter: int | None = None
        try:
            self._said = tempfile.TemporaryFile()  # noqa: SIM115
        except OSError as error:
            raise PlayerLostError(f"{self._name} cannot be started: {error.strerror}") from error
        try:
            # No fork between the making of the pipe and the list below: a child that kept an end of the pipe would keep the player alive.
            with fork.held_off:
                self._process = subprocess.Popen(
                    loudspeaker.command(sample_rate_hz),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=self._said,
                    bufsize=0,
                    start_new_session=True,  # Ctrl-C in the terminal is for this program, which then also decides about the sound
                )
                self._running.add(self)
        except OSError as error:
            self._said.close()
            raise PlayerLostError(f"{self._name} cannot be started: {error.strerror}") from error
        assert self._process.stdin is not None
        self._pipe = self._process.stdin
        os.set_blocking(self._pipe.fileno(), False)
        if sys.platform == "linux":
            with suppress(OSError):  # a user may have only so many bytes in pipes; then the pipe stays as it is
                fcntl.fcntl(self._pipe.fileno(), fcntl.F_SETPIPE_SZ, int(PIPE_S * SAMPLE_BYTES * sample_rate_hz))
        self._room = select.poll()
        self._room.register(self._pipe.fileno(), select.POLLOUT)

    def write(self, block: memoryview, give_up_at: float) -> int:
        """Wait for room and write as much of a block of bytes as fits; returns how many bytes that was. give_up_at: on the monotonic clock.
        Raises PlayerLostError if the player has ended, or takes nothing."""
        wait_s = min(STALL_S, give_up_at - time.monotonic())
        if not self._room.poll(max(wait_s, 0.0) * 1000):
            raise PlayerLostError(f"{self._name} takes no sound any more")
        try:
            count = os.write(self._pipe.fileno(), block)
        except BlockingIOError:
            return 0
        except BrokenPipeError:
            raise PlayerLostError(f"{self._name} ended in the middle of the sound{self._end()}") from None
        now = time.monotonic()
        with self._lock:
            self._written += count
            self._dry_at = max(self._dry_at, now) + count / SAMPLE_BYTES / self.sample_rate_hz
            self._dry_at = max(self._dry_at, now + self._unread() / self.sample_rate_hz)
        return count

    def finish(self, give_up_at: float) -> None:
        """Wait until the player has played the rest and ended; no more sound comes. Raises PlayerLostError if it does not end, ends without
        taking all, or says that it could not play."""
        with self._lock:
            unread_s = self._unread() / self.sample_rate_hz
            self._dry_at = max(self._dry_at, time.monotonic() + unread_s)
            if sys.platform == "linux":
                # Another end of the pipe, to see what is left in it. Not opened earlier: while it is open the pipe does not break.
                self._meter = os.open(f"/proc/self/fd/{self._pipe.fileno()}", os.O_RDONLY | os.O_NONBLOCK)
            self._pipe.close()
        try:
            code = self._process.wait(max(min(give_up_at - time.monotonic(), PATIENCE * unread_s + STALL_S), 0.0))
        except subprocess.TimeoutExpired:
            raise PlayerLostError(f"{self._name} does not come to an end") from None
        if code or self._unread():
            raise PlayerLostError(f"{self._name} ended before the sound{self._end()}")

    def stop(self) -> None:
        """Silence the player at once: the sound that the process holds for its device goes with it."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # the player leads its process group: a command may have started others

    def close(self) -> None:
        """Kill the player if it still runs, and wait for its end. Raises PlayerLostError if it cannot be killed."""
        self.stop()
        with self._lock:
            self._pipe.close()
            if self._meter is not None:
                os.close(self._meter)
                self._meter = None
        self._said.close()
        try:
            self._process.wait(STALL_S)
        except subprocess.TimeoutExpired:
            raise PlayerLostError(f"{self._name} cannot be ended: its device does not let go of process {self._process.pid}") from None
        self._running.discard(self)

    @property
    def heard(self) -> int:
        """Samples that can have been heard: those that the player took, without those that would be early in real time. The delay of the
        device, some 0.2 s, is not known."""
        with self._lock:
            early = max(self._dry_at - time.monotonic(), 0.0) * self.sample_rate_hz
            return max(min(round(self._written / SAMPLE_BYTES - early), self._written // SAMPLE_BYTES - self._unread()), 0)

    def _unread(self) -> int:
        """Samples in the pipe, as far as it can be known."""
        pipe = self._meter if self._pipe.closed else self._pipe.fileno()
        if sys.platform != "linux" or pipe is None:
            return 0
        size = int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)
        return -(-size // SAMPLE_BYTES)

    def _end(self) -> str:
        """How a process ended after it closed its standard input, in words."""
        try:
            code = self._process.wait(STALL_S)
        except subprocess.TimeoutExpired:
            return ""
        self._said.seek(max(self._said.seek(0, os.SEEK_END) - SAID_BYTES, 0))
        said = reason(self._said.read().decode(errors="replace"), self._name)
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        return f" {how}: {said}" if said else f" {how}"

    @classmethod
    def leave_all_to_parent(cls) -> None:
        """Close this child's copies of the pipes: a forked child must not hold them open."""
        for process in list(cls._running):
            process._pipe.close()
            if process._meter is not None:
                os.close(process._meter)
                process._meter = None
            process._process.returncode = 0  # not a child of this process; Python must not warn of it either
        cls._running.clear()


os.register_at_fork(after_in_child=PlayerProcess.leave_all_to_parent)
