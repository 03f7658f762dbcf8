"""A question with a picture and a sound in it, and a film with its sound, asked of a whole chain: all that comes is the formula, whoever is
lost on the way."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager

import numpy as np
import pytest

from helpers.ask import WholeAnswer, ask, refused
from helpers.chain import RouterAndStages, router_and_stages
from helpers.disturbed import DisturbanceStep, ask_through, audio_chunks
from helpers.families import PICTURE, SEEN, looked_at
from helpers.run import messages
from helpers.servers import CHAIN, family_logic
from omnistage.models.toy import formulas
from omnistage.models.toy.files import png
from omnistage.models.toy.film import FILM, SIDE, STEPS
from omnistage.router.pipeline import load_pipeline
from omnistage.v1 import omni_pb2, stage_pb2

ARENA = {"arena_bytes": 256 << 20}
FRAMES, SECONDS = 24, 0.5


def house(replicas: Mapping[str, int] | None = None, **options: object) -> AbstractAsyncContextManager[RouterAndStages]:
    """toy-omni behind a router, with an arena each."""
    kinds = [kind for kind in CHAIN for _ in range((replicas or {}).get(kind, 1))]
    return router_and_stages([family_logic("toy-omni", kind, options) for kind in kinds], load_pipeline("toy-omni"), stage=ARENA)


def film_makers(count: int = 1, **options: object) -> AbstractAsyncContextManager[RouterAndStages]:
    return router_and_stages([family_logic("toy-film", "diffusion", options) for _ in range(count)], load_pipeline("toy-film"))


def question(given: list[stage_pb2.Message], seed: int) -> omni_pb2.GenerateRequest:
    return omni_pb2.GenerateRequest(seed=seed, thinker=stage_pb2.ThinkerParams(messages=given))


def check(answer: WholeAnswer, seen: tuple[formulas.Seen, ...], seed: int) -> None:
    answer.check_whole()
    items = formulas.items(seen)
    tokens = [formulas.omni_token(seed, items, n) for n in range(formulas.NATURAL_LENGTH)]
    assert answer.text() == "".join(map(formulas.word, tokens))
    expected = formulas.samples(formulas.omni_frames(items, tokens))[:, 0] * 32768
    np.testing.assert_array_equal(answer.samples(), expected)


async def test_it_speaks_from_what_it_sees_and_hears(seed: int):
    async with house() as stack:
        check(await ask(stack.stub, question(looked_at(), seed)), SEEN, seed)


async def test_prompt_rows_of_megabytes_go_down_in_pieces(seed: int):
    """65,536 patches: a mebibyte of rows and two of places, and not one chunk above a mebibyte."""
    pixels = (np.add.outer(np.arange(512), 7 * np.arange(512)) % 256).astype(np.uint8)
    media = stage_pb2.Media(data=png(pixels), media_type="image/png")
    given = [stage_pb2.Message(role="user", parts=[stage_pb2.Part(media=media), stage_pb2.Part(text="?")])]
    async with house() as stack:
        answer = await ask(stack.stub, question(given, seed))
        check(answer, ("u", pixels, "?"), seed)
        assert answer.usage is not None
        rows = 256 * 256 + 2
        assert {port: n for port, n in answer.usage.stages[1].input_items.items() if port != "hidden"} == {"prompt": rows, "places": rows}


@pytest.mark.parametrize("lost", CHAIN)
async def test_a_stage_that_is_lost_in_mid_speech_leaves_no_gap(lost: str, seed: int):
    async with house({lost: 2}, interval_s=0.15) as stack:
        strike = DisturbanceStep(audio_chunks(3), lambda: stack.end_busy(lost))
        answer = await ask_through(stack.stub, question(looked_at(), seed), strike)
        check(answer, SEEN, seed)
        assert [stage_pb2.StageKind.Name(failover.kind).lower() for failover in answer.failovers] == [f"stage_kind_{lost}"]


async def test_a_picture_that_cannot_be_read_is_refused_in_words_and_the_next_one_is_seen(seed: int):
    async with house() as stack:
        media = stage_pb2.Media(data=png(PICTURE)[:50], media_type="image/png")
        bad = await refused(stack.stub, question([stage_pb2.Message(role="user", parts=[stage_pb2.Part(media=media)])], seed))
        assert (bad.reason, bad.fields) == ("BAD_REQUEST", ["thinker.messages.parts.media"])
        assert "PNG" in bad.message
        film = stage_pb2.Media(data=b"x", media_type="video/mp4")
        bad = await refused(stack.stub, question([stage_pb2.Message(role="user", parts=[stage_pb2.Part(media=film)])], seed))
        assert "takes text, image and audio, not 'video/mp4'" in bad.message
        check(await ask(stack.stub, question(looked_at(), seed)), SEEN, seed)
        check(await ask(stack.stub, question(messages("Only words."), seed)), ("u", "Only words."), seed)


# Films ---------------------------------------------------------------------------------------------------------------------------------


def film(seed: int, **fields: object) -> omni_pb2.GenerateRequest:
    asked = {"prompt": "a walk", "negative_prompt": "rain", "guidance_scale": 3, "frames": FRAMES, "duration_s": SECONDS, **fields}
    return omni_pb2.GenerateRequest(seed=seed, diffusion=stage_pb2.DiffusionParams(**asked))  # type: ignore[arg-type]


def check_film(answer: WholeAnswer, seed: int) -> None:
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
    async with film_makers() as stack:
        answer = await ask(stack.stub, film(seed, previews=3))
        check_film(answer, seed)
        previews = [chunk for chunk in answer.of("image") if chunk.image.HasField("preview_step")]
        assert [chunk.image.preview_step for chunk in previews] == [2, 4, 6] and not any(chunk.count for chunk in previews)
        bad = await refused(stack.stub, film(seed, layers=2))
        assert (bad.reason, bad.fields) == ("BAD_REQUEST", ["diffusion.frames"])
        only_sound = await ask(stack.stub, omni_pb2.GenerateRequest(outputs=["audio"], seed=seed, diffusion=film(seed).diffusion))
        assert list(only_sound.chunks) == ["audio"]
        np.testing.assert_array_equal(only_sound.samples(), answer.samples())
        assert only_sound.usage is not None and dict(only_sound.usage.stages[0].output_items)["video"] == 0


async def test_a_film_maker_that_is_lost_in_mid_film_leaves_no_gap(seed: int):
    async with film_makers(2, interval_s=0.06, max_chunk=1) as stack:
        strike = DisturbanceStep(lambda heard: len(heard.of("video")) >= 5, lambda: stack.end_busy("diffusion"))
        answer = await ask_through(stack.stub, film(seed), strike)
        check_film(answer, seed)
        assert len(answer.failovers) == 1


def steps_shown(answer: WholeAnswer) -> list[int]:
    return [chunk.progress.done for chunk in answer.of("progress") if chunk.HasField("progress")]


async def test_a_drawing_that_is_lost_between_steps_goes_on_with_all_that_its_sampler_remembers(seed: int):
    """At another part of the model than it began with, from the middle of its steps."""
    hill = stage_pb2.DiffusionParams(prompt="a hill", width=24, height=16, steps=20, results=2)
    asked = omni_pb2.GenerateRequest(seed=seed, diffusion=hill)
    async with film_makers(2, interval_s=0.05, experts=2, multistep=True) as stack:
        strike = DisturbanceStep(lambda heard: 12 in steps_shown(heard), lambda: stack.end_busy("diffusion"))
        answer = await ask_through(stack.stub, asked, strike)
        assert len(answer.failovers) == 1
        shown = steps_shown(answer)
        assert all(step > 10 for step in shown[shown.index(12) :]), "it began anew"
        whole = await ask(stack.stub, asked)
        pictures, expected = ([chunk.image.data for chunk in made.of("image") if chunk.count] for made in (answer, whole))
        assert len(pictures) == 2 and pictures == expected
