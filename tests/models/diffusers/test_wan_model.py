"""Wan as a model: folders that are loaded, films that share steps, leave while they are decoded, and are refused."""

from __future__ import annotations

import asyncio
import atexit
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers import lengths
from helpers.artists import check_refused, draw, jobs_of, model_of, saved
from helpers.waiting import until_collected
from helpers.wans import KINDS, photo, pipeline
from omnistage.models.diffusers.folder import mute_libraries
from omnistage.models.diffusers.model import DrawnModel
from omnistage.models.interface import DrawRequest, StepsDone, TensorRows, inputs_of

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword")  # Diffusers with NumPy 2.

Model = DrawnModel[Any]
SIDE, STEPS = 32, 4
USUAL = {"width": SIDE, "height": SIDE, "steps": STEPS, "max_pixels": 1 << 14}
VAE: dict[str, Any] = {"temperal_downsample": [False, True, True], "dim_mult": [1, 1, 1, 1], "scale_factor_temporal": 4}


def folder(kind: str, place: Path, seed: int = 0) -> Path:
    """A checkpoint with four frames of the film for one of the latents."""
    vae = VAE | {"scale_factor_spatial": 16 if kind.startswith("ti2v") else 8}
    boundary = 0.7 if kind in ("t2v", "i2v") else None
    changed: dict[str, Any] = {"vae": vae, "transformer": {"patch_size": (1, 2, 2)}, "boundary_ratio": boundary}
    with mute_libraries():
        pipeline(kind, seed, **changed).save_pretrained(place)
    return place


@cache
def place(kind: str) -> Path:
    """The folder is gone when the process ends."""
    home = tempfile.mkdtemp(prefix="omnistage-drawings-")
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    return folder(kind, Path(home), 2)


@pytest.fixture
async def model() -> AsyncIterator[Model]:
    """The model of TI2V, which draws with a picture and without."""
    async with model_of(place("ti2v"), **USUAL) as made:
        yield made


@pytest.fixture
async def experts() -> AsyncIterator[Model]:
    """The model that draws from words, with two experts."""
    async with model_of(place("t2v"), **USUAL) as made:
        yield made


def pictures(seed: int, count: int) -> tuple[bytes, ...]:
    return tuple(saved(photo(seed + n, 50, 40)) for n in range(count))


@lengths.drawn_cells(2, "kind", KINDS)
async def test_a_folder_of_each_kind_draws_films(kind: str, tmp_path: Path, seed: int) -> None:
    """With as many pictures as it takes at least, and at most."""
    async with model_of(folder(kind, tmp_path, seed), **USUAL) as made:
        limits = made._artist.limits
        assert made.info.inputs == (("text", "image") if limits.images[1] else ("text",))
        latents = {}
        for count in limits.images:
            shape: dict[str, Any] = {"width": SIDE, "height": SIDE, "frames": 9, "ports": {"latents": 0, "pixels": 0}}
            drawing = await draw(made, "a dog", images=pictures(seed, count), seed=seed, **shape)
            latents[count] = drawing.rows("latents")
            assert np.isfinite(latents[count]).all() and drawing.rows("pixels").shape == (9 * SIDE * SIDE, 3)
        assert len(latents) == 1 or not np.array_equal(latents[limits.images[0]], latents[limits.images[1]])


@pytest.mark.usefixtures("collected_by_hand")
@lengths.drawn_cells(1, "until", [*range(STEPS + 1), None])
async def test_who_goes_at_a_step_or_while_a_film_is_decoded_leaves_nothing(model: Model, until: int | None) -> None:
    """until: the step after which its reader goes; None: at the first frame of the film."""
    prepared = await model.prepare(DrawRequest(seed=0, prompt="a hill", frames=21))
    with jobs_of(model) as jobs:
        async with aclosing(model.draw(prepared, inputs_of(), {"progress": 0, "pixels": 0})) as pieces:
            async for piece in pieces:
                if isinstance(piece, TensorRows) if until is None else isinstance(piece, StepsDone) and piece.step >= until:
                    break
    del prepared, piece
    assert (model.sessions.running, model.load().queued) == (0, 0)
    await until_collected(lambda: [job() for job in jobs] == [None])
    assert (await draw(model, "a hill", frames=5, ports={"pixels": 0})).rows("pixels").shape == (5 * SIDE * SIDE, 3)


async def test_pixels_leave_frame_by_frame_while_another_film_is_decoded(model: Model, seed: int) -> None:
    """And those of each are as when it is decoded alone."""
    ports = {"pixels": 0}
    alone = [await draw(model, "a dog", frames=13, seed=seed + n, steps=2, ports=ports) for n in range(2)]
    assert all(len(piece.rows) == SIDE * SIDE for piece in alone[0].pieces if isinstance(piece, TensorRows))
    together = await asyncio.gather(*(draw(model, "a dog", frames=13, seed=seed + n, steps=2, ports=ports) for n in range(2)))
    for one, other in zip(alone, together, strict=True):
        assert np.abs(one.rows("pixels").astype(int) - other.rows("pixels")).max() <= 1
    rest = await draw(model, "a dog", frames=13, seed=seed, steps=2, ports={"pixels": 5 * SIDE * SIDE + 7})
    assert np.array_equal(rest.rows("pixels"), alone[0].rows("pixels")[5 * SIDE * SIDE + 7 :])


async def test_a_film_goes_on_from_what_was_kept_with_the_same_bits(model: Model, experts: Model, seed: int) -> None:
    """Between any two steps, also where the other expert has the next one, and with a picture."""
    for made, images in ((model, pictures(seed, 1)), (experts, ())):
        shape: dict[str, Any] = {"width": SIDE, "height": SIDE, "frames": 5, "steps": STEPS, "images": images, "seed": seed}
        whole = await draw(made, "a dog", ports={"latents": 0, "checkpoint": 0}, **shape)
        kept = [piece.rows for piece in whole.pieces if isinstance(piece, TensorRows) and piece.port == "checkpoint"]
        assert len(kept) == STEPS - 1
        for count in range(1, STEPS):
            history = np.concatenate(kept[:count])
            rest = await draw(made, "a dog", ports={"latents": 0, "progress": 0}, history=history, **shape)
            assert min(rest.steps) >= count  # Progress that nobody has read gives way to newer.
            assert np.array_equal(rest.rows("latents"), whole.rows("latents"))


@lengths.drawn_cells(
    2,
    ("asked", "field", "told"),
    [
        ({"frames": 6}, "frames", "ask for 5 or 9"),
        ({"frames": 1 << 20}, "frames", "at most"),
        ({"width": 40}, "width", "multiples of 32"),
        ({"width": 1 << 10, "height": 1 << 10}, "width", "at most 16384 pixels"),
        ({"steps": 10_000}, "steps", "takes 1 to 200 steps"),
        ({"guidance_scale": float("nan")}, "guidance_scale", "takes 0 to 30"),
        ({"guidance_scale_2": 2.0}, "guidance_scale_2", "knows none"),
        ({"guidance_scale": 1.0, "negative_prompt": "rain"}, "negative_prompt", "no effect"),
        ({"prompt": "a" * 600}, "prompt", "the text encoder reads 512"),
        ({"results": 2}, "results", "at most 1"),
        ({"seconds": 2.0, "frames": 5}, "duration_s", "frames say how long"),
        ({"media_type": "image/png"}, "media_type", "video/webm"),
        ({"images": (b"no picture",)}, "images", "diffusion.images"),
        ({"images": pictures(0, 2)}, "images", "and 2 came"),
        ({"strength": 0.5}, "strength", "knows none"),
        ({"previews": 2}, "previews", "shows none"),
        ({"flow_shift": 1e-30}, "flow_shift", "give one nearer to 1, not 1e-30"),
    ],
)
async def test_what_it_cannot_be_is_refused_and_the_next_is_made(model: Model, asked: dict[str, Any], field: str, told: str) -> None:
    await check_refused(model, field, told, **{"ports": {"pixels": 0}, **asked})
    made = await draw(model, "", frames=1, steps=1, ports={"pixels": 0})
    assert made.rows("pixels").shape == (SIDE * SIDE, 3)


@lengths.long_form(
    "models/diffusers/test_memory_plan.py::test_a_picture_does_not_depend_on_where_weights_are",
    "models/diffusers/test_wan.py::test_a_vae_that_is_elsewhere_is_fetched_before_it_decodes",
    unkept="an embedding by two names is moved as one",
)
@lengths.drawn_cells(1, "offload", ["group", "disk"])
async def test_a_film_does_not_depend_on_where_weights_are(experts: Model, offload: str, seed: int) -> None:
    """Its text encoder has one embedding by two names."""
    asked: dict[str, Any] = {"frames": 5, "seed": seed, "ports": {"latents": 0, "pixels": 0}}
    here = await draw(experts, "a dog", **asked)
    async with model_of(place("t2v"), **USUAL, offload=offload) as made:
        for _ in range(2):
            there = await draw(made, "a dog", **asked)
            assert np.array_equal(there.rows("latents"), here.rows("latents"))
            assert np.array_equal(there.rows("pixels"), here.rows("pixels"))


async def test_a_film_that_becomes_no_number_is_told_as_that(tmp_path: Path) -> None:
    async with model_of(folder("one", tmp_path), **USUAL) as made:
        artist: Any = made._artist
        weight = artist._painter.pipe.vae.decoder.conv_out.bias
        with torch.no_grad():
            weight.fill_(float("nan"))
        with pytest.raises(Exception, match="no number of the film"):
            await draw(made, "a dog", frames=5, ports={"pixels": 0})
