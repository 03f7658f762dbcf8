"""Runs a program that plays sound: writes samples into its pipe, and computes how many can have been heard."""

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
"""Seconds of sound that the pipe holds: this process may stand still for so long before the listener notices."""

PATIENCE = 2
"""How many times slower than real time a player may be before it counts as hung."""

STALL_S = 5.0
"""A player that takes no sound for so many seconds has hung. Players on PulseAudio need up to 2 s for the end of a sound."""

SAID_BYTES = 4096
"""So many last bytes of a player's standard error are searched for the line to show."""


class PlayerProcess:
    """One run of a loudspeaker at one sample rate. Only one thread may write; any thread may call `stop` and `heard`."""

    _running: ClassVar[WeakSet[PlayerProcess]] = WeakSet()

    def __init__(self, loudspeaker: Loudspeaker, sample_rate_hz: int) -> None:
        """Raises PlayerLostError if the program cannot be started."""
        self._name = loudspeaker.name
        self.sample_rate_hz = sample_rate_hz
        self._lock = threading.RLock()
        self._written = 0  # bytes that were written into the pipe
        self._dry_at = 0.0  # time.monotonic() at which, in real time, all written sound has been played
        self._meter: int | None = None  # descriptor of a read end of the pipe, from `finish` on
        try:
            self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
        except OSError as error:
            raise PlayerLostError(f"{self._name} cannot be started: {error.strerror}") from error
        try:
            # No fork before the process is in `_running`: a forked child that keeps the pipe open would keep the player alive.
            with fork.held_off:
                self._process = subprocess.Popen(
                    loudspeaker.command(sample_rate_hz),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=self._stderr,
                    bufsize=0,
                    start_new_session=True,  # Ctrl-C in the terminal reaches only this program, which then decides about the sound
                )
                self._running.add(self)
        except OSError as error:
            self._stderr.close()
            raise PlayerLostError(f"{self._name} cannot be started: {error.strerror}") from error
        assert self._process.stdin is not None
        self._pipe = self._process.stdin
        os.set_blocking(self._pipe.fileno(), False)
        if sys.platform == "linux":
            with suppress(OSError):  # the system limits the bytes that a user has in pipes; then the pipe keeps its size
                fcntl.fcntl(self._pipe.fileno(), fcntl.F_SETPIPE_SZ, int(PIPE_S * SAMPLE_BYTES * sample_rate_hz))
        self._room = select.poll()
        self._room.register(self._pipe.fileno(), select.POLLOUT)

    def write(self, block: memoryview, give_up_at: float) -> int:
        """Wait until the pipe has room, and write as much of `block`, the bytes of samples, as fits. Returns how many bytes that was,
        perhaps 0. give_up_at: the end of the wait, by time.monotonic(). Raises PlayerLostError if the player has ended, or takes
        nothing."""
        wait_s = min(STALL_S, give_up_at - time.monotonic())
        if not self._room.poll(max(wait_s, 0.0) * 1000):
            raise PlayerLostError(f"{self._name} takes no sound any more")
        try:
            count = os.write(self._pipe.fileno(), block)
        except BlockingIOError:
            return 0
        except BrokenPipeError:
            raise PlayerLostError(f"{self._name} ended in the middle of the sound{self._end()}") from None
        now_s = time.monotonic()
        with self._lock:
            self._written += count
            self._dry_at = max(self._dry_at, now_s) + count / SAMPLE_BYTES / self.sample_rate_hz
            self._dry_at = max(self._dry_at, now_s + self._unread() / self.sample_rate_hz)
        return count

    def finish(self, give_up_at: float) -> None:
        """Close the pipe, and wait until the player has played the rest and ended. give_up_at: as in `write`. Raises PlayerLostError if
        it does not end in time, ends before it has read all, or ends with an error code."""
        with self._lock:
            unread_s = self._unread() / self.sample_rate_hz
            self._dry_at = max(self._dry_at, time.monotonic() + unread_s)
            if sys.platform == "linux":
                # A read end shows how much is left in the pipe. Opened only now: while it is open, writing to a dead player raises nothing.
                self._meter = os.open(f"/proc/self/fd/{self._pipe.fileno()}", os.O_RDONLY | os.O_NONBLOCK)
            self._pipe.close()
        try:
            code = self._process.wait(max(min(give_up_at - time.monotonic(), PATIENCE * unread_s + STALL_S), 0.0))
        except subprocess.TimeoutExpired:
            raise PlayerLostError(f"{self._name} does not come to an end") from None
        if code or self._unread():
            raise PlayerLostError(f"{self._name} ended before the sound{self._end()}")

    def stop(self) -> None:
        """Kill the player, which silences it at once: the sound in its own buffers is lost too."""
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
        self._stderr.close()
        try:
            self._process.wait(STALL_S)
        except subprocess.TimeoutExpired:
            raise PlayerLostError(f"{self._name} cannot be ended: its device does not let go of process {self._process.pid}") from None
        self._running.discard(self)

    @property
    def heard(self) -> int:
        """How many samples can have been heard: no more than the player has read, and no more than there was time to play since they were
        written. The delay of the device, some 0.2 s, is not subtracted."""
        with self._lock:
            unplayed = max(self._dry_at - time.monotonic(), 0.0) * self.sample_rate_hz
            return max(min(round(self._written / SAMPLE_BYTES - unplayed), self._written // SAMPLE_BYTES - self._unread()), 0)

    def _unread(self) -> int:
        """How many samples are still in the pipe; 0 if this system does not say it."""
        pipe = self._meter if self._pipe.closed else self._pipe.fileno()
        if sys.platform != "linux" or pipe is None:
            return 0
        size = int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)
        return -(-size // SAMPLE_BYTES)

    def _end(self) -> str:
        """The end of an error text that says how the player ended, such as " with code 1: REASON"; empty if it still runs after STALL_S."""
        try:
            code = self._process.wait(STALL_S)
        except subprocess.TimeoutExpired:
            return ""
        self._stderr.seek(max(self._stderr.seek(0, os.SEEK_END) - SAID_BYTES, 0))
        reason_text = reason(self._stderr.read().decode(errors="replace"), self._name)
        cause = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        return f" {cause}: {reason_text}" if reason_text else f" {cause}"

    @classmethod
    def leave_all_to_parent(cls) -> None:
        """Close this child's copies of the pipes: a forked child must not hold them open."""
        for process in list(cls._running):
            process._pipe.close()
            if process._meter is not None:
                os.close(process._meter)
                process._meter = None
            process._process.returncode = 0  # no child of this process: without a code Python would warn that it still runs
        cls._running.clear()


os.register_at_fork(after_in_child=PlayerProcess.leave_all_to_parent)
