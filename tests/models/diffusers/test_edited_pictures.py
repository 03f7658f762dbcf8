"""Pictures that are edited, from their files on: resized once, on their ground, in their shape, and held within a bound."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from helpers import lengths
from helpers.artists import EDITING, draw, model_of, pixels_of, published, saved
from helpers.drawings import checkpoint
from helpers.painting import SMALL_AREA, Pixels, changed, pair, picture
from helpers.stable_diffusion import variant
from helpers.waiting import until_collected
from omnistage.models.conversation import Media
from omnistage.models.diffusers import model as model_module
from omnistage.models.diffusers.pictures import parameters
from omnistage.models.interface import BadRequest, DrawRequest, Full

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")  # of a scheduler's

EDITORS = ("qwen-image-edit", "qwen-image-edit-plus", "qwen-image-layered", "longcat-image-edit")
BACKGROUND = (30, 200, 90)
CLOSE = 1e-5


def request(images: Sequence[bytes], background: tuple[int, int, int] | None = None, **asked: Any) -> DrawRequest:
    media = tuple(Media("image/png", image, background=background) for image in images)
    return DrawRequest(seed=0, prompt="bluer", images=media, **asked)


@lengths.some_or_all("name", EDITORS, 2)
async def test_a_photo_of_any_size_is_resized_once_as_the_pipeline_does_it(name: str, seed: int) -> None:
    """More than four times as large as what it is resized to, and with fine detail, of which a first resizing would keep less."""
    name = lengths.draw_of(name, EDITORS, 2, "a photo of any size")
    both, shapes = pair(name), [(570, 700), (410, 930)][: 1 + (name == "qwen-image-edit-plus")]
    images = [picture(seed + n, *shape, opaque=name != "qwen-image-layered") for n, shape in enumerate(shapes)]
    assert all(height * width > 4 * SMALL_AREA for height, width in shapes)
    asked: dict[str, Any] = {"steps": 2, "guidance_scale": 3.0, "seed": seed}
    plan = both.plan("bluer", images, **asked)
    latents, _ = both.published(plan)
    expected = both.painter.grids(latents, plan).permute(0, 2, 3, 1).flatten(0, 2).float().numpy()
    async with model_of(checkpoint(name), **EDITING) as editor:
        made = (await draw(editor, "bluer", images=tuple(map(saved, images)), ports={"latents": 0}, **asked)).rows("latents")
    assert made.shape == expected.shape
    assert np.abs(made - expected).max() <= CLOSE * np.abs(expected).max()


def test_layers_of_the_larger_size_are_taken_from_a_picture_of_that_size(seed: int) -> None:
    both = pair("qwen-image-layered")
    side = both.painter.limits.sides[1]
    plan = both.plan("taken apart", [picture(seed, 90, 170, opaque=False)], width=side, height=side, steps=2, seed=seed)
    [canvas] = both.drawn(plan)
    latents, _ = both.published(plan)
    assert (canvas.latents - latents).abs().max() <= CLOSE * latents.abs().max()


@lengths.one_or_all("name", EDITORS)
async def test_what_is_transparent_lies_on_white_or_on_what_is_asked_for(name: str, seed: int) -> None:
    """But for layers, which keep it where no ground is named."""
    name = lengths.draw(name, EDITORS, seed)
    clear = picture(seed, 60, 90)
    clear[:, 30:, 3] = 0
    flat = {}
    for colour in ((255, 255, 255), BACKGROUND):
        flat[colour] = clear.copy()
        flat[colour][:, 30:] = (*colour, 255)
    async with model_of(checkpoint(name), **EDITING) as editor:

        async def drawn(image: Pixels, background: tuple[int, int, int] | None = None) -> NDArray[np.generic]:
            drawing = await draw(editor, "bluer", images=(saved(image),), backgrounds=(background,), seed=seed, ports={"latents": 0})
            return drawing.rows("latents")

        on_none, on_white, on_green = [await drawn(clear, each) for each in (None, (255, 255, 255), BACKGROUND)]
        white, green = [await drawn(image) for image in flat.values()]
    assert np.array_equal(on_white, white) and np.array_equal(on_green, green)
    assert np.array_equal(on_none, white) == (name != "qwen-image-layered")
    assert not np.array_equal(white, green)


@pytest.mark.parametrize("name", ["qwen-image-edit", "qwen-image-edit-plus"])
async def test_a_side_alone_keeps_the_shape_of_the_last_picture(name: str, seed: int) -> None:
    wide, square = saved(picture(seed, 60, 120)), saved(picture(seed, 80, 80))
    images = (square, wide) if name.endswith("plus") else (wide,)
    async with model_of(checkpoint(name), **EDITING) as editor:
        for width, height, size in ((96, 0, (96, 48)), (0, 96, (192, 96)), (32, 0, (32, 16)), (64, 64, (64, 64))):
            plan = await editor.prepare(request(images, width=width, height=height))
            assert (plan.width, plan.height) == size
        with pytest.raises(BadRequest, match="draws at most 4194304 pixels, 4096x2048"):
            await editor.prepare(request(images, height=2048))


async def test_a_picture_says_what_it_was_drawn_from_and_on_which_ground(seed: int) -> None:
    files = [saved(picture(seed + n, 60, 90)) for n in range(2)]
    media = tuple(Media("image/png", file, background=ground) for file, ground in zip(files, (None, BACKGROUND), strict=True))
    async with model_of(checkpoint("qwen-image-edit-plus"), **EDITING) as editor:
        named = await editor.prepare(DrawRequest(seed=0, prompt="bluer", images=media))
        usual = await editor.prepare(request(files))
    said, plain = (json.loads(parameters(plan, 0, "editor")) for plan in (named, usual))
    assert said["images"] == plain["images"] == [hashlib.sha256(file).hexdigest() for file in files]
    assert said["backgrounds"] == ["", "#1ec85a"] and "backgrounds" not in plain


async def test_pictures_that_wait_are_bounded_and_let_go(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    image = saved(picture(seed, 300, 300))
    async with model_of(checkpoint("qwen-image-edit"), **EDITING) as editor:
        monkeypatch.setattr(model_module, "HELD_BYTES", 2 * 4 * SMALL_AREA)
        waiting = [await editor.prepare(request([image])) for _ in range(2)]
        with pytest.raises(Full, match="wait to be edited"):
            await editor.prepare(request([image]))
        waiting.clear()
        await until_collected(lambda: editor._held_bytes == 0)
        drawn = await asyncio.gather(*(draw(editor, "bluer", images=(image,)) for _ in range(2)))
        assert all(one.pictures for one in drawn)
        await until_collected(lambda: editor._held_bytes == 0)


async def test_a_pipeline_by_whole_calls_gets_a_picture_as_it_was_sent(tmp_path: Path, seed: int) -> None:
    """It resizes by itself."""
    folder, image = changed("qwen-image", tmp_path / "q", "QwenImageImg2ImgPipeline"), picture(seed, 400, 500)
    scheduler = folder / "scheduler" / "scheduler_config.json"
    scheduler.write_text(json.dumps(json.loads(scheduler.read_text()) | {"shift_terminal": None}))  # The pipeline divides by zero else.
    async with model_of(folder, **EDITING) as whole:
        made = await draw(whole, "bluer", images=(saved(image),), width=96, height=64, seed=seed, guidance_scale=1.0)
        plan = await whole.prepare(request((saved(image),), width=80))
        assert (plan.width, plan.height) == (80, 64)
        clear = image.copy()
        clear[..., 3] = 0
        (given,) = (await whole.prepare(request((saved(clear),), BACKGROUND))).images
        assert given.resized[0].getcolors() == [(400 * 500, BACKGROUND)]
    said = {"width": 96, "height": 64, "num_inference_steps": 3, "true_cfg_scale": 1.0}
    expected = published(folder, seed, prompt="bluer", image=Image.fromarray(image).convert("RGB"), **said)
    assert np.abs(made.pixels[0] - expected.astype(int)).max() <= 1


async def test_a_pipeline_that_draws_in_the_size_of_its_picture_gets_no_larger_one_than_it_may(tmp_path: Path, seed: int) -> None:
    folder = variant("StableDiffusionImg2ImgPipeline", tmp_path / "s")
    async with model_of(folder, steps=3, condition_area=64 * 64) as whole:
        small, large = [await draw(whole, "a dog", images=(saved(picture(seed, *size)),)) for size in ((64, 80), (320, 320))]
    assert pixels_of(small.pictures[0].data).shape == (64, 80, 3)
    assert pixels_of(large.pictures[0].data).shape == (128, 128, 3)
