"""Films and sound by whole calls of pipelines for which there is no loop of our own: of the model, and asked of a router."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from helpers import lengths
from helpers.artists import PiecesOfDrawing, check_refused, draw, model_of
from helpers.ask import ask, refused
from helpers.moving import CHANNELS, FILM_SIDE, FRAMES, RATE_HZ, film_maker, frames_of, show_same_frames, sound_maker
from helpers.painting import pipeline_of
from helpers.servers import all_free, family_logic, local_router, local_stage, omni_stub
from omnistage.models.interface import Clip, Content, Sound
from omnistage.router.pipeline import load_pipeline
from omnistage.v1 import omni_pb2, stage_pb2

pytestmark = pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")  # of a VAE's of sound

FILM = {"width": FILM_SIDE, "height": FILM_SIDE, "steps": 3, "max_pixels": 1 << 16}


def shown(pieces: list[Any]) -> tuple[list[NDArray[np.generic]], float]:
    """Frames of the file that clips are pieces of, and their rate."""
    return frames_of(b"".join(piece.data for piece in pieces if isinstance(piece, Clip)))


def heard(pieces: list[Any]) -> NDArray[np.float32]:
    return np.concatenate([piece.samples for piece in pieces if isinstance(piece, Sound)])


async def make(model: Any, prompt: str, first: int = 0, **asked: Any) -> PiecesOfDrawing:
    """first: frame or sample from which on it is wanted."""
    return await draw(model, prompt, ports={model.info.produces[0].name: first, "progress": 0}, **asked)


async def test_a_film_is_that_of_the_pipeline_as_a_file_that_plays(seed: int) -> None:
    async with model_of(film_maker(), **FILM) as model:
        assert model.info.produces[0].content is Content.VIDEO
        drawing = await make(model, "a dog", seed=seed, frames=9, guidance_scale=3.0, negative_prompt="rain", frames_per_second=12.5)
        pipe = pipeline_of(film_maker())
        noise = torch.Generator().manual_seed(seed)
        said = {"num_inference_steps": 3, "width": FILM_SIDE, "height": FILM_SIDE, "guidance_scale": 3.0, "negative_prompt": "rain"}
        said |= {"frame_rate": 12.5}
        (expected,) = pipe("a dog", num_frames=9, generator=noise, output_type="pil", **said).frames
        frames, rate = shown(drawing.pieces)
        assert len(frames) == len(expected) == 9 and rate == 12.5
        for frame, pixels in zip(frames, expected, strict=True):
            # The file keeps colours at half the places, and not exactly: what is drawn here is noise.
            assert np.abs(frame.mean((0, 1)) - np.asarray(pixels).mean((0, 1))).max() < 4
            assert np.abs(frame.mean(2) - np.asarray(pixels).mean(2)).mean() < 16
        assert drawing.steps[-1] == 3
        await model.warm_up()


async def test_a_film_goes_on_at_the_frame_that_is_wanted(seed: int) -> None:
    async with model_of(film_maker(), **FILM) as model:
        whole = [piece for piece in (await make(model, "a dog", seed=seed, frames=21)).pieces if isinstance(piece, Clip)]
        assert len(whole) > 1 and sum(piece.frames for piece in whole) == 21
        rest = await make(model, "a dog", whole[0].frames, seed=seed, frames=21)
        clips = [whole[0], *(piece for piece in rest.pieces if isinstance(piece, Clip))]
        assert sum(piece.frames for piece in clips) == 21
        # The rest begins with a key frame, so its bytes are others.
        assert show_same_frames(b"".join(piece.data for piece in clips), b"".join(piece.data for piece in whole))


async def test_sound_is_that_of_the_pipeline_for_as_long_as_was_asked(seed: int) -> None:
    async with model_of(sound_maker(), steps=4) as model:
        port = model.info.produces[0]
        assert (port.content, port.rate_hz, port.width) == (Content.AUDIO, RATE_HZ, CHANNELS)
        drawing = await make(model, "rain", seed=seed, seconds=1.3, guidance_scale=2.0)
        pipe = pipeline_of(sound_maker())
        said = {"num_inference_steps": 4, "guidance_scale": 2.0, "audio_duration_s": 1.3, "output_type": "np"}
        (expected,) = pipe("rain", generator=torch.Generator().manual_seed(seed), **said).audios
        samples = heard(drawing.pieces)
        assert samples.shape == (round(1.3 * RATE_HZ), CHANNELS)
        whole = expected.T[: len(samples)].clip(-1, 1)
        assert np.abs(samples[: len(whole)] - whole).max() <= 1e-5 and not samples[len(whole) :].any()
        rest = await make(model, "rain", 100, seed=seed, seconds=1.3, guidance_scale=2.0)
        assert np.array_equal(heard(rest.pieces), samples[100:])


async def test_films_that_are_alike_share_a_call_and_others_take_turns(seed: int) -> None:
    async with model_of(film_maker(), **FILM) as model:
        asked: list[dict[str, Any]] = [{"prompt": f"dog {n}", "seed": seed + n, "frames": 5 + 4 * (n == 2)} for n in range(3)]
        together = await asyncio.gather(*(make(model, **one) for one in asked))
        alone = [shown((await make(model, **one)).pieces)[0] for one in asked]
        for number, drawing in enumerate(together):
            frames = shown(drawing.pieces)[0]
            assert len(frames) == len(alone[number]) == asked[number]["frames"]
            # A film of other last bits is compressed in another way. It is far nearer to itself than to the others.
            apart = [np.abs(np.stack(frames[:5]).astype(int) - np.stack(film[:5])).mean() for film in alone]
            assert apart[number] < min(apart[:number] + apart[number + 1 :]) / 5


@lengths.drawn_cells(
    5,
    ("maker", "asked", "field", "told"),
    [
        (film_maker, {"frames": 6}, "frames", "5 or 9"),
        (film_maker, {"frames": 2000}, "frames", "at most"),
        (film_maker, {"seconds": 1.0, "frames": 5}, "duration_s", "frames say how long"),
        (film_maker, {"results": 2}, "results", "at most 1"),
        (film_maker, {"width": 36}, "width", "multiples of 8"),
        (film_maker, {"media_type": "image/png"}, "media_type", "video/webm"),
        (film_maker, {"options": {"num_frames": "5"}}, "options", "the request has frames"),
        (sound_maker, {"frames": 5}, "frames", "makes sound"),
        (sound_maker, {"seconds": 1000.0}, "duration_s", "at most"),
        (sound_maker, {"seconds": 40.0}, "duration_s", "at most 30 s"),
        (sound_maker, {"seconds": 1.0, "options": {"audio_duration_s": "50"}}, "options", "the request has duration_s"),
        (film_maker, {"options": {"frame_rate": "50"}}, "options", "the request has frames_per_second"),
        (sound_maker, {"width": 64}, "width", "no pictures"),
        (sound_maker, {"media_type": "audio/wav"}, "media_type", "makes sound"),
    ],
)
async def test_what_it_cannot_be_is_refused_and_the_next_is_made(maker: Any, asked: dict[str, Any], field: str, told: str) -> None:
    async with model_of(maker(), steps=2, **({"width": FILM_SIDE, "height": FILM_SIDE} if maker is film_maker else {})) as model:
        await check_refused(model, field, told, ports={model.info.produces[0].name: 0}, **asked)
        good = {"frames": FRAMES} if maker is film_maker else {"seconds": 0.5}
        assert any(isinstance(piece, Clip | Sound) for piece in (await make(model, "a dog", **good)).pieces)


# By a router, which learns from the stage which of them it makes ----------------------------------------------------------------------


def request(**fields: object) -> omni_pb2.GenerateRequest:
    return omni_pb2.GenerateRequest(seed=1, diffusion=stage_pb2.DiffusionParams(prompt="a dog", steps=2, **fields))  # type: ignore[arg-type]


async def test_a_film_comes_as_a_file() -> None:
    sizes = {"width": FILM_SIDE, "height": FILM_SIDE}
    async with (
        local_stage(family_logic("diffusers", "diffusion", sizes, film_maker())) as stage,
        local_router({"diffusion": stage.address}, load_pipeline("diffusers")) as router,
        omni_stub(router.address) as stub,
    ):
        answer = await ask(stub, request(frames=13))
        assert sorted(answer.chunks) == ["progress", "video"]
        data = b"".join(chunk.video.data for chunk in answer.of("video"))
        assert len(frames_of(data)[0]) == sum(chunk.count for chunk in answer.of("video")) == 13
        said = {(chunk.video.media_type, chunk.video.codecs) for chunk in answer.of("video") if chunk.HasField("video")}
        assert said == {("video/webm", "vp9")}
        answer = await ask(stub, request(frames=13, media_type='video/mp4; codecs="avc1"'))
        chunks = [chunk for chunk in answer.of("video") if chunk.HasField("video")]
        assert {(chunk.video.media_type, chunk.video.codecs[:5]) for chunk in chunks} == {("video/mp4", "avc1.")}
        assert len(frames_of(b"".join(chunk.video.data for chunk in chunks))[0]) == 13
        for fields, field in (({"duration_s": 2, "frames": 5}, "duration_s"), ({"media_type": "video/mp4; codecs=hvc1"}, "media_type")):
            bad = await refused(stub, request(**fields))
            assert (bad.reason, bad.fields) == ("BAD_REQUEST", [f"diffusion.{field}"])
        await all_free([stage.address])


async def test_sound_comes_as_samples() -> None:
    async with (
        local_stage(family_logic("diffusers", "diffusion", {}, sound_maker())) as stage,
        local_router({"diffusion": stage.address}, load_pipeline("diffusers")) as router,
        omni_stub(router.address) as stub,
    ):
        answer = await ask(stub, request(duration_s=0.5))
        assert sorted(answer.chunks) == ["audio", "progress"]
        assert answer.samples().size == RATE_HZ // 2 * CHANNELS
        await all_free([stage.address])
