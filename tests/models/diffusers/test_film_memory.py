"""The memory and the work of films, told when a model is loaded and refused before any of it is taken."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from helpers import lengths
from helpers.artists import check_refused, draw, model_of
from helpers.drawings import checkpoint
from omnistage.models.diffusers.films import FilmMemory, FilmPainter, TensorBytes
from omnistage.models.diffusers.folder import load_pipeline, read_index
from omnistage.models.diffusers.loading import PAINTERS
from omnistage.models.diffusers.options import Defaults, DiffusersOptions
from omnistage.models.diffusers.plan import DrawingLimits, DrawingPlan, EditedPicture, plan_drawing
from omnistage.models.interface import BadRequest, DrawRequest
from omnistage.models.memory import TensorCache
from omnistage.models.reports import LoadError

SMALL: dict[str, Any] = {"width": 64, "height": 64, "steps": 2}
FILM = DrawingLimits(multiple=16, width=832, height=480, steps=50, guidance=5.0, frames=81, frame_multiple=4, max_frames=1024)


def painter_of(name: str, size: str) -> FilmPainter:
    folder = checkpoint(name, size)
    defaults = Defaults.of(folder, DiffusersOptions(**SMALL))
    painter = PAINTERS[read_index(folder).class_name](load_pipeline(folder, torch.float32), TensorCache(0), TensorCache(0), defaults)
    assert isinstance(painter, FilmPainter)
    return painter


def plan_of(painter: FilmPainter, **asked: Any) -> DrawingPlan:
    return plan_drawing(replace(DrawRequest(seed=0, prompt="a dog"), **asked), painter.limits, "m")


@lengths.drawn_cells(1, "size", ["tiny", "odd"])
@lengths.drawn_cells(1, "name", ["wan2.2-t2v", "wan2.2-ti2v"])
def test_what_decoding_takes_is_known_before_for_any_size(name: str, size: str) -> None:
    painter = painter_of(name, size)
    memory = FilmMemory(painter, 1 << 40)
    for side, frames in ((64, 9), (128, 9), (128, 21)):
        plan = plan_of(painter, width=side, height=side, frames=frames)
        grid = side // int(painter.pipe.vae_scale_factor_spatial)
        latents = torch.zeros(1, painter.channels, painter.frames(plan), grid, grid)
        with torch.inference_mode(), TensorBytes() as count:
            for frame in painter.shown(latents):
                assert frame.shape == (side, side, 3)
        assert 0.95 * count.most <= memory.taken(plan).frame <= 1.4 * count.most


@lengths.drawn_cells(1, "name", ["wan2.2-t2v", "wan2.2-ti2v"])
def test_what_a_step_takes_is_known_before(name: str) -> None:
    painter = painter_of(name, "small")
    plan = plan_of(painter, width=192, height=192, frames=17)
    assert plan.negative is not None
    with torch.inference_mode():
        canvas = painter.canvas(plan, painter.encode(plan), 0)
        with TensorBytes() as count:
            painter.forward([canvas])
    taken = FilmMemory(painter, 1 << 40).taken(plan)
    assert 0.8 * count.most <= taken.step <= 2.5 * count.most


def test_a_longer_film_takes_no_more_while_it_is_decoded_and_a_larger_one_does() -> None:
    painter = painter_of("wan2.2-t2v", "tiny")
    memory = FilmMemory(painter, 1 << 40)
    short, long, large = (
        memory.taken(plan_of(painter, **asked)) for asked in ({"frames": 9}, {"frames": 41}, {"frames": 9, "width": 128, "height": 128})
    )
    assert short.frame == long.frame < large.frame
    assert short.kept * 11 == long.kept * 3 and long.step > short.step


def test_a_whole_film_is_held_where_it_begins_from_a_picture_or_is_decoded_in_tiles() -> None:
    painter = painter_of("wan2.2-ti2v", "tiny")
    memory, pixels = FilmMemory(painter, 1 << 40), 64 * 64 * 3 * 4
    short, long = (plan_of(painter, frames=frames) for frames in (9, 41))
    picture = EditedPicture(64, 64, ())
    for plans in ([replace(plan, images=(picture,)) for plan in (short, long)], [short, long]):
        first, second = (memory.taken(plan).frame for plan in plans)
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
    limits = replace(FILM, max_work=832 * 480 * 81 * 50)
    plan_drawing(DrawRequest(seed=0, prompt="x"), limits, "m")
    with pytest.raises(BadRequest, match=f"pixels times frames times steps.*{told}") as refused:
        plan_drawing(replace(DrawRequest(seed=0, prompt="x"), **asked), limits, "m")
    assert refused.value.field == f"diffusion.{field}"


def test_options_bound_frames_seconds_and_work() -> None:
    def applied(limits: DrawingLimits, **options: Any) -> DrawingLimits:
        return Defaults(DiffusersOptions.from_settings(options)).applied(limits)

    assert applied(FILM).max_work == 1024 * 1024 * 81 * 200
    assert applied(FILM, max_work=5_000_000_000).max_work == 5_000_000_000
    bounded = applied(FILM, max_frames=30)
    assert (bounded.frames, bounded.max_frames) == (29, 30)
    assert applied(FILM, max_frames=5000).max_frames == 1024
    with pytest.raises(BadRequest, match="at most 30 frames"):
        plan_drawing(DrawRequest(seed=0, prompt="x", frames=33), bounded, "m")
    sound = replace(FILM, width=0, height=0, frames=0, max_frames=0, sized=False, seconds=10.0, max_seconds=47.0)
    assert applied(sound, max_seconds=5.0).seconds == applied(sound, max_seconds=5.0).max_seconds == 5.0
    assert applied(sound, max_seconds=90.0).max_seconds == 47.0
    with pytest.raises(LoadError, match="max_frames is 1: films have 82 frames, or a multiple of 10 fewer"):
        applied(replace(FILM, frames=82, frame_multiple=10, max_frames=1024), max_frames=1)
