"""Media that come in pieces: whole files in the end, bounded on the way, and nothing left of them whatever happens."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest

from helpers.lengths import rounds
from helpers.processes import open_files
from helpers.waiting import until
from omnistage.models.conversation import Streamed
from omnistage.models.interface import BadRequest, Full, Piece
from omnistage.models.media.spool import MEDIA_PORTS, Spool

MAX_FILM_BYTES = 1 << 20
FILMS = [Streamed(port.name, "video/mp4") for port in MEDIA_PORTS[:3]]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the files are; nothing may be in it and none of them be open when a test ends."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    assert not list(tmp_path.iterdir())
    assert not [name for _, name in open_files() if name.startswith(str(tmp_path))]


def most(streamed: Streamed) -> int:
    return MAX_FILM_BYTES


def pieces_of(media: dict[str, bytes], chance: random.Random) -> list[Piece]:
    """In pieces of any size, the ports mixed; the end comes with the last bytes or by itself."""
    left = dict.fromkeys(media, 0)
    made = []
    while left:
        port = chance.choice(sorted(left))
        first, data = left[port], media[port]
        part = data[first : first + chance.choice([1, 7, 1000, 65536])]
        last = first + len(part) == len(data) and (not part or chance.random() < 0.5)
        made.append(Piece(port, first, last, part))
        left[port] += len(part)
        if last:
            del left[port]
    return made


async def arriving(pieces: Sequence[Piece]) -> AsyncIterator[Piece]:
    for piece in pieces:
        yield piece


async def test_what_comes_out_is_what_came_in_however_it_was_cut(seed: int):
    chance = random.Random(seed)
    spool = Spool()
    media = {one.port: chance.randbytes(chance.choice([1, 3000, 200_000])) for one in FILMS}
    async with spool.files(FILMS, most) as files:
        await files.take_all(arriving(pieces_of(media, chance)))
        assert spool.held_bytes == sum(map(len, media.values()))
        for port, whole in files.complete_media.items():
            assert (whole.size, whole.digest) == (len(media[port]), hashlib.sha256(media[port]).digest())
            assert os.pread(whole.file, whole.size + 1, 0) == media[port]
    assert spool.held_bytes == 0


@pytest.mark.parametrize(
    ("streamed", "pieces", "field"),
    [
        *[(Streamed("media0", "video/mp4"), pieces, "port") for pieces in ([bytes(MAX_FILM_BYTES), b"x"], [b""])],
        *[(Streamed("media0", "video/mp4", total_bytes=5), [b"123", last], "total_bytes") for last in (b"456", b"4")],
    ],
    ids=["too large", "empty", "more than said", "less than said"],
)
async def test_a_medium_that_is_not_right_is_refused_before_it_is_written(streamed: Streamed, pieces: list[bytes], field: str):
    spool = Spool()
    async with spool.files([streamed], most) as files:
        for piece in pieces[:-1]:
            await files.take(Piece("media0", 0, False, piece))
        held = spool.held_bytes
        with pytest.raises(BadRequest) as refused:
            await files.take(Piece("media0", 0, True, pieces[-1]))
        assert (refused.value.field, spool.held_bytes) == (f"thinker.messages.parts.{field}", held)
    assert spool.held_bytes == 0


async def test_a_medium_that_says_that_it_is_too_large_is_refused_at_once():
    with pytest.raises(BadRequest, match="more than 1048576 bytes, the most of video/mp4"):
        Spool().files([Streamed("media0", "video/mp4", total_bytes=1 << 30)], most)


async def test_media_that_end_early_are_told():
    async with Spool().files(FILMS, most) as files:
        with pytest.raises(BadRequest, match="ended before its media did"):
            await files.take_all(arriving([Piece("media0", 0, True, b"all")]))


async def test_all_media_of_a_process_are_bounded_together_and_a_host_leaves_some():
    spool = Spool(1000)
    first, second, third = (spool.files(FILMS, most, client) for client in ("host/one", "host/two", "other/one"))
    async with first as files, second as more, third as others:
        await files.take(Piece("media0", 0, False, bytes(600)))
        with pytest.raises(Full):
            await others.take(Piece("media0", 0, False, bytes(401)))
        with pytest.raises(Full):
            await more.take(Piece("media0", 0, False, bytes(151)))
        await others.take(Piece("media0", 0, False, bytes(400)))
    assert spool.held_bytes == 0


async def test_a_disk_that_is_full_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    spool = Spool()
    async with spool.files(FILMS, most) as files:
        with pytest.raises(Full, match="No such file"):
            await files.take(Piece("media0", 0, False, b"x"))
    assert spool.held_bytes == 0


@rounds(10, 100)
async def test_who_is_cancelled_at_any_moment_leaves_nothing(rounds: int, seed: int):
    """Also a write that still runs in its thread: the file is closed after it, and no other file is written to."""
    chance = random.Random(seed)
    spool = Spool()

    async def work() -> None:
        media = {one.port: chance.randbytes(300_000) for one in FILMS}
        async with spool.files(FILMS, most) as files:
            await files.take_all(arriving(pieces_of(media, chance)))

    for _ in range(rounds):
        working = asyncio.create_task(work())
        for _ in range(chance.randint(0, 40)):
            await asyncio.sleep(0)
        working.cancel()
        await asyncio.wait({working})
        assert spool.held_bytes == 0
    await until(lambda: not [name for _, name in open_files() if name.startswith(tempfile.gettempdir())])  # A thread may still close them.
