"""The sound of a diffusion model: the time to its first samples, compared with the time to decode all of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderOobleck

from benchmarks.figures import Figure, Report, median
from omnistage.models.diffusers.folder import quiet
from omnistage.models.diffusers.sounds import SoundPieces, Upsampling

CHANNELS, LATENTS, LONGEST = 32, 64, 1024
"""Sizes of the decoder: channels, a quarter of the published ones; channels of the latents, as published; latents of 47 s."""
ASKED_S = 10.0
ROUNDS = 3


async def first_sound(report: Report, folder: Path) -> None:
    """Measure 10 s of sound by a model that always computes 47 s."""
    with quiet():
        vae: Any = AutoencoderOobleck(decoder_channels=CHANNELS, decoder_input_channels=LATENTS).eval()
    latents = torch.randn(1, LATENTS, LONGEST, generator=torch.Generator().manual_seed(0))
    end = int(ASKED_S * vae.config.sampling_rate)
    pieces = SoundPieces(lambda part: vae.decode(part).sample, Upsampling(vae.decoder))
    head_s, part_s, all_s = list[float](), list[float](), list[float]()
    with torch.inference_mode():
        for _ in range(ROUNDS):
            begin_s, parts = time.process_time(), list[Any]()
            for piece in pieces.decoded(latents, 0, end):
                if not parts:
                    head_s.append(time.process_time() - begin_s)
                parts.append(piece)
            part_s.append(time.process_time() - begin_s)
            begin_s = time.process_time()
            expected = vae.decode(latents).sample[0, :, :end].clamp(-1, 1).T.numpy()
            all_s.append(time.process_time() - begin_s)
    difference = float(np.abs(np.concatenate(parts) - expected).max() / np.abs(expected).max())
    report.add(
        Figure("first_sound_over_decode", _ratio(head_s, part_s), "", "<= 0.15", "of 10 s asked of 47 s: first samples over all of them"),
        Figure("first_sound_over_whole_decode", _ratio(head_s, all_s), "", "", "the same over the 47 s that the pipeline decodes for them"),
        Figure("sound_asked_over_whole_decode", _ratio(part_s, all_s), "", "", "all of the 10 s over that"),
        Figure("sound_apart", difference, "", "<= 0.000001", "of the largest sample, in parts from whole"),
    )


def _ratio(some: Sequence[float], all_of_it: Sequence[float]) -> float:
    return median([one / other for one, other in zip(some, all_of_it, strict=True)])
