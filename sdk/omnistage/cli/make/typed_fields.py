"""The options of commands that are fields of the contract. `python -m tools.options` makes this file from the protos."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import typer

FIELDS: Mapping[str, Any] = {
    "seed": Annotated[
        int | None,
        typer.Option(
            "--seed",
            min=0,
            max=18446744073709551615,
            metavar="N",
            help="The same seed gives the same answer, picture, film or sound.",
        ),
    ],
    "max_tokens": Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            min=1,
            max=32768,
            metavar="N",
            help="Longest answer, in tokens.",
        ),
    ],
    "stop": Annotated[
        list[str] | None,
        typer.Option(
            "--stop",
            metavar="TEXT",
            help="The answer ends before this. Repeatable.",
        ),
    ],
    "temperature": Annotated[
        float | None,
        typer.Option(
            "--temperature",
            min=0.0,
            max=2.0,
            metavar="X",
            help="How freely words are drawn; 0 is greedy, and mostly the default.",
        ),
    ],
    "top_p": Annotated[
        float | None,
        typer.Option(
            "--top-p",
            min=0.0,
            max=1.0,
            metavar="X",
            help="Choose among the likeliest tokens that have so much of 1.",
        ),
    ],
    "regex": Annotated[
        str | None,
        typer.Option(
            "--regex",
            metavar="TEXT",
            help="The whole text keeps to this regular expression.",
        ),
    ],
    "choice": Annotated[
        list[str] | None,
        typer.Option(
            "--choice",
            metavar="TEXT",
            help="The text is this, or that of another --choice.",
        ),
    ],
    "voice": Annotated[
        str | None,
        typer.Option(
            "--voice",
            metavar="TEXT",
            help="Who speaks: `omnistage voices` tells whom there is.",
        ),
    ],
    "speed": Annotated[
        float | None,
        typer.Option(
            "--speed",
            min=0.5,
            max=2.0,
            metavar="X",
            help="Of the speech; 1 is usual.",
        ),
    ],
    "max_frames": Annotated[
        int | None,
        typer.Option(
            "--max-frames",
            min=1,
            max=1048576,
            metavar="N",
            help="Longest speech, in frames; Qwen2.5-Omni has 50 a second.",
        ),
    ],
    "profile": Annotated[
        Literal["latency", "balanced", "quality", "offline"] | None,
        typer.Option(
            "--profile",
            help="How soon sound is heard, against what it costs and how good it is; default: balanced.",
        ),
    ],
    "sample_rate_hz": Annotated[
        int | None,
        typer.Option(
            "--sample-rate",
            metavar="HZ",
            help="Samples a second; default: the model's own.",
        ),
    ],
    "encoding": Annotated[
        Literal["pcm16", "float32"] | None,
        typer.Option(
            "--encoding",
            help="In what form samples come, and stand in a .wav; default: pcm16.",
        ),
    ],
    "negative_prompt": Annotated[
        str | None,
        typer.Option(
            "--negative",
            metavar="TEXT",
            help="What must not be shown or heard.",
        ),
    ],
    "width": Annotated[
        int | None,
        typer.Option(
            "--width",
            min=1,
            max=16384,
            metavar="PIXELS",
            help="One side alone, instead of --size.",
        ),
    ],
    "height": Annotated[
        int | None,
        typer.Option(
            "--height",
            min=1,
            max=16384,
            metavar="PIXELS",
            help="One side alone, instead of --size.",
        ),
    ],
    "steps": Annotated[
        int | None,
        typer.Option(
            "--steps",
            min=1,
            max=1000,
            metavar="N",
            help="More take longer and show more; default: the model's own.",
        ),
    ],
    "guidance_scale": Annotated[
        float | None,
        typer.Option(
            "--guidance",
            min=0.0,
            max=100.0,
            metavar="X",
            help="How closely to follow the prompt.",
        ),
    ],
    "results": Annotated[
        int | None,
        typer.Option(
            "--count",
            min=1,
            max=8,
            metavar="N",
            help="So many pictures, a file each.",
        ),
    ],
    "previews": Annotated[
        int | None,
        typer.Option(
            "--previews",
            min=0,
            max=16,
            metavar="N",
            help="So many pictures on the way, a file each, beside the others; of the first picture alone.",
        ),
    ],
    "preview_side": Annotated[
        int | None,
        typer.Option(
            "--preview-side",
            min=1,
            max=1024,
            metavar="PIXELS",
            help="Their longest side.",
        ),
    ],
    "step_cache": Annotated[
        float | None,
        typer.Option(
            "--step-cache",
            min=0.0,
            max=1.0,
            metavar="X",
            help="Skip most of a step in which little changes, up to so much of 1; default: never.",
        ),
    ],
    "frames": Annotated[
        int | None,
        typer.Option(
            "--frames",
            min=1,
            max=65536,
            metavar="N",
            help="How many; default: the model's own.",
        ),
    ],
    "frames_per_second": Annotated[
        float | None,
        typer.Option(
            "--fps",
            min=0.1,
            max=120.0,
            metavar="X",
            help="Frames a second; default: the model's own.",
        ),
    ],
    "seconds": Annotated[
        float | None,
        typer.Option(
            "--seconds",
            min=0.0,
            max=3600.0,
            metavar="SECONDS",
            help="How long; of a film instead of --frames.",
        ),
    ],
    "begin_s": Annotated[
        float | None,
        typer.Option(
            "--begin",
            min=0.0,
            max=3600.0,
            metavar="SECONDS",
            help="Seconds of a longer sound that come before it.",
        ),
    ],
    "guidance_scale_2": Annotated[
        float | None,
        typer.Option(
            "--guidance-2",
            min=0.0,
            max=100.0,
            metavar="X",
            help="The same where a second transformer takes over.",
        ),
    ],
    "flow_shift": Annotated[
        float | None,
        typer.Option(
            "--flow-shift",
            min=0.0,
            max=100.0,
            metavar="X",
            help="How far the schedule is shifted to its noise.",
        ),
    ],
    "sigmas": Annotated[
        str | None,
        typer.Option(
            "--sigmas",
            metavar="X,X,..",
            help="Noise levels of the steps, from the most noise down, instead of --steps: 1,0.7,0.3.",
        ),
    ],
    "strength": Annotated[
        float | None,
        typer.Option(
            "--strength",
            min=0.0,
            max=1.0,
            metavar="X",
            help="How much of --image is drawn anew, where the pipeline knows that.",
        ),
    ],
    "mask_image": Annotated[
        str | None,
        typer.Option(
            "--mask",
            metavar="F",
            help="A picture, white or transparent where to draw anew; - is standard input.",
        ),
    ],
    "control_image": Annotated[
        str | None,
        typer.Option(
            "--control",
            metavar="F",
            help="A picture to keep to, such as edges, of a pipeline with a ControlNet; - is standard input.",
        ),
    ],
    "layers": Annotated[
        int | None,
        typer.Option(
            "--layers",
            min=0,
            max=64,
            metavar="N",
            help="So many layers, a file each, of a model that draws layers.",
        ),
    ],
}
"""By the name that programs use."""

GROUPS: Mapping[str, Sequence[str]] = {
    "text": (
        "seed",
        "max_tokens",
        "stop",
        "temperature",
        "top_p",
        "regex",
        "choice",
    ),
    "speech": (
        "seed",
        "voice",
        "speed",
        "max_frames",
        "profile",
        "sample_rate_hz",
        "encoding",
    ),
    "image": (
        "seed",
        "negative_prompt",
        "width",
        "height",
        "steps",
        "guidance_scale",
        "results",
        "previews",
        "preview_side",
        "step_cache",
        "sigmas",
        "strength",
        "mask_image",
        "control_image",
        "layers",
    ),
    "video": (
        "seed",
        "negative_prompt",
        "width",
        "height",
        "steps",
        "guidance_scale",
        "step_cache",
        "frames",
        "frames_per_second",
        "seconds",
        "guidance_scale_2",
        "flow_shift",
        "sigmas",
        "mask_image",
        "control_image",
    ),
    "audio": (
        "seed",
        "negative_prompt",
        "steps",
        "guidance_scale",
        "seconds",
        "begin_s",
    ),
}
"""The options for text, for speech, and for each product of drawing."""
