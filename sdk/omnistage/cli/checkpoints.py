"""`omnistage pull`, `fetch-default` and `make-tiny`: their options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from omnistage.cli.options import Verbose
from omnistage.cli.report import errors_reported
from omnistage.models.tiny.makers import MAKERS

SIZES = tuple(dict.fromkeys(size for maker in MAKERS.values() for size in maker.sizes))
"""All sizes of checkpoints that `make-tiny` can make."""


def pull(
    name: Annotated[str, typer.Argument(metavar="OWNER/NAME[@REVISION]", help="Of a model at the hub; default revision: main.")],
    verbose: Verbose = False,
) -> None:
    """Fetch a model by its name into the cache.

    `serve` does so too. An interrupted fetch goes on where it stopped.
    """
    from omnistage.cli.fetch import pull as fetch_named

    with errors_reported(verbose):
        print(fetch_named(name))


def fetch_default(verbose: Verbose = False) -> None:
    """Download and convert the models of the default pipelines, once.

    Later calls find them in the cache.
    """
    from omnistage.cli.fetch import fetch_defaults

    with errors_reported(verbose):
        print(*fetch_defaults(), sep="\n")


def make_tiny(
    architecture: Annotated[str, typer.Argument(metavar="ARCHITECTURE", help=f"One of {', '.join(MAKERS)}.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that is empty or not there.")],
    size: Annotated[str, typer.Option(metavar="SIZE", help=f"{', '.join(SIZES)}, as far as there is one of this.")] = "tiny",
    seed: Annotated[int, typer.Option(metavar="N", min=0, max=2**64 - 1, help="The same seed gives the same files.")] = 0,
    tokenizer: Annotated[
        str, typer.Option(metavar="NAME", help="built: some hundred tokens; qwen: all of Qwen2.5's, downloaded once.")
    ] = "built",
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="float32 or bfloat16; default: the size's own.")] = "",
    verbose: Verbose = False,
) -> None:
    """Make a checkpoint with random weights, for trials.

    In the layout of a published one.
    """
    from omnistage.cli.make import make
    from omnistage.models.tiny.makers import CheckpointOrder

    with errors_reported(verbose):
        make(architecture, directory, CheckpointOrder(size, seed, tokenizer, dtype))
        print(directory)
