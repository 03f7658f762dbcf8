"""Options that several commands share."""

from __future__ import annotations

import re
from typing import Annotated

import typer

DEFAULT_TIMEOUT_S = 120.0
"""Time limit of a call. It is the Python client's, whose import would take a while."""


def _colour(colour: str | None) -> str | None:
    """Callback of --background. Raises BadParameter for a text that is no #rrggbb."""
    if colour is not None and re.fullmatch(r"#[0-9a-fA-F]{6}", colour) is None:
        raise typer.BadParameter(f"is {colour!r}; it must be a colour as #rrggbb, such as #ffffff for white")
    return colour


Address = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="A router, or several with commas between; default: OMNISTAGE_ROUTER, or that of this machine, or one is started.",
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        metavar="KEY",
        help="Who asks, for a router that serves many; default: OMNISTAGE_API_KEY, which keeps it out of the list of processes.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line, nothing else.")]
Background = Annotated[
    str | None,
    typer.Option(
        metavar="#RRGGBB", callback=_colour, help="Colour under what is transparent in what is shown; default: white, and none for layers."
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=2**64 - 1,
        metavar="N",
        help="The same seed gives the same answer. Without --temperature, of ask, text is not drawn and every seed gives the same.",
    ),
]
DrawingSeed = Annotated[int | None, typer.Option("--seed", min=0, max=2**64 - 1, metavar="N", help="The same seed gives the same picture.")]
PipelineName = Annotated[
    str,
    typer.Option(
        *("--pipeline", "--model"),
        metavar="NAME",
        help="See `omnistage pipelines`; without --address also a checkpoint, DIR or OWNER/NAME. Default: the router's own.",
    ),
]
Timeout = Annotated[float, typer.Option(min=0.001, metavar="SECONDS", help="Time limit of the call.")]
MaxRetries = Annotated[
    int | None,
    typer.Option(
        "--max-retries", min=0, metavar="N", help="How often to ask again where the server says when to, within --timeout; default: 2."
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show the servers' output and tracebacks.")]
