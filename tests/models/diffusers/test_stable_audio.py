"""Stable Audio step by step against the pipeline of Diffusers: latents and samples to 1e-5 of the largest."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from contextlib import aclosing
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderOobleck,
    CosineDPMSolverMultistepScheduler,
    EDMDPMSolverMultistepScheduler,
    StableAudioDiTModel,
    StableAudioPipeline,
)
from diffusers.pipelines.stable_audio.modeling_stable_audio import StableAudioProjectionModel
from numpy.typing import NDArray
from transformers.models.t5 import T5Config, T5EncoderModel

from helpers import lengths
from helpers.artists import PiecesOfDrawing, check_refused, draw, model_of
from helpers.moving import letters
from helpers.painting import CLOSE, apart, pipeline_of
from omnistage.models.diffusers.folder import load_pipeline, mute_libraries
from omnistage.models.diffusers.sounds import Upsampling
from omnistage.models.interface import Content, DrawRequest, Sound, StepsDone, TensorRows, inputs_of

SAMPLERS: Mapping[str, tuple[Any, Mapping[str, Any]]] = {
    "cosine": (CosineDPMSolverMultistepScheduler, {}),
    "karras": (CosineDPMSolverMultistepScheduler, {"sigma_schedule": "karras", "solver_type": "heun", "sigma_max": 80.0}),
    "edm": (EDMDPMSolverMultistepScheduler, {"prediction_type": "v_prediction", "sigma_min": 0.3, "sigma_max": 500}),
}
LATENTS = 40


def decoder(seed: int) -> Any:
    """A VAE whose decoder has random proportions, odd ones too."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    ratios = [rng.choice([2, 3, 4, 5]) for _ in range(rng.randint(1, 4))]
    made: Any = AutoencoderOobleck(
        encoder_hidden_size=4,
        downsampling_ratios=ratios,
        channel_multiples=[rng.choice([1, 2]) for _ in ratios],
        decoder_channels=rng.choice([3, 4]),
        decoder_input_channels=rng.choice([5, 8]),
        audio_channels=rng.choice([1, 2]),
        sampling_rate=100 * prod(ratios) // 4,
    )
    for name, each in made.named_parameters():
        if name.endswith(("alpha", "beta")):
            torch.nn.init.normal_(each, std=0.3)
    return made.eval()


def stable_audio(place: Path, seed: int, sampler: str = "cosine") -> Path:
    """The folder of one. It knows LATENTS latents, 25 of them a second."""
    rng = random.Random(seed)
    vae = decoder(seed)
    width, heads = vae.config.decoder_input_channels, rng.choice([1, 2])
    text, told = rng.choice([16, 32]), rng.choice([16, 24])
    kind, config = SAMPLERS[sampler]
    pipe = StableAudioPipeline(
        tokenizer=letters(),
        text_encoder=T5EncoderModel(T5Config(d_model=text, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=100)),
        vae=vae,
        projection_model=StableAudioProjectionModel(text_encoder_dim=text, conditioning_dim=told, min_value=0, max_value=32),
        transformer=StableAudioDiTModel(
            sample_size=LATENTS,
            in_channels=width,
            out_channels=width,
            num_layers=rng.choice([1, 2]),
            attention_head_dim=rng.choice([8, 16]),
            num_attention_heads=2 * heads,
            num_key_value_attention_heads=heads,
            cross_attention_dim=heads * 16,
            cross_attention_input_dim=told,
            time_proj_dim=16,
            global_states_input_dim=2 * told,
        ),
        scheduler=kind(**config),
    )
    with mute_libraries():
        pipe.save_pretrained(place)
    return place


pytestmark = pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")  # of the VAE

ALL = {"audio": 0, "latents": 0}
LONGEST = LATENTS / 25


def heard(drawing: PiecesOfDrawing) -> NDArray[np.float32]:
    return np.concatenate([piece.samples for piece in drawing.pieces if isinstance(piece, Sound)])


def asks(seed: int) -> list[dict[str, Any]]:
    """With guidance from nothing, from words and without, in more steps and fewer, from the beginning and later."""
    return [
        {"seed": seed, "seconds": 1.1, "begin_s": 0.31, "steps": 4},
        {"seed": seed + 1, "seconds": 0.4, "steps": 5, "guidance_scale": 2.5, "negative_prompt": "a voice"},
        {"seed": seed + 2, "seconds": LONGEST, "steps": 3, "guidance_scale": 1.0},
    ]


def of_pipeline(pipe: Any, prompt: str, asked: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Final latents [length, channels] and samples [n, channels] of the pipeline itself."""
    begin = asked.get("begin_s", 0.0)
    said = {
        "audio_start_in_s": begin,
        "audio_end_in_s": begin + asked["seconds"],
        "num_inference_steps": asked["steps"],
        "negative_prompt": asked.get("negative_prompt"),
        **({"guidance_scale": asked["guidance_scale"]} if "guidance_scale" in asked else {}),
    }
    latents, samples = (
        pipe(prompt, generator=torch.Generator().manual_seed(asked["seed"]), output_type=each, **said).audios[0].T
        for each in ("latent", "pt")
    )
    return latents, samples.clamp(-1, 1)


@lengths.drawn_cells(1, "sampler", SAMPLERS)
async def test_a_sound_is_that_of_the_pipeline_alone_and_in_company(sampler: str, tmp_path: Path, seed: int) -> None:
    async with model_of(stable_audio(tmp_path, seed, sampler)) as model:
        pipe = pipeline_of(tmp_path)
        port = model.info.produces[0]
        assert (port.content, port.rate_hz, port.width) == (Content.AUDIO, pipe.vae.config.sampling_rate, pipe.vae.config.audio_channels)
        together = await asyncio.gather(*(draw(model, f"rain {n}", ports=ALL, **each) for n, each in enumerate(asks(seed))))
        for number, (each, drawing) in enumerate(zip(asks(seed), together, strict=True)):
            latents, samples = of_pipeline(pipe, f"rain {number}", each)
            alone = await draw(model, f"rain {number}", ports=ALL, **each)
            for made in (drawing, alone):
                assert apart(torch.from_numpy(made.rows("latents")), latents) <= CLOSE
                assert apart(torch.from_numpy(heard(made)), samples) <= CLOSE


@pytest.mark.parametrize("sampler", ["cosine", "edm"])
async def test_a_sound_goes_on_from_what_was_kept_with_the_same_bits(sampler: str, tmp_path: Path, seed: int) -> None:
    """Between any two steps: noise that was drawn is drawn again."""
    asked: dict[str, Any] = {"seed": seed, "steps": 4, "seconds": 0.5}
    async with model_of(stable_audio(tmp_path, seed, sampler)) as model:
        whole = await draw(model, "rain", ports={**ALL, "checkpoint": 0}, **asked)
        kept = [piece.rows for piece in whole.pieces if isinstance(piece, TensorRows) and piece.port == "checkpoint"]
        assert len(kept) == asked["steps"] - 1
    async with model_of(tmp_path) as other:
        for count in range(1, len(kept) + 1):
            rest = await draw(other, "rain", ports={**ALL, "progress": 0}, history=np.concatenate(kept[:count]), **asked)
            assert min(rest.steps) >= count  # Progress that nobody has read gives way to newer.
            assert np.array_equal(rest.rows("latents"), whole.rows("latents"))
            assert np.array_equal(heard(rest), heard(whole))
        assert np.array_equal(heard(await draw(other, "rain", ports={"audio": 7}, **asked)), heard(whole)[7:])


@lengths.drawn_cells(2, "until", [*range(5), None])
async def test_who_goes_at_a_step_or_while_a_sound_is_decoded_leaves_nothing(until: int | None, tmp_path: Path) -> None:
    """until: the step after which its reader goes; None: at the first samples."""
    async with model_of(stable_audio(tmp_path, 3), steps=4) as model:
        prepared = await model.prepare(DrawRequest(seed=0, prompt="rain"))
        async with aclosing(model.draw(prepared, inputs_of(), {"progress": 0, "audio": 0})) as pieces:
            async for piece in pieces:
                if isinstance(piece, Sound) if until is None else isinstance(piece, StepsDone) and piece.step >= until:
                    break
        assert (model.sessions.running, model.load().queued) == (0, 0)
        assert len(heard(await draw(model, "rain", ports={"audio": 0}, seconds=0.5)))


@pytest.mark.parametrize("places", [1, 7, 60])
def test_samples_of_a_part_of_the_latents_are_those_of_all(places: int, seed: int) -> None:
    """In float64, so that what is left is not rounding. Also where the decoder makes fewer samples than it has latents for."""
    vae = decoder(seed).double()
    upsampling = Upsampling(vae.decoder)
    latents = torch.randn(1, vae.config.decoder_input_channels, places, dtype=torch.float64)
    with torch.inference_mode():
        whole = vae.decode(latents).sample[0]
        assert whole.shape[1] == upsampling.samples(places)
        for first in range(0, whole.shape[1], max(whole.shape[1] // 9, 1)):
            end = min(first + 1 + seed % (2 * upsampling.hop), whole.shape[1])
            low, high = upsampling.latents(first, end)
            low, high = max(low, 0), min(high, places)
            part = vae.decode(latents[:, :, low:high]).sample[0, :, first - low * upsampling.hop : end - low * upsampling.hop]
            assert part.shape[1] == end - first
            assert (part - whole[:, first:end]).abs().max() <= 1e-12


def test_samples_need_the_latents_at_both_ends_of_what_is_said(seed: int) -> None:
    """No more is decoded than has a part in them."""
    vae = decoder(seed).double()
    upsampling = Upsampling(vae.decoder)
    latents = torch.randn(1, vae.config.decoder_input_channels, 90, dtype=torch.float64)
    low, high = upsampling.latents(45 * upsampling.hop, 45 * upsampling.hop + 1)
    assert 0 < low < high < 90
    with torch.inference_mode():
        whole = vae.decode(latents).sample[0, :, 45 * upsampling.hop]
        for place, has_part in ((low - 1, False), (low, True), (high - 1, True), (high, False)):
            other = latents.clone()
            other[:, :, place] += 1
            assert bool((vae.decode(other).sample[0, :, 45 * upsampling.hop] != whole).any()) == has_part


async def test_a_long_sound_leaves_in_pieces_that_are_the_whole(tmp_path: Path, seed: int) -> None:
    """The first is short. Rounding in float32 alone is apart by more than 1e-6 for one decoder in a hundred: then pieces may be, too."""
    async with model_of(stable_audio(tmp_path, seed), steps=2) as model:
        drawing = await draw(model, "rain", ports=ALL, seconds=LONGEST)
        pieces = [piece.samples for piece in drawing.pieces if isinstance(piece, Sound)]
        assert len(pieces) > 2 and len(pieces[0]) < len(pieces[1])
        vae: Any = load_pipeline(tmp_path, torch.float32).vae
        latents = torch.from_numpy(drawing.rows("latents")).T[None]
        with torch.inference_mode():
            whole = vae.decode(latents).sample
            exact = vae.double().decode(latents.double()).sample
        rounding = apart(whole.double(), exact)
        expected = exact[0].clamp(-1, 1).T
        assert apart(torch.from_numpy(heard(drawing)).double(), expected[: sum(map(len, pieces))]) <= max(1e-6, 3 * rounding)


@lengths.drawn_cells(
    6,
    ("asked", "field", "told"),
    [
        ({"frames": 5}, "frames", "makes sound"),
        ({"seconds": 1000.0}, "duration_s", "at most 1.6 s"),
        ({"seconds": 1.5, "begin_s": 0.2}, "duration_s", "ask for at most 1.4"),
        ({"begin_s": 2.0}, "begin_s", "begin earlier"),
        ({"seconds": 1e-7}, "duration_s", "no sample"),
        ({"steps": 10_000}, "steps", "takes 1 to 200 steps"),
        ({"sigmas": (1.0, 0.5)}, "sigmas", "takes none"),
        ({"guidance_scale": float("nan")}, "guidance_scale", "takes 0 to 30"),
        ({"guidance_scale_2": 2.0}, "guidance_scale_2", "knows none"),
        ({"frames_per_second": 2.0}, "frames_per_second", "knows none"),
        ({"flow_shift": 2.0}, "flow_shift", "knows none"),
        ({"guidance_scale": 1.0, "negative_prompt": "rain"}, "negative_prompt", "no effect"),
        ({"prompt": "a" * 600}, "prompt", "the text encoder reads 64"),
        ({"results": 2}, "results", "at most 1"),
        ({"width": 64}, "width", "no pictures"),
        ({"media_type": "audio/wav"}, "media_type", "makes sound"),
        ({"images": (b"no picture",)}, "images", "leave them out"),
        ({"previews": 2}, "previews", "shows none"),
    ],
)
async def test_what_it_cannot_be_is_refused_and_the_next_is_made(asked: dict[str, Any], field: str, told: str, tmp_path: Path) -> None:
    async with model_of(stable_audio(tmp_path, 3), steps=2) as model:
        await check_refused(model, field, told, **{"ports": {"audio": 0}, **asked})
        port = model.info.produces[0]
        assert len(heard(await draw(model, "rain", ports={"audio": 0}, seconds=0.5))) == int(0.5 * port.rate_hz)
