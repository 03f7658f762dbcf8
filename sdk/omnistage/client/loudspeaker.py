"""Finds a program that plays sound on this machine from its standard input; a trial shows whether it works. `PlayerProcess` runs it:
writes samples into its pipe, and computes how many can have been heard."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import select
import shlex
import shutil
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from omnistage.client.errors import NotAvailableError, PlayerLostError, RequestError
from omnistage.host.child import ChildProcess, describe_end

PLAYER_VARIABLE = "OMNISTAGE_PLAYER"
"""The environment variable that chooses the player: `none`, the name of a player, or a command with {rate} and {channels}."""

TRIAL_S = 2.0
"""The most seconds that a trial may take. Players that work, and those without a device, take some 0.01 s to 0.3 s."""

TRIAL_RATE_HZ = 24_000


@dataclass(frozen=True, slots=True)
class Loudspeaker:
    """A program that plays its standard input (raw float32 samples, little-endian, without a head) and ends when all of it was heard.

    name: for people. words: the command line; {rate} (Hz) and {channels} in it stand for numbers. tail_s: seconds of silence to append to
    the sound, because the program does not play its last buffer to the end; 0: it does."""

    name: str
    words: tuple[str, ...]
    tail_s: float = 0.0

    def command(self, sample_rate_hz: int, channels: int = 1) -> list[str]:
        """The command line for this sample rate and number of channels."""
        return [word.replace("{rate}", str(sample_rate_hz)).replace("{channels}", str(channels)) for word in self.words]


def is_silenced() -> bool:
    """Whether the variable turns players off."""
    return os.environ.get(PLAYER_VARIABLE, "").strip() == "none"


def find_loudspeaker() -> Loudspeaker | None:
    """The player of this machine: the one that the variable OMNISTAGE_PLAYER names, or the first that works of the package sounddevice and,
    on PATH, pacat (PulseAudio, or PipeWire in its place), pw-cat (PipeWire), aplay (ALSA), play (SoX) and ffplay (FFmpeg); None if none
    works, or the variable is `none`.

    Each is tried without a sound; that takes 0.01 s to 0.3 s for each that is installed. Code on an event loop calls this in a thread.
    Raises RequestError if the variable names no known player, NotAvailableError if the named player does not work."""
    if is_silenced():
        return None
    if name := os.environ.get(PLAYER_VARIABLE, "").strip():
        return _chosen_player(name)
    candidates = ((player, player.installed()) for player in PLAYERS)
    return next((loudspeaker for player, loudspeaker in candidates if loudspeaker and not player.trouble(loudspeaker)), None)


def _chosen_player(name: str) -> Loudspeaker:
    """The player that the variable names. name: its value, the name of a player or a command. Raises as `find_loudspeaker`."""
    player = next((player for player in PLAYERS if player.name == name), None)
    if player is not None:
        loudspeaker = player.installed()
        trouble = player.trouble(loudspeaker) if loudspeaker else "it is not installed"
        if loudspeaker is None or trouble:
            hint = f"Name another player, or leave {PLAYER_VARIABLE} unset to have one found."
            raise NotAvailableError(f"{PLAYER_VARIABLE}={name}: {trouble}", hint=hint)
        return loudspeaker
    names = ", ".join(player.name for player in PLAYERS)
    if "{rate}" not in name:
        hint = f"Give none, {names}, or a command with {{rate}} and {{channels}} that plays raw float32 from its standard input."
        raise RequestError(f"{PLAYER_VARIABLE}={name}: no player of that name is known", hint=hint)
    try:
        words = tuple(shlex.split(name))
    except ValueError as error:
        raise RequestError(f"{PLAYER_VARIABLE}={name}: {error}", hint="Write it as a shell would read it.") from None
    if shutil.which(words[0]) is None:
        raise NotAvailableError(f"{PLAYER_VARIABLE}: there is no program {words[0]}", hint="Give its path, or put its folder on PATH.")
    return Loudspeaker(Path(words[0]).name, words)


@dataclass(frozen=True, slots=True)
class _Player:
    """A program that this module knows. options: of its command line. reachable: returns False if a trial is useless, because it cannot
    play. trial_command: run for the trial in place of the program; empty: none. no_device_error, no_device_output: a text on standard
    error, or in the output, of a program that ends with 0 although it has no device; empty: none. tail_s: see Loudspeaker."""

    name: str
    options: str
    reachable: Callable[[], bool] = lambda: True
    no_device_error: str = ""
    trial_command: tuple[str, ...] = ()
    no_device_output: str = ""
    tail_s: float = 0.0

    def installed(self) -> Loudspeaker | None:
        """The program as a loudspeaker; None if it is not installed."""
        path = shutil.which(self.name)
        return Loudspeaker(self.name, (path, *self.options.split()), self.tail_s) if path else None

    def trouble(self, loudspeaker: Loudspeaker) -> str:
        """The reason why the program cannot play here; empty: it can. loudspeaker: the program as `installed` gives it."""
        if not self.reachable():
            return "there is no such server here"
        try:
            done = subprocess.run(
                self.trial_command or loudspeaker.command(TRIAL_RATE_HZ),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=TRIAL_S,
                start_new_session=True,
                env={**os.environ, "LC_ALL": "C"},
            )
        except subprocess.TimeoutExpired:
            return f"it did not answer within {TRIAL_S:g} s"
        except OSError as error:
            return str(error.strerror)
        if done.returncode:
            return failure_reason(done.stderr, self.name) or f"it ended with {describe_end(done.returncode, 'code')}"
        texts = ((self.no_device_error, done.stderr), (self.no_device_output, done.stdout))
        return "it has no device" if any(mark and mark in text for mark, text in texts) else ""


class _SoundDevice(_Player):
    """The package sounddevice, imported in a process of its own."""

    def installed(self) -> Loudspeaker | None:
        if not sys.executable or importlib.util.find_spec("sounddevice") is None:
            return None
        # -P: Python does not look for packages in the folder of that program.
        program = (sys.executable, "-P", str(Path(__file__).with_name("portaudio.py")))
        return Loudspeaker(self.name, (*program, *self.options.split()), self.tail_s)


def failure_reason(text: str, name: str) -> str:
    """The one line to show from a program's standard error, without unprintable characters: the last line that begins with the program's
    name, or else the last line; empty: there is none."""
    printable = ("".join(filter(str.isprintable, line)).strip()[:200] for line in text.splitlines())
    lines = [line for line in printable if line]
    own_lines = [line for line in lines if line.startswith(name)]
    return (own_lines or lines or [""])[-1]


def _has_pulse() -> bool:
    """Whether the environment names a PulseAudio server, or one listens here. If not, there is no trial, because it could start one."""
    folders = [Path(f"/run/user/{os.getuid()}/pulse"), Path("/run/pulse")]
    for name, below in (("PULSE_RUNTIME_PATH", "."), ("XDG_RUNTIME_DIR", "pulse")):
        if os.environ.get(name):
            folders.append(Path(os.environ[name], below))
    return bool(os.environ.get("PULSE_SERVER")) or any((folder / "native").is_socket() for folder in folders)


PLAYERS: tuple[_Player, ...] = (
    # PortAudio drops sound that does not fill its last buffer.
    _SoundDevice("sounddevice", "{rate} {channels}", tail_s=0.25),
    # Stands before pw-cat, because PipeWire has pacat too, and its options have never changed. A server without a device has a null sink.
    _Player(
        "pacat",
        "--playback --raw --format=float32le --rate={rate} --channels={channels} --latency-msec=200",
        reachable=_has_pulse,
        trial_command=("pactl", "info"),
        no_device_output="Default Sink: auto_null",
    ),
    _Player("pw-cat", "--playback --raw --format=f32 --rate={rate} --channels={channels} --latency=200ms -"),
    _Player("aplay", "-q -t raw -f FLOAT_LE -r {rate} -c {channels} --buffer-time=200000 -"),
    _Player("play", "-q -t raw -e floating-point -b 32 -L -r {rate} -c {channels} -"),
    # Stands last, because it plays 16 bits, and ends before its last buffer is heard. By default it takes one channel; the option for more
    # has changed its name.
    _Player(
        "ffplay",
        "-hide_banner -loglevel error -nodisp -autoexit -probesize 32 -analyzeduration 0 -f f32le -sample_rate {rate} -i -",
        no_device_error="audio open failed",
        tail_s=0.25,
    ),
)


SAMPLE_BYTES = 4

PIPE_S = 1.0
"""Seconds of sound that the pipe holds: this process may stand still for so long before the listener notices."""

PATIENCE = 2
"""How many times slower than real time a player may be before it counts as hung."""

STALL_S = 5.0
"""A player that takes no sound for so many seconds has hung. Players on PulseAudio need up to 2 s for the end of a sound."""

SAID_BYTES = 4096
"""So many last bytes of a player's standard error are searched for the line to show."""


class PlayerProcess(ChildProcess):
    """One run of a loudspeaker at one sample rate. Only one thread may write; any thread may call `kill` and `heard_samples`."""

    def __init__(self, loudspeaker: Loudspeaker, sample_rate_hz: int) -> None:
        """Raises PlayerLostError if the program cannot be started."""
        self._name = loudspeaker.name
        self.sample_rate_hz = sample_rate_hz
        self._lock = threading.RLock()
        self._written_bytes = 0  # into the pipe
        self._dry_at = 0.0  # time.monotonic() at which, in real time, all written sound has been played
        self._meter: int | None = None  # descriptor of a read end of the pipe, from `finish` on
        try:
            with ExitStack() as undo:
                self._stderr = undo.enter_context(tempfile.TemporaryFile())
                super().__init__(loudspeaker.command(sample_rate_hz), stdin=subprocess.PIPE, errors=self._stderr)
                undo.pop_all()
        except OSError as error:
            raise PlayerLostError(f"{self._name} cannot be started: {error.strerror}") from error
        self._pipe = self.stdin
        os.set_blocking(self._pipe.fileno(), False)
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
            raise PlayerLostError(f"{self._name} ended in the middle of the sound{self._cause()}") from None
        now_s = time.monotonic()
        with self._lock:
            self._written_bytes += count
            self._dry_at = max(self._dry_at, now_s) + count / SAMPLE_BYTES / self.sample_rate_hz
            # A player that is slower than real time still has all of the pipe to play.
            self._dry_at = max(self._dry_at, now_s + self._unread() / self.sample_rate_hz)
        return count

    def finish(self, give_up_at: float) -> None:
        """Close the pipe, and wait until the player has played the rest and ended. give_up_at: as in `write`. Raises PlayerLostError if
        it does not end in time, ends before it has read all, or ends with an error code."""
        with self._lock:
            unread_s = self._unread() / self.sample_rate_hz
            self._dry_at = max(self._dry_at, time.monotonic() + unread_s)
            # A read end shows how much is left in the pipe. Opened only now: while it is open, writing to a dead player raises nothing.
            self._meter = os.open(f"/proc/self/fd/{self._pipe.fileno()}", os.O_RDONLY | os.O_NONBLOCK)
            self._pipe.close()
        code = self.wait(max(min(give_up_at - time.monotonic(), PATIENCE * unread_s + STALL_S), 0.0))
        if code is None:
            raise PlayerLostError(f"{self._name} does not come to an end")
        if code or self._unread():
            raise PlayerLostError(f"{self._name} ended before the sound{self._cause()}")

    def close(self) -> None:
        """Kill the player if it still runs, and wait for its end. Raises PlayerLostError if it cannot be killed."""
        self.kill()
        has_ended = self.wait(STALL_S) is not None
        with self._lock:
            if has_ended:
                super().close()
            elif self in self._open:
                self.leave()
        if not has_ended:
            raise PlayerLostError(f"{self._name} cannot be ended: its device does not let go of process {self.pid}")

    def leave(self) -> None:
        super().leave()
        self._stderr.close()
        meter, self._meter = self._meter, None
        if meter is not None:
            os.close(meter)

    @property
    def heard_samples(self) -> int:
        """How many samples can have been heard: no more than the player has read, and no more than there was time to play since they were
        written. The delay of the device, some 0.2 s, is not subtracted."""
        with self._lock:
            unplayed = max(self._dry_at - time.monotonic(), 0.0) * self.sample_rate_hz
            return max(min(round(self._written_bytes / SAMPLE_BYTES - unplayed), self._written_bytes // SAMPLE_BYTES - self._unread()), 0)

    def _unread(self) -> int:
        """How many samples are still in the pipe; 0 if the player was closed."""
        pipe = self._meter if self._pipe.closed else self._pipe.fileno()
        if pipe is None:
            return 0
        size = int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)
        return -(-size // SAMPLE_BYTES)  # Rounded up: the player may have read a part of a sample.

    def _cause(self) -> str:
        """The end of an error text that says how the player ended, such as " with code 1: REASON"; empty if it still runs after STALL_S."""
        code = self.wait(STALL_S)
        if code is None:
            return ""
        self._stderr.seek(max(self._stderr.seek(0, os.SEEK_END) - SAID_BYTES, 0))
        reason_text = failure_reason(self._stderr.read().decode(errors="replace"), self._name)
        cause = f" with {describe_end(code, 'code')}"
        return f"{cause}: {reason_text}" if reason_text else cause
