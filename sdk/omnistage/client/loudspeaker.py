"""Finds a program that plays sound on this machine from its standard input; a trial shows whether it works."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from omnistage.client.errors import NotAvailableError, RequestError

VARIABLE = "OMNISTAGE_PLAYER"
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
    return os.environ.get(VARIABLE, "").strip() == "none"


def find_loudspeaker() -> Loudspeaker | None:
    """The player of this machine: the one that the variable OMNISTAGE_PLAYER names, or the first that works of the package sounddevice and,
    on PATH, pacat (PulseAudio, or PipeWire in its place), pw-cat (PipeWire), aplay (ALSA), play (SoX) and ffplay (FFmpeg); None if none
    works, or the variable is `none`.

    Each is tried without a sound; that takes 0.01 s to 0.3 s for each that is installed. Code on an event loop calls this in a thread.
    Raises RequestError if the variable names no known player, NotAvailableError if the named player does not work."""
    if is_silenced():
        return None
    wish = os.environ.get(VARIABLE, "").strip()
    if wish:
        return _chosen_player(wish)
    return next((command for player in PLAYERS if (command := player.installed()) and not player.trouble(command)), None)


def _chosen_player(name: str) -> Loudspeaker:
    """The player that the variable names. name: its value, the name of a player or a command. Raises as `find_loudspeaker`."""
    player = next((player for player in PLAYERS if player.name == name), None)
    if player is not None:
        command = player.installed()
        trouble = player.trouble(command) if command else "it is not installed"
        if command is None or trouble:
            raise NotAvailableError(
                f"{VARIABLE}={name}: {trouble}", hint=f"Name another player, or leave {VARIABLE} unset to have one found."
            )
        return command
    names = ", ".join(player.name for player in PLAYERS)
    if "{rate}" not in name:
        raise RequestError(
            f"{VARIABLE}={name}: no player of that name is known",
            hint=f"Give none, {names}, or a command with {{rate}} and {{channels}} that plays raw float32 from its standard input.",
        )
    try:
        words = tuple(shlex.split(name))
    except ValueError as error:
        raise RequestError(f"{VARIABLE}={name}: {error}", hint="Write it as a shell would read it.") from None
    if shutil.which(words[0]) is None:
        raise NotAvailableError(f"{VARIABLE}: there is no program {words[0]}", hint="Give its path, or put its folder on PATH.")
    return Loudspeaker(Path(words[0]).name, words)


@dataclass(frozen=True, slots=True)
class _Player:
    """A program that this module knows. options: of its command line. reachable: returns False if a trial is useless, because it cannot
    play. silent_mark: the text on standard error of a program that ends with 0 although it has no device. asks: a command for the trial,
    run in place of the program; empty: none. without: words in its output which mean that there is no device. tail_s: see Loudspeaker."""

    name: str
    options: str
    reachable: Callable[[], bool] = lambda: True
    silent_mark: str = ""
    asks: tuple[str, ...] = ()
    without: str = ""
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
                self.asks or loudspeaker.command(TRIAL_RATE_HZ),
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
            return reason(done.stderr, self.name) or f"it ended with code {done.returncode}"
        silent = (self.silent_mark and self.silent_mark in done.stderr) or (self.without and self.without in done.stdout)
        return "it has no device" if silent else ""


class _SoundDevice(_Player):
    """The package sounddevice, imported in a process of its own."""

    def installed(self) -> Loudspeaker | None:
        if not sys.executable or importlib.util.find_spec("sounddevice") is None:
            return None
        # -P: Python does not look for packages in the folder of that program.
        program = (sys.executable, "-P", str(Path(__file__).with_name("portaudio.py")))
        return Loudspeaker(self.name, (*program, *self.options.split()), self.tail_s)


def reason(text: str, name: str) -> str:
    """The one line to show from a program's standard error, without unprintable characters: the last line that begins with the program's
    name, or else the last line; empty: there is none."""
    lines = [line for line in ("".join(filter(str.isprintable, line)).strip()[:200] for line in text.splitlines()) if line]
    return next((line for line in reversed(lines) if line.startswith(name)), lines[-1] if lines else "")


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
        asks=("pactl", "info"),
        without="Default Sink: auto_null",
    ),
    _Player("pw-cat", "--playback --raw --format=f32 --rate={rate} --channels={channels} --latency=200ms -"),
    _Player("aplay", "-q -t raw -f FLOAT_LE -r {rate} -c {channels} --buffer-time=200000 -"),
    _Player("play", "-q -t raw -e floating-point -b 32 -L -r {rate} -c {channels} -"),
    # Stands last, because it plays 16 bits, and ends before its last buffer is heard. By default it takes one channel; the option for more
    # has changed its name.
    _Player(
        "ffplay",
        "-hide_banner -loglevel error -nodisp -autoexit -probesize 32 -analyzeduration 0 -f f32le -sample_rate {rate} -i -",
        silent_mark="audio open failed",
        tail_s=0.25,
    ),
)
