"""A pipeline without a loop of our own: whole calls, which can be watched, shared from their beginning, and given up at a step."""

from __future__ import annotations

import asyncio
import json
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

from helpers.artists import Drawing, draw, model_of
from helpers.drawings import checkpoint
from helpers.stable_diffusion import SIDE, stable_diffusion
from omnistage.models.common.checkpoint import BadCheckpoint
from omnistage.models.common.worker import LOOK_S
from omnistage.models.diffusers.folder import load_pipeline, read_index
from omnistage.models.diffusers.model import DrawnModel
from omnistage.models.diffusers.plan import Plan
from omnistage.models.diffusers.whole import WholeDrawing
from omnistage.models.interface import BadRequest, DrawRequest, Failed, Progress, no_inputs

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
    pipe: Any = load_pipeline(stable_diffusion(), torch.float32)
    pipe.set_progress_bar_config(disable=True)
    noise = torch.Generator().manual_seed(seed)
    said = {"num_inference_steps": 5, "width": SIDE, "height": SIDE, "guidance_scale": 3.0, "negative_prompt": "rain"}
    assert np.array_equal(drawing.pixels[0], np.asarray(pipe("a dog", generator=noise, **said).images[0]))
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

    async def drawn(plan: Plan) -> Drawing:
        return Drawing([piece async for piece in model.draw(plan, no_inputs(), {"image": 0, "progress": 0})])

    # Prepared before, for only who begins at the same moment surely shares.
    plans = [await model.prepare(DrawRequest(seed=seed, prompt=prompt)) for prompt in ("a dog", "a cat")]
    with artist._pipe.unet.register_forward_pre_hook(fails_in_company):
        drawings = await asyncio.gather(*map(drawn, plans))
    assert shared == 4
    for drawing in drawings:
        told = [(piece.step, piece.steps) for piece in drawing.pieces if isinstance(piece, Progress)]
        assert told == [(step, 5) for step in (1, 2, 1, 2, 3, 4, 5)]
    assert np.array_equal(drawings[0].pixels, alone.pixels)
    assert calls(model) == 0


@pytest.mark.parametrize(("asked", "field"), [({"previews": 2}, "previews"), ({"layers": 2}, "layers"), ({"width": 60}, "width")])
async def test_what_it_cannot_do_is_refused(model: Model, asked: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest) as refused:
        await draw(model, "a dog", **asked)
    assert refused.value.field == f"diffusion.{field}"


def test_parts_that_only_its_pipelines_have_are_classes_of_diffusers_too(tmp_path: Path) -> None:
    folder = tmp_path / "published"
    shutil.copytree(stable_diffusion(), folder)
    index = json.loads((folder / "model_index.json").read_text())
    index["safety_checker"] = ["stable_diffusion", "StableDiffusionSafetyChecker"]
    (folder / "model_index.json").write_text(json.dumps(index))
    assert read_index(folder).components["safety_checker"][0] == "stable_diffusion"
    index["safety_checker"] = ["os", "system"]
    (folder / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(BadCheckpoint, match="'os'"):
        read_index(folder)


def test_the_seven_have_loops_of_their_own() -> None:
    from omnistage.models.diffusers.loading import PAINTERS

    assert read_index(checkpoint("z-image")).class_name in PAINTERS
    assert read_index(stable_diffusion()).class_name not in PAINTERS
