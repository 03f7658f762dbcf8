"""Trains the picture model's VAE: pictures of 128 by 128 pixels to latents of 16 by 16, eight channels, and back."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import typer
from diffusers import AutoencoderKL
from torch import Tensor
from torch.nn import functional

from tools.pictures.scenes import SIDE, Scene, draw_scene, mask, picture

CHANNELS = 8
NOISE = 0.1
"""Standard deviation of the noise that training adds to the latents: a diffusion does not give the decoder exact latents either."""
EDGE_WEIGHT = 3.0
CROP = 64
"""Side in pixels of the crops of which most of the training consists: most of a whole picture is nothing but background."""
WHOLE_FROM, EXACT_FROM = 0.75, 0.9
"""Shares of the training after which it sees whole pictures, and after which it computes in float32 instead of bfloat16."""


def new_vae() -> AutoencoderKL:
    """A VAE to be trained. Its norms have one group each: a norm of single channels removes a flat colour, and these pictures are mostly
    flat colour."""
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 16, 48, 96),
        layers_per_block=1,
        latent_channels=CHANNELS,
        norm_num_groups=1,
        sample_size=128,
        scaling_factor=1.0,
        shift_factor=0.0,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
    )


def tensors(scenes: Sequence[Scene]) -> tuple[Tensor, Tensor]:
    """The pictures of scenes in -1..1, [n, 3, SIDE, SIDE], and their shapes in 0..1, [n, 1, SIDE, SIDE]."""
    pictures = torch.from_numpy(np.stack([picture(scene) for scene in scenes])).permute(0, 3, 1, 2).float() / 127.5 - 1
    return pictures, torch.from_numpy(np.stack([mask(scene) for scene in scenes]))[:, None]


def draw_batch(rng: random.Random, count: int, crop: int = 0) -> tuple[Tensor, Tensor]:
    """Random pictures in -1..1, [count, 3, side, side], and weights of their pixels, [count, 1, side, side], which are higher at edges.
    Held-out scenes are not among them. crop: side in pixels of a cutout with a shape in it, taken from each picture; 0: whole pictures."""
    scenes = [draw_scene(rng) for _ in range(count)]
    pictures, shapes = tensors(scenes)
    edges = functional.max_pool2d(shapes, 7, 1, 3) - -functional.max_pool2d(-shapes, 7, 1, 3)
    weights = 1 + EDGE_WEIGHT * edges
    if not crop:
        return pictures, weights
    places = []
    for scene in scenes:
        centre = rng.choice(scene.things).centre
        x, y = (min(max(round(at - crop / 2 + rng.uniform(-crop / 2, crop / 2)), 0), SIDE - crop) for at in centre)
        places.append((slice(y, y + crop), slice(x, x + crop)))
    parts = [(pictures[n, :, *place], weights[n, :, *place]) for n, place in enumerate(places)]
    return torch.stack([part for part, _ in parts]), torch.stack([weight for _, weight in parts])


def train(out: Path, minutes: float = 20, batch: int = 8, rate: float = 2e-3, seed: int = 0) -> None:
    """Train a VAE for `minutes` of processor time, and save it in `out`. batch: number of whole pictures in one. rate: the highest learning
    rate."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    rng = random.Random(seed)
    vae = new_vae().to(memory_format=torch.channels_last)
    # The encoder also gives variances of the latents, which are not used: they are set to nearly nothing, once.
    with torch.no_grad():
        vae.encoder.conv_out.weight[CHANNELS:] = 0
        vae.encoder.conv_out.bias[CHANNELS:] = -14
    optimizer = torch.optim.AdamW(vae.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
    begin_s, step, printed_s = time.process_time(), 0, 0.0
    while (done := (time.process_time() - begin_s) / 60 / minutes) < 1:
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, (step + 1) / 100) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
        pictures, weights = draw_batch(rng, batch) if done > WHOLE_FROM else draw_batch(rng, 2 * batch, CROP)
        pictures = pictures.to(memory_format=torch.channels_last)
        with torch.autocast("cpu", torch.bfloat16, enabled=done < EXACT_FROM):
            codes = vae.encoder(pictures).float()[:, :CHANNELS]
            reconstructions = vae.decoder(codes + NOISE * torch.randn_like(codes)).float()
        wrong = reconstructions - pictures
        spread = codes.transpose(0, 1).flatten(1)  # [channels, latents]: each channel should have mean 0 and deviation 1.
        loss = (weights * (wrong.square() + 0.2 * wrong.abs())).mean()
        loss = loss + 0.02 * (spread.mean(1).square() + (spread.std(1) - 1).square()).mean() + 1e-3 * codes.square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        step += 1
        if time.process_time() - printed_s > 30:
            printed_s = time.process_time()
            print(f"{step} {100 * done:.0f}% loss {loss.item():.4f} psnr {psnr(vae, rng):.2f} spread {spread.std().item():.2f}", flush=True)
    # The shift and the scale that the pipelines apply, one number of each for all channels.
    codes = torch.cat([encode(vae, draw_batch(rng, 64)[0]) for _ in range(8)])
    vae.register_to_config(shift_factor=round(codes.mean().item(), 4), scaling_factor=round(1 / codes.std().item(), 4))
    vae.save_pretrained(out)
    score = {"steps": step, "cpu_minutes": minutes, "psnr_db": round(psnr(vae, random.Random(seed + 1), 256, held_out=True), 2)}
    (out / "training.json").write_text(json.dumps(score, indent=1) + "\n")
    print(score, vae.config.shift_factor, vae.config.scaling_factor)


@torch.no_grad()
def encode(vae: AutoencoderKL, pictures: Tensor) -> Tensor:
    """The latents of pictures, [n, channels, 16, 16], as the encoder gives them, without shift and scale."""
    codes: Tensor = vae.encode(pictures.to(memory_format=torch.channels_last)).latent_dist.mode()
    return codes


@torch.no_grad()
def psnr(vae: AutoencoderKL, rng: random.Random, count: int = 32, held_out: bool = False) -> float:
    """How well random pictures come through the VAE: PSNR in dB, mean over `count` pictures."""
    pictures, _ = tensors([draw_scene(rng, held_out) for _ in range(count)])
    decoded = vae.decode(encode(vae, pictures)).sample.clamp(-1, 1)
    wrong = (decoded - pictures).square().flatten(1).mean(1) / 4  # Over the square of the range of values, -1 to 1.
    return float((-10 * wrong.clamp(min=1e-8).log10()).mean())


if __name__ == "__main__":
    typer.run(train)
