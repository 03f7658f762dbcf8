"""A pipeline without a loop of our own: whole calls, which can be watched, shared from their beginning, and given up at a step."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.Image import Resampling

from helpers.artists import PiecesOfDrawing, check_refused, draw, model_of, published, saved
from helpers.painting import changed
from helpers.stable_diffusion import SIDE, stable_diffusion, variant
from omnistage.models.conversation import Media
from omnistage.models.diffusers.folder import read_index
from omnistage.models.diffusers.model import DrawnModel
from omnistage.models.diffusers.plan import DrawingPlan
from omnistage.models.diffusers.whole import WholeDrawing
from omnistage.models.interface import BadRequest, DrawRequest, Failed, StepsDone, inputs_of
from omnistage.models.worker import LOOK_S

Model = DrawnModel[Any]

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")  # of a scheduler's


@pytest.fixture
async def model() -> AsyncIterator[Model]:
    async with model_of(stable_diffusion(), steps=5) as loaded:
        assert isinstance(loaded._artist, WholeDrawing)
        yield loaded


def calls(model: Model) -> int:
    """That have begun and not ended, or whose readers are still there."""
    artist = model._artist
    assert isinstance(artist, WholeDrawing)
    assert sum(thread.name == "pipeline" for thread in threading.enumerate()) <= len(artist._calls)
    return len(artist._calls)


async def test_a_picture_is_that_of_the_pipeline(model: Model, seed: int) -> None:
    drawing = await draw(model, "a dog", seed=seed, guidance_scale=3.0, negative_prompt="rain")
    said = {"num_inference_steps": 5, "width": SIDE, "height": SIDE, "guidance_scale": 3.0, "negative_prompt": "rain"}
    assert np.array_equal(drawing.pixels[0], published(stable_diffusion(), seed, **said))
    assert drawing.steps[-1] == 5
    assert calls(model) == 0


async def test_requests_that_are_alike_share_a_call_and_others_take_turns(model: Model, seed: int) -> None:
    asked: list[dict[str, Any]] = [
        {"prompt": f"dog {n}", "seed": seed + n, "steps": 4 + (n == 4), "results": 1 + (n == 3)} for n in range(5)
    ]
    begun = model.sessions.steps
    together = await asyncio.gather(*(draw(model, **one) for one in asked))
    shared = model.sessions.steps - begun
    for one, drawing in zip(asked, together, strict=True):
        alone = await draw(model, **one)
        assert np.abs(drawing.pixels - alone.pixels).max() <= 1
    assert shared < model.sessions.steps - begun - shared
    assert calls(model) == 0


async def test_who_leads_away_from_something_does_so_beside_one_who_does_not(model: Model, seed: int) -> None:
    asked: list[dict[str, Any]] = [
        {"seed": seed, "guidance_scale": 5.0},
        {"seed": seed + 1, "guidance_scale": 5.0, "negative_prompt": "rain snow"},
    ]
    for order in (asked, asked[::-1]):
        together = await asyncio.gather(*(draw(model, "a dog", **one) for one in order))
        for one, drawing in zip(order, together, strict=True):
            assert np.abs(drawing.pixels - (await draw(model, "a dog", **one)).pixels).max() <= 1


async def test_what_becomes_no_number_is_no_picture(model: Model) -> None:
    with torch.no_grad():
        next(model._artist._pipe.unet.parameters()).fill_(torch.nan)  # type: ignore[attr-defined]
    with pytest.raises(Failed, match="no number after a step"):
        await draw(model, "a dog")
    assert calls(model) == 0


async def test_a_thread_that_hangs_is_not_said_to_go_on(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, released, activity = threading.Event(), threading.Event(), model.threads[0]
    unet = model._artist._pipe.unet  # type: ignore[attr-defined]

    def hanging(*arguments: Any, **named: Any) -> Any:
        entered.set()
        assert released.wait(timeout=60)
        raise RuntimeError("it hung")

    monkeypatch.setattr(unet, "forward", hanging)
    drawing = asyncio.create_task(draw(model, "a dog"))
    assert await asyncio.to_thread(entered.wait, 60)
    said = activity.steps
    await asyncio.sleep(8 * LOOK_S)
    assert activity.busy and activity.steps <= said + 1, "once for what it did before it hung"
    released.set()
    with pytest.raises(RuntimeError, match="it hung"):
        await drawing


def test_words_of_requests_are_in_no_log(tmp_path: Path) -> None:
    """CLIP of diffusers warns of what it cuts with all of that."""
    program = f"""
import asyncio, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from pathlib import Path
from helpers.artists import draw, model_of
async def main():
    async with model_of(Path({str(stable_diffusion())!r}), steps=1) as model:
        assert (await draw(model, "secret " * 500)).pictures
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "secret" not in done.stdout + done.stderr


@pytest.mark.parametrize("until", [1, 3])
async def test_a_call_that_nobody_waits_for_ends_at_its_step(model: Model, until: int) -> None:
    drawing = await draw(model, "a dog", until=until)
    assert not drawing.pictures
    assert calls(model) == 0
    assert len((await draw(model, "a dog")).pictures) == 1


async def test_who_shares_a_call_does_not_lose_it_when_another_goes(model: Model, seed: int) -> None:
    """Also the one that stands last in it."""
    alone = await draw(model, "dog 0", seed=seed)
    stays, *_ = await asyncio.gather(
        draw(model, "dog 0", seed=seed), draw(model, "dog 1", seed=seed, until=1), draw(model, "dog 2", seed=seed, until=2)
    )
    assert np.abs(stays.pixels - alone.pixels).max() <= 1
    assert calls(model) == 0


async def test_an_error_of_the_pipeline_is_that_of_its_request_alone(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    artist = model._artist
    assert isinstance(artist, WholeDrawing)
    encode = type(artist._pipe).encode_prompt

    def failing(self: Any, prompt: Any, *arguments: Any, **named: Any) -> Any:
        if "bad" in (prompt if isinstance(prompt, str) else " ".join(prompt)):
            raise RuntimeError("this prompt breaks it")
        return encode(self, prompt, *arguments, **named)

    monkeypatch.setattr(type(artist._pipe), "encode_prompt", failing)
    good, bad = await asyncio.gather(draw(model, "a dog"), draw(model, "a bad dog"), return_exceptions=True)
    assert isinstance(bad, RuntimeError)
    assert not isinstance(good, BaseException) and len(good.pictures) == 1
    assert calls(model) == 0


async def test_progress_begins_anew_with_a_call_of_its_own_after_a_shared_one_failed(model: Model, seed: int) -> None:
    artist = model._artist
    assert isinstance(artist, WholeDrawing)
    alone = await draw(model, "a dog", seed=seed)
    shared = 0

    def fails_in_company(unet: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        nonlocal shared
        shared += len(arguments[0]) > 2  # With guidance, one picture has two rows.
        if shared == 3:
            shared += 1
            raise Failed("too many")

    async def drawn(plan: DrawingPlan) -> PiecesOfDrawing:
        return PiecesOfDrawing([piece async for piece in model.draw(plan, inputs_of(), {"image": 0, "progress": 0})])

    # Prepared before, for only who begins at the same moment surely shares.
    plans = [await model.prepare(DrawRequest(seed=seed, prompt=prompt)) for prompt in ("a dog", "a cat")]
    with artist._pipe.unet.register_forward_pre_hook(fails_in_company):
        drawings = await asyncio.gather(*map(drawn, plans))
    assert shared == 4
    for drawing in drawings:
        told = [(piece.step, piece.steps) for piece in drawing.pieces if isinstance(piece, StepsDone)]
        assert told == [(step, 5) for step in (1, 2, 1, 2, 3, 4, 5)]
    assert np.array_equal(drawings[0].pixels, alone.pixels)
    assert calls(model) == 0


@pytest.mark.parametrize(
    ("asked", "field"),
    [({"previews": 2}, "previews"), ({"layers": 2}, "layers"), ({"width": 60}, "width"), ({"step_cache": 0.5}, "step_cache")],
)
async def test_what_it_cannot_do_is_refused(model: Model, asked: dict[str, Any], field: str) -> None:
    await check_refused(model, field, **asked)


def test_parts_that_only_its_pipelines_have_are_classes_of_diffusers_too(tmp_path: Path) -> None:
    folder = tmp_path / "published"
    shutil.copytree(stable_diffusion(), folder)
    index = json.loads((folder / "model_index.json").read_text())
    index["safety_checker"] = ["stable_diffusion", "StableDiffusionSafetyChecker"]
    (folder / "model_index.json").write_text(json.dumps(index))
    assert read_index(folder).components["safety_checker"][0] == "stable_diffusion"


# Pictures of users -------------------------------------------------------------------------------------------------------------------


def colours(seed: int, width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize("class_name", ["ZImageImg2ImgPipeline", "ZImageInpaintPipeline"])
async def test_a_pipeline_that_does_not_resize_gets_pictures_as_large_as_what_is_drawn(class_name: str, tmp_path: Path, seed: int) -> None:
    """The pipeline fails by itself for pictures of any other size."""
    folder = changed("z-image", tmp_path / "other", class_name)
    image, mask = colours(seed, 90, 70), Image.new("L", (90, 70))
    mask.paste(255, (45, 0, 90, 70))
    is_masked = class_name == "ZImageInpaintPipeline"
    async with model_of(folder, width=64, height=64, steps=3) as model:
        await model.warm_up()
        for width, height in ((64, 64), (96, 32)):
            drawn_where: dict[str, Any] = {"mask_image": Media("image/png", saved(mask))} if is_masked else {}
            said: dict[str, Any] = {"width": width, "height": height, "strength": 0.7, "guidance_scale": 3.0}
            drawing = await draw(model, "a dog", seed=seed, images=(saved(image),), **said, **drawn_where)
            part, middle = ((10, 0, 80, 70), "70x70") if width == height else ((0, 20, 90, 50), "90x30")
            fitting, fitting_mask = image.crop(part).resize((width, height), Resampling.LANCZOS), mask.crop(part)
            told = {"num_inference_steps": 3, "negative_prompt": "", **said, **({"mask_image": fitting_mask} if is_masked else {})}
            assert np.array_equal(drawing.pixels[0], published(folder, seed, image=fitting, **told))
            (note,) = drawing.notes
            assert "a picture of 90x70 has another shape" in note and f"its middle part of {middle} is used, in the shape of" in note


async def test_sigmas_and_steps_that_the_scheduler_makes_nothing_of_are_refused(tmp_path: Path, seed: int) -> None:
    """Also where all of the picture is drawn anew. Those that are taken do what they do in the pipeline."""
    image = colours(seed, SIDE, SIDE)
    scheduler = ("FlowMatchEulerDiscreteScheduler", {"shift_terminal": 0.02})
    folder = changed("qwen-image", tmp_path / "other", "QwenImageImg2ImgPipeline", *scheduler)
    async with model_of(folder, width=SIDE, height=SIDE, steps=3) as model:
        said: dict[str, Any] = {"seed": seed, "images": (saved(image),), "strength": 1.0}
        for asked, field in (({"steps": 1}, "steps"), ({"sigmas": (0.5,)}, "steps"), ({"sigmas": (1.0, 1 - 1e-12)}, "sigmas")):
            await check_refused(model, field, **said, **asked)
        drawing = await draw(model, "a dog", **said, sigmas=(1.0, 0.6, 0.2))
        told = {"num_inference_steps": 3, "width": SIDE, "height": SIDE, "true_cfg_scale": 4.0, "strength": 1.0}
        assert np.array_equal(drawing.pixels[0], published(folder, seed, image=image, sigmas=[1.0, 0.6, 0.2], **told))


async def test_where_no_strength_is_said_there_are_no_fewer_steps_than_the_scheduler_makes(tmp_path: Path) -> None:
    scheduler = ("FlowMatchEulerDiscreteScheduler", {"shift_terminal": 0.02})
    folder = changed("z-image", tmp_path / "other", "ZImageInpaintPipeline", *scheduler)
    image = saved(colours(0, SIDE, SIDE))
    async with model_of(folder, width=SIDE, height=SIDE, steps=3) as model:
        assert model._artist.limits.strength == 1.0
        await check_refused(model, "steps", "takes 2 to 200 steps, not 1", images=(image,), mask_image=Media("image/png", image), steps=1)


async def test_a_scheduler_that_computes_with_sigmas_gets_what_it_can_compute_with(tmp_path: Path, seed: int) -> None:
    config = {"_class_name": "UniPCMultistepScheduler", "use_flow_sigmas": True, "prediction_type": "flow_prediction"}
    folder = variant("StableDiffusionPipeline", tmp_path / "other", config)
    async with model_of(folder, steps=3) as model:
        drawing = await draw(model, "a dog", seed=seed, sigmas=(0.9, 0.5, 0.2))
        told = {"num_inference_steps": 3, "width": SIDE, "height": SIDE, "guidance_scale": 7.5}
        assert np.array_equal(drawing.pixels[0], published(folder, seed, sigmas=np.array([0.9, 0.5, 0.2]), **told))
        await check_refused(model, "sigmas", "no noise levels of them that differ", sigmas=(0.9, 0.5, 0.5 - 1e-12))


@pytest.mark.parametrize(
    ("scheduler", "asked", "field"),
    [
        ("EulerDiscreteScheduler", {"sigmas": (1000.0, 900.0, 3.0)}, "sigmas"),
        ("EulerDiscreteScheduler", {"sigmas": (3.0,)}, "sigmas"),
        ("LCMScheduler", {"steps": 60}, "steps"),
    ],
)
async def test_what_only_the_scheduler_knows_it_cannot_do_is_a_bad_request(
    scheduler: str, asked: dict[str, Any], field: str, tmp_path: Path
) -> None:
    """Two sigmas of one timestep, no step at all, and more steps than there are."""
    async with model_of(variant("StableDiffusionPipeline", tmp_path / "other", {"_class_name": scheduler}), steps=3) as model:
        await check_refused(model, field, "refuses it", **asked)
        assert calls(model) == 0
        assert len((await draw(model, "a dog")).pictures) == 1


async def test_whatever_a_pipeline_refuses_options_by_is_a_bad_request_and_a_fault_is_none(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    artist = model._artist
    assert isinstance(artist, WholeDrawing)
    raised: list[BaseException] = [RuntimeError("shapes"), NotImplementedError("not for this"), ImportError("ftfy is not there")]
    faults: list[BaseException] = [
        *(Failed("no number"), torch.OutOfMemoryError("CUDA out of memory"), OSError("no such file")),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
    ]

    def refusing(self: Any, *arguments: Any, **named: Any) -> Any:
        raise errors[-1]

    with monkeypatch.context() as patched:
        patched.setattr(type(artist._pipe), "prepare_latents", refusing)
        for error in [*raised, *faults]:
            errors = [error]
            expected = BadRequest if error in raised else type(error)
            with pytest.raises(expected, match=re.escape(str(error))):
                await draw(model, "a dog", options={"guidance_rescale": "0"})
        errors = raised[:1]
        with pytest.raises(RuntimeError, match="shapes"):
            await draw(model, "a dog")
        errors = [StopIteration("no more")]
        with pytest.raises(RuntimeError, match=r"StopIteration\('no more'\)"):
            await draw(model, "a dog", options={"guidance_rescale": "0"})
    assert calls(model) == 0
    assert len((await draw(model, "a dog", options={"guidance_rescale": "0"})).pictures) == 1
