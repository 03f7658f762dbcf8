"""Options that only some pipelines know: sigmas, strength, masks, control images, and options of a pipeline's own; pictures that are
edited, from their files on."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from helpers import lengths
from helpers.artists import EDITING, check_refused, draw, model_of, pixels_of, published, saved
from helpers.drawings import NAMES, checkpoint
from helpers.painting import CLOSE, SMALL_AREA, Pixels, apart, changed, pair, picture
from helpers.stable_diffusion import SIDE, stable_diffusion, variant
from helpers.waiting import until_collected
from omnistage.models.conversation import Media
from omnistage.models.diffusers import model as model_module
from omnistage.models.diffusers.own_options import OwnOption, own_options, read_options
from omnistage.models.diffusers.pictures import parameters
from omnistage.models.diffusers.plan import DrawingLimits, mask_of
from omnistage.models.interface import BadRequest, DrawRequest, Full

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")  # of a scheduler's

FOLLOWED = {
    "qwen-image": [{"max_sequence_length": "3"}],
    "qwen-image-layered": [{"cfg_normalize": "true"}, {"cfg_normalize": "true", "max_sequence_length": "3"}],
    "z-image": [{"cfg_normalization": "true"}, {"cfg_truncation": "0.1"}, {"max_sequence_length": "7"}],
    "longcat-image": [{"enable_cfg_renorm": "false"}, {"cfg_renorm_min": "0.9"}],
}
"""The options that loops here follow, as requests name them."""


def signature_of(
    *, flag: bool = False, share: float | None = None, words: str | list[str] | None = None, count: int = 700, **_: Any
) -> None:
    """As pipelines have them."""


# The words themselves ------------------------------------------------------------------------------------------------------------------


def test_types_are_those_of_the_signature() -> None:
    options = {option.name: option.kind for option in own_options(signature_of, None)}
    assert options == {"flag": bool, "share": float, "words": str, "count": int}
    assert [option.name for option in own_options(signature_of, "share", {"share": (0, 1), "flag": (0, 1)})] == ["flag"]
    said = read_options({"words": "true", "flag": "True", "share": "1e-1", "count": "1400"}, own_options(signature_of, None), "m")
    assert dict(said) == {"words": "true", "flag": True, "share": 0.1, "count": 1400}
    [(_, count)] = read_options({"count": "2.0"}, own_options(signature_of, None), "m")
    assert count == 2 and isinstance(count, int), "as JSON may say it"


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("flag", "1", "give true or false"),
        ("share", "much", "give a number"),
        ("share", "nan", "give a number"),
        ("share", "1e9", "give a number"),
        ("share", "1" + "0" * 400, "give a number"),
        ("share", "1e400", "give a number"),
        ("count", "1.5", "give a whole number from 1 to 1400"),
        ("count", "1401", "give a whole number from 1 to 1400"),
        ("count", "0", "give a whole number from 1 to 1400"),
        ("count", "-1", "give a whole number from 1 to 1400"),
        ("count", "1" + "0" * 400, "give a whole number"),
        ("count", "9" * 5000, "give a whole number"),
        ("count", "1e400", "give a whole number"),
        ("count", "nan", "give a whole number"),
        ("flags", "true", "it has flag, share, words, count"),
        ("num_inference_steps", "3", "the request has steps for it"),
        ("generator", "3", "the request has seed for it"),
        ("true_cfg_scale", "3", "the request has guidance_scale for it"),
    ],
)
def test_what_is_no_option_is_refused_with_what_is_one(name: str, value: str, told: str) -> None:
    with pytest.raises(BadRequest) as refused:
        read_options({name: value}, own_options(signature_of, None), "m")
    assert refused.value.field == "diffusion.options" and told in refused.value.description


def test_the_text_of_the_limits_in_a_revision_stays() -> None:
    """Servers of two versions with other revisions would not go on with each other's drawings."""
    limits = DrawingLimits(16, 1024, 768, 20, 4.0, options=(OwnOption("cfg_trunc", float, 0.0, 1.0),))
    assert repr(limits) == (
        "DrawingLimits(multiple=16, width=1024, height=768, steps=20, guidance=4.0, guided_above=1.0, negative='', min_side=32,"
        " max_side=16384, max_pixels=4194304, min_steps=1, scheduled_steps=1, max_steps=200, max_guidance=30.0, images=(0, 0), layers=0,"
        " max_layers=0, max_results=8, guidable=True, negatable=True, previewed=True, step_cached=True, sized=True, sides=(),"
        " max_work=838860800, prompt_tokens=0, max_sigma=1.0, strength=None, masked=False, controlled=False,"
        " options=(OwnOption(name='cfg_trunc', kind=<class 'float'>, least=0.0, most=1.0),), frames=0, frame_multiple=1, max_frames=0,"
        " seconds=0.0, max_seconds=0.0, second_guidance=False, rate_hz=0.0, shifted=False, begins=False, shaped=False)"
    )


@pytest.mark.parametrize("name", NAMES)
def test_what_a_loop_follows_its_pipeline_has(name: str) -> None:
    both = pair(name)
    assert {option.name for option in both.painter.limits.options} == both.painter.follows.keys()
    assert {said for each in FOLLOWED.get(name, []) for said in each} == both.painter.follows.keys()
    taken = inspect.signature(type(both.pipe).__call__).parameters
    for owned in (
        "latents",
        "prompt_embeds",
        "output_type",
        "return_dict",
        "callback_on_step_end",
        "enable_prompt_rewrite",
        "use_en_prompt",
    ):
        if owned in taken:
            with pytest.raises(BadRequest):
                both.plan("x", [picture(0, 64, 64)] * both.edits, options={owned: "true"})


# Own loops -----------------------------------------------------------------------------------------------------------------------------


@lengths.drawn_cells(3, "name", [*FOLLOWED, "qwen-image-edit", "longcat-image-edit"])
def test_sigmas_and_options_do_what_they_do_in_the_pipeline(name: str, seed: int) -> None:
    """Also beside pictures without them."""
    both = pair(name)
    images = [picture(seed, 90, 120, opaque=name != "qwen-image-layered")][: both.edits]
    # Rounding grows with the scale; LongCat-Image limits a norm that only a large scale lowers so far.
    words = {"guidance_scale": 20.0 if name == "longcat-image" else 5.0, "negative_prompt": "ugly", "steps": 3}
    usual = both.plan("two small houses by the sea", images, **words)
    asked = [both.plan(usual.prompt, images, **words, options=options) for options in FOLLOWED.get(name, [])]
    asked.append(both.plan(usual.prompt, images, **{**words, "steps": 0}, sigmas=(1.0, 0.7, 0.3)))
    plain, *drawn = both.drawn(usual, *asked)
    for plan, canvas in zip(asked, drawn, strict=True):
        latents, _ = both.published(plan)
        assert apart(canvas.latents, latents) <= CLOSE
        assert apart(canvas.latents, plain.latents) > 1e-3


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"sigmas": (2.0, 1.0)}, "sigmas"),
        ({"sigmas": (1.0, 0.5), "steps": 3}, "steps"),
        ({"strength": 0.5}, "strength"),
        ({"mask_image": Media("image/png", b"-")}, "mask_image"),
        ({"control_image": Media("image/png", b"-")}, "control_image"),
        ({"options": {"cfg_truncation": "2"}}, "options"),
    ],
)
def test_what_a_loop_does_not_know_is_refused(asked: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest) as refused:
        pair("z-image").plan("x", **asked)
    assert refused.value.field == f"diffusion.{field}"


# Whole calls ---------------------------------------------------------------------------------------------------------------------------


def shape(seed: int, make: Callable[[Any], Any] = lambda rng: rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)) -> Image.Image:
    return Image.fromarray(make(np.random.default_rng(seed)))


def half() -> Image.Image:
    """White on the right."""
    return Image.fromarray(np.tile(np.where(np.arange(SIDE) < SIDE // 2, 0, 255).astype(np.uint8), (SIDE, 1)))


async def test_a_picture_is_drawn_anew_as_far_as_it_is_said(tmp_path: Path, seed: int) -> None:
    folder, image = variant("StableDiffusionImg2ImgPipeline", tmp_path / "img2img"), shape(seed)
    async with model_of(folder, steps=5) as model:
        for strength in (0.4, 0.7, 1.0):
            drawing = await draw(model, "a dog", seed=seed, images=(saved(image),), strength=strength)
            assert np.array_equal(drawing.pixels[0], published(folder, seed, image=image, strength=strength, num_inference_steps=5))
        told = "is none: give a larger one, or more steps"
        await check_refused(model, "strength", told, images=(saved(image),), strength=0.1)


async def test_only_what_a_mask_shows_is_drawn_anew(tmp_path: Path, seed: int) -> None:
    folder, image, mask = variant("StableDiffusionInpaintPipeline", tmp_path / "inpaint"), shape(seed), half()
    hole = image.convert("RGBA")
    hole.putalpha(Image.eval(mask, lambda level: 255 - level))
    async with model_of(folder, steps=3) as model:
        assert (model._artist.limits.strength, model._artist.limits.masked) == (1.0, True)
        sent = (saved(image),)
        expected = published(folder, seed, image=image, mask_image=mask, num_inference_steps=3, width=SIDE, height=SIDE)
        faint = Image.merge("LA", (mask, Image.new("L", mask.size, 254)))
        for given in (mask, hole, faint):
            drawing = await draw(model, "a dog", seed=seed, images=sent, mask_image=Media("image/png", saved(given)))
            assert np.array_equal(drawing.pixels[0], expected)
            assert not drawing.notes
        black = await draw(model, "a dog", images=sent, mask_image=Media("image/png", saved(Image.new("L", mask.size))))
        assert len(black.pictures) == 1 and [note for note in black.notes if "black all over" in note]
        await check_refused(model, "mask_image", "white or transparent there", images=sent)
        small = Media("image/png", saved(mask.resize((8, 8))))
        await check_refused(model, "mask_image", "is 8x8, and the picture 64x64", images=sent, mask_image=small)
        with pytest.raises(BadRequest, match="refuses it"):
            nothing = Media("image/png", saved(Image.new("L", mask.size)))
            await draw(model, "a dog", images=sent, mask_image=nothing, options={"padding_mask_crop": "8"})
        assert len((await draw(model, "a dog", images=sent, mask_image=Media("image/png", saved(mask)))).pictures) == 1


async def test_a_control_image_is_kept_to(tmp_path: Path, seed: int) -> None:
    folder = variant("StableDiffusionControlNetImg2ImgPipeline", tmp_path / "control", controlled=True)
    image, control = shape(seed), shape(seed + 1)
    async with model_of(folder, steps=3) as model:
        said: dict[str, Any] = {
            "images": (saved(image),),
            "control_image": Media("image/png", saved(control)),
            "seed": seed,
            "strength": 0.9,
        }
        drawing = await draw(model, "a dog", **said, options={"controlnet_conditioning_scale": "0.5"})
        told = {"image": image, "control_image": control, "strength": 0.9, "num_inference_steps": 3, "width": SIDE, "height": SIDE}
        assert np.array_equal(drawing.pixels[0], published(folder, seed, **told, controlnet_conditioning_scale=0.5))
        assert not np.array_equal(drawing.pixels[0], published(folder, seed, **told))


async def test_sigmas_go_to_a_scheduler_that_takes_them(tmp_path: Path, seed: int) -> None:
    folder = variant("StableDiffusionPipeline", tmp_path / "euler", {"_class_name": "EulerDiscreteScheduler"})
    async with model_of(folder, steps=3) as model:
        drawing = await draw(model, "a dog", seed=seed, sigmas=(10.0, 3.0, 0.5))
        said = {"num_inference_steps": 3, "width": SIDE, "height": SIDE, "guidance_scale": 7.5}
        assert np.array_equal(drawing.pixels[0], published(folder, seed, **said, sigmas=[10.0, 3.0, 0.5]))
    async with model_of(stable_diffusion(), steps=2) as model:
        await check_refused(model, "sigmas", "takes none with its scheduler", sigmas=(10.0, 3.0))


async def test_an_option_for_the_steps_of_a_scheduler_is_offered_where_they_take_it(tmp_path: Path, seed: int) -> None:
    """Pipelines leave it out elsewhere without a word."""
    folder = variant("StableDiffusionPipeline", tmp_path / "ddim", {"_class_name": "DDIMScheduler"})
    async with model_of(folder, steps=2) as model:
        drawing = await draw(model, "a dog", seed=seed, options={"eta": "1"})
        said = {"num_inference_steps": 2, "width": SIDE, "height": SIDE}
        assert np.array_equal(drawing.pixels[0], published(folder, seed, **said, eta=1.0))
        assert not np.array_equal(drawing.pixels[0], published(folder, seed, **said))
    async with model_of(stable_diffusion(), steps=2) as model:
        await check_refused(model, "options", "has no option 'eta'", options={"eta": "1"})


async def test_an_option_that_a_pipeline_cannot_follow_is_not_offered(tmp_path: Path, seed: int) -> None:
    """One that it follows with some values is."""
    folder = variant("StableDiffusionInpaintPipeline", tmp_path / "inpaint")
    image, mask = shape(seed), half()
    said: dict[str, Any] = {"image": image, "mask_image": mask, "num_inference_steps": 2, "width": SIDE, "height": SIDE}
    with pytest.raises(AttributeError) as unable:  # `clip_skip` of this diffusers is for an older transformers.
        published(folder, seed, **said, clip_skip=0)
    async with model_of(folder, steps=2) as model:
        assert model.info.settings["options of its own"] == "padding_mask_crop"
        assert model.info.settings["options that it cannot follow"] == f"clip_skip: {unable.value}"
        sent: dict[str, Any] = {"images": (saved(image),), "mask_image": Media("image/png", saved(mask)), "seed": seed}
        await check_refused(model, "options", "has no option 'clip_skip': it has padding_mask_crop", **sent, options={"clip_skip": "0"})
        drawing = await draw(model, "a dog", **sent, options={"padding_mask_crop": "8"})
        assert np.array_equal(drawing.pixels[0], published(folder, seed, **said, padding_mask_crop=8))


def test_a_mask_is_where_it_is_transparent_or_else_white() -> None:
    plain = Image.new("RGBA", (4, 2), (255, 255, 255, 255))
    assert mask_of(plain).resized[0].getextrema() == (255, 255)
    plain.putpixel((1, 0), (255, 255, 255, 0))
    assert np.asarray(mask_of(plain).resized[0])[0, :3].tolist() == [0, 255, 0]
    faint = Image.merge("RGBA", (*half().convert("RGB").split(), Image.new("L", (SIDE, SIDE), 128)))
    assert mask_of(faint).resized[0].tobytes() == half().tobytes(), "more opaque than not"


def test_a_kind_is_told_in_words() -> None:
    assert str(replace(own_options(signature_of, None)[3], min_value=0, max_value=3)) == "a whole number from 0 to 3"


async def test_a_drawing_with_them_goes_on_elsewhere(seed: int) -> None:
    said: dict[str, Any] = {"seed": seed, "sigmas": (1.0, 0.7, 0.5, 0.2), "guidance_scale": 3.0, "options": {"cfg_truncation": "0.1"}}
    async with model_of(checkpoint("z-image"), width=64, height=64) as model:
        whole = await draw(model, "a hill", ports={"image": 0, "checkpoint": 0}, **said)
        again = await draw(model, "a hill", history=whole.rows("checkpoint"), **said)
    assert again.steps[0] == 3 and again.steps[-1] == 4
    assert np.array_equal(again.pixels, whole.pixels)


EDITORS = ("qwen-image-edit", "qwen-image-edit-plus", "qwen-image-layered", "longcat-image-edit")
BACKGROUND = (30, 200, 90)
SHARE_CLOSE = 1e-5


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
    assert np.abs(made - expected).max() <= SHARE_CLOSE * np.abs(expected).max()


def test_layers_of_the_larger_size_are_taken_from_a_picture_of_that_size(seed: int) -> None:
    both = pair("qwen-image-layered")
    side = both.painter.limits.sides[1]
    plan = both.plan("taken apart", [picture(seed, 90, 170, opaque=False)], width=side, height=side, steps=2, seed=seed)
    [canvas] = both.drawn(plan)
    latents, _ = both.published(plan)
    assert (canvas.latents - latents).abs().max() <= SHARE_CLOSE * latents.abs().max()


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
    """It resizes by itself, after its middle part of the asked shape was taken."""
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
    part = Image.fromarray(image).convert("RGB").crop((0, 33, 500, 366))
    expected = published(folder, seed, prompt="bluer", image=part, **said)
    assert len(made.notes) == 1 and "its middle part of 500x333 is used" in made.notes[0]
    assert np.abs(made.pixels[0] - expected.astype(int)).max() <= 1


async def test_a_pipeline_that_draws_in_the_size_of_its_picture_gets_no_larger_one_than_it_may(tmp_path: Path, seed: int) -> None:
    folder = variant("StableDiffusionImg2ImgPipeline", tmp_path / "s")
    async with model_of(folder, steps=3, condition_area=64 * 64) as whole:
        small, large = [await draw(whole, "a dog", images=(saved(picture(seed, *size)),)) for size in ((64, 80), (320, 320))]
    assert pixels_of(small.pictures[0].data).shape == (64, 80, 3)
    assert pixels_of(large.pictures[0].data).shape == (128, 128, 3)
