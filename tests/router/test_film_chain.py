"""A film asked of a router: it comes in pieces with its sound, each frame once, whoever is lost on the way."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import numpy as np

from helpers.ask import WholeAnswer, ask, read, read_all, refused
from helpers.servers import Local, all_free, family_logic, is_busy, local_router, local_stage, omni_stub
from omnistage.models.toy import formulas
from omnistage.models.toy.film import FILM, SIDE, STEPS
from omnistage.router.pipeline import load_pipeline
from omnistage.v1 import omni_pb2, stage_pb2

FRAMES, SECONDS = 24, 0.5


def film(seed: int, **fields: object) -> omni_pb2.GenerateRequest:
    asked = {"prompt": "a walk", "negative_prompt": "rain", "guidance_scale": 3, "frames": FRAMES, "duration_s": SECONDS, **fields}
    return omni_pb2.GenerateRequest(seed=seed, diffusion=stage_pb2.DiffusionParams(**asked))  # type: ignore[arg-type]


def check(answer: WholeAnswer, seed: int) -> None:
    answer.check_whole()
    steer = formulas.steer("a walk", "rain", 3)
    places = (np.arange(FRAMES), np.arange(SIDE), np.arange(SIDE))
    expected = formulas.latent_after(formulas.noise(seed, *places), steer, STEPS).astype(np.uint8)
    clips = [chunk.video for chunk in answer.of("video") if chunk.HasField("video")]
    assert {clip.media_type for clip in clips} == {FILM}
    assert b"".join(clip.data for clip in clips) == expected.tobytes()
    assert sum(chunk.count for chunk in answer.of("video")) == FRAMES
    sound = formulas.film_sound(seed, steer, 0, round(SECONDS * formulas.SAMPLE_RATE_HZ))[:, 0] * 32768
    np.testing.assert_array_equal(answer.samples(), sound)


async def test_a_film_with_previews_and_sound(seed: int):
    async with (
        local_stage(family_logic("toy-film", "diffusion")) as stage,
        local_router({"diffusion": stage.address}, load_pipeline("toy-film")) as router,
        omni_stub(router.address) as stub,
    ):
        answer = await ask(stub, film(seed, previews=3))
        check(answer, seed)
        previews = [chunk for chunk in answer.of("image") if chunk.image.HasField("preview_step")]
        assert [chunk.image.preview_step for chunk in previews] == [2, 4, 6] and not any(chunk.count for chunk in previews)
        bad = await refused(stub, film(seed, layers=2))
        assert (bad.reason, bad.fields) == ("BAD_REQUEST", ["diffusion.frames"])
        only_sound = await ask(stub, omni_pb2.GenerateRequest(outputs=["audio"], seed=seed, diffusion=film(seed).diffusion))
        assert list(only_sound.chunks) == ["audio"]
        np.testing.assert_array_equal(only_sound.samples(), answer.samples())
        assert only_sound.usage is not None and dict(only_sound.usage.stages[0].output_items)["video"] == 0
        await all_free([stage.address])


@asynccontextmanager
async def two_film_makers(**options: object) -> AsyncIterator[tuple[list[tuple[Local, AsyncExitStack]], Any]]:
    """Each with what ends it, and a stub of their router."""
    async with AsyncExitStack() as everything:
        running: list[tuple[Local, AsyncExitStack]] = []
        for _ in range(2):
            own = await everything.enter_async_context(AsyncExitStack())
            running.append((await own.enter_async_context(local_stage(family_logic("toy-film", "diffusion", options))), own))
        addresses = [("diffusion", local.address) for local, _ in running]
        router = await everything.enter_async_context(local_router(addresses, load_pipeline("toy-film")))
        yield running, await everything.enter_async_context(omni_stub(router.address))


async def test_a_film_maker_that_is_lost_in_mid_film_leaves_no_gap(seed: int):
    async with two_film_makers(interval_s=0.06, max_chunk=1) as (running, stub):
        answer = WholeAnswer()
        call = stub.Generate(film(seed), timeout=60)
        while len(answer.of("video")) < 5:
            answer.take(await read(call))
        (busy,) = [own for local, own in running if is_busy(local)]
        await busy.aclose()
        async for event in read_all(call):
            answer.take(event)
        check(answer, seed)
        assert len(answer.failovers) == 1


def steps_shown(answer: WholeAnswer) -> list[int]:
    return [chunk.progress.done for chunk in answer.of("progress") if chunk.HasField("progress")]


async def test_a_drawing_that_is_lost_between_steps_goes_on_with_all_that_its_sampler_remembers(seed: int):
    """At another part of the model than it began with, from the middle of its steps."""
    asked = omni_pb2.GenerateRequest(
        seed=seed, diffusion=stage_pb2.DiffusionParams(prompt="a hill", width=24, height=16, steps=20, results=2)
    )
    async with two_film_makers(interval_s=0.05, experts=2, multistep=True) as (running, stub):
        answer = WholeAnswer()
        call = stub.Generate(asked, timeout=60)
        while 12 not in steps_shown(answer):
            answer.take(await read(call))
        (busy,) = [own for local, own in running if is_busy(local)]
        await busy.aclose()
        async for event in read_all(call):
            answer.take(event)
        assert len(answer.failovers) == 1
        shown = steps_shown(answer)
        assert all(step > 10 for step in shown[shown.index(12) :]), "it began anew"
        whole = await ask(stub, asked)
        pictures, expected = ([chunk.image.data for chunk in made.of("image") if chunk.count] for made in (answer, whole))
        assert len(pictures) == 2 and pictures == expected
