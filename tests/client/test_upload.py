"""Files that are too large for a request: the client streams them, and all else is as for small ones."""

from __future__ import annotations

import asyncio
import hashlib
import os
import resource
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from helpers.servers import ServerProcesses, all_free, local_router, omni_stub, stack
from omnistage.client import AsyncOmni, BadRequestError, Done, Omni, TextDelta, Video
from omnistage.client import request as requests
from omnistage.client.request import Options
from omnistage.client.upload import LEAST_BYTES, PORTS, Conversing
from omnistage.models.media.spool import MEDIA_PORTS
from omnistage.models.toy import formulas
from omnistage.router.pipeline import load_pipeline

ROOT = Path(__file__).resolve().parents[2]
MP4 = b"\0\0\0\x18ftypmp42"
LENGTH = 12


def test_the_ports_of_a_client_are_those_of_the_models() -> None:
    """Neither knows the other: the contract names them."""
    assert PORTS == tuple(port.name for port in MEDIA_PORTS) == tuple(f"media{number}" for number in range(8))
    for page in ("docs/media.md", "protos/omnistage/v1/stage.proto"):
        text = " ".join((ROOT / page).read_text().replace("//", "").replace("`", "").split())
        assert f"has the ports {PORTS[0]} to {PORTS[-1]}" in text, page


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcesses]:
    seeing = {"thinker": {"films": True, "interval_s": 0.01}}
    with stack(tmp_path_factory.mktemp("uploads"), pipeline="toy-omni", family="toy-omni", options_of=seeing) as running:
        yield running


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two of 80 and 20 MiB, and one that fits into a request."""
    folder = tmp_path_factory.mktemp("films")
    made = []
    for size in (80 << 20, 20 << 20, 5000):
        made.append(folder / f"{size}.mp4")
        made[-1].write_bytes(MP4)
        os.truncate(made[-1], size)
    return made


def digest_of(path: Path) -> formulas.Seen:
    with path.open("rb") as file:
        return formulas.film(hashlib.file_digest(file, "sha256").digest())


def said(seen: list[formulas.Seen], seed: int, length: int = LENGTH) -> str:
    items = formulas.items(["u", *seen])
    return "".join(formulas.word(formulas.omni_token(seed, items, n)) for n in range(length))


def test_what_is_streamed_and_what_is_not(films: list[Path]) -> None:
    asked = requests.for_prompt("x", (), (), [films[2], Video(films[0], use_audio=True), films[1].read_bytes()], Options())
    small, large, bytes_, _ = asked.complete().thinker.messages[0].parts
    assert small.HasField("media") and len(small.media.data) == 5000
    assert (large.port, large.media_type, large.use_audio, large.total_bytes) == ("media0", "video/mp4", True, 80 << 20)
    assert (bytes_.port, bytes_.use_audio, bytes_.total_bytes) == ("media1", False, 20 << 20)
    assert [upload.source for upload in asked.uploads.values()] == [films[0], films[1].read_bytes()]
    with pytest.raises(BadRequestError, match=r"videos\[8\]: is one file above 16 MiB too many"):
        requests.for_prompt("x", (), (), [films[0]] * (len(PORTS) + 1), Options()).complete()
    with pytest.raises(BadRequestError, match=r"images\[0\]: .*is video/mp4, not a picture"):
        requests.for_prompt("x", [films[0]], (), (), Options()).complete()


async def test_large_films_are_seen_beside_small_ones(standing: ServerProcesses, films: list[Path]) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with AsyncOmni(address=standing.address) as omni:
        for _ in range(2):
            answer = await omni.generate("?", videos=films, seed=4, max_tokens=LENGTH, outputs=["text"])
            assert answer.text == said([*map(digest_of, films), "?"], 4)
            assert answer.usage.stages[0].input_items["media0"] == 80 << 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < LEAST_BYTES * 3 >> 10, "they are not read into memory"
    await all_free(list(standing.addresses.values()))


def test_what_is_refused_is_told_as_by_generate(standing: ServerProcesses, films: list[Path], tmp_path: Path) -> None:
    huge = tmp_path / "huge.mp4"
    huge.write_bytes(MP4)
    os.truncate(huge, 1 << 30)
    with Omni(address=standing.address) as omni:
        with pytest.raises(BadRequestError, match="more than 536870912 bytes") as told:
            omni.generate("?", videos=[films[1], huge])
        assert (told.value.fields[0].field, told.value.metadata["port"]) == ("videos[1]", "media1")
        assert told.value.message.startswith(f"videos[1]: {huge}: has more than")
        sound = tmp_path / "long.wav"
        sound.write_bytes(b"RIFF\0\0\0\0WAVE")
        os.truncate(sound, 20 << 20)
        with pytest.raises(BadRequestError, match="more than 1048576 bytes, the most of audio/wav"):
            omni.generate("?", audios=[sound])
        assert omni.generate("?", videos=[films[1]], seed=4, max_tokens=LENGTH).text == said([digest_of(films[1]), "?"], 4)


async def test_a_file_that_gets_shorter_or_goes_away_meanwhile_is_told(standing: ServerProcesses, tmp_path: Path) -> None:
    film = tmp_path / "film.mp4"
    for change in (lambda: os.truncate(film, 18 << 20), film.unlink):
        film.write_bytes(MP4)
        os.truncate(film, 20 << 20)
        asked = requests.for_prompt("?", (), (), [film], Options())
        request = asked.complete()
        change()
        async with omni_stub(standing.address) as stub:
            conversing = Conversing(stub.Converse(timeout=30), request, asked.uploads)
            with pytest.raises(BadRequestError, match=r"videos\[0\]: .*film.mp4"):
                async for _ in conversing:
                    pass
            conversing.cancel()
    await all_free(list(standing.addresses.values()))


async def test_a_router_that_is_lost_is_replaced_and_sent_the_file_again(standing: ServerProcesses, films: list[Path]) -> None:
    """In the middle of the answer, which goes on where it stopped."""
    async with AsyncExitStack() as first:
        lost = await first.enter_async_context(local_router(standing.addresses, load_pipeline("toy-omni")))
        async with AsyncOmni(address=f"{lost.address},{standing.address}") as omni:
            text = ""
            async for event in omni.stream("?", videos=[films[1]], seed=4, max_tokens=20, outputs=["text"]):
                if isinstance(event, TextDelta):
                    text += event.text
                    await first.aclose()
            assert isinstance(event, Done)
            assert [failover.stage for failover in event.failovers] == ["router"]
            assert text == said([digest_of(films[1]), "?"], 4, 20)
    await all_free(list(standing.addresses.values()))


async def test_who_leaves_in_the_middle_leaves_nothing(standing: ServerProcesses, films: list[Path]) -> None:
    async with AsyncOmni(address=standing.address) as omni:
        stream = omni.stream("?", videos=[films[0]], max_tokens=LENGTH)
        await anext(stream)
        await stream.aclose()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await omni.generate("?", videos=[films[0]], max_tokens=LENGTH)
    await all_free(list(standing.addresses.values()))
