"""Films of Wan: the time to the first frame, many films at once compared with Diffusers, and the memory that they take. Sounds of a
diffusion model: the time to the first samples, compared with the time to decode all."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch
from diffusers import AutoencoderKLWan, AutoencoderOobleck
from numpy.typing import NDArray

from benchmarks.figures import Figure, Report, median
from helpers.memory import Peak
from helpers.servers import stack
from omnistage.client import AsyncOmni, Progress, VideoDelta
from omnistage.models.diffusers.films import PIXELS
from omnistage.models.diffusers.folder import load_pipeline, mute_libraries
from omnistage.models.diffusers.model import PROGRESS, DrawnModel
from omnistage.models.diffusers.sounds import SoundPieces, Upsampling
from omnistage.models.interface import DrawRequest, StepsDone, TensorRows, inputs_of
from omnistage.models.options import LoadOptions
from omnistage.models.registry import load
from omnistage.models.tiny.makers import CheckpointOrder, make_tiny

CHANNELS, LATENTS, LONGEST = 32, 64, 1024
"""Sizes of the decoder: channels, a quarter of the published ones; channels of the latents, as published; latents of 47 s."""
ASKED_S = 10.0
SOUND_ROUNDS = 3


async def first_sound(report: Report, folder: Path) -> None:
    """Measure 10 s of sound by a model that always computes 47 s."""
    with mute_libraries():
        vae: Any = AutoencoderOobleck(decoder_channels=CHANNELS, decoder_input_channels=LATENTS).eval()
    latents = torch.randn(1, LATENTS, LONGEST, generator=torch.Generator().manual_seed(0))
    end = int(ASKED_S * vae.config.sampling_rate)
    pieces = SoundPieces(lambda part: vae.decode(part).sample, Upsampling(vae.decoder))
    head_s, part_s, all_s = list[float](), list[float](), list[float]()
    with torch.inference_mode():
        for _ in range(SOUND_ROUNDS):
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


def _ratio(over: Sequence[float], under: Sequence[float]) -> float:
    return median([over_s / under_s for over_s, under_s in zip(over, under, strict=True)])


SIDE = 64
"""Width and height of a frame in pixels: all parts of decoding grow alike with the pixels."""
FRAMES = 81
RATE_HZ = 16
SHORT_S, LONG_S = 2.5, 10.0
ROUNDS = 3
REQUESTS = 4
STEPS = 20
DRAWN_FRAMES = 9
MAX_DIFFERENCE = 2
"""By how much, of 255, a colour in the two films may differ, as for pictures."""

PIPELINE = """
name: film
description: What Wan makes.
inputs: [text]
outputs: [video, progress]
stages: [{kind: diffusion, family: diffusers}]
"""

Frames = NDArray[np.uint8]
"""[frames, height, width, 3]."""


@dataclass(slots=True)
class FilmTimes:
    """When a film was asked for, its steps ended, its first frame came, and it ended, in CPU seconds of this process; its frames."""

    arrived_s: float
    drawn_s: float = 0.0
    first_s: float = 0.0
    done_s: float = 0.0
    frames: Frames = field(default_factory=lambda: np.empty((0, 0, 0, 3), np.uint8))


class Camera:
    """Our model of the checkpoint of Wan in `folder`. side: width and height of its films in pixels."""

    def __init__(self, folder: Path, side: int) -> None:
        options = LoadOptions(path=folder, dtype="float32", family={"width": side, "height": side})
        self.model = cast(DrawnModel[Any], load("diffusers", "diffusion", options))

    async def film(self, request: DrawRequest, after_s: float = 0.0) -> FilmTimes:
        """Ask for a film after `after_s` seconds; returns its times and its frames, which are not encoded."""
        await asyncio.sleep(after_s)
        times, rows = FilmTimes(time.process_time()), list[Any]()
        prepared = await self.model.prepare(request)
        async for piece in self.model.draw(prepared, inputs_of(), {PIXELS: 0, PROGRESS: 0}):
            if isinstance(piece, StepsDone):
                times.drawn_s = time.process_time()
            elif isinstance(piece, TensorRows):
                times.first_s = times.first_s or time.process_time()
                rows.append(piece.rows)
        times.done_s = time.process_time()
        times.frames = np.concatenate(rows).reshape(-1, prepared.height, prepared.width, 3)
        return times

    async def frames_only(self, request: DrawRequest) -> int:
        """Make a film without keeping its frames; returns their number."""
        prepared, count = await self.model.prepare(request), 0
        async for piece in self.model.draw(prepared, inputs_of(), {PIXELS: 0}):
            count += len(piece.rows) if isinstance(piece, TensorRows) else 0
        return count // (prepared.height * prepared.width)


def film_request(seed: int, side: int, frames: int, *, guided: bool = False, steps: int = STEPS) -> DrawRequest:
    """The request for a film; every seed is another client with another prompt."""
    return DrawRequest(
        seed=seed,
        prompt=f"a {'very ' * (seed % 4)}small boat on the sea, {seed}",
        negative_prompt="grey" if guided else "",
        width=side,
        height=side,
        frames=frames,
        steps=steps,
        guidance_scale=4.0 if guided else 1.0,
        client=f"client {seed}",
    )


def call_pipeline(pipe: Any, request: DrawRequest) -> tuple[float, Frames]:
    """Make a film with the pipeline of Diffusers; returns CPU seconds and frames."""
    begin_s = time.process_time()
    frames = pipe(
        prompt=request.prompt,
        negative_prompt=request.negative_prompt or None,
        width=request.width,
        height=request.height,
        num_frames=request.frames,
        num_inference_steps=request.steps,
        guidance_scale=request.guidance_scale,
        generator=torch.Generator().manual_seed(request.seed),
        output_type="np",
    ).frames[0]
    return time.process_time() - begin_s, (frames * 255).round().astype(np.uint8)


# Many at once --------------------------------------------------------------------------------------------------------------------------


async def throughput(report: Report, folder: Path, side: int = SIDE) -> None:
    """Measure how many times as fast films at once are as calls of the pipeline one by one, and compare the pixels."""
    checkpoint = folder / "wan-small"
    make_tiny("wan2.2-t2v", checkpoint, CheckpointOrder(size="small"))
    camera, pipe, speeds = Camera(checkpoint, side), load_pipeline(checkpoint, torch.float32), list[float]()
    pipe.set_progress_bar_config(disable=True)
    step_s = call_pipeline(pipe, film_request(0, side, DRAWN_FRAMES))[0] / STEPS
    await camera.film(film_request(0, side, DRAWN_FRAMES, guided=True))
    for turn in range(1, 1 + ROUNDS):
        requests = [film_request(100 * turn + n, side, DRAWN_FRAMES, guided=n % 2 == 1) for n in range(REQUESTS)]
        # Each of the two goes first in every second round.
        theirs = [call_pipeline(pipe, request) for request in requests] if turn % 2 else []
        ours = await asyncio.gather(*(camera.film(request, n * step_s) for n, request in enumerate(requests)))
        theirs = theirs or [call_pipeline(pipe, request) for request in requests]
        difference = max(int(np.abs(times.frames.astype(int) - frames).max()) for times, (_, frames) in zip(ours, theirs, strict=True))
        if difference > MAX_DIFFERENCE:
            raise AssertionError(f"ours and the pipeline's films are {difference} of 255 apart")
        elapsed_s = max(times.done_s for times in ours) - min(times.arrived_s for times in ours)
        speeds.append(sum(seconds for seconds, _ in theirs) / elapsed_s)
    await camera.model.close()
    setup = f"{REQUESTS} requests one step apart, half of them guided, {STEPS} steps, {DRAWN_FRAMES} frames of {side} px, decoded; small"
    report.add(Figure(f"x_throughput_wan_{REQUESTS}", median(speeds), "x", ">= 1.2", f"{setup}; over calls of the pipeline one by one"))


# Decoding ------------------------------------------------------------------------------------------------------------------------------


def published_decoder(folder: Path) -> Path:
    """Make a checkpoint of Wan 2.2 with tiny transformers and a VAE as large as the published one; returns its folder."""
    checkpoint = folder / "wan-decoder"
    if checkpoint.exists():
        return checkpoint
    make_tiny("wan2.2-t2v", checkpoint, CheckpointOrder(size="tiny"))
    with mute_libraries():
        AutoencoderKLWan().save_pretrained(checkpoint / "vae")
    return checkpoint


async def first_frame(report: Report, folder: Path) -> None:
    """Measure the time to the first decoded frame, and to the first fragment of video at a client."""
    checkpoint = published_decoder(folder)
    camera = Camera(checkpoint, SIDE)
    await camera.film(film_request(0, SIDE, 5, steps=1))
    times = await camera.film(film_request(1, SIDE, FRAMES, steps=1))
    await camera.model.close()
    ratio = (times.first_s - times.drawn_s) / (times.done_s - times.drawn_s)
    setup = f"{FRAMES} frames of {SIDE} px by a VAE of the published width, over the time to the last one"
    report.add(Figure("first_frame_over_decode", ratio, "", "<= 0.1", f"raw, at the stage's output; {setup}"))
    fragment = await first_fragment(checkpoint, folder)
    report.add(Figure("first_fragment_over_decode", fragment, "", "", f"VP9 in WebM, at a client behind a router; {setup}"))


async def first_fragment(checkpoint: Path, folder: Path) -> float:
    """The time from the last step to the first fragment, divided by the time from that step to the end of the film."""
    flags = ("--checkpoint", str(checkpoint), "--dtype", "float32")
    pipeline = folder / "film.yaml"
    pipeline.write_text(PIPELINE)
    with stack(
        folder, kinds=["diffusion"], family="diffusers", pipeline=str(pipeline), options={"width": SIDE, "height": SIDE}, stage_args=flags
    ) as running:
        assert running.router is not None
        drawn_s, first_s = 0.0, 0.0
        async with AsyncOmni(address=running.router.address) as omni:
            async for event in omni.stream_film("a boat", width=SIDE, height=SIDE, frames=FRAMES, steps=1):
                if isinstance(event, Progress):
                    drawn_s = time.perf_counter()
                elif isinstance(event, VideoDelta):
                    first_s = first_s or time.perf_counter()
        return (first_s - drawn_s) / (time.perf_counter() - drawn_s)


# Memory --------------------------------------------------------------------------------------------------------------------------------


async def memory(report: Report, folder: Path) -> None:
    """Measure the memory of decoding short and long films, frame by frame and by the pipeline."""
    checkpoint = published_decoder(folder)
    short, long = (1 + 4 * round(seconds * RATE_HZ / 4) for seconds in (SHORT_S, LONG_S))
    peaks = {
        (streamed, frames): _measure_peak(checkpoint, frames, streamed)
        for streamed, frames in ((True, short), (True, long), (True, FRAMES), (False, FRAMES))
    }
    mib = {key: peak / (1 << 20) for key, peak in peaks.items()}
    setup = f"resident memory above the loaded model, {SIDE} px, VAE of the published width"
    report.add(
        Figure("film_memory_10s_over_2_5s", mib[True, long] / mib[True, short], "", "<= 1.1", f"streamed; {setup}"),
        Figure("film_memory_streamed_over_whole", mib[True, FRAMES] / mib[False, FRAMES], "", "<= 0.7", f"{FRAMES} frames; {setup}"),
        Figure("film_memory", mib[True, FRAMES], "MiB", "", f"streamed, {FRAMES} frames; {setup}"),
    )


def _measure_peak(checkpoint: Path, frames: int, streamed: bool) -> int:
    """Run `peak_of` in a process of its own, so that no measurement finds memory of another one. That process gives freed memory back to
    the system at once: the figure must not show what the C library keeps."""
    freed = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
    with patch.dict(os.environ, freed), ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(peak_of, checkpoint, frames, streamed).result()


def peak_of(checkpoint: Path, frames: int, streamed: bool) -> int:
    """The bytes of memory that making a film takes, besides those of the loaded model. streamed: it is made by this project, which keeps no
    frames; else by the pipeline of Diffusers. A short film is made first, so that the weights are in memory."""
    torch.set_num_threads(1)
    request = film_request(1, SIDE, frames, steps=1)
    if streamed:
        return asyncio.run(_peak_streamed(checkpoint, request))
    pipe = load_pipeline(checkpoint, torch.float32)
    pipe.set_progress_bar_config(disable=True)
    call_pipeline(pipe, replace(request, frames=5))
    peak = Peak(os.getpid())
    _, made_frames = call_pipeline(pipe, request)
    assert len(made_frames) == frames
    return peak.growth


async def _peak_streamed(checkpoint: Path, request: DrawRequest) -> int:
    """The bytes of `peak_of` for our model."""
    camera = Camera(checkpoint, SIDE)
    assert await camera.frames_only(replace(request, frames=5)) == 5
    peak = Peak(os.getpid())
    assert await camera.frames_only(request) == request.frames
    growth = peak.growth
    await camera.model.close()
    return growth
