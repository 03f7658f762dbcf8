"""Drawings of many readers at once: what each of them gets, and what is left when one goes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from helpers import lengths
from helpers.artists import EDITING, USUAL, PiecesOfDrawing, check_refused, draw, jobs_of, model_of, opened, pixels_of, saved
from helpers.drawings import checkpoint, writable
from helpers.logic import run_logic, start_at
from helpers.painting import picture
from helpers.run import params
from helpers.servers import family_logic
from helpers.waiting import until_collected
from omnistage.diffusion.stage import DiffusionStage
from omnistage.models import registry
from omnistage.models.conversation import Media
from omnistage.models.diffusers.loading import load_pictures
from omnistage.models.diffusers.model import DrawingJob, DrawnModel
from omnistage.models.diffusers.pictures import PicturePainter, encode_picture, parameters
from omnistage.models.diffusers.plan import MEDIA_TYPES, PNG, DrawingLimits, plan_drawing
from omnistage.models.interface import BadRequest, DrawRequest, Failed, PromptRead, TensorRows
from omnistage.models.options import LoadOptions
from omnistage.models.reports import LoadError
from omnistage.models.steps.loop import Aside
from omnistage.v1 import stage_pb2
from omnistage.wire.errors import StageError

Model = DrawnModel[Any]


@pytest.fixture
async def model() -> AsyncIterator[Model]:
    async with model_of(checkpoint("z-image"), **USUAL) as loaded:
        await loaded.warm_up()
        yield loaded


@pytest.mark.parametrize(("name", "widths"), [("z-image", (32, 64, 96)), ("qwen-image", (64, 96))])
async def test_eight_in_words_and_guidance_of_their_own_draw_at_once_what_they_draw_alone(
    name: str, widths: tuple[int, ...], seed: int
) -> None:
    """The second of the families computes only passes of one size."""
    asked: list[dict[str, Any]] = [
        {"prompt": "hill " * (n + 1), "seed": seed + n, "steps": 2 + n % 4, "guidance_scale": n % 3, "width": widths[n % len(widths)]}
        for n in range(8)
    ]
    async with model_of(checkpoint(name), **USUAL) as artist:
        steps = artist.sessions.steps
        together = await asyncio.gather(*(draw(artist, **one) for one in asked))
        shared = artist.sessions.steps - steps
        steps = artist.sessions.steps
        for one, drawing in zip(asked, together, strict=True):
            assert np.abs(drawing.pixels - (await draw(artist, **one)).pixels).max() <= 1
        assert shared < artist.sessions.steps - steps


async def test_a_picture_alone_has_the_same_bits_again_and_tells_each_step(model: Model, seed: int) -> None:
    drawing, again = [await draw(model, "a hill", seed=seed, steps=5) for _ in range(2)]
    assert drawing.pictures == again.pictures
    assert drawing.steps == sorted(set(drawing.steps)) and drawing.steps[-1] == 5
    assert [opened(one.data).size for one in drawing.pictures] == [(64, 64)]
    assert drawing.pieces[-1] is drawing.pictures[0]


@pytest.mark.parametrize("previews", [0, 1, 3, 16])
async def test_previews_are_as_many_and_as_large_as_asked_for(model: Model, previews: int) -> None:
    drawing = await draw(model, "a hill", steps=8, previews=previews, preview_side=24, width=96, height=48)
    assert len(drawing.previews) == min(previews, 7)
    assert all(opened(one.data).size == (24, 12) for one in drawing.previews)
    assert [one.step for one in drawing.previews] == sorted({one.step for one in drawing.previews})
    assert len(drawing.pictures) == 1


async def test_a_preview_before_any_picture_is_the_vae_s() -> None:
    async with model_of(checkpoint("qwen-image"), **USUAL) as fresh:
        drawing = await draw(fresh, "a hill", steps=4, previews=3)
        assert len(drawing.previews) == 3
        # A linear map has a pixel for 8; the VAE has all of them.
        sharp = np.abs(np.diff(pixels_of(drawing.previews[-1].data), axis=1)).mean()
        again = await draw(fresh, "a hill", steps=4, previews=3)
        smooth = np.abs(np.diff(pixels_of(again.previews[-1].data), axis=1)).mean()
        assert smooth < sharp
        assert again.pictures == drawing.pictures


async def test_the_fitted_map_shows_the_last_estimate_better_than_any_flat_picture(model: Model) -> None:
    drawing = await draw(model, "a hill", steps=12, previews=11, preview_side=8)
    small = np.asarray(opened(drawing.pictures[0].data).resize((8, 8), Image.Resampling.BOX), dtype=float)
    shown = pixels_of(drawing.previews[-1].data).astype(float)
    assert np.square(shown - small).mean() < np.square(small.mean((0, 1)) - small).mean()


@pytest.mark.usefixtures("collected_by_hand")
@lengths.drawn_cells(1, "until", [0, 1, 3])
async def test_who_goes_at_a_step_leaves_nothing_and_the_next_is_drawn(model: Model, until: int) -> None:
    with jobs_of(model) as jobs:
        drawing = await draw(model, "a hill", steps=4, until=until)
    assert not drawing.pictures
    assert (model.sessions.running, model.load().queued) == (0, 0)
    await until_collected(lambda: [job() for job in jobs] == [None])
    assert len((await draw(model, "a hill")).pictures) == 1


async def test_of_several_results_those_that_somebody_has_are_not_drawn_again(model: Model, seed: int) -> None:
    whole = await draw(model, "a hill", seed=seed, results=3)
    assert len({one.data for one in whole.pictures}) == 3
    rest = await draw(model, "a hill", seed=seed, results=3, first=1)
    assert np.abs(rest.pixels - whole.pixels[1:]).max() <= 1
    alone = await draw(model, "a hill", seed=seed + 2)
    assert np.abs(alone.pixels - whole.pixels[2:]).max() <= 1


@pytest.mark.parametrize(("media_type", "form"), [("image/png", "PNG"), ("image/jpeg", "JPEG"), ("image/webp", "WEBP"), ("", "PNG")])
async def test_a_picture_says_what_it_was_drawn_from(model: Model, media_type: str, form: str) -> None:
    drawing = await draw(model, "a hill, “ü”", seed=41, results=2, media_type=media_type, negative_prompt="rain")
    for number, one in enumerate(drawing.pictures):
        image = opened(one.data)
        assert image.format == form
        said = json.loads(image.text["parameters"] if form == "PNG" else image.getexif()[0x010E])  # type: ignore[attr-defined]
        assert said["seed"] == 41 + number
        assert (said["prompt"], said["negative_prompt"], said["steps"], said["width"]) == ("a hill, “ü”", "rain", 4, 64)
        again = await draw(model, said["prompt"], seed=said["seed"], negative_prompt=said["negative_prompt"], media_type=media_type)
        assert np.abs(pixels_of(again.pictures[0].data) - pixels_of(one.data)).max() <= (1 if form == "PNG" else 60)


async def test_prompts_that_are_asked_again_are_encoded_once(model: Model) -> None:
    kept = model._artist._painter._texts  # type: ignore[attr-defined]
    await draw(model, "never said before", steps=1)
    hits = kept.hits
    await draw(model, "never said before", steps=1)
    assert kept.hits == hits + 2  # and that of no words at all


async def test_with_the_cache_off_nothing_is_kept() -> None:
    loaded = load_pictures(checkpoint("z-image"), LoadOptions(enable_cache=False, dtype="float32", family=dict(USUAL)))
    try:
        await draw(loaded, "a hill", steps=1)
        assert loaded._artist._painter._texts.bytes == 0  # type: ignore[attr-defined]
    finally:
        await loaded.close()


async def test_no_more_drawings_share_a_step_than_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    async with model_of(checkpoint("z-image"), max_batch_size=2, **USUAL) as small:
        groups = list[int]()
        step = small._artist.step

        def counted(jobs: Sequence[DrawingJob], aside: Aside | None) -> None:
            groups.append(len(jobs))
            step(jobs, aside)

        monkeypatch.setattr(small._artist, "step", counted)
        await asyncio.gather(*(draw(small, "a hill", seed=n) for n in range(5)))
        assert max(groups) == 2


async def test_what_has_more_latent_tokens_than_fit_is_refused() -> None:
    async with model_of(checkpoint("z-image"), max_tokens=64, **USUAL) as small:
        await draw(small, "a hill")
        with pytest.raises(BadRequest, match="fewer or smaller"):
            await draw(small, "a hill", results=2)
        assert len((await draw(small, "a hill")).pictures) == 1


async def test_what_becomes_no_number_is_told_as_that_and_ends_alone(model: Model) -> None:
    painter: PicturePainter = model._artist._painter  # type: ignore[attr-defined]
    snowman, hill = (set(painter.counting(words)["input_ids"]) for words in ("☃", "a hill"))
    with torch.no_grad():
        painter.pipe.text_encoder.get_input_embeddings().weight[(snowman - hill).pop()] = torch.nan
    good, bad, other = await asyncio.gather(
        draw(model, "a hill", seed=1), draw(model, "☃", seed=2), draw(model, "a hill", seed=3), return_exceptions=True
    )
    assert isinstance(bad, Failed) and "no number after step 1 of 4" in str(bad)
    assert isinstance(good, PiecesOfDrawing) and isinstance(other, PiecesOfDrawing) and len(good.pictures) == len(other.pictures) == 1
    with pytest.raises(StageError, match="INTERNAL: the picture is no number after step 1 of 4"):
        await run_logic(DiffusionStage(model), stage_pb2.StageParams(diffusion=stage_pb2.DiffusionParams(prompt="☃")))
    assert (model.sessions.running, model.load().queued) == (0, 0)


def check_unloadable(told: str, folder: Path, **options: Any) -> None:
    with pytest.raises(LoadError, match=told):
        registry.load("diffusers", "diffusion", LoadOptions(folder, dtype="float32", family={**USUAL, **options}))


def test_weights_that_draw_no_number_are_refused_when_they_are_loaded(tmp_path: Path) -> None:
    file = writable("z-image", tmp_path / "z") / "transformer" / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    name = next(name for name in weights if name.startswith("layers.0") and name.endswith("weight"))
    save_file({**weights, name: torch.full_like(weights[name], torch.nan)}, file, {"format": "pt"})
    check_unloadable(f"transformer: {name} has numbers that are not finite", tmp_path / "z")


async def test_a_picture_that_the_vae_makes_no_number_of_is_no_picture(model: Model) -> None:
    """It would be flat: to no number every colour is as near."""
    with torch.no_grad():
        model._artist._painter.pipe.vae.decoder.conv_out.bias.fill_(torch.inf)  # type: ignore[attr-defined]
    with pytest.raises(Failed, match="the VAE makes no number"):
        await draw(model, "a hill")
    assert (model.sessions.running, model.load().queued) == (0, 0)


NO_VALUES = [
    ("vae", {"shift_factor": None}),
    ("scheduler", {"base_shift": "x", "use_dynamic_shifting": True}),
    ("transformer", {"axes_lens": [1, 1, 1]}),
]


@pytest.mark.parametrize(("part", "values"), NO_VALUES)
def test_a_config_that_nothing_can_be_drawn_with_is_told_as_that(part: str, values: dict[str, Any], tmp_path: Path) -> None:
    (config,) = (writable("z-image", tmp_path / "z") / part).glob("*config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | values))
    check_unloadable(str(tmp_path), tmp_path / "z")


@pytest.mark.parametrize("options", [{"max_tokens": 1}, {"guidance": 50.0}])
def test_options_with_which_the_usual_picture_cannot_be_drawn_are_refused(options: dict[str, Any]) -> None:
    check_unloadable(next(iter(options)), checkpoint("z-image"), **options)


async def test_a_side_that_the_transformer_has_no_places_for_is_refused(model: Model) -> None:
    """The places are those of Z-Image's table; a picture that fits is drawn."""
    painter: PicturePainter = model._artist._painter  # type: ignore[attr-defined]
    most = painter.limits.max_side
    assert most == painter.limits.multiple * min(painter.pipe.transformer.axes_lens[1:])
    with pytest.raises(BadRequest, match=f"at most {most} pixels a side"):
        await draw(model, "a hill", width=most + painter.limits.multiple, height=32)
    assert (await draw(model, "a hill", width=most, height=32, steps=1)).pixels.shape[1:3] == (32, most)


@pytest.mark.parametrize(("asked", "field"), [({"width": 1024}, "width"), ({"height": 1024}, "height"), ({}, "images")])
async def test_an_edited_picture_has_no_more_pixels_than_may_be_asked_for(asked: dict[str, Any], field: str) -> None:
    """Where one side is asked for, and the other one follows from the picture; or both do, of a thin one."""
    image = saved(picture(1, *((60, 90) if asked else (3, 90))))
    async with model_of(checkpoint("qwen-image-edit"), max_pixels=128 * 128, **EDITING) as editor:
        with pytest.raises(BadRequest, match="at most") as refused:
            await editor.prepare(DrawRequest(seed=0, prompt="x", images=(Media("image/png", image),), **asked))
        assert refused.value.field == f"diffusion.{field}"


async def test_a_thin_picture_beside_another_is_refused_with_its_number() -> None:
    async with model_of(checkpoint("qwen-image-edit-plus"), **EDITING) as editor:
        with pytest.raises(BadRequest, match="less long") as refused:
            await draw(editor, "bluer", images=(saved(picture(1, 3, 90)), saved(picture(1, 64, 64))))
        assert refused.value.place == {"medium": "1"}


def test_a_long_prompt_fits_into_a_jpeg() -> None:
    limits = DrawingLimits(multiple=8, width=32, height=32, steps=1, guidance=2.0)
    plan = plan_drawing(DrawRequest(seed=3, prompt="é😀" * 10_000, negative_prompt="ü" * 20_000), limits, "m")
    for media_type in MEDIA_TYPES:
        image = opened(encode_picture(Image.new("RGB", (8, 8)), media_type, parameters(plan, 0, "m")))
        said = json.loads(image.text["parameters"] if media_type == PNG else image.getexif()[0x010E])  # type: ignore[attr-defined]
        assert said["seed"] == 3 and said["prompt"].startswith("é😀" * 500)
        assert (said["prompt"] == plan.prompt) is (media_type == PNG)


@pytest.mark.parametrize("sampler", ["DDIMScheduler", "FlowMatchHeunDiscreteScheduler"])
def test_a_sampler_that_nobody_compared_is_refused(sampler: str, tmp_path: Path) -> None:
    """One knows no sigmas, another one asks the model twice a step."""
    folder = writable("z-image", tmp_path / "z")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"scheduler": ["diffusers", sampler]}))
    check_unloadable(f"is drawn here with FlowMatchEulerDiscreteScheduler, .*not {sampler}", folder)


@lengths.drawn_cells(1, "name", ["qwen-image-layered", "longcat-image", "qwen-image-edit-plus"])
async def test_every_family_shows_previews(name: str, seed: int) -> None:
    usual = {**EDITING, "width": 64, "height": 64} if name == "longcat-image" else EDITING
    async with model_of(checkpoint(name), **usual) as artist:
        images = (saved(picture(seed, 60, 90)),)[: artist._artist.limits.images[1]]
        for _ in range(2):  # By the VAE, then by the map that is fitted to its picture.
            drawing = await draw(artist, "a hill", images=images, seed=seed, steps=4, previews=2, preview_side=32)
            assert [max(opened(one.data).size) for one in drawing.previews] == [32, 32]
            assert [one.step for one in drawing.previews] == [1, 3]


async def test_the_largest_picture_that_may_be_asked_for_fits(tmp_path: Path) -> None:
    async with model_of(checkpoint("z-image"), max_pixels=256 * 256, **USUAL) as artist:
        await draw(artist, "a hill", width=256, height=256, guidance_scale=2.0, steps=1)
        with pytest.raises(BadRequest, match="at most 65536 pixels"):
            await draw(artist, "a hill", width=272, height=256)
    async with model_of(checkpoint("qwen-image-edit-plus"), **EDITING) as editor:
        images = (Media("image/png", saved(picture(1, 60, 90))),) * 8
        await editor.prepare(DrawRequest(seed=0, prompt="x", images=images, guidance_scale=4.0))


async def test_layers_of_each_of_several_results_stay_together(seed: int) -> None:
    image = saved(picture(seed, 60, 90, opaque=False))
    async with model_of(checkpoint("qwen-image-layered"), **EDITING) as layered:
        both = await draw(layered, "taken apart", images=(image,), layers=3, results=2, seed=seed)
        assert [one.layer for one in both.pictures] == [0, 1, 2, 0, 1, 2]
        for number in range(2):
            alone = await draw(layered, "taken apart", images=(image,), layers=3, seed=seed + number)
            assert {opened(one.data).mode for one in alone.pictures} == {"RGBA"}
            assert np.abs(alone.pixels - both.pixels[3 * number : 3 * number + 3]).max() <= 1
        rest = await draw(layered, "taken apart", images=(image,), layers=3, results=2, seed=seed, first=4)
        assert [one.layer for one in rest.pictures] == [1, 2]
        assert np.abs(rest.pixels - both.pixels[4:]).max() <= 1


async def test_items_that_the_model_counts_by_itself_are_known() -> None:
    """Four layers of each picture where the request says none."""
    logic = family_logic("diffusers", "diffusion", EDITING, checkpoint("qwen-image-layered"))
    image = stage_pb2.Media(data=saved(picture(1, 60, 90, opaque=False)), media_type="image/png")
    asked = stage_pb2.Open(params=params("diffusion", "a hill", images=[image], results=2))
    await logic.prepare(asked, start_at({"image": 8}))
    with pytest.raises(StageError, match="cannot go on at 9: there are only 8 items"):
        await logic.prepare(asked, start_at({"image": 9}))
    await logic.close()


@lengths.drawn_cells(1, "name", ["qwen-image-edit", "qwen-image-edit-plus", "longcat-image-edit"])
async def test_a_picture_that_is_edited_matters_and_is_encoded_once(name: str, seed: int) -> None:
    images = [saved(picture(seed + n, 50 + n, 70)) for n in range(2)]
    async with model_of(checkpoint(name), **EDITING) as editor:
        first, again, other = [await draw(editor, "bluer", images=(image,), seed=seed) for image in (images[0], images[0], images[1])]
        assert first.pictures == again.pictures
        assert np.abs(first.pixels - other.pixels).max() > 1
        assert editor._artist._painter._pictures.hits == 1  # type: ignore[attr-defined]


@lengths.drawn_cells(
    2,
    ("data", "why"),
    [
        (b"no picture", "no picture"),
        (b"", "no bytes"),
        (saved(picture(1, 40, 40))[:-200], "damaged"),
        (saved(picture(1, 2, 500)), "longer one way"),
        (saved(picture(1, 3, 300)), "less long"),
    ],
    ids=["text", "empty", "cut", "line", "strip"],
)
async def test_what_is_no_picture_to_edit_is_refused_with_its_number(data: bytes, why: str) -> None:
    async with model_of(checkpoint("qwen-image-edit-plus"), **EDITING) as editor:
        good = saved(picture(1, 40, 40))
        await check_refused(editor, "images", why, images=(good, data))
        assert len((await draw(editor, "bluer", images=(good, good))).pictures) == 1


async def test_latents_and_pixels_come_on_ports_of_their_own(seed: int) -> None:
    image = saved(picture(seed, 60, 90, opaque=False))
    async with model_of(checkpoint("qwen-image-layered"), **EDITING) as layered:
        ports = {port.name: port for port in layered.info.produces}
        pictures = await draw(layered, "taken apart", images=(image,), layers=2, seed=seed)
        rows = await draw(layered, "taken apart", images=(image,), layers=2, seed=seed, ports={"latents": 0, "pixels": 0})
        assert not rows.pictures
        height, width = pictures.pixels.shape[1:3]
        assert np.array_equal(rows.rows("pixels").reshape(2, height, width, ports["pixels"].width), pictures.pixels)
        assert rows.rows("latents").shape == (2 * (height // 8) * (width // 8), ports["latents"].width)
        first = {"latents": 7, "pixels": height * width + 5}
        rest = await draw(layered, "taken apart", images=(image,), layers=2, seed=seed, ports=first)
        assert all(np.array_equal(rest.rows(port), rows.rows(port)[begin:]) for port, begin in first.items())


def never(*arguments: object) -> None:
    raise AssertionError("nobody wants it")


async def test_who_wants_latents_alone_has_them_without_the_vae(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model._artist._painter, "images", never)  # type: ignore[attr-defined]
    drawing = await draw(model, "a hill", results=2, ports={"latents": 0})
    assert drawing.rows("latents").shape == (2 * 8 * 8, 16)


@lengths.drawn_cells(1, "name", ["z-image", "qwen-image", "qwen-image-layered", "longcat-image-edit"])
async def test_a_drawing_goes_on_at_the_step_that_was_kept(name: str, seed: int) -> None:
    """With the same bits, wherever what was kept ends: in the middle of latents too."""
    edits = name.endswith(("edit", "layered"))
    images = (saved(picture(seed, 60, 90)),) if edits else ()
    asked: dict[str, Any] = {"images": images, "seed": seed, "steps": 8, "results": 2, "previews": 3}
    async with model_of(checkpoint(name), **(EDITING if edits else USUAL)) as drawer:
        begun = drawer.sessions.steps
        first = await draw(drawer, "a hill", ports={"image": 0, "progress": 0, "checkpoint": 0}, **asked)
        whole = drawer.sessions.steps - begun
        kept = first.rows("checkpoint").astype(np.uint32)
        each = len(kept) // 3
        for rows, step in ((0, 0), (each - 1, 0), (each, 2), (2 * each + 3, 4), (3 * each, 6)):
            ports = {"image": 0, "progress": 0, "checkpoint": rows}
            begun = drawer.sessions.steps
            again = await draw(drawer, "a hill", ports=ports, history=kept[:rows], **asked)
            assert whole - (drawer.sessions.steps - begun) == step
            assert [one.data for one in again.pictures] == [one.data for one in first.pictures]
            if rows < len(kept):
                assert np.array_equal(again.rows("checkpoint"), kept[rows:])


async def test_who_has_all_of_it_already_is_told_the_end_and_nothing_is_computed(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after the loss of a replica between the last picture and the end."""
    for owned in ("encode", "velocities", "images"):
        monkeypatch.setattr(model._artist._painter, owned, never)  # type: ignore[attr-defined]
    for ports in ({"image": 2}, {"image": 2, "progress": 0}, {"latents": 2 * 64, "checkpoint": 0}):
        assert [type(piece) for piece in (await draw(model, "a hill", results=2, ports=ports)).pieces] == [PromptRead]


async def test_of_what_was_kept_only_those_pictures_that_are_wanted_go_on(model: Model, seed: int) -> None:
    ports = {"image": 0, "checkpoint": 0}
    whole = await draw(model, "a hill", seed=seed, steps=6, results=3, ports=ports)
    kept = whole.rows("checkpoint").astype(np.uint32)
    rest = await draw(model, "a hill", seed=seed, steps=6, results=3, ports={"image": 2, "checkpoint": len(kept)}, history=kept)
    assert len(rest.pictures) == 1
    assert np.abs(rest.pixels - whole.pixels[2:]).max() <= 1


@pytest.mark.parametrize("shape", [(5000, 16), (4, 3), (4,)])
async def test_a_history_that_is_none_is_refused(model: Model, shape: tuple[int, ...]) -> None:
    with pytest.raises(BadRequest, match=r"resume\.history"):
        await draw(model, "a hill", history=np.zeros(shape, np.uint32))
    with pytest.raises(BadRequest, match="no numbers"):
        await draw(model, "a hill", history=np.full((4, 16), 0x7FC00000, np.uint32))


async def test_with_a_step_cache_nothing_is_kept(model: Model) -> None:
    drawing = await draw(model, "a hill", step_cache=0.5, ports={"image": 0, "checkpoint": 0})
    assert not [piece for piece in drawing.pieces if isinstance(piece, TensorRows)]
