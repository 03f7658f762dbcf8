"""`omnistage sound`: its options. The work is in `sounding`, imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from omnistage.cli.ask import Play, check_play, options_of
from omnistage.cli.draw import Device, Guidance, Own, Steps, devices_of, own_options
from omnistage.cli.options import Address, ApiKey, Json, MaxRetries, PipelineName, Timeout, Verbose

Prompt = Annotated[str, typer.Argument(metavar="PROMPT", help="What is to be heard; - reads it from standard input.")]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        metavar="F",
        help="The sound's file: .wav, .flac, .ogg, .opus or .mp3; - is standard output. Default: it is heard, or a new .wav is made.",
    ),
]
Seconds = Annotated[float | None, typer.Option(min=0.001, max=3600.0, metavar="N", help="How long; default: as long as is usual.")]
Begin = Annotated[
    float | None, typer.Option("--begin", min=0.0, max=3600.0, metavar="N", help="Seconds of a longer sound that come before it.")
]
Negative = Annotated[str | None, typer.Option(metavar="TEXT", help="What is not to be heard.")]
Seed = Annotated[int | None, typer.Option("--seed", min=0, max=2**64 - 1, metavar="N", help="The same seed gives the same sound.")]


def sound(
    prompt: Prompt,
    out: Out = None,
    seconds: Seconds = None,
    begin: Begin = None,
    play: Play = None,
    steps: Steps = None,
    guidance: Guidance = None,
    negative: Negative = None,
    words: Own = None,
    seed: Seed = None,
    address: Address = None,
    api_key: ApiKey = None,
    pipeline: PipelineName = "",
    device: Device = None,
    json: Json = False,
    timeout: Timeout = 600.0,
    max_retries: MaxRetries = None,
    verbose: Verbose = False,
) -> None:
    """Make the sound that a prompt describes; `omnistage say` speaks a text.

    It takes a checkpoint that makes sound, such as Stable Audio Open: --pipeline.
    """
    check_play(play, out, json)
    options = options_of(seconds=seconds, begin_s=begin, steps=steps, guidance_scale=guidance, negative_prompt=negative)
    options |= options_of(options=own_options(words or ()), seed=seed, timeout_s=timeout, max_retries=max_retries)
    devices = devices_of(device, address)
    from omnistage.cli.orders import carry_out
    from omnistage.cli.sounding import SoundOrder, make_sound

    carry_out(SoundOrder(prompt, out, options, json, play), make_sound, address, pipeline, api_key, verbose, devices)
