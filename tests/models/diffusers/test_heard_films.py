"""Films with sound, films without and sound alone, by whole calls of pipelines that have no loop of our own: of the model, in their files,
beside them, by a router and over HTTP."""

from __future__ import annotations

import asyncio
import inspect
import io
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import soundfile
import torch
from diffusers import Kandinsky6TI2VAPipeline, LTX2Pipeline
from diffusers.models.autoencoders.autoencoder_mmaudio import MMAudioVAE
from diffusers.models.autoencoders.mmaudio_vocoder import MMAudioVocoder
from diffusers.pipelines.ltx2 import LTX2Vocoder
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file, save_file

from helpers import lengths, moving
from helpers.artists import PiecesOfDrawing, check_refused, draw, model_of, saved
from helpers.ask import ask, refused
from helpers.gateway import local_gateway
from helpers.moving import FILM_CHANNELS, FILM_RATE_HZ, heard_film_maker, streams_of
from helpers.painting import pipeline_of
from helpers.servers import all_free, family_logic, local_router, local_stage, omni_stub
from helpers.videos import by
from omnistage.models.diffusers.folder import load_part
from omnistage.models.diffusers.model import DrawnModel
from omnistage.models.diffusers.results import WholeFilm, results_of
from omnistage.models.diffusers.whole import WholeDrawing
from omnistage.models.interface import Clip, Content, DrawRequest, Failed, Sound, StepsDone, inputs_of
from omnistage.models.media.film_file import FilmWriter, Track, film_kind
from omnistage.models.reports import LoadError
from omnistage.router.pipeline import load_pipeline as load_chain
from omnistage.v1 import omni_pb2, omni_pb2_grpc, stage_pb2

pytestmark = pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")  # of a VAE's of sound

SIDE, FRAMES, RATE_HZ, STEPS = 64, 17, 24.0, 3
FILM = {"width": SIDE, "height": SIDE, "steps": STEPS, "max_pixels": 1 << 16}
BOTH = {"video": 0, "audio": 0, "progress": 0}
ALL = ("audio", "progress", "video")
AVC = 'video/mp4; codecs="avc1"'
forms = pytest.mark.parametrize(("asked", "ending"), [("", "vp9, opus"), ("video/mp4", ", opus"), (AVC, ", opus")])


@pytest.fixture
async def model() -> AsyncIterator[DrawnModel[Any]]:
    async with model_of(heard_film_maker(), **FILM) as loaded:
        yield loaded


async def make(model: DrawnModel[Any], seed: int, ports: dict[str, int] = BOTH, **asked: Any) -> PiecesOfDrawing:
    return await draw(model, "a dog", ports=ports, seed=seed, **{"frames": FRAMES, **asked})


def file_of(drawing: PiecesOfDrawing) -> bytes:
    return b"".join(piece.data for piece in drawing.pieces if isinstance(piece, Clip))


def heard(drawing: PiecesOfDrawing) -> NDArray[np.float32]:
    return np.concatenate([piece.samples for piece in drawing.pieces if isinstance(piece, Sound)])


def expected(
    seed: int, frames: int = FRAMES, rate_hz: float = RATE_HZ, folder: Path | None = None, **said: Any
) -> tuple[list[NDArray[np.uint8]], Track]:
    """Frames of the pipeline itself, and its sound, as long as they are."""
    pipe = pipeline_of(folder or heard_film_maker())
    said |= {"num_frames": frames, "frame_rate": rate_hz, "num_inference_steps": STEPS, "width": SIDE, "height": SIDE}
    made = pipe(prompt="a dog", generator=torch.Generator().manual_seed(seed), **said)
    count = round(frames / rate_hz * FILM_RATE_HZ)
    samples = made.audio[0].T.numpy()[:count]
    return [np.asarray(frame) for frame in made.frames[0]], Track(np.pad(samples, ((0, count - len(samples)), (0, 0))), FILM_RATE_HZ)


def written(frames: list[NDArray[np.uint8]], track: Track, asked: str, rate_hz: float = RATE_HZ) -> bytes:
    """The same frames and samples make the same bytes, and no others do."""
    kind = film_kind(asked)
    assert kind is not None
    writer = FilmWriter(kind, rate_hz, len(frames), track)
    return b"".join(piece.data for piece in map(writer.write, frames) if piece)


@forms
async def test_frames_and_sound_are_those_of_the_pipeline(model: DrawnModel[Any], asked: str, ending: str, seed: int) -> None:
    ports = {port.name: (port.content, port.rate_hz, port.width) for port in model.info.produces}
    assert ports["video"][0] is Content.VIDEO and ports["audio"] == (Content.AUDIO, FILM_RATE_HZ, FILM_CHANNELS)
    drawing = await make(model, seed, media_type=asked)
    frames, track = expected(seed)
    assert len(frames) == FRAMES and np.abs(track.samples).max() > 0.01
    assert file_of(drawing) == written(frames, track, asked)
    samples = heard(drawing)
    assert samples.shape == track.samples.shape and np.abs(samples - track.samples).max() <= 1e-6
    assert all(piece.codecs.endswith(ending) for piece in drawing.pieces if isinstance(piece, Clip)) and drawing.steps == [1, 2, 3]
    (shown, shown_s), (sound, sound_rate_hz) = streams_of(file_of(drawing))
    assert shown == FRAMES and sound.shape[1] == FILM_CHANNELS
    assert abs(len(sound) / sound_rate_hz - shown_s) < 1 / RATE_HZ and abs(len(samples) / FILM_RATE_HZ - shown_s) < 1 / FILM_RATE_HZ


@lengths.drawn_cells(1, "apart", [-700, 0, 700])
async def test_longer_sound_than_frames_is_cut_and_shorter_ends_in_silence(model: DrawnModel[Any], apart: int) -> None:
    plan = await model.prepare(DrawRequest(seed=0, prompt="a dog", frames=FRAMES))
    count = model.items(plan)["audio"]
    made = np.linspace(0.1, 0.9, FILM_CHANNELS * (count + apart), dtype=np.float32).reshape(FILM_CHANNELS, -1)
    frames = [Image.new("RGB", (SIDE, SIDE))] * FRAMES
    pieces: list[Any] = list(model._artist.product.decode(plan, [(frames, torch.from_numpy(made))], BOTH))
    samples = heard(PiecesOfDrawing(pieces))
    assert len(samples) == count and np.array_equal(samples[: count + apart], made.T[:count]) and not samples[count + apart :].any()
    (_, shown_s), (sound, rate_hz) = streams_of(file_of(PiecesOfDrawing(pieces)))
    assert abs(len(sound) / rate_hz - shown_s) < 1 / RATE_HZ
    with pytest.raises(Failed, match="made 1 channels of sound, and its parts say 2"):
        list(model._artist.product.decode(plan, [(frames, made[:1])], BOTH))


async def test_each_port_comes_alone_or_with_the_other(model: DrawnModel[Any], seed: int) -> None:
    both = await make(model, seed)
    film = await make(model, seed, {"video": 0})
    sound = await make(model, seed, {"audio": 0})
    assert {type(piece) for piece in film.pieces} == {Clip} and file_of(film) == file_of(both)
    assert {type(piece) for piece in sound.pieces} == {Sound} and np.array_equal(heard(sound), heard(both))
    kinds = [type(piece) for piece in both.pieces if not isinstance(piece, StepsDone)]
    assert Sound in kinds[: kinds.index(Sound) + 2] and Clip in kinds[kinds.index(Sound) :]  # Sound does not wait for the whole film.
    whole = [piece for piece in both.pieces if isinstance(piece, Clip)]
    rest = await make(model, seed, {"video": sum(piece.frames for piece in whole[:5]), "audio": 4567})
    joined = b"".join(piece.data for piece in whole[:5]) + file_of(rest)
    (shown, _), (sound_of_all, _) = streams_of(joined)
    assert shown == FRAMES and np.array_equal(sound_of_all, streams_of(file_of(both))[1][0])
    assert np.array_equal(heard(rest), heard(both)[4567:])


@lengths.drawn_cells(1, "kind", [StepsDone, Clip, Sound])
async def test_who_goes_away_late_leaves_nothing_behind(model: DrawnModel[Any], kind: type, seed: int) -> None:
    """After the last step, in the middle of the frames, at the first samples."""
    prepared = await model.prepare(DrawRequest(seed=seed, prompt="a cat", frames=FRAMES))
    async with aclosing(model.draw(prepared, inputs_of(), BOTH)) as pieces:
        async for piece in pieces:
            if isinstance(piece, kind) and (not isinstance(piece, StepsDone) or piece.step == STEPS):
                break
    frames, track = expected(seed)
    assert file_of(await make(model, seed)) == written(frames, track, "")
    assert isinstance(model._artist, WholeDrawing) and not model._artist._calls


async def test_a_film_of_a_picture_has_sound_too(tmp_path: Path, seed: int) -> None:
    folder = tmp_path / "pictured"
    shutil.copytree(heard_film_maker(), folder)
    index = folder / "model_index.json"
    index.write_text(index.read_text().replace('"LTX2Pipeline"', '"LTX2ImageToVideoPipeline"'))
    image = Image.linear_gradient("L").convert("RGB").resize((SIDE, SIDE))
    async with model_of(folder, **FILM) as model:
        drawing = await make(model, seed, images=(saved(image),))
    frames, track = expected(seed, folder=folder, image=image)
    assert file_of(drawing) == written(frames, track, "") and np.abs(heard(drawing) - track.samples).max() <= 1e-6


async def test_films_of_other_rates_do_not_share_a_call(model: DrawnModel[Any], seed: int) -> None:
    """The sound of one would be as long as that of the other."""
    rates = (24.0, 12.0, 24.0)
    made = await asyncio.gather(*(make(model, seed + n, frames=9, frames_per_second=rate_hz) for n, rate_hz in enumerate(rates)))
    for n, (rate_hz, drawing) in enumerate(zip(rates, made, strict=True)):
        _, track = expected(seed + n, 9, rate_hz)
        assert heard(drawing).shape == track.samples.shape and np.abs(heard(drawing) - track.samples).max() <= 1e-4


async def test_it_makes_5_seconds_where_nobody_says(model: DrawnModel[Any]) -> None:
    """As the pipeline itself does, whose parameter is None."""
    plan = await model.prepare(DrawRequest(seed=0, prompt="a dog"))
    assert model.items(plan) == {"video": 121, "audio": round(121 / 24 * FILM_RATE_HZ)}


@lengths.drawn_cells(
    3,
    ("asked", "field", "told"),
    [
        ({"frames": 16}, "frames", "9 or 17"),
        ({"width": 32}, "width", "64 pixels at least"),
        ({"seconds": 1.0}, "duration_s", "frames say how long"),
        ({"begin_s": 1.0}, "begin_s", "leave it out"),
        ({"frames": 65, "frames_per_second": 0.1}, "frames_per_second", "at most 600 s of film with sound, these are 650"),
        ({"frames": 0, "seconds": 601.0, "frames_per_second": 1.0}, "duration_s", "at most 600 s"),
        ({"options": {"min_seconds": "2"}}, "options", "the request has frames"),
    ],
)
async def test_what_it_cannot_be_is_refused(model: DrawnModel[Any], asked: dict[str, Any], field: str, told: str) -> None:
    await check_refused(model, field, told, ports=BOTH, **{"frames": FRAMES, **asked})


def film_of(pipe: Any) -> WholeFilm:
    made = results_of(pipe, inspect.signature(type(pipe).__call__).parameters, "a model")
    assert isinstance(made, WholeFilm)
    return made


def kandinsky(**parts: Any) -> WholeFilm:
    """The rest of the pipeline is not asked."""
    names = ("transformer", "vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "scheduler")
    return film_of(Kandinsky6TI2VAPipeline(**dict.fromkeys(names), **parts))


def ltx2(**vocoder: Any) -> Any:
    names = ("scheduler", "vae", "audio_vae", "text_encoder", "tokenizer", "connectors")
    transformer = load_part(heard_film_maker(), "transformer", torch.float32)
    sizes: dict[str, Any] = {"in_channels": 4, "hidden_channels": 8, "upsample_kernel_sizes": [4], "upsample_factors": [2]}
    made = LTX2Vocoder(**sizes, resnet_kernel_sizes=[3], resnet_dilations=[[1]], **vocoder)
    return LTX2Pipeline(**dict.fromkeys(names), transformer=transformer, vocoder=made)


def test_what_sound_a_film_has_its_vocoder_says_or_the_vae_behind_it() -> None:
    vae = MMAudioVAE(mel_bins=8, latent_channels=4, hidden_channels=8, channel_multipliers=(1, 1), layers_per_block=1, sample_rate=16_000)
    sizes: dict[str, Any] = {"resblock_kernel_sizes": (3,), "resblock_dilation_sizes": ((1,),)}
    vocoder = MMAudioVocoder(num_mels=8, upsample_initial_channel=8, upsample_rates=(2,), upsample_kernel_sizes=(4,), **sizes)
    made = kandinsky(audio_vae=vae, vocoder=vocoder)
    _, port = made.ports
    assert (port.name, port.rate_hz, port.width) == ("audio", 16_000, 1) and made._sound_argument == {"sample_audio": True}
    assert [port.name for port in kandinsky().ports] == ["video"] and kandinsky()._sound_argument == {"sample_audio": False}
    with pytest.raises(LoadError, match="does not say how many samples of its sound are a second"):
        kandinsky(vocoder=vocoder)
    with pytest.raises(LoadError, match="4 channels of sound, and their files have 2 at most"):
        film_of(ltx2(out_channels=4))


@pytest.mark.parametrize("rate_hz", [0, -8000, 0.5])
def test_a_rate_that_is_none_is_not_made_up(rate_hz: float) -> None:
    with pytest.raises(LoadError, match="does not say how many samples of its sound are a second"):
        film_of(ltx2(output_sampling_rate=rate_hz))


async def test_sound_that_is_no_number_is_found_when_it_is_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "silent"
    shutil.copytree(heard_film_maker(), folder)
    file = folder / "vocoder" / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    weights["conv_in.bias"][0] = 1e38
    weights["conv_in.weight"][:] = 1e38
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(LoadError, match="no number of the sound"):
        async with model_of(folder, **FILM):
            pass


def request(*outputs: str, **fields: Any) -> omni_pb2.GenerateRequest:
    drawing = stage_pb2.DiffusionParams(prompt="a dog", steps=STEPS, **{"frames": FRAMES, **fields})
    return omni_pb2.GenerateRequest(seed=1, outputs=outputs, diffusion=drawing)


@asynccontextmanager
async def routed(folder: Path, options: Mapping[str, object]) -> AsyncIterator[omni_pb2_grpc.OmniServiceAsyncStub]:
    """Asks a router in front of a checkpoint; nothing of what was asked is left."""
    async with (
        local_stage(family_logic("diffusers", "diffusion", options, folder)) as stage,
        local_router({"diffusion": stage.address}, load_chain("diffusers")) as router,
        omni_stub(router.address) as stub,
    ):
        yield stub
        await all_free([stage.address])


async def test_a_router_gives_what_is_named_and_both_where_nothing_is() -> None:
    async with (
        local_stage(family_logic("diffusers", "diffusion", FILM, heard_film_maker())) as stage,
        local_router({"diffusion": stage.address}, load_chain("diffusers")) as router,
        omni_stub(router.address) as stub,
        local_gateway(router.address) as (url, _),
    ):
        answers = {outputs: await ask(stub, request(*outputs)) for outputs in ((), ("video",), ("audio",), ("video", "audio", "progress"))}
        assert [sorted(answer.chunks) for answer in answers.values()] == [[*ALL], ["video"], ["audio"], [*ALL]]
        files = [b"".join(chunk.video.data for chunk in answer.of("video")) for outputs, answer in answers.items() if outputs != ("audio",)]
        sounds = [answer.samples() for outputs, answer in answers.items() if outputs != ("video",)]
        for sound in sounds:
            assert np.array_equal(sound, sounds[0]) and len(sound) == round(FRAMES / RATE_HZ * FILM_RATE_HZ) * FILM_CHANNELS
        assert len(set(files)) == 1
        check_file(files[0])
        async with httpx2.AsyncClient(headers=by("ann"), base_url=f"{url}/v1") as client:
            await check_http(client, files[0], sounds[0])
        await all_free([stage.address])


def check_file(data: bytes) -> None:
    (shown, shown_s), (sound, rate_hz) = streams_of(data)
    assert shown == FRAMES and shown_s == FRAMES / RATE_HZ and sound.shape[1] == FILM_CHANNELS and np.abs(sound).max() > 0.01
    assert abs(len(sound) / rate_hz - shown_s) < 1 / RATE_HZ


async def check_http(client: httpx2.AsyncClient, file: bytes, sound: NDArray[Any]) -> None:
    """A job keeps the film with its sound, and says so to browsers; sound of a prompt comes without the film."""
    asked = {"prompt": "a dog", "seed": 1, "steps": STEPS}
    job = (await client.post("/videos", json={**asked, "frames": FRAMES})).json()
    whole = await client.get(f"/videos/{job['id']}/content?stream=true")
    assert whole.content == file
    job = (await client.get(f"/videos/{job['id']}")).json()
    assert (job["frames"], job["media_type"]) == (FRAMES, 'video/webm; codecs="vp9, opus"') and whole.headers["content-type"] == job[
        "media_type"
    ]
    made = await client.post("/audio/generate", json={**asked, "seconds": FRAMES / RATE_HZ, "response_format": "wav"})
    samples, rate_hz = soundfile.read(io.BytesIO(made.content), dtype="int16")
    assert rate_hz == FILM_RATE_HZ and np.array_equal(samples.ravel(), sound)


# Films without sound, and sound without a film ------------------------------------------------------------------------------------------


SMALL = {"width": moving.FILM_SIDE, "height": moving.FILM_SIDE}
SILENT = {**SMALL, "steps": 3, "max_pixels": 1 << 16}


def shown(pieces: list[Any]) -> tuple[list[NDArray[np.generic]], float]:
    """Frames of the file that clips are pieces of, and their rate."""
    return moving.frames_of(b"".join(piece.data for piece in pieces if isinstance(piece, Clip)))


async def make_one(model: Any, prompt: str, first: int = 0, **asked: Any) -> PiecesOfDrawing:
    """first: frame or sample from which on it is wanted."""
    return await draw(model, prompt, ports={model.info.produces[0].name: first, "progress": 0}, **asked)


async def test_a_film_is_that_of_the_pipeline_as_a_file_that_plays(seed: int) -> None:
    async with model_of(moving.film_maker(), **SILENT) as model:
        assert model.info.produces[0].content is Content.VIDEO
        drawing = await make_one(model, "a dog", seed=seed, frames=9, guidance_scale=3.0, negative_prompt="rain", frames_per_second=12.5)
        pipe = pipeline_of(moving.film_maker())
        noise = torch.Generator().manual_seed(seed)
        said = {**SMALL, "num_inference_steps": 3, "guidance_scale": 3.0, "negative_prompt": "rain", "frame_rate": 12.5}
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
    async with model_of(moving.film_maker(), **SILENT) as model:
        whole = [piece for piece in (await make_one(model, "a dog", seed=seed, frames=21)).pieces if isinstance(piece, Clip)]
        assert len(whole) > 1 and sum(piece.frames for piece in whole) == 21
        rest = await make_one(model, "a dog", whole[0].frames, seed=seed, frames=21)
        clips = [whole[0], *(piece for piece in rest.pieces if isinstance(piece, Clip))]
        assert sum(piece.frames for piece in clips) == 21
        # The rest begins with a key frame, so its bytes are others.
        assert moving.show_same_frames(b"".join(piece.data for piece in clips), b"".join(piece.data for piece in whole))


async def test_sound_is_that_of_the_pipeline_for_as_long_as_was_asked(seed: int) -> None:
    async with model_of(moving.sound_maker(), steps=4) as model:
        port = model.info.produces[0]
        assert (port.content, port.rate_hz, port.width) == (Content.AUDIO, moving.RATE_HZ, moving.CHANNELS)
        drawing = await make_one(model, "rain", seed=seed, seconds=1.3, guidance_scale=2.0)
        pipe = pipeline_of(moving.sound_maker())
        said = {"num_inference_steps": 4, "guidance_scale": 2.0, "audio_duration_s": 1.3, "output_type": "np"}
        (expected,) = pipe("rain", generator=torch.Generator().manual_seed(seed), **said).audios
        samples = heard(drawing)
        assert samples.shape == (round(1.3 * moving.RATE_HZ), moving.CHANNELS)
        whole = expected.T[: len(samples)].clip(-1, 1)
        assert np.abs(samples[: len(whole)] - whole).max() <= 1e-5 and not samples[len(whole) :].any()
        rest = await make_one(model, "rain", 100, seed=seed, seconds=1.3, guidance_scale=2.0)
        assert np.array_equal(heard(rest), samples[100:])


async def test_films_that_are_alike_share_a_call_and_others_take_turns(seed: int) -> None:
    async with model_of(moving.film_maker(), **SILENT) as model:
        asked: list[dict[str, Any]] = [{"prompt": f"dog {n}", "seed": seed + n, "frames": 5 + 4 * (n == 2)} for n in range(3)]
        together = await asyncio.gather(*(make_one(model, **one) for one in asked))
        alone = [shown((await make_one(model, **one)).pieces)[0] for one in asked]
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
        (moving.film_maker, {"frames": 6}, "frames", "5 or 9"),
        (moving.film_maker, {"frames": 2000}, "frames", "at most"),
        (moving.film_maker, {"seconds": 1.0, "frames": 5}, "duration_s", "frames say how long"),
        (moving.film_maker, {"results": 2}, "results", "at most 1"),
        (moving.film_maker, {"width": 36}, "width", "multiples of 8"),
        (moving.film_maker, {"media_type": "image/png"}, "media_type", "video/webm"),
        (moving.film_maker, {"options": {"num_frames": "5"}}, "options", "the request has frames"),
        (moving.sound_maker, {"frames": 5}, "frames", "makes sound"),
        (moving.sound_maker, {"seconds": 1000.0}, "duration_s", "at most"),
        (moving.sound_maker, {"seconds": 40.0}, "duration_s", "at most 30 s"),
        (moving.sound_maker, {"seconds": 1.0, "options": {"audio_duration_s": "50"}}, "options", "the request has duration_s"),
        (moving.film_maker, {"options": {"frame_rate": "50"}}, "options", "the request has frames_per_second"),
        (moving.sound_maker, {"width": 64}, "width", "no pictures"),
        (moving.sound_maker, {"media_type": "audio/wav"}, "media_type", "makes sound"),
    ],
)
async def test_what_it_cannot_be_is_refused_and_the_next_is_made(maker: Any, asked: dict[str, Any], field: str, told: str) -> None:
    async with model_of(maker(), steps=2, **(SMALL if maker is moving.film_maker else {})) as model:
        await check_refused(model, field, told, ports={model.info.produces[0].name: 0}, **asked)
        good = {"frames": moving.FRAMES} if maker is moving.film_maker else {"seconds": 0.5}
        assert any(isinstance(piece, Clip | Sound) for piece in (await make_one(model, "a dog", **good)).pieces)


async def test_a_router_learns_from_the_stage_that_films_are_made_and_gives_a_file() -> None:
    async with routed(moving.film_maker(), SMALL) as stub:
        for asked, said in (("", ("video/webm", "vp9")), (AVC, ("video/mp4", "avc1."))):
            answer = await ask(stub, request(frames=13, media_type=asked))
            assert sorted(answer.chunks) == ["progress", "video"]
            chunks = [chunk for chunk in answer.of("video") if chunk.HasField("video")]
            assert {(chunk.video.media_type, chunk.video.codecs[:5]) for chunk in chunks} == {said}
            data = b"".join(chunk.video.data for chunk in chunks)
            assert len(moving.frames_of(data)[0]) == sum(chunk.count for chunk in answer.of("video")) == 13
        for fields, field in (({"duration_s": 2, "frames": 5}, "duration_s"), ({"media_type": "video/mp4; codecs=hvc1"}, "media_type")):
            bad = await refused(stub, request(**fields))
            assert (bad.reason, bad.fields) == ("BAD_REQUEST", [f"diffusion.{field}"])


async def test_a_router_learns_from_the_stage_that_sound_is_made_and_gives_samples() -> None:
    async with routed(moving.sound_maker(), {}) as stub:
        answer = await ask(stub, request(frames=0, duration_s=0.5))
        assert sorted(answer.chunks) == ["audio", "progress"]
        assert answer.samples().size == moving.RATE_HZ // 2 * moving.CHANNELS
