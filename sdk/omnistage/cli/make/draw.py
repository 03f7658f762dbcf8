"""`omnistage draw`, `film` and `sound`: their options. The work is in `make.drawing`, imported when it runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from omnistage.cli.make.ask import Play, check_play, options_of
from omnistage.cli.make.typed_fields import FIELDS, GROUPS
from omnistage.cli.options import Background, with_call, with_fields

if TYPE_CHECKING:
    from omnistage.client.request import Options

MAX_SIDE: int = get_args(FIELDS["width"])[1].max

Prompt = Annotated[str, typer.Argument(metavar="PROMPT", help="What to show; - reads it from standard input.")]
PictureOut = Annotated[
    Path | None,
    typer.Option("--out", "-o", metavar="F", help="The picture's file: .png, .jpg or .webp; default: a new .png named by the prompt."),
]
PictureImages = Annotated[
    list[str] | None, typer.Option("--image", metavar="F", help="A picture to start from or to change; - is standard input. Repeatable.")
]
Size = Annotated[str | None, typer.Option(metavar="WxH", help="Width and height in pixels, such as 512x512; default: the model's own.")]
Own = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="NAME=VALUE", help="An option of the pipeline's own, such as cfg_normalization=true. Repeatable."),
]
PreviewDir = Annotated[Path | None, typer.Option(metavar="DIR", help="Put the previews into this folder.")]
Device = Annotated[
    list[str] | None, typer.Option(metavar="STAGE=DEV", help="Of a stack that is started: cpu, cuda:0 ...; a bare DEV is for all stages.")
]


@with_fields(*GROUPS["image"])
@with_call(600.0)
def draw(
    context: typer.Context,
    prompt: Prompt,
    out: PictureOut = None,
    images: PictureImages = None,
    background: Background = None,
    size: Size = None,
    options: Own = None,
    preview_dir: PreviewDir = None,
    device: Device = None,
    **fields: Any,
) -> None:
    """Draw a picture of a prompt, also from other pictures.

    The model that is there without --pipeline knows coloured shapes alone: circle, square, triangle, star and heart, as in "a red circle".

    Several pictures get -1, -2 ... behind the name of the file, layers -layer-0, -layer-1 ..., previews -preview- and their step.
    """
    for option, value in (("--preview-dir", preview_dir), ("--preview-side", fields["preview_side"])):
        if value is not None and not fields["previews"]:
            raise typer.BadParameter(f"{option} is for previews; say how many with --previews")
    if background and not images:
        raise typer.BadParameter("--background is for pictures that are changed; give one with --image")
    sized, call_options = _picture_options(context)
    devices = devices_of(device, fields["address"])
    from omnistage.cli.make.drawing import DrawingOrder
    from omnistage.cli.make.orders import carry_out

    order = DrawingOrder(prompt, out, call_options, fields["json"], images or (), sized, preview_dir)
    carry_out(order, context, devices)


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


@with_fields(*GROUPS["video"])
@with_call(3600.0)
def film(
    context: typer.Context,
    prompt: Prompt,
    out: FilmOut = None,
    codec: Codec = None,
    images: FilmImages = None,
    background: Background = None,
    size: Size = None,
    options: Own = None,
    device: Device = None,
    **fields: Any,
) -> None:
    """Make a film of a prompt, also from a picture.

    The file grows while frames come, and can be played meanwhile. It takes a checkpoint that makes films, such as Wan 2.2: --pipeline.
    """
    if background and not images:
        raise typer.BadParameter("--background is for pictures that it begins with; give one with --image")
    sized, call_options = _picture_options(context)
    devices = devices_of(device, fields["address"])
    from omnistage.cli.make.drawing import FilmOrder
    from omnistage.cli.make.orders import carry_out

    order = FilmOrder(prompt, out, call_options, fields["json"], images or (), sized, codec)
    carry_out(order, context, devices)


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


@with_fields(*GROUPS["audio"])
@with_call(600.0)
def sound(
    context: typer.Context,
    prompt: SoundPrompt,
    out: SoundOut = None,
    play: Play = None,
    options: Own = None,
    device: Device = None,
    **fields: Any,
) -> None:
    """Make the sound that a prompt describes; `omnistage say` speaks a text.

    It takes a checkpoint that makes sound, such as Stable Audio Open: --pipeline.
    """
    check_play(play, out, fields["json"])
    call_options = options_of(context, options=own_options(options or ()))
    devices = devices_of(device, fields["address"])
    from omnistage.cli.make.drawing import SoundOrder
    from omnistage.cli.make.orders import carry_out

    carry_out(SoundOrder(prompt, out, call_options, fields["json"], play), context, devices)
