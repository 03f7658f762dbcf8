"""Small Stable Audios of random proportions."""

from __future__ import annotations

import random
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderOobleck,
    CosineDPMSolverMultistepScheduler,
    EDMDPMSolverMultistepScheduler,
    StableAudioDiTModel,
    StableAudioPipeline,
)
from diffusers.pipelines.stable_audio.modeling_stable_audio import StableAudioProjectionModel
from transformers.models.t5 import T5Config, T5EncoderModel

from helpers.moving import letters
from omnistage.models.diffusers.quiet import quiet

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
    with quiet():
        pipe.save_pretrained(place)
    return place
