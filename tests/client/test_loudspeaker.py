"""Players on this machine: found by trying, named by a variable, and played through for real if their programs are there."""

from __future__ import annotations

import asyncio
import ctypes.util
import importlib.util
import os
import shlex
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from helpers.processes import StartedProcess
from helpers.sink import Sink
from helpers.waiting import until
from omnistage.client import Audio, NotAvailableError, Player, RequestError, find_loudspeaker
from omnistage.client.loudspeaker import PLAYER_VARIABLE

RATE = 24_000
PATIENCE_S = 30.0
Named = Callable[[str, str], None]


@pytest.fixture(autouse=True)
def silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without a sound device, whatever this one has: no server that plays, and an ALSA that knows no device."""
    (tmp_path / "alsa.conf").write_text("# no device\n")
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("ALSA_CONFIG_PATH", str(tmp_path / "alsa.conf"))
    monkeypatch.setenv("PULSE_SERVER", f"unix:{tmp_path}/run/nobody")
    for name in ("XDG_RUNTIME_DIR", "PIPEWIRE_RUNTIME_DIR", "PULSE_RUNTIME_PATH"):
        monkeypatch.setenv(name, str(tmp_path / "run"))
    for name in (PLAYER_VARIABLE, "SDL_AUDIODRIVER", "AUDIODRIVER", "AUDIODEV"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def program(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_a_machine_without_a_device_has_none() -> None:
    assert find_loudspeaker() is None
    with pytest.raises(NotAvailableError, match="no loudspeaker here") as raised:
        Player()
    assert "answer.save(path)" in raised.value.hint


def test_the_first_program_that_works_is_taken(silent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink, sound = Sink(silent / "sink", speed=0.0), np.linspace(-1, 1, 5000, dtype=np.float32)
    played = shlex.join(sink.loudspeaker.command(RATE))
    program(silent / "bin", "pw-cat", 'echo "pw-cat: unrecognized option --raw" >&2; exit 1')
    program(silent / "bin", "aplay", f'echo "$@" > {shlex.quote(str(silent / "words"))}; exec {played}')
    program(silent / "bin", "play", f"touch {shlex.quote(str(silent / 'tried'))}")
    monkeypatch.setenv("PATH", str(silent / "bin"))
    found = find_loudspeaker()
    assert found is not None and found.name == "aplay"
    with Player(found) as player:
        player.write(Audio(sound, RATE))
    np.testing.assert_array_equal(sink.samples(), sound)
    assert f"-f FLOAT_LE -r {RATE} -c 1" in (silent / "words").read_text() and not (silent / "tried").exists()


@pytest.fixture
def player(silent: Path, monkeypatch: pytest.MonkeyPatch) -> Named:
    """Makes a program the player that is named, before those of this machine."""
    monkeypatch.setenv("PATH", f"{silent / 'bin'}:/usr/bin:/bin")

    def named(name: str, script: str) -> None:
        monkeypatch.setenv(PLAYER_VARIABLE, name)
        program(silent / "bin", name, script)

    return named


@pytest.mark.parametrize("script", ["exit 1", "echo 'audio open failed' >&2", "sleep 100"])
def test_a_program_that_cannot_play_is_passed_over(player: Named, script: str) -> None:
    player("ffplay", script)
    with pytest.raises(NotAvailableError, match=r"OMNISTAGE_PLAYER=ffplay: it (ended with code 1|has no device|did not answer within 2 s)"):
        find_loudspeaker()


def test_a_server_with_nothing_but_a_null_sink_plays_nothing(silent: Path, player: Named) -> None:
    player("pacat", "exit 0")
    program(silent / "bin", "pactl", "echo Default Sink: auto_null")
    with pytest.raises(NotAvailableError, match="it has no device"):
        find_loudspeaker()
    program(silent / "bin", "pactl", "echo Default Sink: speakers")
    assert find_loudspeaker() is not None


def test_no_server_is_asked_where_none_listens(silent: Path, monkeypatch: pytest.MonkeyPatch, player: Named) -> None:
    monkeypatch.delenv("PULSE_SERVER")
    if Path("/run/pulse/native").exists() or Path(f"/run/user/{os.getuid()}/pulse/native").exists():
        pytest.skip("a PulseAudio server listens on this machine")
    player("pacat", "exit 0")
    program(silent / "bin", "pactl", f"touch {shlex.quote(str(silent / 'asked'))}")
    with pytest.raises(NotAvailableError, match="there is no such server here"):
        find_loudspeaker()
    assert not (silent / "asked").exists()


def test_none_is_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLAYER_VARIABLE, "none")
    assert find_loudspeaker() is None


def test_a_command_is_taken_as_it_is(silent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink, sound = Sink(silent / "si nk", speed=0.0), np.linspace(-1, 1, 100, dtype=np.float32)
    monkeypatch.setenv(PLAYER_VARIABLE, sink.variable)
    with Player(sample_rate_hz=8000) as player:
        player.write(Audio(sound, 8000))
    np.testing.assert_array_equal(sink.samples(), sound)
    assert sink.rate_hz == 8000


@pytest.mark.parametrize(
    ("value", "kind", "says"),
    [
        ("loud", RequestError, "OMNISTAGE_PLAYER=loud: no player of that name is known"),
        ("cat 'x {rate}", RequestError, "No closing quotation"),
        ("no-such-program {rate}", NotAvailableError, "there is no program no-such-program"),
        ("aplay", NotAvailableError, "OMNISTAGE_PLAYER=aplay: it is not installed"),
    ],
)
def test_a_wrong_variable_is_told(silent: Path, monkeypatch: pytest.MonkeyPatch, value: str, kind: type[RequestError], says: str) -> None:
    monkeypatch.setenv("PATH", str(silent))
    monkeypatch.setenv(PLAYER_VARIABLE, value)
    with pytest.raises(kind, match=says) as raised:
        find_loudspeaker()
    assert raised.value.hint or value == "aplay"


def need(player: str) -> None:
    """Skips where a player is not installed."""
    if player == "sounddevice" and importlib.util.find_spec(player) is None:
        pytest.skip("the package sounddevice is not installed")
    if player == "sounddevice" and ctypes.util.find_library("portaudio") is None:
        pytest.skip("there is no PortAudio: apt install libportaudio2")
    if player != "sounddevice" and shutil.which(player) is None:
        pytest.skip(f"there is no {player}: its package is {PACKAGES[player]}")


PACKAGES = {"aplay": "alsa-utils", "ffplay": "ffmpeg", "play": "sox", "pacat": "pulseaudio-utils", "pulseaudio": "pulseaudio"}

ALSA = """
pcm.!default {{ type plug slave {{ pcm recorder format FLOAT_LE rate 24000 channels 1 }} }}
pcm.recorder {{ type file slave.pcm {{ type null }} file "{file}" format raw }}
"""


def play(seed: int) -> NDArray[np.float32]:
    """A sound, played in pieces by the player that is named, through its end."""
    sound = np.random.default_rng(seed).uniform(0.1, 0.9, RATE).astype(np.float32)
    with Player() as opened:
        for piece in np.split(sound, 24):
            opened.write(Audio(piece, RATE))
    assert opened.heard.samples == len(sound)
    return sound


@pytest.mark.parametrize("name", ["sounddevice", "aplay", "play"])
def test_alsa_gets_every_sample_once(silent: Path, monkeypatch: pytest.MonkeyPatch, seed: int, name: str) -> None:
    need(name)
    recorded = silent / "recorded.raw"
    (silent / "alsa.conf").write_text(ALSA.format(file=recorded))
    monkeypatch.setenv(PLAYER_VARIABLE, name)
    sound = play(seed)
    heard = np.fromfile(recorded, "<f4")
    # Behind it there may be silence that fills a buffer. SoX computes in 32 bit whole numbers.
    np.testing.assert_allclose(heard[: len(sound)], sound, rtol=0, atol=1e-7 if name == "play" else 0)
    assert not heard[len(sound) :].any()


@pytest.fixture
def pulse_recording(silent: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[bytearray]:
    """The sound that a PulseAudio server of the test's own plays, float32 in real time."""
    need("pulseaudio")
    recorded, fifo = bytearray(), silent / "run" / "fifo"
    sink = f"module-pipe-sink rate={RATE} channels=1 format=float32le file={fifo} use_system_clock_for_timing=yes"
    command = ["pulseaudio", "-n", "--daemonize=no", "--exit-idle-time=-1", "--use-pid-file=no", "-L", sink]
    command += ["-L", f"module-native-protocol-unix socket={silent}/run/native auth-anonymous=1"]
    monkeypatch.setenv("HOME", str(silent / "run"))
    monkeypatch.delenv("PULSE_SERVER")
    with StartedProcess(command, stderr=subprocess.PIPE) as server:
        deadline = threading.Timer(PATIENCE_S, server.kill)
        deadline.start()
        assert server.stderr is not None

        def record() -> None:
            with fifo.open("rb", buffering=0) as pipe:
                while data := pipe.read(1 << 12):
                    recorded.extend(data)

        reader = threading.Thread(target=record)
        while not (silent / "run" / "native").exists():
            assert server.poll() is None, server.stderr.read()
            deadline.join(0.01)
        reader.start()
        monkeypatch.setenv("PULSE_SERVER", f"unix:{silent}/run/native")
        yield recorded
        server.kill()
        deadline.cancel()
        reader.join(PATIENCE_S)


@pytest.mark.parametrize(
    ("name", "exact_to"),
    [
        ("pacat", 0.0),
        ("aplay", 0.0),
        ("sounddevice", 0.0),
        pytest.param("play", 1e-7, id="play, in 32 bit whole numbers"),
        pytest.param("ffplay", 2**-15, id="ffplay, in 16 bit"),
    ],
)
def test_pulseaudio_gets_every_sample_once(
    pulse_recording: bytearray, silent: Path, monkeypatch: pytest.MonkeyPatch, seed: int, name: str, exact_to: float
) -> None:
    need(name)
    if name in ("aplay", "sounddevice"):
        if not any(Path("/usr/lib").glob("*/alsa-lib/libasound_module_pcm_pulse.so")):
            pytest.skip("ALSA cannot play by PulseAudio here: its package is libasound2-plugins")
        (silent / "alsa.conf").write_text("pcm.!default { type pulse }\n")
    if name == "play" and not any(Path("/usr/lib").glob("*/sox/libsox_fmt_pulseaudio.so")):
        pytest.skip("SoX cannot play by PulseAudio here: its package is libsox-fmt-pulse")
    for variable, value in ((PLAYER_VARIABLE, name), ("AUDIODRIVER", "pulseaudio"), ("SDL_AUDIODRIVER", "pulseaudio")):
        monkeypatch.setenv(variable, value)
    sound = play(seed)

    def heard() -> NDArray[np.float32]:
        played = np.frombuffer(bytes(pulse_recording[: len(pulse_recording) // 4 * 4]), np.float32)
        return played.compress(played != 0)

    # Where the server or the player is held up there is silence, which stands in no sound here.
    asyncio.run(until(lambda: len(heard()) >= len(sound)))
    np.testing.assert_allclose(heard(), sound, rtol=0, atol=exact_to)
