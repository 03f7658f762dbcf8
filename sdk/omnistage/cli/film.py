"""`omnistage film`: its options. The work is in `filming`, imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from omnistage.cli.ask import options_of
from omnistage.cli.draw import (
    Control,
    Device,
    Guidance,
    Mask,
    Negative,
    Own,
    Prompt,
    Side,
    Sigmas,
    Size,
    StepCache,
    Steps,
    devices_of,
    numbers,
    own_options,
    sides,
)
from omnistage.cli.options import Address, ApiKey, Background, Json, MaxRetries, PipelineName, Timeout, Verbose
from omnistage.cli.report import errors_reported

Out = Annotated[
    Path | None, typer.Option("--out", "-o", metavar="F", help="The film's file: .webm or .mp4; default: a new .webm named by the prompt.")
]
Codec = Annotated[
    Literal["vp9", "h264"] | None,
    typer.Option("--codec", metavar="NAME", help="vp9, the default; or h264 of .mp4, which more players know."),
]
Images = Annotated[
    list[str] | None,
    typer.Option("--image", metavar="F", help="The picture with which it begins; a second one, with which it ends; - is standard input."),
]
Frames = Annotated[int | None, typer.Option(metavar="N", min=1, max=1 << 16, help="How many; default: the model's own.")]
Seconds = Annotated[float | None, typer.Option(min=0.001, max=3600.0, metavar="N", help="How long, instead of --frames.")]
Rate = Annotated[float | None, typer.Option("--fps", metavar="X", min=0.1, max=120.0, help="Frames a second; default: the model's own.")]
Guidance2 = Annotated[
    float | None, typer.Option("--guidance-2", metavar="X", min=0.0, max=100.0, help="The same where a second transformer takes over.")
]
Shift = Annotated[
    float | None, typer.Option("--flow-shift", metavar="X", min=0.001, max=100.0, help="How far the schedule is shifted to its noise.")
]
Seed = Annotated[int | None, typer.Option("--seed", min=0, max=2**64 - 1, metavar="N", help="The same seed gives the same film.")]


def film(
    prompt: Prompt,
    out: Out = None,
    codec: Codec = None,
    images: Images = None,
    background: Background = None,
    frames: Frames = None,
    seconds: Seconds = None,
    rate: Rate = None,
    size: Size = None,
    width: Side = None,
    height: Side = None,
    steps: Steps = None,
    guidance: Guidance = None,
    guidance_2: Guidance2 = None,
    flow_shift: Shift = None,
    negative: Negative = None,
    step_cache: StepCache = None,
    sigmas: Sigmas = None,
    mask: Mask = None,
    control: Control = None,
    words: Own = None,
    seed: Seed = None,
    address: Address = None,
    api_key: ApiKey = None,
    pipeline: PipelineName = "",
    device: Device = None,
    json: Json = False,
    timeout: Timeout = 3600.0,
    max_retries: MaxRetries = None,
    verbose: Verbose = False,
) -> None:
    """Make a film of a prompt, also from a picture.

    The file grows while frames come, and can be played meanwhile. It takes a checkpoint that makes films, such as Wan 2.2: --pipeline.
    """
    if background and not images:
        raise typer.BadParameter("--background is for pictures that it begins with; give one with --image")
    if (prompt, *(images or ()), mask, control).count("-") > 1:
        raise typer.BadParameter("standard input is one thing: only one of PROMPT, --image, --mask and --control can be -")
    width, height, sized = sides(size, width, height)
    options = options_of(width=width, height=height, steps=steps, guidance_scale=guidance, negative_prompt=negative, background=background)
    options |= options_of(frames=frames, seconds=seconds, frames_per_second=rate, guidance_scale_2=guidance_2, flow_shift=flow_shift)
    options |= options_of(
        step_cache=step_cache, sigmas=numbers(sigmas), options=own_options(words or ()), mask_image=mask, control_image=control
    )
    options |= options_of(seed=seed, timeout_s=timeout, max_retries=max_retries)
    devices = devices_of(device, address)
    from omnistage.cli.filming import FilmOrder, make_film, out_of
    from omnistage.cli.orders import carry_out

    with errors_reported(verbose):
        path, options["media_type"] = out_of(out, codec)
    order = FilmOrder(prompt, path, tuple(images or ()), options, json, sized=sized, is_unnamed=out is None)
    carry_out(order, make_film, address, pipeline, api_key, verbose, devices)
