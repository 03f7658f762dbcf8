"""Sizes that a model does not draw well: a model with one size draws in it, and its pictures are brought to the wanted size; every other
model refuses more than four times its own area. Pictures of another shape than what is made of them."""

from __future__ import annotations

import io
import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw

from helpers.artists import check_refused, draw, model_of
from helpers.drawings import checkpoint, writable
from omnistage.models import registry
from omnistage.models.checkpoint.files import BadCheckpoint
from omnistage.models.diffusers.family import model_directory
from omnistage.models.diffusers.model import DrawnModel
from omnistage.models.diffusers.options import Defaults, DiffusersOptions
from omnistage.models.diffusers.pictures import fitted
from omnistage.models.diffusers.plan import DrawingLimits, crop_to_shape
from omnistage.models.options import LoadOptions

OWN = 128
RED, BLUE = (200, 30, 40), (30, 40, 200)
PROMPT = "a large red circle on a blue background"


def disc(width: int, height: int) -> Image.Image:
    """A red disc of half the height, in the middle of a blue ground."""
    image = Image.new("RGB", (width, height), BLUE)
    radius = height / 4
    ImageDraw.Draw(image).ellipse((width / 2 - radius, height / 2 - radius, width / 2 + radius, height / 2 + radius), RED)
    return image


def extent(image: Image.Image) -> tuple[int, int, int, int]:
    """Where the disc is: left, top, right, bottom."""
    box = Image.fromarray((np.asarray(image)[..., 0] > 115).astype(np.uint8)).getbbox()
    assert box is not None
    return box


# Bringing to a size ----------------------------------------------------------------------------------------------------------------------


def test_a_disc_stays_round_and_in_the_middle_in_every_size(seed: int) -> None:
    source = random.Random(seed)
    for _ in range(40):
        drawn_size = source.choice(((128, 128), (96, 128), (160, 96)))
        size = (source.randint(64, 1500), source.randint(64, 1500))
        result = fitted(disc(*drawn_size), *size)
        assert result.size == size
        x0, y0, x1, y1 = extent(result)
        slack = max(3.0, 0.03 * min(size))
        assert abs((x1 - x0) - (y1 - y0)) <= slack
        assert abs(x0 + x1 - size[0]) <= slack and abs(y0 + y1 - size[1]) <= slack
        assert abs((y1 - y0) - drawn_size[1] / 2 * min(size[0] / drawn_size[0], size[1] / drawn_size[1])) <= slack


def test_an_edge_is_enlarged_without_a_line_beside_it(seed: int) -> None:
    """Lanczos alone leaves the range of the pixels around it."""
    edge = Image.new("RGB", (32, 32), (100, 100, 100))
    edge.paste((180, 180, 180), (16, 0, 32, 32))
    result = np.asarray(fitted(edge, 256, 256)).astype(int)
    assert (result.min(), result.max()) == (100, 180) and (np.diff(result, axis=1) >= 0).all()
    raw = np.asarray(edge.resize((256, 256), Image.Resampling.LANCZOS)).astype(int)
    assert raw.min() < 100 and raw.max() > 180, "the check can fail"


def test_what_is_added_has_the_colour_of_the_ground() -> None:
    wide = np.asarray(fitted(disc(128, 128), 700, 200))
    assert (wide[:, :240] == BLUE).all() and (wide[:, 460:] == BLUE).all()
    grey = fitted(disc(128, 128).convert("L"), 100, 400)
    assert grey.mode == "L" and grey.size == (100, 400)


# A model with one size -----------------------------------------------------------------------------------------------------------------


async def test_the_default_model_draws_in_its_own_size_and_the_picture_is_brought_to_the_wanted_one(seed: int) -> None:
    async with model_of(model_directory()) as model:
        assert "128x128 pixels; other sizes are made of that" in model.info.settings["drawn in one size"]
        drawing = await draw(model, PROMPT, seed=seed)
        drawn_image = Image.fromarray(drawing.pixels[0].astype(np.uint8))
        for (width, height), size, change in (
            ((1024, 1024), (1024, 1024), "enlarged to 1024x1024"),
            ((1792, 1024), (1792, 1024), "enlarged to 1792x1024, with more background on two sides"),
            ((100, 333), (100, 333), "enlarged to 100x333, with more background on two sides"),
            ((64, 64), (64, 64), "reduced to 64x64"),
            ((0, 300), (300, 300), "enlarged to 300x300"),
        ):
            result = await draw(model, PROMPT, seed=seed, width=width, height=height, ports={"image": 0, "pixels": 0, "latents": 0})
            assert result.pixels.shape[1:] == (size[1], size[0], 3)
            assert np.array_equal(result.pixels[0], np.asarray(fitted(drawn_image, *size))), "the same seed is the same drawing"
            assert result.rows("pixels").shape == (size[0] * size[1], 3) and result.rows("latents").shape == (16 * 16, 8)
            assert result.notes == [f"drawn at 128x128, the size of this model, and {change}"]
            parameters = json.loads(Image.open(io.BytesIO(result.pictures[0].data)).info["parameters"])
            assert (parameters["width"], parameters["height"]) == size
        assert drawing.notes == [] and drawing.pixels.shape[1:] == (OWN, OWN, 3)
        shown = await draw(model, PROMPT, seed=seed, width=896, height=512, previews=2)
        assert [Image.open(io.BytesIO(preview.data)).size for preview in shown.previews] == [(256, 146)] * 2
        await check_refused(model, "width", "at most 4194304 pixels, 2064x2048 are 4227072", width=2064, height=2048)


def with_one_size(folder: Path, **sides: Any) -> Path:
    (folder / "omnistage.json").write_text(json.dumps({**sides, "steps": 3, "draws": {"what": "hills", "words": {}, "one_size": True}}))
    return folder


async def test_any_checkpoint_can_say_so(tmp_path: Path, seed: int) -> None:
    """Also one that is drawn by whole calls; a default size of the operator is a wanted size."""
    own_loop = with_one_size(writable("z-image", tmp_path / "z"), width=64, height=32)
    by_calls = with_one_size(writable("z-image", tmp_path / "w"), width=64, height=32)
    index = json.loads((by_calls / "model_index.json").read_text())
    (by_calls / "model_index.json").write_text(json.dumps({**index, "_class_name": "ZImageImg2ImgPipeline"}))
    sketch = disc(64, 32)
    file = io.BytesIO()
    sketch.save(file, "PNG")
    for folder, images in ((own_loop, ()), (by_calls, (file.getvalue(),))):
        async with model_of(folder, width=100, height=100) as model:
            drawing = await draw(model, "a hill", images=images, seed=seed, width=64, height=32)
            default = await draw(model, "a hill", images=images, seed=seed)
            drawn_image = Image.fromarray(drawing.pixels[0].astype(np.uint8))
            assert np.array_equal(default.pixels[0], np.asarray(fitted(drawn_image, 100, 100)))
            assert default.notes == [
                "drawn at 64x32, the size of this model, and enlarged to 100x100, with more background on two sides",
                *drawing.notes,
            ]


def test_a_checkpoint_that_has_no_size_of_its_own_cannot_say_so(tmp_path: Path) -> None:
    folder = tmp_path / "edit"
    shutil.copytree(checkpoint("qwen-image-edit"), folder)
    with pytest.raises(BadCheckpoint, match="one_size is for pipelines that draw pictures in a size of their own"):
        registry.load("diffusers", "diffusion", LoadOptions(with_one_size(folder)))
    for limits, size in (
        (DrawingLimits(16, 128, 128, 4, 1.0, frames=5, max_frames=9), (128, 128)),
        (DrawingLimits(16, 128, 128, 4, 1.0), (120, 128)),
        (DrawingLimits(16, 128, 128, 4, 1.0), (16, 16)),
    ):
        with pytest.raises(BadCheckpoint, match="one_size"):
            Defaults(DiffusersOptions(), *size, has_one_size=True).applied(limits)


# The largest size -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("folder_size", "options", "max_pixels"),
    [
        ((0, 0), {}, 4 * 128 * 96),
        ((256, 128), {}, 4 * 256 * 128),
        ((0, 0), {"width": 64, "height": 64}, 4 * 128 * 96),
        ((0, 0), {"max_pixels": 999_999}, 999_999),
    ],
)
def test_a_picture_or_a_frame_has_at_most_four_times_the_area_that_the_model_names(
    folder_size: tuple[int, int], options: dict[str, Any], max_pixels: int
) -> None:
    for frames in (0, 5):
        limits = DrawingLimits(16, 128, 96, 4, 1.0, frames=frames, max_frames=9 * bool(frames))
        assert Defaults(DiffusersOptions(**options), *folder_size).applied(limits).max_pixels == max_pixels


@pytest.mark.parametrize("max_pixels", [0, 200 * 200])
async def test_a_larger_size_is_refused_with_the_setting_that_allows_it(max_pixels: int, tmp_path: Path) -> None:
    folder = writable("z-image", tmp_path / "z")
    (folder / "omnistage.json").write_text(json.dumps({"width": 64, "height": 64, "steps": 2}))
    model = registry.load("diffusers", "diffusion", LoadOptions(folder, max_pixels=max_pixels))
    assert isinstance(model, DrawnModel)
    try:
        limit = max_pixels or 128 * 128
        words = rf"at most {limit} pixels, 32x2000 are 64000: ask for fewer, or have its operator allow more \(setting max_pixels\)"
        await check_refused(model, "height", words, width=32, height=2000)
        largest = await draw(model, "a hill", width=128 if not max_pixels else 160, height=128 if not max_pixels else 240, steps=2)
        assert largest.notes == []
    finally:
        await model.close()


# Pictures of another shape ---------------------------------------------------------------------------------------------------------------


def test_a_picture_of_another_shape_is_cropped_in_its_middle(seed: int) -> None:
    source = random.Random(seed)
    for _ in range(60):
        image = disc(source.randint(40, 600), source.randint(40, 600))
        width, height = source.randint(40, 600), source.randint(40, 600)
        part, note = crop_to_shape(image, width, height)
        assert part.width == image.width or part.height == image.height, "no more is cut than must be"
        rounding = max(width, height, *image.size) / 2  # Half a pixel of one side, times the other sides.
        assert abs(part.width * height - part.height * width) <= rounding
        assert bool(note) == (part.size != image.size)
        assert not note or f"its middle part of {part.width}x{part.height} is used, in the shape of {width}x{height}" in note
        assert len(note) <= 200
    by_calls, note = crop_to_shape(disc(1920, 1080), 832, 464, multiple=16)
    assert (by_calls.size, note) == ((1920, 1080), ""), "a side that was rounded is no other shape"
    thin, _ = crop_to_shape(disc(1, 9000), 832, 480)
    assert thin.size == (1, 1)
