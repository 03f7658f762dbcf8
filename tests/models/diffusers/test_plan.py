"""Requests that are refused before anything is drawn, and the plans that the others become."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from omnistage.models.checkpoint.files import BadCheckpoint
from omnistage.models.conversation import Media
from omnistage.models.diffusers.options import Defaults, DiffusersOptions
from omnistage.models.diffusers.pictures import check_kind
from omnistage.models.diffusers.plan import DrawingLimits, plan_drawing, smallest
from omnistage.models.interface import BadRequest, DrawRequest
from omnistage.models.reports import LoadError

WORDS = DrawingLimits(multiple=16, width=128, height=96, steps=20, guidance=4.0, negative=" ")
EDIT = replace(WORDS, width=0, height=0, images=(1, 2))
LAYERED = replace(WORDS, width=0, height=0, images=(1, 1), layers=4, max_layers=8, sides=(640, 1024))
STRETCHED = replace(WORDS, min_steps=2)
WHOLE = replace(WORDS, guidable=False, negatable=False, previewed=False, max_results=1)
FIXED = replace(EDIT, sized=False)
IMAGE = Media("image/png", b"-")

REFUSED: list[tuple[DrawingLimits, dict[str, Any], str]] = [
    (STRETCHED, {"steps": 1}, "steps"),
    (WORDS, {"steps": 201}, "steps"),
    (WORDS, {"width": 65}, "width"),
    (WORDS, {"height": 72}, "height"),
    (WORDS, {"width": 16, "height": 16}, "width"),
    (WORDS, {"width": 8}, "width"),
    (WORDS, {"width": 16384, "height": 16384}, "width"),
    (replace(WORDS, max_side=2048), {"width": 32, "height": 2064}, "height"),
    (WORDS, {"width": 16384, "height": 128, "media_type": "image/webp"}, "media_type"),
    (replace(WORDS, max_work=128 * 96 * 20 * 3), {"results": 4}, "steps"),
    (WORDS, {"guidance_scale": math.nan}, "guidance_scale"),
    (WORDS, {"guidance_scale": math.inf}, "guidance_scale"),
    (WORDS, {"guidance_scale": 1e9}, "guidance_scale"),
    (WORDS, {"guidance_scale": -1.0}, "guidance_scale"),
    (WORDS, {"guidance_scale": 1.0, "negative_prompt": "rain"}, "negative_prompt"),
    (WORDS, {"frames": 6}, "frames"),
    (WORDS, {"seconds": 1.0}, "duration_s"),
    (WORDS, {"layers": 2}, "layers"),
    (WORDS, {"results": 9}, "results"),
    (WORDS, {"media_type": "image/gif"}, "media_type"),
    (WORDS, {"media_type": "video/mp4"}, "media_type"),
    (WORDS, {"images": (IMAGE,)}, "images"),
    (EDIT, {}, "images"),
    (EDIT, {"images": (IMAGE,) * 3}, "images"),
    (LAYERED, {"images": (IMAGE,), "layers": 9}, "layers"),
    (LAYERED, {"images": (IMAGE,), "width": 512, "height": 512}, "width"),
    (LAYERED, {"images": (IMAGE,), "width": 640, "height": 1024}, "width"),
    (FIXED, {"images": (IMAGE,), "height": 96}, "height"),
    (WHOLE, {"guidance_scale": 3.0}, "guidance_scale"),
    (WHOLE, {"negative_prompt": "rain"}, "negative_prompt"),
    (WHOLE, {"previews": 1}, "previews"),
    (WHOLE, {"results": 2}, "results"),
]


@pytest.mark.parametrize(("limits", "asked", "field"), REFUSED, ids=lambda value: str(value) if isinstance(value, str) else None)
def test_what_would_fail_or_draw_nonsense_is_refused_with_its_field(limits: DrawingLimits, asked: dict[str, Any], field: str) -> None:
    request = replace(DrawRequest(seed=0, prompt="a hill"), **asked)
    with pytest.raises(BadRequest) as refused:
        check_kind(request, "m")
        plan_drawing(request, limits, "m")
    assert refused.value.field == f"diffusion.{field}"
    assert len(refused.value.description) > 10


@pytest.mark.parametrize(
    ("asked", "frames"),
    [
        ({}, 81),
        ({"frames": 17}, 17),
        ({"seconds": 5.0}, 77),
        ({"seconds": 5.07}, 81),
        ({"seconds": 0.01}, 1),
        ({"seconds": 2.0, "frames_per_second": 8.0}, 13),
    ],
)
def test_a_film_of_so_many_seconds_has_as_many_frames_as_fit_into_them(asked: dict[str, Any], frames: int) -> None:
    film = replace(WHOLE, frames=81, frame_multiple=4, max_frames=200, rate_hz=16.0)
    plan = plan_drawing(DrawRequest(seed=0, prompt="x", **asked), film, "m")
    assert (plan.frames, plan.seconds) == (frames, 0)


@pytest.mark.parametrize(
    ("rate_hz", "asked", "told"),
    [
        (16.0, {"seconds": 1.0, "frames": 17}, "give one"),
        (16.0, {"seconds": 13.0}, "at most 200 frames, and 13 s have 205"),
        (0.0, {"seconds": 1.0}, "give frames"),
    ],
)
def test_a_film_is_not_as_long_as_two_things_say(rate_hz: float, asked: dict[str, Any], told: str) -> None:
    film = replace(WHOLE, frames=81, frame_multiple=4, max_frames=200, rate_hz=rate_hz)
    with pytest.raises(BadRequest, match=told) as refused:
        plan_drawing(DrawRequest(seed=0, prompt="x", **asked), film, "m")
    assert refused.value.field == "diffusion.duration_s"


def test_a_size_that_is_no_multiple_is_told_the_nearest_one() -> None:
    with pytest.raises(BadRequest, match="ask for 64"):
        plan_drawing(DrawRequest(seed=0, prompt="x", width=65), WORDS, "m")


def test_what_is_not_said_is_the_default() -> None:
    plan = plan_drawing(DrawRequest(seed=7, prompt="a hill"), WORDS, "m")
    assert (plan.width, plan.height, plan.steps, plan.guidance, plan.negative) == (128, 96, 20, 4.0, " ")
    assert (plan.results, plan.pictures, plan.layers, plan.media_type) == (1, 1, 0, "")


def test_without_guidance_there_is_nothing_to_lead_away_from() -> None:
    assert plan_drawing(DrawRequest(seed=0, prompt="x", guidance_scale=1.0), WORDS, "m").negative is None
    assert plan_drawing(DrawRequest(seed=0, prompt="x", guidance_scale=1.01, negative_prompt="y"), WORDS, "m").negative == "y"


def test_previews_are_no_more_than_steps_and_layers_count_as_pictures() -> None:
    assert plan_drawing(DrawRequest(seed=0, prompt="x", steps=3, previews=16), WORDS, "m").previews == 3
    assert plan_drawing(DrawRequest(seed=0, prompt="x", images=(IMAGE,), results=2), LAYERED, "m").pictures == 8


def test_a_checkpoint_may_say_its_own_defaults_and_options_say_more(tmp_path: Any) -> None:
    (tmp_path / "omnistage.json").write_text('{"width": 64, "height": 32, "steps": 5, "guidance_scale": 0}')
    limits = Defaults.of(tmp_path, DiffusersOptions(steps=7)).applied(WORDS)
    assert (limits.width, limits.height, limits.steps, limits.guidance) == (64, 32, 7, 0.0)


@pytest.mark.parametrize("said", ['{"width": "64"}', '{"steps": 2.5}', '{"steps": true}', '{"guidance_scale": -1}', "[]", "{"])
def test_defaults_that_are_none_are_refused(tmp_path: Any, said: str) -> None:
    (tmp_path / "omnistage.json").write_text(said)
    with pytest.raises(BadCheckpoint):
        Defaults.of(tmp_path, DiffusersOptions())


@pytest.mark.parametrize(
    "options", [{"width": 65}, {"steps": 500}, {"width": 4096, "height": 4096}, {"max_steps": 10}], ids=lambda options: str(options)
)
def test_defaults_that_cannot_be_drawn_are_refused(options: dict[str, Any], tmp_path: Any) -> None:
    with pytest.raises(LoadError):
        Defaults.of(tmp_path, DiffusersOptions(**options)).applied(WORDS)


@pytest.mark.parametrize(
    "options", [{"width": -1}, {"condition_area": 0}, {"max_pixels": -1}, {"steps": "5"}, {"colour": 1}, {"width": True}]
)
def test_options_that_are_none_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(LoadError):
        DiffusersOptions.from_settings(options)


@pytest.mark.parametrize("max_side", [100, 256, 1000])
def test_the_first_picture_is_small_and_one_that_may_be_asked_for(max_side: int, seed: int) -> None:
    source = random.Random(seed)
    for _ in range(200):
        multiple = source.choice((8, 16, 28, 32, 64))
        width, height = (multiple * source.randint(-(-32 // multiple), 100) for _ in range(2))
        limits = replace(WORDS, multiple=multiple, width=width, height=height)
        plan = plan_drawing(smallest(DrawRequest(seed=0, prompt="x"), limits, max_side), limits, "name")
        assert plan.width == min(width, -(-max_side // multiple) * multiple)
        assert plan.height == min(height, -(-max_side // multiple) * multiple)


@pytest.mark.parametrize("limits", [replace(WORDS, sized=False), replace(WORDS, sides=(640,)), replace(WORDS, width=0, height=0)])
def test_where_the_size_follows_from_a_picture_none_is_asked_for(limits: DrawingLimits) -> None:
    request = smallest(DrawRequest(seed=0, prompt="x"), limits, 64)
    assert (request.width, request.height) == (0, 0)


def test_an_option_that_no_flag_names_is_taken_by_a_pipeline_that_says_so() -> None:
    request = DrawRequest(seed=0, prompt="x", begin_s=2.0, seconds=1.0)
    limits = DrawingLimits(1, 0, 0, 5, 1.0, sized=False, seconds=1.0, max_seconds=9.0)
    with pytest.raises(BadRequest, match="name knows none: leave it out") as refused:
        plan_drawing(request, limits, "name")
    assert refused.value.field == "diffusion.begin_s"
    assert plan_drawing(request, replace(limits, takes=frozenset({"begin_s"})), "name").begin_s == 2.0
