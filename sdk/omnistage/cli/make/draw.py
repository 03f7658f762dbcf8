"""`omnistage draw`, `film` and `sound`: their options. The work is in `make.drawing`, imported when it runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from omnistage.cli.make.ask import Play, check_play, options_of
from omnistage.cli.options import Address, ApiKey, Background, DrawingSeed, Json, MaxRetries, PipelineName, Timeout, Verbose

if TYPE_CHECKING:
    from omnistage.client.request import Options

MAX_SIDE = 16384

Prompt = Annotated[str, typer.Argument(metavar="PROMPT", help="What to show; - reads it from standard input.")]
PictureOut = Annotated[
    Path | None,
    typer.Option("--out", "-o", metavar="F", help="The picture's file: .png, .jpg or .webp; default: a new .png named by the prompt."),
]
PictureImages = Annotated[
    list[str] | None, typer.Option("--image", metavar="F", help="A picture to start from or to change; - is standard input. Repeatable.")
]
Size = Annotated[str | None, typer.Option(metavar="WxH", help="Width and height in pixels, such as 512x512; default: the model's own.")]
Side = Annotated[int | None, typer.Option(min=1, max=MAX_SIDE, metavar="PIXELS", help="One side alone, instead of --size.")]
Layers = Annotated[int | None, typer.Option(metavar="N", min=1, max=64, help="So many layers, a file each, of a model that draws layers.")]
Count = Annotated[int | None, typer.Option("--count", metavar="N", min=1, max=8, help="So many pictures, a file each.")]
Steps = Annotated[int | None, typer.Option(metavar="N", min=1, max=1000, help="More take longer and show more; default: the model's own.")]
Guidance = Annotated[float | None, typer.Option("--guidance", metavar="X", min=0.0, max=100.0, help="How closely to follow the prompt.")]
Negative = Annotated[str | None, typer.Option("--negative", metavar="TEXT", help="What not to show.")]
StepCache = Annotated[
    float | None,
    typer.Option(min=0.0, max=1.0, metavar="PART", help="Skip most of a step in which little changes, up to so much of 1; default: never."),
]
Sigmas = Annotated[
    str | None, typer.Option(metavar="X,X,..", help="Noise levels of the steps, from the most noise down, instead of --steps: 1,0.7,0.3.")
]
Strength = Annotated[
    float | None, typer.Option(min=0.0, max=1.0, metavar="PART", help="How much of --image is drawn anew, where the pipeline knows that.")
]
Mask = Annotated[
    str | None, typer.Option("--mask", metavar="F", help="A picture, white or transparent where to draw anew; - is standard input.")
]
Control = Annotated[
    str | None,
    typer.Option(
        "--control", metavar="F", help="A picture to keep to, such as edges, of a pipeline with a ControlNet; - is standard input."
    ),
]
Own = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="NAME=VALUE", help="An option of the pipeline's own, such as cfg_normalization=true. Repeatable."),
]
Previews = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=0, max=16, help="So many pictures on the way, a file each, beside the others; of the first picture alone."
    ),
]
PreviewDir = Annotated[Path | None, typer.Option(metavar="DIR", help="Put them into this folder.")]
PreviewSide = Annotated[int | None, typer.Option(min=1, max=1024, metavar="PIXELS", help="Their longest side.")]
Device = Annotated[
    list[str] | None, typer.Option(metavar="STAGE=DEV", help="Of a stack that is started: cpu, cuda:0 ...; a bare DEV is for all stages.")
]


def draw(
    context: typer.Context,
    prompt: Prompt,
    out: PictureOut = None,
    images: PictureImages = None,
    background: Background = None,
    layers: Layers = None,
    size: Size = None,
    width: Side = None,
    height: Side = None,
    steps: Steps = None,
    guidance_scale: Guidance = None,
    negative_prompt: Negative = None,
    step_cache: StepCache = None,
    sigmas: Sigmas = None,
    strength: Strength = None,
    mask_image: Mask = None,
    control_image: Control = None,
    options: Own = None,
    seed: DrawingSeed = None,
    results: Count = None,
    previews: Previews = None,
    preview_dir: PreviewDir = None,
    preview_side: PreviewSide = None,
    address: Address = None,
    api_key: ApiKey = None,
    pipeline: PipelineName = "",
    device: Device = None,
    json: Json = False,
    timeout_s: Timeout = 600.0,
    max_retries: MaxRetries = None,
    verbose: Verbose = False,
) -> None:
    """Draw a picture of a prompt, also from other pictures.

    The model that is there without --pipeline knows coloured shapes alone: circle, square, triangle, star and heart, as in "a red circle".

    Several pictures get -1, -2 ... behind the name of the file, layers -layer-0, -layer-1 ..., previews -preview- and their step.
    """
    for option, value in (("--preview-dir", preview_dir), ("--preview-side", preview_side)):
        if value is not None and not previews:
            raise typer.BadParameter(f"{option} is for previews; say how many with --previews")
    if background and not images:
        raise typer.BadParameter("--background is for pictures that are changed; give one with --image")
    sized, call_options = _picture_options(context)
    devices = devices_of(device, address)
    from omnistage.cli.make.drawing import DrawingOrder
    from omnistage.cli.make.orders import carry_out

    order = DrawingOrder(prompt, out, call_options, json, images or (), sized, preview_dir)
    carry_out(order, address, pipeline, api_key, verbose, devices)


def _picture_options(context: typer.Context) -> tuple[bool, Options]:
    """Returns (whether width and height were typed as one, the options) of `draw` or `film`. Raises BadParameter."""
    params = context.params
    if [params["prompt"], *params["images"], params["mask_image"], params["control_image"]].count("-") > 1:
        raise typer.BadParameter("standard input is one thing: only one of PROMPT, --image, --mask and --control can be -")
    width, height = sides(params["size"], params["width"], params["height"])
    values = {"width": width, "height": height, "sigmas": numbers(params["sigmas"]), "options": own_options(params["options"])}
    return params["size"] is not None, options_of(context, **values)


def devices_of(device: Sequence[str] | None, address: str | None) -> dict[str, str]:
    """Read [STAGE=]DEV words into devices by stage. Raises BadParameter, also if a router was typed, because its devices are fixed."""
    if device and address is not None:
        raise typer.BadParameter("--device is for a stack that is started; leave it out with --address")
    from omnistage.cli.stack.layout import by_stage

    try:
        return by_stage(device or (), "--device")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def numbers(text: str | None) -> list[float] | None:
    """Read a text such as 1,0.7,0.3; None stays None. Raises BadParameter."""
    try:
        return None if text is None else [float(each) for each in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--sigmas {text}: give numbers with commas between them, such as 1,0.7,0.3") from None


def own_options(words: Sequence[str]) -> dict[str, str] | None:
    """Read NAME=VALUE words; None if there are none. Raises BadParameter."""
    for word in words:
        if word.startswith("=") or "=" not in word:
            raise typer.BadParameter(f"--option {word}: give NAME=VALUE, such as cfg_normalization=true")
    return {name: value for name, _, value in (word.partition("=") for word in words)} or None


def sides(size: str | None, width: int | None, height: int | None) -> tuple[int | None, int | None]:
    """Width and height in pixels, None if not typed. size: both as one, such as 640x480. Raises BadParameter."""
    if size is None:
        return width, height
    if width is not None or height is not None:
        raise typer.BadParameter("--size is both sides; leave --width and --height out")
    match = re.fullmatch(r"(\d{1,5})[xX×](\d{1,5})", size)
    width, height = map(int, match.groups()) if match else (0, 0)  # 0 is refused below.
    if not 1 <= width <= MAX_SIDE or not 1 <= height <= MAX_SIDE:
        raise typer.BadParameter(f"--size {size}: give width and height in pixels, such as 512x512, each at most {MAX_SIDE}")
    return width, height


FilmOut = Annotated[
    Path | None, typer.Option("--out", "-o", metavar="F", help="The film's file: .webm or .mp4; default: a new .webm named by the prompt.")
]
Codec = Annotated[
    Literal["vp9", "h264"] | None,
    typer.Option("--codec", metavar="NAME", help="vp9, the default; or h264 of .mp4, which more players know."),
]
FilmImages = Annotated[
    list[str] | None,
    typer.Option("--image", metavar="F", help="The picture with which it begins; a second one, with which it ends; - is standard input."),
]
Frames = Annotated[int | None, typer.Option(metavar="N", min=1, max=1 << 16, help="How many; default: the model's own.")]
FilmSeconds = Annotated[float | None, typer.Option(min=0.001, max=3600.0, metavar="N", help="How long, instead of --frames.")]
Rate = Annotated[float | None, typer.Option("--fps", metavar="X", min=0.1, max=120.0, help="Frames a second; default: the model's own.")]
Guidance2 = Annotated[
    float | None, typer.Option("--guidance-2", metavar="X", min=0.0, max=100.0, help="The same where a second transformer takes over.")
]
Shift = Annotated[
    float | None, typer.Option("--flow-shift", metavar="X", min=0.001, max=100.0, help="How far the schedule is shifted to its noise.")
]
FilmSeed = Annotated[int | None, typer.Option("--seed", min=0, max=2**64 - 1, metavar="N", help="The same seed gives the same film.")]


def film(
    context: typer.Context,
    prompt: Prompt,
    out: FilmOut = None,
    codec: Codec = None,
    images: FilmImages = None,
    background: Background = None,
    frames: Frames = None,
    seconds: FilmSeconds = None,
    frames_per_second: Rate = None,
    size: Size = None,
    width: Side = None,
    height: Side = None,
    steps: Steps = None,
    guidance_scale: Guidance = None,
    guidance_scale_2: Guidance2 = None,
    flow_shift: Shift = None,
    negative_prompt: Negative = None,
    step_cache: StepCache = None,
    sigmas: Sigmas = None,
    mask_image: Mask = None,
    control_image: Control = None,
    options: Own = None,
    seed: FilmSeed = None,
    address: Address = None,
    api_key: ApiKey = None,
    pipeline: PipelineName = "",
    device: Device = None,
    json: Json = False,
    timeout_s: Timeout = 3600.0,
    max_retries: MaxRetries = None,
    verbose: Verbose = False,
) -> None:
    """Make a film of a prompt, also from a picture.

    The file grows while frames come, and can be played meanwhile. It takes a checkpoint that makes films, such as Wan 2.2: --pipeline.
    """
    if background and not images:
        raise typer.BadParameter("--background is for pictures that it begins with; give one with --image")
    sized, call_options = _picture_options(context)
    devices = devices_of(device, address)
    from omnistage.cli.make.drawing import FilmOrder
    from omnistage.cli.make.orders import carry_out

    order = FilmOrder(prompt, out, call_options, json, images or (), sized, codec)
    carry_out(order, address, pipeline, api_key, verbose, devices)


SoundPrompt = Annotated[str, typer.Argument(metavar="PROMPT", help="What is to be heard; - reads it from standard input.")]
SoundOut = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        metavar="F",
        help="The sound's file: .wav, .flac, .ogg, .opus or .mp3; - is standard output. Default: it is heard, or a new .wav is made.",
    ),
]
SoundSeconds = Annotated[float | None, typer.Option(min=0.001, max=3600.0, metavar="N", help="How long; default: as long as is usual.")]
Begin = Annotated[
    float | None, typer.Option("--begin", min=0.0, max=3600.0, metavar="N", help="Seconds of a longer sound that come before it.")
]
SoundNegative = Annotated[str | None, typer.Option("--negative", metavar="TEXT", help="What is not to be heard.")]
SoundSeed = Annotated[int | None, typer.Option("--seed", min=0, max=2**64 - 1, metavar="N", help="The same seed gives the same sound.")]


def sound(
    context: typer.Context,
    prompt: SoundPrompt,
    out: SoundOut = None,
    seconds: SoundSeconds = None,
    begin_s: Begin = None,
    play: Play = None,
    steps: Steps = None,
    guidance_scale: Guidance = None,
    negative_prompt: SoundNegative = None,
    options: Own = None,
    seed: SoundSeed = None,
    address: Address = None,
    api_key: ApiKey = None,
    pipeline: PipelineName = "",
    device: Device = None,
    json: Json = False,
    timeout_s: Timeout = 600.0,
    max_retries: MaxRetries = None,
    verbose: Verbose = False,
) -> None:
    """Make the sound that a prompt describes; `omnistage say` speaks a text.

    It takes a checkpoint that makes sound, such as Stable Audio Open: --pipeline.
    """
    check_play(play, out, json)
    call_options = options_of(context, options=own_options(options or ()))
    devices = devices_of(device, address)
    from omnistage.cli.make.drawing import SoundOrder
    from omnistage.cli.make.orders import carry_out

    carry_out(SoundOrder(prompt, out, call_options, json, play), address, pipeline, api_key, verbose, devices)
