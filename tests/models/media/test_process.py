"""The processes that decode: they may die, hang and run out of memory, cost one medium by that, and leave nothing."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from helpers import lengths, media_files
from helpers.decoding import decoding
from helpers.lengths import rounds
from helpers.processes import few_descriptors, wait_end
from helpers.waiting import turning, until
from omnistage.models.media import child
from omnistage.models.media.decoder import MediaDecoder
from omnistage.models.media.results import DecodedFilm
from omnistage.models.media.terms import BadMedia, DecoderFailed, DecoderFull, FilmPreprocessing, MediaLimits, PicturePreprocessing

SMALL = PicturePreprocessing(max_pixels=16 * 784)
LONG = FilmPreprocessing(fps=10, min_pixels=700 * 784, max_pixels=700 * 784, total_pixels=1 << 30)


def children() -> set[int]:
    """The children of this process, with those that ended and were not waited for."""
    while True:
        with suppress(FileNotFoundError, ProcessLookupError):  # A thread has ended, and its children are those of another one now.
            tasks = Path("/proc/self/task").iterdir()
            return {int(word) for task in tasks for word in (task / "children").read_text().split()}


def descriptors(pid: int | None = None) -> int:
    """The number of descriptors of a process; this one if none is named."""
    return len(list(Path(f"/proc/{pid or 'self'}/fd").iterdir()))


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No process and no descriptor more than before, without what an earlier test left to the collector."""
    gc.collect()
    processes, count = children(), descriptors()
    yield
    gc.collect()
    # Fewer descriptors are possible: threads of gRPC may close those of an earlier test now.
    assert children() == processes and descriptors() <= count


@pytest.fixture(scope="module")
def picture() -> bytes:
    return media_files.picture(3)


@pytest.fixture(scope="module")
def film() -> bytes:
    """Much work as LONG, in few bytes."""
    return media_files.film(4, 250, rate_hz=10, numbered=True)


async def begun(decoder: MediaDecoder, work: asyncio.Task[DecodedFilm]) -> int:
    """The process that decodes, once it has taken processor time for it; it has decoded before."""
    (pid,) = decoder.pids
    before = _ticks(pid)
    await until(lambda: work.done() or _ticks(pid) > before + 10)
    assert not work.done()
    return pid


def _ticks(pid: int) -> int:
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[11:13]))


async def test_a_process_that_dies_costs_the_medium_that_it_decoded(picture: bytes, film: bytes) -> None:
    async with decoding(processes=1) as decoder:
        await decoder.picture(picture, SMALL)
        for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT):
            work = asyncio.create_task(decoder.film(film, LONG))
            pid = await begun(decoder, work)
            waiting = asyncio.create_task(decoder.picture(picture, SMALL))
            os.kill(pid, number)
            with pytest.raises(BadMedia, match=rf"ended the process that does it \(signal {number.name}\)"):
                await work
            await waiting
            assert decoder.pids != [pid]


async def test_one_that_hangs_is_killed_when_its_time_is_up(picture: bytes, film: bytes) -> None:
    """Stopped, it does not even answer signals that can be caught."""
    async with decoding(MediaLimits(film_time_s=3.0), processes=1) as decoder:
        await decoder.picture(picture, SMALL)
        work = asyncio.create_task(decoder.film(film, LONG))
        pid = await begun(decoder, work)
        os.kill(pid, signal.SIGSTOP)
        async with turning() as turns:
            with pytest.raises(BadMedia, match="takes longer than 3 s: send a part of it"):
                await work
            assert turns() > 1
        await decoder.picture(picture, SMALL)
        assert decoder.pids != [pid]


async def test_one_that_needs_more_memory_than_there_is_costs_that_medium(picture: bytes) -> None:
    large = media_files.encoded(Image.new("RGB", (5000, 4000)), "PNG", compress_level=1)
    async with decoding(MediaLimits(memory_bytes=280 << 20), processes=1) as decoder:
        for _ in range(2):
            with pytest.raises(BadMedia, match=r"more memory than the 280 MiB there are: send a smaller one"):
                await decoder.picture(large)
            await decoder.picture(picture, SMALL)


@lengths.drawn_cells(1, "happens", ["ended", "killed at that moment", "stopped"])
async def test_one_that_dies_or_stops_with_nothing_to_do_costs_nothing(picture: bytes, happens: str) -> None:
    async with decoding(processes=2) as decoder:
        await asyncio.gather(*(decoder.picture(picture, SMALL, client=client) for client in "ab"))
        pids = decoder.pids
        assert len(pids) == 2
        for pid in pids:
            os.kill(pid, signal.SIGSTOP if happens == "stopped" else signal.SIGKILL)
            assert happens != "ended" or wait_end(pid, 60)
        assert (await decoder.picture(picture, SMALL)).pixels.size
        assert set(decoder.pids).isdisjoint(pids)


@lengths.drawn_cells(1, "does", ["os.kill(os.getpid(), signal.SIGKILL)", "os.kill(os.getpid(), signal.SIGSEGV)", "os._exit(3)", "CLOSE"])
async def test_one_that_dies_while_it_starts_costs_nothing(
    picture: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, does: str
) -> None:
    """Or leaves, and lives on."""
    if does == "CLOSE":
        does = "os.close(int(sys.argv[1])); time.sleep(300)"
    (tmp_path / "soxr.py").write_text(ONCE.format(does=does))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    async with decoding(processes=1) as decoder:
        assert (await decoder.picture(picture, SMALL)).pixels.size
        assert (tmp_path / "once").exists()


ONCE = """
import os, signal, sys, time
from pathlib import Path
once = Path(__file__).with_name("once")
if not once.exists():
    once.touch()
    {does}
"""
"""A library that the process loads while it starts."""


async def test_a_client_leaves_a_process_to_others(picture: bytes) -> None:
    """However many of its pictures there are."""
    async with decoding(processes=3) as decoder:
        await asyncio.gather(*(decoder.picture(picture, SMALL, client="many") for _ in range(20)))
        assert len(decoder.pids) == 2
        await asyncio.gather(*(decoder.picture(picture, SMALL, client=client) for client in ("many", "many", "one")))
        assert len(decoder.pids) == 3


def replace_child(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program in the place of the one that decodes."""
    package = folder / "omnistage" / "models" / "media"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "child.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(folder))


async def test_no_process_that_takes_anything_is_told_and_is_no_fault_of_the_medium(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    replace_child(LAZY, tmp_path, monkeypatch)
    async with decoding(processes=1) as decoder:
        with pytest.raises(DecoderFailed, match=r"ended while it had nothing to do( \(.*\))?: ask again"):
            await decoder.picture(b"anything")


LAZY = """
import socket, sys
socket.socket(fileno=int(sys.argv[1])).send(b"ready")
"""


def test_an_event_loop_that_ends_leaves_no_process(film: bytes) -> None:
    """Not even one that it was still to see the end of."""

    async def given_up() -> None:
        decoder = MediaDecoder()
        task = asyncio.create_task(decoder.film(film, LONG))
        await until(lambda: bool(decoder.pids))
        task.cancel()
        await asyncio.wait([task])

    before = children(), descriptors()
    asyncio.run(given_up())
    assert (children(), descriptors()) == before


async def test_cancelling_ends_the_work_and_leaves_nothing(picture: bytes, film: bytes, seed: int) -> None:
    chance = random.Random(seed)
    async with decoding(processes=2) as decoder:
        for _ in range(8):
            works = [asyncio.create_task(decoder.film(film, LONG)) for _ in range(5)]
            for _ in range(chance.choice([0, 1, 2, 5, 30, 300])):
                await asyncio.sleep(0)
            for work in works:
                work.cancel()
            assert all(isinstance(one, asyncio.CancelledError) for one in await asyncio.gather(*works, return_exceptions=True))
        assert (await decoder.picture(picture, SMALL)).pixels.size
        assert decoder.waiting == 0


@rounds(short=300, long=3000)
async def test_hundreds_of_media_leave_nothing(seed: int, rounds: int) -> None:
    """Bytes and descriptors, good ones and bad ones; the process is another one in the end, and what it was given is no longer open."""
    good = [media_files.picture(seed), media_files.sound(seed, 0.1), media_files.film(seed, 4)]
    async with decoding(processes=1) as decoder:
        await decoder.picture(good[0], SMALL)
        first = decoder.pids
        with tempfile.TemporaryFile() as file:
            file.write(good[0])
            file.flush()
            for number in range(rounds // 4):
                await decoder.picture(file.fileno() if number % 2 else good[0], SMALL)
                await decoder.sound(good[1])
                await decoder.film(good[2], FilmPreprocessing(min_pixels=784, max_pixels=784))
                with pytest.raises(BadMedia):
                    await decoder.picture(good[0][: 40 + number])
            assert file.tell() == len(good[0])
        (pid,) = decoder.pids
        assert [pid] != first
        await until(lambda: descriptors(pid) == 4)  # it answers before it closes what it was given


async def test_a_result_lives_as_long_as_somebody_holds_it(picture: bytes) -> None:
    async with decoding(processes=1) as decoder:
        one, other = [(await decoder.picture(picture, SMALL)).pixels for _ in range(2)]
    before = one.copy()
    one[3:5] = 7
    assert np.array_equal(other, before)


async def test_a_source_is_a_file_with_its_own_offset(picture: bytes) -> None:
    async with decoding(processes=3) as decoder:
        with tempfile.TemporaryFile() as file:
            file.write(picture)
            file.flush()
            file.seek(17)
            results = await asyncio.gather(*(decoder.picture(file.fileno(), SMALL) for _ in range(6)))
            assert file.tell() == 17
        assert all(np.array_equal(results[0].pixels, one.pixels) for one in results)
        with socket.socket() as stream, pytest.raises(ValueError, match="regular file"):
            await decoder.picture(stream.fileno())


@pytest.mark.parametrize("left", [0, 1])
async def test_a_server_without_descriptors_blames_itself_and_no_medium(picture: bytes, left: int) -> None:
    async with decoding(processes=1) as decoder:
        with tempfile.TemporaryFile() as file:
            file.write(picture)
            file.flush()
            await decoder.picture(file.fileno(), SMALL)
            with few_descriptors(left), pytest.raises(DecoderFailed, match=r"cannot be handed .*Too many open files.*: ask again later"):
                await decoder.picture(file.fileno(), SMALL)
            await decoder.picture(file.fileno(), SMALL)


async def test_too_many_that_wait_are_told_so(picture: bytes, film: bytes) -> None:
    async with decoding(processes=1, max_waiting=2) as decoder:
        await decoder.picture(picture, SMALL)
        work = asyncio.create_task(decoder.film(film, LONG))
        await begun(decoder, work)
        waiting = [asyncio.create_task(decoder.picture(picture, SMALL)) for _ in range(2)]
        await until(lambda: decoder.waiting == 2)
        with pytest.raises(DecoderFull, match="2 media wait to be decoded: ask again later"):
            await decoder.picture(picture, SMALL)
        work.cancel()
        await asyncio.gather(*waiting)


async def test_films_leave_a_process_to_pictures(picture: bytes, film: bytes) -> None:
    """However many there are: none ends before the picture."""
    async with decoding(processes=2) as decoder:
        await decoder.picture(picture, SMALL)
        films = [asyncio.create_task(decoder.film(film, LONG)) for _ in range(3)]
        await begun(decoder, films[0])
        await decoder.picture(picture, SMALL)
        assert decoder.waiting == 2
        for work in films:
            work.cancel()
        await asyncio.wait(films)


async def test_the_process_can_do_nothing_but_compute_and_holds_no_secret(picture: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNISTAGE_TOKEN", "a secret of the stage")
    with tempfile.TemporaryFile() as file:
        os.set_inheritable(file.fileno(), True)
        async with decoding(processes=1) as decoder:
            await decoder.picture(picture, SMALL)
            (pid,) = decoder.pids
            folder = Path(f"/proc/{pid}")
            await until(lambda: descriptors(pid) == 4)
            assert b"secret" not in (folder / "environ").read_bytes()
            status = dict(line.split(":\t", 1) for line in (folder / "status").read_text().splitlines())
            assert (status["Seccomp"].strip(), status["NoNewPrivs"].strip(), status["Threads"].strip()) == ("2", "1", "1")
            opened = [str(one.readlink()) for one in (folder / "fd").iterdir()]
            assert sorted(one.partition(":")[0] for one in opened) == ["/dev/null", "/dev/null", "/dev/null", "socket"]


def test_processor_time_ends_it_even_if_its_parent_does_not(film: bytes) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            words = (str(theirs.fileno()), str(os.getpid()), "{}")
            process = subprocess.Popen([sys.executable, "-m", "omnistage.models.media.child", *words], pass_fds=(theirs.fileno(),))
        with process, tempfile.TemporaryFile() as file:
            file.write(film)
            file.flush()
            assert ours.recv(100) == child.READY
            request = {"kind": "video", "ask": asdict(LONG), "limit_s": 0.1 - child.GRACE_S}
            socket.send_fds(ours, [json.dumps(request).encode()], [file.fileno(), file.fileno()])
            assert ours.recv(100) == child.RECEIPT
            assert process.wait(60) == -signal.SIGPROF


LIES = [
    *(b"no JSON", b"[]", b'{"shape": [2, 2, 3]}', b'{"shape": [1000, 1000, 3]}', b'{"shape": [-1, -4, 3]}', b'{"shape": "much"}'),
    *(b'{"shape": [1e400, 1, 3]}', b'{"samples": 4}', b"[" * 60_000),
]


@pytest.mark.parametrize("kept", [False, True])
async def test_a_process_that_lies_is_not_believed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kept: bool) -> None:
    """One that was taken over: another program in its place, which answers what it likes, and may keep a way to change what it made. It
    decodes nothing any more."""
    replace_child(LIAR.format(lies=LIES, kept=kept, count=tmp_path / "count"), tmp_path, monkeypatch)
    async with decoding(processes=1) as decoder:
        for _ in LIES:
            with pytest.raises(BadMedia, match="decoding it went wrong"):
                await decoder.picture(b"anything")
            assert decoder.pids == []
        ends: AbstractContextManager[object] = pytest.raises(BadMedia, match="decoding it went wrong") if kept else nullcontext()
        with ends:
            assert (await decoder.picture(b"anything")).pixels.shape == (2, 2, 3)


LIAR = """
import mmap, os, pathlib, socket, sys
count = pathlib.Path("{count}")
number = count.stat().st_size if count.exists() else 0
with count.open("a") as file:
    file.write("x")
channel = socket.socket(fileno=int(sys.argv[1]))
channel.send(b"ready")
while True:
    _, (file, result), _, _ = socket.recv_fds(channel, 10000, 2)
    channel.send(b"taken")
    os.write(result, bytes(5 if number == 2 else 12))
    if {kept}:
        way = mmap.mmap(result, 0)
    channel.send([*{lies!r}, b'{{"shape": [2, 2, 3]}}'][number])
"""


async def test_a_process_that_cannot_start_says_so(picture: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "soxr.py").write_text("raise SystemExit(3)")
    with monkeypatch.context() as broken:
        broken.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
        async with decoding(processes=1) as decoder:
            for _ in range(2):
                with pytest.raises(DecoderFailed, match=r"did not start \(status 3\); its standard error says why"):
                    await decoder.picture(picture)
            broken.undo()
            await decoder.picture(picture)
