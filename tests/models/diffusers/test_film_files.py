"""Films of a loop of our own: as files, in which form they are asked for, when their pieces leave, and who goes on with them; and what
memory and work they take."""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import av
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from helpers import lengths
from helpers.artists import PiecesOfDrawing, check_refused, draw, model_of
from helpers.drawings import checkpoint
from helpers.moving import FILM_SIDE, frames_of
from helpers.painting import painter_of
from omnistage.models.diffusers.films import Clips, FilmMemory, FilmPainter, TensorBytes
from omnistage.models.diffusers.folder import load_pipeline
from omnistage.models.diffusers.model import DrawnModel, StepDrawing
from omnistage.models.diffusers.options import Defaults, DiffusersOptions
from omnistage.models.diffusers.plan import DrawingLimits, DrawingPlan, EditedPicture, plan_drawing
from omnistage.models.interface import MAX_CLIP_BYTES, BadRequest, Clip, DrawRequest, Failed, PromptRead, TensorRows, inputs_of
from omnistage.models.reports import LoadError

FILM = {"width": FILM_SIDE, "height": FILM_SIDE, "steps": 2, "max_pixels": 1 << 16}
AVC = 'video/mp4; codecs="avc1"'


@pytest.fixture
async def model() -> AsyncIterator[DrawnModel[Any]]:
    async with model_of(checkpoint("wan2.2-t2v"), **FILM) as loaded:
        yield loaded


def clips_of(drawing: PiecesOfDrawing) -> list[Clip]:
    return [piece for piece in drawing.pieces if isinstance(piece, Clip)]


def check_near(frames: Sequence[NDArray[np.generic]], pixels: NDArray[np.generic]) -> None:
    """The colours of each frame are those that were drawn: a file keeps no exact pixels."""
    for frame, expected in zip(frames, pixels, strict=True):
        assert np.abs(frame.mean((0, 1)) - expected.mean((0, 1))).max() < 4


def film_plan(frames: int, media_type: str = "") -> DrawingPlan:
    limits = DrawingLimits(
        multiple=8, width=64, height=64, steps=1, guidance=1.0, frames=frames, max_frames=1000, frame_multiple=1, rate_hz=16
    )
    return plan_drawing(DrawRequest(seed=0, prompt="a dog", frames=frames, media_type=media_type), limits, "a model")


@lengths.drawn_cells(
    2,
    ("asked", "told", "codec"),
    [("", "video/webm", "vp9"), ("video/webm", "video/webm", "vp9"), ("video/mp4", "video/mp4", "vp09."), (AVC, "video/mp4", "avc1.")],
)
async def test_a_film_has_the_form_that_was_asked_for(model: DrawnModel[Any], asked: str, told: str, codec: str, seed: int) -> None:
    ports = {"video": 0, "pixels": 0}
    drawing = await draw(model, "a dog", ports=ports, seed=seed, frames=9, frames_per_second=12.5, media_type=asked)
    clips = clips_of(drawing)
    assert {clip.media_type for clip in clips} == {told} and all(clip.codecs.startswith(codec) for clip in clips)
    frames, rate_hz = frames_of(b"".join(clip.data for clip in clips))
    pixels = drawing.rows("pixels").reshape(9, FILM_SIDE, FILM_SIDE, 3)
    assert len(frames) == 9 and rate_hz == 12.5
    check_near(frames, pixels)


@lengths.drawn_cells(1, "asked", ["", "video/mp4", AVC])
async def test_pixels_and_bytes_of_a_frame_leave_before_the_next_is_encoded(model: DrawnModel[Any], asked: str, seed: int) -> None:
    prompt_read, *pieces = (await draw(model, "a dog", ports={"video": 0, "pixels": 0}, seed=seed, frames=9, media_type=asked)).pieces
    assert isinstance(prompt_read, PromptRead)
    assert [type(piece) for piece in pieces] == [TensorRows, Clip] * 9
    assert [piece.frames for piece in pieces if isinstance(piece, Clip)] == [1] * 9


@lengths.drawn_cells(1, "asked", ["", "video/mp4", AVC])
async def test_who_has_some_of_a_film_gets_the_rest_of_its_file(model: DrawnModel[Any], asked: str, seed: int) -> None:
    drawing = await draw(model, "a dog", ports={"video": 0, "pixels": 0}, seed=seed, frames=9, media_type=asked)
    whole, pixels = clips_of(drawing), drawing.rows("pixels").reshape(9, FILM_SIDE, FILM_SIDE, 3)
    for first in (1, 4, 8, 9):
        rest = clips_of(await draw(model, "a dog", ports={"video": first}, seed=seed, frames=9, media_type=asked))
        frames, _ = frames_of(b"".join(clip.data for clip in whole[:first] + rest))
        assert len(rest) == 9 - first and len(frames) == 9
        check_near(frames, pixels)


@lengths.drawn_cells(2, "media_type", ["", "video/mp4", AVC])
@lengths.drawn_cells(2, "first", [1, 7, 16, 23])
def test_the_rest_of_a_file_goes_with_what_was_drawn_in_other_company(media_type: str, first: int) -> None:
    """A few pixels are then a level apart, which decoders of frames that follow on others cannot bear."""
    draws, (rows, columns) = np.random.default_rng(first), np.mgrid[:160, :256]
    frames = [_waves(rows, columns, number) for number in range(24)]
    apart = [np.where(draws.random(frame.shape) < 0.001, frame + 1, frame).astype(np.uint8) for frame in frames]
    begun, rest = (Clips(film_plan(24, media_type), 16, place) for place in (0, first))
    whole = [clip for frame in frames for clip in begun.with_frame(frame)]
    pieces = whole[:first] + [clip for frame in apart for clip in rest.with_frame(frame)]
    shown, _ = frames_of(b"".join(clip.data for clip in pieces))
    assert len(shown) == 24 and sum(clip.frames for clip in pieces) == 24
    assert max(np.abs(one.astype(int) - frame).mean() for one, frame in zip(shown, frames, strict=True)) < 8


def _waves(rows: NDArray[np.intp], columns: NDArray[np.intp], number: int) -> NDArray[np.uint8]:
    """[height, width, 3], with edges, which move."""
    waves = 120 + 60 * np.sin((columns + 3 * number) / 17) + 40 * np.sign(np.cos((rows - 2 * number) / 11))
    return np.stack([waves, waves[::-1], waves[:, ::-1]], 2).astype(np.uint8)


@lengths.drawn_cells(
    2,
    ("asked", "field", "told"),
    [
        ({"media_type": "video/quicktime"}, "media_type", r'video/webm \(VP9\), video/mp4 \(VP9\), video/mp4; codecs="avc1" \(H\.264\)'),
        ({"media_type": 'video/mp4; codecs="hvc1"'}, "media_type", "ask for one of these"),
        ({"media_type": "video/webm; codecs=av01"}, "media_type", "ask for one of these"),
        ({"media_type": "audio/wav"}, "media_type", "ask for one of these"),
        ({"frames_per_second": 0.01}, "frames_per_second", "0.1 to 120"),
        ({"frames_per_second": float("nan")}, "frames_per_second", "0.1 to 120"),
    ],
)
async def test_files_that_are_not_made_are_refused(model: DrawnModel[Any], asked: dict[str, Any], field: str, told: str) -> None:
    await check_refused(model, field, told, ports={"video": 0}, frames=5, **asked)


async def test_without_an_encoder_others_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with an FFmpeg that was built without code under the GPL."""
    monkeypatch.setattr(av, "codecs_available", av.codecs_available - {"libx264"})
    async with model_of(checkpoint("wan2.2-t2v"), **FILM) as model:
        assert model.info.settings["files of films"] == "video/webm (VP9), video/mp4 (VP9)"
        told = r"no libx264 here, so H\.264 is not made: ask for video/webm \(VP9\), video/mp4 \(VP9\)$"
        await check_refused(model, "media_type", told, ports={"video": 0}, frames=5, media_type=AVC)
        assert len(clips_of(await draw(model, "a dog", ports={"video": 0}, frames=5, media_type="video/mp4"))) == 5


async def test_a_reader_who_stops_holds_no_decoder(model: DrawnModel[Any], seed: int) -> None:
    """There is memory for one decoder. Others are drawn meanwhile, and the film of the slow reader is whole."""
    request = DrawRequest(seed=seed, prompt="a dog", frames=81)
    prepared, sessions = await model.prepare(request), model.sessions
    artist = model._artist
    assert isinstance(artist, StepDrawing) and artist.memory is not None
    memory, taken = artist.memory, artist.memory.estimate(prepared)
    memory.budget = taken.total_bytes
    assert 2 * taken.frame_bytes > memory.budget
    async with aclosing(model.draw(prepared, inputs_of(), {"video": 0})) as slow:
        assert isinstance(await anext(slow), PromptRead)
        first = await anext(slow)
        assert isinstance(first, Clip)
        data = [first.data]
        async with asyncio.timeout(100):
            for number in range(3):
                pieces = await draw(model, "a cat", ports={"video": 0}, seed=seed + number, frames=41)
                assert len(frames_of(b"".join(clip.data for clip in clips_of(pieces)))[0]) == 41
        assert not sessions._decoding
        data += [piece.data async for piece in slow if isinstance(piece, Clip)]
    assert len(frames_of(b"".join(data))[0]) == 81


@lengths.drawn_cells(1, "media_type", ["", "video/mp4", AVC])
def test_large_frames_wait_for_others_to_go_with(media_type: str) -> None:
    """Noise is as large as a film can be: its first frame does not fit into a message."""
    noise = np.random.default_rng(0).integers(0, 256, (1200, 1600, 3), np.uint8)
    clips = Clips(film_plan(8, media_type), 16, 0)
    made = [list(clips.with_frame(frame)) for frame in [noise, *[np.zeros_like(noise)] * 7]]
    assert made[0] == [] and len(made[1]) + len(made[2]) > 1
    pieces = [clip for part in made for clip in part]
    assert all(len(clip.data) <= MAX_CLIP_BYTES and clip.frames for clip in pieces)
    assert sum(clip.frames for clip in pieces) == 8
    with av.open(io.BytesIO(b"".join(clip.data for clip in pieces)), "r") as container:
        assert sum(1 for _ in container.decode(video=0)) == 8


def test_a_film_of_nothing_but_large_frames_is_refused() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (1200, 1600, 3), np.uint8)
    clips = Clips(film_plan(1), 16, 0)
    with pytest.raises(Failed, match="ask for fewer pixels"):
        list(clips.with_frame(noise))


# Memory and work, told when a model is loaded and refused before any of it is taken -----------------------------------------------------


SMALL: dict[str, Any] = {"width": 64, "height": 64, "steps": 2}
USUAL_FILM = DrawingLimits(multiple=16, width=832, height=480, steps=50, guidance=5.0, frames=81, frame_multiple=4, max_frames=1024)


def film_painter(name: str, size: str) -> FilmPainter:
    folder = checkpoint(name, size)
    painter = painter_of(folder, load_pipeline(folder, torch.float32), DiffusersOptions(**SMALL))
    assert isinstance(painter, FilmPainter)
    return painter


def plan_of(painter: FilmPainter, **asked: Any) -> DrawingPlan:
    return plan_drawing(replace(DrawRequest(seed=0, prompt="a dog"), **asked), painter.limits, "m")


@lengths.drawn_cells(1, "size", ["tiny", "odd"])
@lengths.drawn_cells(1, "name", ["wan2.2-t2v", "wan2.2-ti2v"])
def test_what_decoding_takes_is_known_before_for_any_size(name: str, size: str) -> None:
    painter = film_painter(name, size)
    memory = FilmMemory(painter, 1 << 40)
    for side, frames in ((64, 9), (128, 9), (128, 21)):
        plan = plan_of(painter, width=side, height=side, frames=frames)
        grid = side // int(painter.pipe.vae_scale_factor_spatial)
        latents = torch.zeros(1, painter.channels, painter.frames(plan), grid, grid)
        with torch.inference_mode(), TensorBytes() as count:
            for frame in painter.shown(latents):
                assert frame.shape == (side, side, 3)
        assert 0.95 * count.peak_bytes <= memory.estimate(plan).frame_bytes <= 1.4 * count.peak_bytes


@lengths.drawn_cells(1, "name", ["wan2.2-t2v", "wan2.2-ti2v"])
def test_what_a_step_takes_is_known_before(name: str) -> None:
    painter = film_painter(name, "small")
    plan = plan_of(painter, width=192, height=192, frames=17)
    assert plan.negative is not None
    with torch.inference_mode():
        canvas = painter.canvas(plan, painter.encode(plan), 0)
        with TensorBytes() as count:
            painter.forward([canvas])
    taken = FilmMemory(painter, 1 << 40).estimate(plan)
    assert 0.8 * count.peak_bytes <= taken.step_bytes <= 2.5 * count.peak_bytes


def test_a_longer_film_takes_no_more_while_it_is_decoded_and_a_larger_one_does() -> None:
    painter = film_painter("wan2.2-t2v", "tiny")
    memory = FilmMemory(painter, 1 << 40)
    short, long, large = (
        memory.estimate(plan_of(painter, **asked)) for asked in ({"frames": 9}, {"frames": 41}, {"frames": 9, "width": 128, "height": 128})
    )
    assert short.frame_bytes == long.frame_bytes < large.frame_bytes
    assert short.film_bytes * 11 == long.film_bytes * 3 and long.step_bytes > short.step_bytes


def test_a_whole_film_is_held_where_it_begins_from_a_picture_or_is_decoded_in_tiles() -> None:
    painter = film_painter("wan2.2-ti2v", "tiny")
    memory, pixels = FilmMemory(painter, 1 << 40), 64 * 64 * 3 * 4
    short, long = (plan_of(painter, frames=frames) for frames in (9, 41))
    picture = EditedPicture(64, 64, ())
    for plans in ([replace(plan, images=(picture,)) for plan in (short, long)], [short, long]):
        first, second = (memory.estimate(plan).frame_bytes for plan in plans)
        assert second - first >= 32 * pixels
        painter.pipe.vae.tiled_above = 1


async def test_memory_is_told_and_what_fits_is_drawn(seed: int) -> None:
    folder, budget = checkpoint("wan2.2-t2v"), 10 << 20
    async with model_of(folder, film_bytes=budget, **SMALL) as model:
        told = model.info.settings["memory of the usual film"]
        assert re.search(r"MiB above the weights \(.* as long as it is drawn, .* in a step, .* while it is decoded\), and 10 MiB may", told)
        told = r"1001 frames of 64x64 take .* above the weights, and 10 MiB .*film_bytes"
        most = int(re.findall(r"ask for at most (\d+) of this size", await check_refused(model, "frames", told, frames=1001))[0])
        assert most % 4 == 1 and 9 < most < 1001
        request = DrawRequest(seed=seed, prompt="a dog", frames=most)
        await model.prepare(request)
        with pytest.raises(BadRequest):
            await model.prepare(replace(request, frames=most + 4))
        await check_refused(model, "width", "ask for fewer pixels", frames=9, width=512, height=512)
        made = await draw(model, "a dog", ports={"pixels": 0}, frames=9, seed=seed)
        assert made.rows("pixels").shape == (9 * 64 * 64, 3) and np.ptp(made.rows("pixels")) > 0


async def test_a_model_of_which_no_film_fits_is_not_loaded() -> None:
    with pytest.raises(LoadError, match=r"no film fits: .* 64 KiB may be taken \(option film_bytes\)"):
        async with model_of(checkpoint("wan2.2-t2v"), film_bytes=64 << 10, **SMALL):
            raise AssertionError("it was loaded")


@pytest.mark.parametrize(
    ("asked", "field", "told"),
    [
        ({"frames": 1001}, "frames", "at most 81 frames"),
        ({"width": 1664, "height": 960}, "width", r"at most 399360 pixels"),
        ({"steps": 100}, "steps", "at most 50 steps"),
        ({"frames": 85, "steps": 150}, "steps", "at most 47 steps"),
    ],
)
def test_too_much_work_names_the_field_that_is_furthest_above_the_usual(asked: dict[str, Any], field: str, told: str) -> None:
    limits = replace(USUAL_FILM, max_work=832 * 480 * 81 * 50)
    plan_drawing(DrawRequest(seed=0, prompt="x"), limits, "m")
    with pytest.raises(BadRequest, match=f"pixels times frames times steps.*{told}") as refused:
        plan_drawing(replace(DrawRequest(seed=0, prompt="x"), **asked), limits, "m")
    assert refused.value.field == f"diffusion.{field}"


def test_options_bound_frames_seconds_and_work() -> None:
    def applied(limits: DrawingLimits, **options: Any) -> DrawingLimits:
        return Defaults(DiffusersOptions.from_settings(options)).applied(limits)

    assert applied(USUAL_FILM).max_work == 1024 * 1024 * 81 * 200
    assert applied(USUAL_FILM, max_work=5_000_000_000).max_work == 5_000_000_000
    bounded = applied(USUAL_FILM, max_frames=30)
    assert (bounded.frames, bounded.max_frames) == (29, 30)
    assert applied(USUAL_FILM, max_frames=5000).max_frames == 1024
    with pytest.raises(BadRequest, match="at most 30 frames"):
        plan_drawing(DrawRequest(seed=0, prompt="x", frames=33), bounded, "m")
    sound = replace(USUAL_FILM, width=0, height=0, frames=0, max_frames=0, sized=False, seconds=10.0, max_seconds=47.0)
    assert applied(sound, max_seconds=5.0).seconds == applied(sound, max_seconds=5.0).max_seconds == 5.0
    assert applied(sound, max_seconds=90.0).max_seconds == 47.0
    with pytest.raises(LoadError, match="max_frames is 1: films have 82 frames, or a multiple of 10 fewer"):
        applied(replace(USUAL_FILM, frames=82, frame_multiple=10, max_frames=1024), max_frames=1)
