"""Films as the Thinker takes them: how many frames there is room for, when each picture stands beside the sound, and that one which is
refused after it was decoded leaves nothing."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import lengths, media_files
from helpers.models import text_pieces
from helpers.processes import open_files
from helpers.run import RunStream, open_of
from helpers.servers import all_free, family_logic, local_stage, stage_stub
from omnistage.models.conversation import Media, Turn
from omnistage.models.encoders.encoder import Features
from omnistage.models.encoders.reader import FILM_SHARE, rows_of
from omnistage.models.interface import BadRequest, Failed, TextRequest
from omnistage.models.media.decoder import DecodingProcess
from omnistage.models.media.terms import BadMedia, NoRoom
from omnistage.models.options import LoadOptions
from omnistage.models.qwen2_5_omni.thinker import Qwen2_5Thinker, load_thinker
from omnistage.v1 import stage_pb2

ROOM = 30_000


async def features(thinker: Qwen2_5Thinker, data: bytes, room: int = ROOM, *, use_audio: bool = True) -> Features:
    part = Media("video/mp4", data, use_audio)
    medium = thinker.reader.medium(part, data, hashlib.sha256(data).digest(), scope="", client="")
    return await thinker.reader.features(medium, room)


@lengths.drawn_cells(
    1,
    ("frames", "rate_hz", "times", "lasts_s"),
    [(40, 10, None, 4), (16, 1, None, 16), (6, 1, [5000 * number for number in range(6)], 30)],
    ids=["ten a second", "one a second", "one each five seconds"],
)
async def test_what_is_seen_and_heard_together_stands_at_the_same_time(
    thinker: Qwen2_5Thinker, frames: int, rate_hz: int, times: list[int] | None, lasts_s: int, seed: int
) -> None:
    """The last two pictures begin so long before the last sound as they last, to half a second."""
    film = await features(thinker, media_files.film(seed, frames, rate_hz=rate_hz, times=times, sound_s=lasts_s))
    layout = thinker.lay_out([thinker.config.ids.video], [film.extent])
    seen, heard = (layout.positions[0][layout.ids == of].max() for of in (thinker.config.ids.video, thinker.config.ids.audio))
    assert (heard - seen) / thinker.config.position_ids_per_second == pytest.approx(2 * lasts_s / _shown(film), abs=0.5)


def _shown(film: Features) -> int:
    """Frames that were taken."""
    assert film.extent.grid is not None
    return 2 * film.extent.grid.frames


async def test_a_long_film_is_looked_at_less_often(omni_checkpoint: Path, seed: int) -> None:
    """It has the times that it has, and the context has room for it, and for a question."""
    context = 2048
    thinker = load_thinker(omni_checkpoint, LoadOptions(path=omni_checkpoint, dtype="float32", family={"context": context}))
    film = await features(thinker, media_files.film(seed, 40, rate_hz=2, sound_s=20), context)
    assert context / 2 < rows_of(film.extent, thinker.config) <= context * FILM_SHARE
    assert 2 <= _shown(film) < 40
    layout = thinker.lay_out([thinker.config.ids.video], [film.extent])
    seen = layout.positions[0][layout.ids == thinker.config.ids.video].max()
    assert (seen + film.extent.seconds * thinker.config.position_ids_per_second) / thinker.config.position_ids_per_second == pytest.approx(
        20, abs=1
    )
    await thinker.close()


async def test_a_film_without_room_is_refused_before_it_is_decoded(thinker: Qwen2_5Thinker, seed: int) -> None:
    """Whatever follows its header: nothing of this one can be decoded."""
    data = media_files.film(seed, 60, rate_hz=10)
    begin, end = data.index(b"mdat") + 4, data.index(b"moov") - 4
    broken = data[:begin] + bytes(end - begin) + data[end:]
    with pytest.raises(BadMedia, match=r"takes \d+ tokens, and the conversation has room for 500"):
        await features(thinker, broken, 500, use_audio=False)
    with pytest.raises(BadMedia, match="damaged"):
        await features(thinker, broken, use_audio=False)


async def test_rows_are_put_together_on_a_thread(thinker: Qwen2_5Thinker, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a film is, others run meanwhile."""
    cat, threads = torch.cat, list[str]()

    def noted(*tensors: Any, **how: Any) -> torch.Tensor:
        threads.append(threading.current_thread().name)
        return cat(*tensors, **how)

    monkeypatch.setattr(torch, "cat", noted)
    film = await features(thinker, media_files.film(seed, 20, sound_s=2))
    assert len(film.rows) == rows_of(film.extent, thinker.config) - 2
    assert set(threads) == {"encoders"}


async def test_equal_films_that_are_refused_are_decoded_once(thinker: Qwen2_5Thinker, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that only this conversation has no room for is no reason for others."""
    decode, decoded = DecodingProcess.decode, list[str]()

    async def noted(process: DecodingProcess, request: dict[str, Any], *rest: Any) -> bytes:
        decoded.append(request["kind"])
        return await decode(process, request, *rest)

    monkeypatch.setattr(DecodingProcess, "decode", noted)
    data = refused_film(seed)
    refused = await asyncio.gather(*(features(thinker, data) for _ in range(6)), return_exceptions=True)
    assert all(isinstance(one, BadMedia) and "too short to hear anything" in str(one) for one in refused)
    assert decoded == ["video"]
    good = media_files.film(seed, 20, sound_s=2)
    small, large = await asyncio.gather(features(thinker, good, 100), features(thinker, good), return_exceptions=True)
    assert isinstance(small, NoRoom) and isinstance(large, Features)


@pytest.mark.parametrize("film_fps", [1.0, 2.0, 3.0])
async def test_frames_count_as_those_of_one_rate_where_that_is_said(omni_checkpoint: Path, seed: int, film_fps: float) -> None:
    """As Transformers' processors count the frames of any film if no program says an fps."""
    model = load_thinker(omni_checkpoint, LoadOptions(path=omni_checkpoint, dtype="float32", family={"film_fps": film_fps}))
    try:
        for frames, rate_hz, times in ((8, 4, None), (6, 1, [5000 * number for number in range(6)])):
            film = await features(model, media_files.film(seed, frames, rate_hz=rate_hz, times=times), use_audio=False)
            assert film.extent.seconds == 2 / film_fps
    finally:
        await model.close()


# Media that are refused after they were decoded -----------------------------------------------------------------------------------------


REFUSED = 6
"""Films, one after the other."""


@pytest.fixture
def resting_collector() -> Iterator[None]:
    """In a server it looks at old objects after hundreds of requests only, so nothing may wait for it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def pixels_here() -> tuple[int, int]:
    """Descriptors and mappings of decoded media that this process has."""
    mappings = Path("/proc/self/maps").read_text().splitlines()
    return sum("omnistage-medium" in target for _, target in open_files()), sum("omnistage-medium" in mapping for mapping in mappings)


def refused_film(seed: int) -> bytes:
    """With a sound that is too short, which is told when all of it is decoded."""
    return media_files.film(seed, 20, form="mov", sound_s=0.01, sound_codec="pcm_s16le")


@pytest.mark.usefixtures("resting_collector")
async def test_a_refusal_that_somebody_keeps_keeps_no_pixels(omni_checkpoint: Path, seed: int) -> None:
    model = load_thinker(omni_checkpoint, LoadOptions(path=omni_checkpoint, dtype="float32"))
    request = TextRequest((Turn("user", (Media("video/quicktime", refused_film(seed), use_audio=True),)),), seed=seed, max_tokens=4)
    with pytest.raises(BadRequest, match="too short to hear anything") as refused:
        await text_pieces(model, request)
    assert refused.value.__context__ is None
    assert pixels_here() == (0, 0)
    await model.close()


@pytest.mark.usefixtures("resting_collector")
async def test_films_that_are_refused_leave_no_pixels_in_a_server(omni_checkpoint: Path, seed: int) -> None:
    logic = family_logic("qwen2_5_omni", "thinker", checkpoint=omni_checkpoint)
    async with local_stage(logic, family="qwen2_5_omni") as server, stage_stub(server.address) as stub:
        description = await stub.Describe(stage_pb2.DescribeRequest(), timeout=10)
        for number in range(REFUSED):
            part = stage_pb2.Part(media=stage_pb2.Media(media_type="video/quicktime", data=refused_film(seed + number), use_audio=True))
            thinker = stage_pb2.ThinkerParams(messages=[stage_pb2.Message(role="user", parts=[part])], max_tokens=4)
            caller = RunStream(stub)
            await caller.send(open=open_of(description, params=stage_pb2.StageParams(thinker=thinker)))
            ended = (await caller.finish()).ended
            assert ended is not None
            assert "too short to hear anything" in ended.message
        await all_free([server.address])
        assert pixels_here() == (0, 0)


async def test_a_fault_of_the_sandbox_is_told_as_the_servers_own(
    omni_checkpoint: Path, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a library that wants a file in the middle of a sound."""
    (tmp_path / "soxr.py").write_text("class ResampleStream:\n    def __init__(self, *rest, **options):\n        open('/etc/hostname')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    model = load_thinker(omni_checkpoint, LoadOptions(path=omni_checkpoint, dtype="float32"))
    request = TextRequest((Turn("user", (Media("audio/wav", media_files.sound(seed, 0.5, 8000)),)),), seed=seed, max_tokens=4)
    with pytest.raises(Failed, match=r"this server cannot decode a medium because of a fault of its own"):
        await text_pieces(model, request)
    await model.close()
