"""The files of an answer: tried before anything is asked, whole or absent, never another file's place; sound on standard output."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import re
import select
import signal
import stat
import subprocess
import tempfile
import threading
import time
import wave
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import soundfile

from helpers import lengths, servers
from helpers.command import omnistage
from helpers.mounts import need_namespace
from helpers.output import COMMAND, names, refusal
from helpers.peer import STARTED, TEXT, USAGE, PlayingPeer, event, listening
from helpers.processes import StartedProcess
from helpers.terminal import terminal_after
from helpers.toy_pipeline import toy_pipeline
from omnistage.cli.make.files import OutputFile, new_name, slug
from omnistage.client import Omni
from omnistage.client.errors import RequestError
from omnistage.models.toy import formulas
from omnistage.v1 import chunk_pb2


def error_of(*words: str, folder: Path) -> str:
    """The one line that tells of the mistake; a hint stands below it, and nothing was asked."""
    error, hint = refusal(*words, folder=folder)
    assert hint.startswith("hint: ")
    return error


@lengths.drawn_cells(
    5,
    ("words", "told"),
    [
        (["--out", "."], "--out .: this is a folder"),
        (["--out", "/proc/x.wav"], "/proc/x.wav cannot be written: "),
        (["--out", "absent/x.wav"], "--out absent/x.wav: its folder does not exist"),
        (["--timeline", "-"], "standard output is for the text"),
        (["--out", "x.aac"], "only WAV, FLAC, Ogg Vorbis, Opus and MP3 can be written"),
        (["--out", "x"], "only WAV, FLAC, Ogg Vorbis, Opus and MP3 can be written"),
        (["--out", "x.opus", "--sample-rate", "44100"], "Opus cannot have 44100 samples a second, only 8000, 12000, 16000, 24000, 48000"),
        (["--out", "x.flac", "--encoding", "float32"], "FLAC does not hold samples as float32"),
        (["--out", "pipe.wav"], "this is no file but a device or a pipe"),
        (["--out", f"{'x' * 300}.wav"], "cannot be written: File name too long"),
        (["--timeline", "x.jpg"], "only PNG can be written"),
        (["--captions", "x.txt"], "only SubRip and WebVTT can be written"),
        (["--captions", "absent/x.srt"], "--captions absent/x.srt: its folder does not exist"),
        (["--out", "x.wav", "--timeline", "absent/x.png"], "--timeline absent/x.png: its folder does not exist"),
    ],
)
def test_a_place_that_cannot_be_is_told_before_anything_is_started(tmp_path: Path, words: list[str], told: str) -> None:
    """There is no address, so that a model would have to be fetched and loaded: the pipeline of that name is not even looked for."""
    os.mkfifo(tmp_path / "pipe.wav")
    assert told in error_of("say", "Hi", "--pipeline", "absent", *words, folder=tmp_path)
    assert names(tmp_path) == ["pipe.wav"]


def on_mount(options: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command with a small mount of its own at `folder`; its output, then its exit code and what is left there."""
    need_namespace("-m")
    script = f'folder=$1; shift; mount -t tmpfs -o {options} tmpfs "$folder" && {{ "$@"; echo "code $?"; ls -A "$folder"; }}'
    command = ["unshare", "-m", "sh", "-c", script, "sh", str(folder), *COMMAND, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_folder_that_may_not_be_written(tmp_path: Path) -> None:
    done = on_mount("ro", tmp_path, "say", "Hi", "--pipeline", "absent", "--out", f"{tmp_path}/x.wav")
    assert done.stdout.splitlines() == ["code 1"]
    assert done.stderr.splitlines()[0] == f"error: {tmp_path}/x.wav cannot be written: Read-only file system"


async def said(address: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(omnistage, "say", "Hi", *words, "--address", address)


async def test_a_file_keeps_its_mode_and_links_stay_links(tmp_path: Path) -> None:
    target, link = tmp_path / "target.wav", tmp_path / "link.wav"
    target.write_bytes(b"old")
    target.chmod(0o640)
    link.symlink_to(target)
    async with listening(PlayingPeer()) as wire:
        assert (await said(wire.address, "--out", link)).returncode == 0
    assert link.is_symlink()
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    with wave.open(str(target)) as file:
        assert file.getnframes() == 36


async def test_an_answer_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    old = tmp_path / "x.wav"
    old.write_bytes(b"old")
    async with listening(PlayingPeer(5)) as wire:
        done = await said(wire.address, "--out", old, "--timeline", tmp_path / "x.png", "--timeout", "1")
    assert (done.returncode, old.read_bytes(), names(tmp_path)) == (1, b"old", ["x.wav"])


def test_a_full_disk_is_told_with_the_path_and_leaves_no_cut_file(toy_address: str, tmp_path: Path) -> None:
    words = " ".join(["words"] * 200)  # more than two pages of sound
    done = on_mount("size=8k", tmp_path, "say", words, "--address", toy_address, "--out", f"{tmp_path}/x.wav")
    assert done.stdout.splitlines()[1:] == ["code 1"], done
    error = next(line for line in done.stderr.splitlines() if line.startswith("error: "))
    told, kept = error.split("; it is kept as ")
    assert told == f"error: {tmp_path}/x.wav cannot be written: No space left on device"
    with wave.open(kept) as file:
        assert file.getnframes() > 4096
    assert Path(kept).stat().st_mode & 0o077 == 0
    Path(kept).unlink()
    assert "Traceback" not in done.stderr


def test_what_can_be_kept_nowhere_is_told_to_be_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def fill(place: Path) -> None:
        place.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    told = f"{tmp_path}/x.wav cannot be written: No space left on device; what was made is lost"
    with pytest.raises(RequestError, match=re.escape(told)), OutputFile(tmp_path / "x.wav", "--out", {".wav": "WAV"}) as file:
        file.write(fill)
    assert names(tmp_path) == []


def is_whole(path: Path) -> bool:
    """Whether this is all the sound of `WORDS` that the toy stack has spoken."""
    with wave.open(str(path)) as file:
        frames: int = file.getnframes()
    return frames == len(formulas.audio(1, WORDS, len(WORDS.split()))) > 0


WORDS = "one two three four five six"
REDIRECTS = ("2>/dev/full", "2> >(exec true)", "2>&-")
ASKED = ("say", WORDS, "--seed", "1")


@lengths.one_or_all("redirect", REDIRECTS)
def test_an_answer_stays_though_nobody_reads_what_is_told_of_it(toy_address: str, tmp_path: Path, redirect: str, seed: int) -> None:
    redirect = lengths.draw(redirect, REDIRECTS, seed)
    out, picture = tmp_path / "x.wav", tmp_path / "x.png"
    words = (*COMMAND, *ASKED, "--address", toy_address, "--out", str(out), "--timeline", str(picture))
    done = subprocess.run(["bash", "-c", f'"$@" {redirect}', "bash", *words], stdout=subprocess.PIPE, text=True, timeout=60)
    assert names(tmp_path) == ["x.png", "x.wav"] and is_whole(out)
    assert (done.returncode, done.stdout.split()) == (0, WORDS.split())


def test_an_answer_stays_though_the_reader_of_its_text_has_gone(toy_address: str, tmp_path: Path) -> None:
    out = tmp_path / "x.wav"
    reading, writing = os.pipe()
    os.close(reading)
    command = [*COMMAND, *ASKED, "--address", toy_address, "--out", str(out)]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writing)
    assert is_whole(out)
    assert done.returncode == 141 and f"wrote {out}" in done.stderr


def test_a_file_that_is_mounted_by_itself_gets_the_answer(toy_address: str, tmp_path: Path) -> None:
    """As `docker run --volume FILE:FILE` has it: it cannot be replaced, nor can anything be made beside it in the second case."""
    need_namespace("-m")
    source, out = tmp_path / "source", tmp_path / "folder" / "x.wav"
    out.parent.mkdir()
    mounts = 'mount -t tmpfs tmpfs "$1" && touch "$2" && mount --bind "$0" "$2" && mount -o "remount,$3" tmpfs "$1" && shift 3 && exec "$@"'
    for options in ("rw", "ro"):
        out.touch()
        source.write_bytes(b"old" * 100_000)
        words = [*COMMAND, *ASKED, "--address", toy_address, "--out", str(out)]
        command = ["unshare", "-m", "sh", "-c", mounts, str(source), str(out.parent), str(out), options, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert is_whole(source)


def test_a_mounted_file_keeps_what_it_has_where_there_is_no_room(toy_address: str, tmp_path: Path) -> None:
    need_namespace("-m")
    (tmp_path / "small").mkdir()
    (tmp_path / "x.wav").touch()
    mounts = 'mount -t tmpfs -o size=8k tmpfs "$0" && printf old > "$0/x" && mount --bind "$0/x" "$1" && shift && "$@"; cat "$0/x"'
    words = [*COMMAND, "say", " ".join(["words"] * 200), "--address", toy_address, "--out", str(tmp_path / "x.wav")]
    command = ["unshare", "-m", "sh", "-c", mounts, str(tmp_path / "small"), str(tmp_path / "x.wav"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith("\nold") and "x.wav cannot be written: No space left on device" in done.stderr


SILENT_TEXT = chunk_pb2.Chunk(port="text", count=1, last=True, text=chunk_pb2.TextChunk(text=TEXT))
SILENT_ANSWER = [event(STARTED), event(SILENT_TEXT), event(chunk_pb2.Chunk(port="audio", last=True)), event(USAGE)]


@pytest.mark.parametrize(
    ("command", "out", "code", "text", "note"),
    [
        ("ask", "x.wav", 1, f"{TEXT}\n", "could be spoken"),
        ("say", "x.wav", 1, f"{TEXT}\n", "could be spoken"),
        ("ask", "-", 1, "", "nothing of the answer could be spoken"),
        ("ask", "", 0, f"{TEXT}\n", "no audio"),
    ],
)
async def test_what_cannot_be_spoken_is_an_error_where_a_file_or_a_pipe_was_wanted(
    tmp_path: Path, command: str, out: str, code: int, text: str, note: str
) -> None:
    words = ("--out", out) if out else ()
    async with listening(PlayingPeer(SILENT_ANSWER)) as wire:
        done = await asyncio.to_thread(omnistage, command, "什么是火山?", *words, "--address", wire.address, folder=tmp_path)
    assert (done.returncode, done.stdout) == (code, text)
    assert note in done.stderr and ("nothing of" in done.stderr or not out)
    assert names(tmp_path) == []


async def test_the_draft_of_a_killed_call_goes_with_the_next_one(tmp_path: Path) -> None:
    """And not that of one that lives."""
    async with listening(PlayingPeer(6, 6)) as wire:
        command = [*COMMAND, "say", "Hi", "--address", wire.address, "--out", str(tmp_path / "x.wav")]
        calls = [await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE) for _ in range(2)]
        for call in calls:
            assert call.stdout is not None
            assert await asyncio.wait_for(call.stdout.read(1), 60)
        assert len(names(tmp_path)) == 2
        calls[0].kill()
        await calls[0].wait()
        assert len(names(tmp_path)) == 2
        with OutputFile(tmp_path / "y.wav", "--out", {".wav": "WAV"}):
            assert len(names(tmp_path)) == 2
        assert len(names(tmp_path)) == 1
        calls[1].terminate()
        await asyncio.wait_for(calls[1].communicate(), 60)
    assert names(tmp_path) == []


# Names of pictures


def test_a_name_is_held_until_its_call_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with new_name("A hill", ".png", [Path()]) as first, new_name("a HILL!", ".png", [Path()]) as second:
        assert (first, second) == (Path("hill.png"), Path("hill-2.png"))
    assert not [*tmp_path.iterdir()]
    with new_name("A hill", ".png", [Path()]) as again:
        assert again == first


class ReadTogether(list[Path]):
    """Folders of which the first reading ends for all calls at the same time."""

    def __init__(self, folder: Path, barrier: threading.Barrier) -> None:
        super().__init__([folder])
        self._barriers = [barrier]

    def __iter__(self) -> Iterator[Path]:
        yield from super().__iter__()
        if self._barriers:
            self._barriers.pop().wait(20)


def test_calls_that_find_the_folder_empty_at_the_same_time_get_a_name_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    calls = 20
    barrier = threading.Barrier(calls)

    def taken_name() -> str:
        with new_name("A hill", ".png", ReadTogether(Path(), barrier)) as path:
            barrier.wait(20)
        return path.name

    with ThreadPoolExecutor(calls) as pool:
        taken = [future.result() for future in [pool.submit(taken_name) for _ in range(calls)]]
    assert sorted(taken) == sorted(["hill.png", *(f"hill-{number}.png" for number in range(2, calls + 1))])


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ("A photo of a cat wearing a hat", "photo-of-a-cat-wearing-a-hat"),
        ("a photo of the cat that is wearing a hat", "photo-of-the-cat-that-is"),
        ("../../etc/passwd", "etc-passwd"),
        ("-rf *", "rf"),
        ("The", "the"),
        ("🙂 \x1b[2J\u202e", "2j"),
        ("🙂", "picture"),
        ("Grüße, Œuvre", "grüße-œuvre"),
        ("हिन्दी में", "हिन्दी-में"),
        ("火山" * 40, "火山" * 7),
        ("x" * 300, "x" * 28),
        ("CON\x00\nnul", "con-nul"),
    ],
)
def test_names_of_prompts_are_short_and_of_letters(prompt: str, named: str) -> None:
    assert slug(prompt) == named


# Sound on standard output


@pytest.fixture(scope="module")
def loud_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a router whose answers have far more sound than a pipe holds."""
    folder = tmp_path_factory.mktemp("loud")
    with servers.toy_address(folder, toy_pipeline(folder, interval_s=0.02, samples_per_frame=4800)) as address:
        yield address


ASK = (*COMMAND, "ask", "Hi", "--seed", "1", "--out", "-", "--address")


def ask(address: str, *words: str, folder: Path | None = None) -> StartedProcess[bytes]:
    return StartedProcess([*ASK, address, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=folder)


def samples(data: bytes) -> np.ndarray:
    """The samples of a WAV file whose head does not know its length, as `aplay` reads it from a pipe."""
    sound: np.ndarray
    sound, rate_hz = soundfile.read(io.BytesIO(data), dtype="float32")
    assert rate_hz == 24000
    return sound


def wait_for_figures(asking: StartedProcess[bytes]) -> None:
    """All of the answer came, and nothing of it was read."""
    assert asking.stderr is not None
    shown = b""
    while b"ttft" not in shown:
        shown += os.read(asking.stderr.fileno(), 65536)


@pytest.fixture(scope="module")
def whole(loud_address: str) -> np.ndarray:
    with Omni(address=loud_address) as omni:
        audio = omni.generate("Hi", seed=1, max_tokens=40).audio
    assert audio is not None
    return audio.samples


def test_standard_output_is_a_wav_file_and_the_words_stand_elsewhere(loud_address: str, whole: np.ndarray, tmp_path: Path) -> None:
    """And no file is called a dash."""
    with ask(loud_address, "--max-tokens", "40", folder=tmp_path) as asking:
        sound, told = asking.communicate(timeout=60)
    assert (asking.returncode, names(tmp_path)) == (0, []), told
    assert np.array_equal(samples(sound), whole)
    assert b"ttft" in told and b"w" in told.splitlines()[0]


def test_it_comes_while_it_is_made(loud_address: str) -> None:
    """Long before the end of an answer that goes on for minutes."""
    with ask(loud_address, "--max-tokens", "4000") as asking:
        assert asking.stdout is not None
        assert asking.stdout.read(44 + 9600).startswith(b"RIFF") and asking.poll() is None
        asking.send_signal(signal.SIGINT)
        asking.stdout.close()
        assert asking.wait(30) == 130


def test_a_reader_that_plays_slowly_holds_no_answer_up(loud_address: str, whole: np.ndarray) -> None:
    """The router would cancel a client that reads nothing for ten seconds; the pipe is full long before."""
    with ask(loud_address, "--max-tokens", "40") as asking:
        assert asking.stdout is not None
        wait_for_figures(asking)
        data = b""
        while piece := os.read(asking.stdout.fileno(), 16384):
            data += piece
            time.sleep(0.001)
        assert asking.wait(30) == 0
    assert np.array_equal(samples(data), whole)


def test_a_reader_that_goes_away_ends_it(loud_address: str) -> None:
    with ask(loud_address, "--max-tokens", "4000") as asking:
        assert asking.stdout is not None and asking.stderr is not None
        asking.stdout.read(4096)
        asking.stdout.close()
        assert asking.wait(60) == 128 + signal.SIGPIPE and b"Traceback" not in asking.stderr.read()


def test_ctrl_c_ends_a_pipe_that_nobody_reads(loud_address: str) -> None:
    with ask(loud_address, "--max-tokens", "40") as asking:
        wait_for_figures(asking)
        while asking.poll() is None:  # The signal may come before the command is back from its figures.
            asking.send_signal(signal.SIGINT)
            time.sleep(0.05)
        assert asking.returncode == 130


def test_a_terminal_gets_no_sound(toy_address: str) -> None:
    terminal = terminal_after("say", "Hi", "--out", "-", "--address", toy_address, code=1)
    assert "standard output is a terminal" in " ".join(terminal.lines)


@pytest.mark.parametrize("words", [("--json",), ("--play",)])
def test_what_cannot_be_together_is_refused(toy_address: str, words: tuple[str, ...]) -> None:
    with ask(toy_address, *words) as asking:
        _, told = asking.communicate(timeout=60)
    assert asking.returncode == 2 and b"--out -" in told


def test_a_pipe_that_does_not_wait_gets_all_of_it(loud_address: str, whole: np.ndarray) -> None:
    """A program beside it may have set the pipe so. A full one from which a little was read takes only a part of the next piece."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with (
        StartedProcess([*ASK, loud_address, "--max-tokens", "40"], stdout=writing, stderr=subprocess.DEVNULL) as asking,
        os.fdopen(reading, "rb", buffering=0) as pipe,
    ):
        room = select.poll()
        room.register(writing, select.POLLOUT)
        data, deadline = b"", time.monotonic() + 60
        for _ in range(10):
            while room.poll(0):
                assert time.monotonic() < deadline
                time.sleep(0.005)
            data += pipe.read(5000)
        os.close(writing)
        while piece := pipe.read(1 << 16):
            data += piece
        assert asking.wait(60) == 0
    assert np.array_equal(samples(data), whole)
