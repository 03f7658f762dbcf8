"""`python -m benchmarks.diffusion`: pictures and films drawn step by step, several at once, compared with Diffusers' pipelines; the first
frame and the memory of a film, and the first samples of a sound. Checkpoints have random weights; one thread. With `--device cuda` only the
transformer of Z-Image in its full size is measured."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from diffusers import AutoencoderKLWan, AutoencoderOobleck

from benchmarks import full_size
from benchmarks.figures import Benchmark, Figure, arguments, ratio, run
from benchmarks.studio import STEPS, DiffusersPipeline, Pixels, Studio, draw_request
from helpers.memory import Peak
from omnistage.models.diffusers.folder import mute_libraries
from omnistage.models.diffusers.sounds import SoundPieces, Upsampling
from omnistage.models.interface import DrawRequest
from omnistage.models.tiny.makers import CheckpointOrder, make_tiny

ROUNDS = 3

# Many at once --------------------------------------------------------------------------------------------------------------------------


class Contest(NamedTuple):
    """Requests that we draw at once, and the pipeline one by one. maker: of the checkpoint. frames: of a film; 0: a picture. goal: of the
    ratio of the speeds."""

    maker: str
    name: str
    requests: int
    side: int
    frames: int
    goal: str


CONTESTS = (
    Contest("qwen-image", "qwen_image", 8, 128, 0, ">= 1.3"),
    Contest("z-image", "z_image", 8, 128, 0, ">= 1.1"),
    Contest("wan2.2-t2v", "wan", 4, 64, 9, ">= 1.2"),
)
MAX_DIFFERENCE = 2
"""By how much, of 255, a colour in two results may differ, because the two add the same numbers in another order."""


async def throughput(contest: Contest, benchmark: Benchmark) -> None:
    """Measure how many times as fast requests are that come a step apart as calls of the pipeline one by one, and compare the pixels. Half
    of the requests are guided."""
    folder, size = benchmark.folder / contest.maker, benchmark.size("small", "tiny")
    steps, count = benchmark.size((STEPS, contest.requests), (2, 2))
    make_tiny(contest.maker, folder, CheckpointOrder(size=size))
    studio, pipeline = Studio(folder), DiffusersPipeline(folder)
    request = partial(draw_request, side=contest.side, frames=contest.frames, steps=steps)
    step_s = pipeline.draw(request(0))[0] / steps

    def order(number: int) -> list[DrawRequest]:
        """The requests of a round."""
        return [request(100 * number + n, guided=n % 2 == 1) for n in range(count)]

    async def ours(number: int) -> tuple[float, list[Pixels]]:
        """CPU seconds from the first request to the last result, and the results."""
        drawings = await studio.draw_together(order(number), step_s)
        elapsed_s = max(drawing.done_s for drawing in drawings) - min(drawing.arrived_s for drawing in drawings)
        return elapsed_s, [drawing.pixels(one) for drawing, one in zip(drawings, order(number), strict=True)]

    async def theirs(number: int) -> tuple[float, list[Pixels]]:
        """CPU seconds of all calls, and the results."""
        results = [pipeline.draw(one) for one in order(number)]
        return sum(call_s for call_s, _ in results), [pixels for _, pixels in results]

    rounds = await benchmark.by_turns(ROUNDS, ours, theirs)
    await studio.model.close()
    our_pixels, their_pixels = ([pixels for _, results in of_way for pixels in results] for of_way in rounds)
    difference = max(_most_apart(*pair) for pair in zip(our_pixels, their_pixels, strict=True))
    if difference > MAX_DIFFERENCE:
        raise RuntimeError(f"{contest.name} and its pipeline draw pixels that are {difference} of 255 apart")
    our_s, their_s = ([elapsed_s for elapsed_s, _ in of_way] for of_way in rounds)
    subject = f"{contest.frames} frames of {contest.side} px, decoded" if contest.frames else f"{contest.side} px"
    note = f"{count} requests one step apart, half of them guided, {steps} steps, {subject}; {size}; over calls of the pipeline one by one"
    figure = f"x_throughput_{contest.name}_{contest.requests}"
    benchmark.add(Figure(figure, ratio(their_s, our_s), "x", contest.goal, f"{note}; median of {len(our_s)}"))


def _most_apart(ours: Pixels, theirs: Pixels) -> int:
    """The largest difference of two colours, of 255."""
    return int(np.abs(ours.astype(np.int16) - theirs.astype(np.int16)).max())


# Decoding a film -----------------------------------------------------------------------------------------------------------------------

SIDE = 64
"""Width and height of a frame in pixels: all parts of decoding grow alike with the pixels."""
FRAMES = 81
RATE_HZ = 16
SHORT_S, LONG_S = 2.5, 10.0


def published_decoder(folder: Path) -> Path:
    """Make a checkpoint of Wan 2.2 with tiny transformers and a VAE as large as the published one, unless it is there; returns its
    folder."""
    checkpoint = folder / "wan-decoder"
    if not checkpoint.exists():
        make_tiny("wan2.2-t2v", checkpoint, CheckpointOrder(size="tiny"))
        with mute_libraries():
            AutoencoderKLWan().save_pretrained(checkpoint / "vae")
    return checkpoint


async def first_frame(benchmark: Benchmark) -> None:
    """Measure the time to the first frame."""
    studio, frames = Studio(published_decoder(benchmark.folder)), benchmark.size(FRAMES, 5)
    await studio.draw(draw_request(0, SIDE, frames=5, steps=1))
    film = await studio.draw(draw_request(1, SIDE, frames=frames, steps=1))
    await studio.model.close()
    share = (film.first_s - film.drawn_s) / (film.done_s - film.drawn_s)
    note = f"at the stage's output; {frames} frames of {SIDE} px by a VAE of the published width, over the time to the last one"
    benchmark.add(Figure("first_frame_over_decode", share, "", "<= 0.1", note))


async def memory(benchmark: Benchmark) -> None:
    """Measure the memory of decoding short and long films, frame by frame and by the pipeline."""
    checkpoint, frames = published_decoder(benchmark.folder), benchmark.size(FRAMES, 9)
    short, long = benchmark.size(tuple(1 + 4 * round(seconds * RATE_HZ / 4) for seconds in (SHORT_S, LONG_S)), (9, 13))
    short_mib, long_mib, mib = (_measure_peak_mib(checkpoint, count, True) for count in (short, long, frames))
    whole_mib = _measure_peak_mib(checkpoint, frames, False)
    setup = f"resident memory above the loaded model, {SIDE} px, VAE of the published width"
    benchmark.add(
        Figure("film_memory_10s_over_2_5s", long_mib / short_mib, "", "<= 1.1", f"streamed; {setup}"),
        Figure("film_memory_pipeline_over_streamed", whole_mib / mib, "", ">= 1", f"{frames} frames; {setup}"),
        Figure("film_memory", mib, "MiB", "", f"streamed, {frames} frames; {setup}"),
    )


def _measure_peak_mib(checkpoint: Path, frames: int, streamed: bool) -> float:
    """Run `peak_of` in a process of its own, so that no measurement finds memory of another one; in MiB. That process gives freed memory
    back to the system at once: the figure must not show what the C library keeps."""
    freed = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
    with patch.dict(os.environ, freed), ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(peak_of, checkpoint, frames, streamed).result() / (1 << 20)


def peak_of(checkpoint: Path, frames: int, streamed: bool) -> int:
    """The bytes of memory that making a film takes, besides those of the loaded model. streamed: it is made by this project, which keeps no
    frames; else by the pipeline of Diffusers. A short film is made first, so that the weights are in memory."""
    torch.set_num_threads(1)
    request = draw_request(1, SIDE, frames=frames, steps=1)
    if streamed:
        return asyncio.run(_peak_streamed(checkpoint, request))
    pipeline = DiffusersPipeline(checkpoint)
    pipeline.draw(replace(request, frames=5))
    peak = Peak(os.getpid())
    assert len(pipeline.draw(request)[1]) == frames
    return peak.growth


async def _peak_streamed(checkpoint: Path, request: DrawRequest) -> int:
    """The bytes of `peak_of` for our model."""
    studio = Studio(checkpoint)
    await studio.draw(replace(request, frames=5), keeps_rows=False)
    peak = Peak(os.getpid())
    await studio.draw(request, keeps_rows=False)
    growth = peak.growth
    await studio.model.close()
    return growth


# Decoding a sound ----------------------------------------------------------------------------------------------------------------------

CHANNELS, LATENTS, LONGEST = 32, 64, 1024
"""Sizes of the decoder: channels, a quarter of the published ones; channels of the latents, as published; latents of 47 s."""
SOUND_S = 10.0


async def first_sound(benchmark: Benchmark) -> None:
    """Measure 10 s of sound by a model that always computes 47 s."""
    channels, seconds = benchmark.size((CHANNELS, SOUND_S), (8, 1.0))
    with mute_libraries():
        vae: Any = AutoencoderOobleck(decoder_channels=channels, decoder_input_channels=LATENTS).eval()
    latents = torch.randn(1, LATENTS, LONGEST, generator=torch.Generator().manual_seed(0))
    end = int(seconds * vae.config.sampling_rate)
    pieces = SoundPieces(lambda part: vae.decode(part).sample, Upsampling(vae.decoder))

    async def in_pieces(_: int) -> list[float]:
        """CPU seconds to each piece of the sound."""
        with torch.inference_mode():
            begin_s = time.process_time()
            return [time.process_time() - begin_s for _ in pieces.decoded(latents, 0, end)]

    async def decode_all(_: int) -> list[float]:
        """CPU seconds to all 47 s."""
        with torch.inference_mode():
            begin_s = time.process_time()
            vae.decode(latents)
            return [time.process_time() - begin_s]

    parts_s, whole_s = await benchmark.by_turns(ROUNDS, in_pieces, decode_all)
    all_s = [of_round[-1] for of_round in parts_s]
    note = f"of {seconds:g} s asked of 47 s"
    benchmark.add(
        Figure("first_sound_over_decode", ratio([of_round[0] for of_round in parts_s], all_s), "", "<= 0.15", f"first samples {note}"),
        Figure("sound_asked_over_whole_decode", ratio(all_s, [of_round[0] for of_round in whole_s]), "", "", f"all {note}, over all 47 s"),
    )


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: only the full-size transformer on a GPU")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.device == "cuda":
        if not torch.cuda.is_available():
            print("no GPU is here: nothing was measured")
            return 0
        return run("diffusion-cuda", options, {"full size": full_size.measure})
    contests = {f"{contest.maker} at once": partial(throughput, contest) for contest in CONTESTS}
    return run("diffusion", options, contests | {"first frame": first_frame, "memory of films": memory, "first sound": first_sound})


if __name__ == "__main__":
    sys.exit(main())
