"""`omnistage pipelines`, `status`, `voices` and `list`: their options. None of them starts anything."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from omnistage.cli.options import DEFAULT_TIMEOUT_S, ApiKey, Json, Timeout, Verbose
from omnistage.cli.report import errors_reported

Running = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="A router, or several with commas between; default: OMNISTAGE_ROUTER, or that of this machine."),
]


Settings = Annotated[bool, typer.Option("--verbose", "-v", help="Show too what every stage chose, and tracebacks.")]


def pipelines(
    address: Running = None, api_key: ApiKey = None, json: Json = False, timeout: Timeout = DEFAULT_TIMEOUT_S, verbose: Verbose = False
) -> None:
    """List what can be asked, or served.

    Where nothing runs, what `omnistage serve NAME` can start. Starts nothing.
    """
    from omnistage.cli.show import show_pipelines

    with errors_reported(verbose):
        asyncio.run(show_pipelines(address, api_key, json, timeout, verbose))


def status(
    address: Running = None, api_key: ApiKey = None, json: Json = False, timeout: Timeout = DEFAULT_TIMEOUT_S, verbose: Settings = False
) -> None:
    """Show the stage servers and how they are.

    Starts nothing. With -v, or in the JSON object, also what every stage chose: device, memory, limits.
    """
    from omnistage.cli.show import show_status

    with errors_reported(verbose):
        asyncio.run(show_status(address, api_key, json, timeout, verbose))


def voices(
    address: Running = None, api_key: ApiKey = None, json: Json = False, timeout: Timeout = DEFAULT_TIMEOUT_S, verbose: Verbose = False
) -> None:
    """List who speaks.

    Starts nothing; where nothing runs, the voices of the pipelines that have the same with every checkpoint.
    """
    from omnistage.cli.show import show_voices

    with errors_reported(verbose):
        asyncio.run(show_voices(address, api_key, json, timeout, verbose))


def list_models(json: Json = False, verbose: Verbose = False) -> None:
    """List the models on this machine.

    Their size, what they take and give, and which pipelines serve them. Nothing is fetched.
    """
    from omnistage.cli.show import show_models

    with errors_reported(verbose):
        show_models(json)
