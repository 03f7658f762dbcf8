"""Commands that start no stack: `omnistage pipelines`, `status`, `voices` and `list`; `pull`, `fetch-default` and `make-tiny`; and
`protos`, the contract for clients and stages in any language.

The work is in `show.tables`, `show.fetch` and `show.bars`, imported when it runs; that of `protos` is here."""

from __future__ import annotations

import asyncio
import re
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from omnistage.cli.options import DEFAULT_TIMEOUT_S, MAX_SEED, ApiKey, Json, Timeout, Verbose
from omnistage.cli.report import errors_reported
from omnistage.models.tiny.makers import MAKERS

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
    from omnistage.cli.show.tables import show_pipelines

    with errors_reported(verbose):
        asyncio.run(show_pipelines(address, api_key, json, timeout, verbose))


def status(
    address: Running = None, api_key: ApiKey = None, json: Json = False, timeout: Timeout = DEFAULT_TIMEOUT_S, verbose: Settings = False
) -> None:
    """Show the stage servers and how they are.

    Starts nothing. With -v, or in the JSON object, also what every stage chose: device, memory, limits.
    """
    from omnistage.cli.show.tables import show_status

    with errors_reported(verbose):
        asyncio.run(show_status(address, api_key, json, timeout, verbose))


def doctor(address: Running = None, json: Json = False, verbose: Verbose = False) -> None:
    """Look at this machine, and say what is wrong.

    Versions, memory, folders, ports, players, models, and whether routers answer: ok, warn or bad, and what to do. Exit code 1 if
    something is bad. Starts nothing.
    """
    with errors_reported(verbose):
        from omnistage.cli.show.doctor import examine

        is_well = examine(address, json)
    if not is_well:
        raise typer.Exit(1)


def _since(text: str | None) -> str:
    """The earliest time, as the logs write it. text: as typed by --since; None: any time. Raises BadParameter."""
    if text is None:
        return ""
    if match := re.fullmatch(r"([0-9]{1,9})([smhd])", text):
        ago_s = int(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]
        return datetime.fromtimestamp(max(time.time() - ago_s, 0.0), UTC).strftime("%Y-%m-%dT%H:%M:%S")
    try:
        return datetime.fromisoformat(text).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S")
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"is {text!r}; it must be like 30s, 10m, 2h or 1d, or a time such as 2026-03-01T12:00:00Z") from None


def logs(
    processes: Annotated[
        list[str] | None, typer.Argument(metavar="PROCESS", help="Names, such as router, talker, talker-1, gateway or serve; default: all.")
    ] = None,
    address: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Of the stack's router, or its port; default: the only stack of yours.")
    ] = None,
    log_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="Of a stack that has ended: its --log-dir.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print further lines as they come, until the stack ends.")] = False,
    lines: Annotated[
        int | None,
        typer.Option(
            "--lines", "-n", min=0, max=100_000, metavar="N", help="The last N; default: 100, or all that --request and --since find."
        ),
    ] = None,
    request: Annotated[str, typer.Option(metavar="ID", help="Only about this request, or session: of an error, or of x-request-id.")] = "",
    since: Annotated[str | None, typer.Option(metavar="TIME", help="Only from then on: 30s, 10m, 2h, 1d ago, or a time.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the objects of the logs, a line each, with the process.")] = False,
    verbose: Verbose = False,
) -> None:
    """Print the logs of a stack of this machine.

    Those of all its processes, in the order of their times, which are in UTC. Where none serves, those of the last one that were kept.
    """
    earliest = _since(since)
    if address is not None and log_dir is not None:
        raise typer.BadParameter("--address is a stack that serves, and --log-dir one that has ended; leave one out")
    from omnistage.cli.show.logs import LogQuery, find_folder, show_logs

    with errors_reported(verbose):
        folder, pid = (log_dir, 0) if log_dir is not None else find_folder(address)
        show_logs(folder, processes or (), LogQuery(lines, request, earliest, follow, as_json), pid)


def voices(
    address: Running = None, api_key: ApiKey = None, json: Json = False, timeout: Timeout = DEFAULT_TIMEOUT_S, verbose: Verbose = False
) -> None:
    """List who speaks.

    Starts nothing; where nothing runs, the voices of the pipelines that have the same with every checkpoint.
    """
    from omnistage.cli.show.tables import show_voices

    with errors_reported(verbose):
        asyncio.run(show_voices(address, api_key, json, timeout, verbose))


def list_models(json: Json = False, verbose: Verbose = False) -> None:
    """List the models on this machine.

    Their size, what they take and give, and which pipelines serve them. Nothing is fetched.
    """
    from omnistage.cli.show.tables import show_models

    with errors_reported(verbose):
        show_models(json)


TINY_SIZES = tuple(dict.fromkeys(size for maker in MAKERS.values() for size in maker.sizes))
"""All sizes of checkpoints that `make-tiny` can make."""


def pull(
    name: Annotated[str, typer.Argument(metavar="OWNER/NAME[@REVISION]", help="Of a model at the hub; default revision: main.")],
    verbose: Verbose = False,
) -> None:
    """Fetch a model by its name into the cache.

    `serve` does so too. An interrupted fetch goes on where it stopped.
    """
    from omnistage.cli.show.fetch import pull as fetch_named

    with errors_reported(verbose):
        print(fetch_named(name))


def fetch_default(verbose: Verbose = False) -> None:
    """Download and convert the models of the default pipelines, once.

    Later calls find them in the cache.
    """
    from omnistage.cli.show.fetch import fetch_defaults

    with errors_reported(verbose):
        print(*fetch_defaults(), sep="\n")


def make_tiny(
    architecture: Annotated[str, typer.Argument(metavar="ARCHITECTURE", help=f"One of {', '.join(MAKERS)}.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that is empty or not there.")],
    size: Annotated[str, typer.Option(metavar="SIZE", help=f"{', '.join(TINY_SIZES)}, as far as there is one of this.")] = "tiny",
    seed: Annotated[int, typer.Option(metavar="N", min=0, max=MAX_SEED, help="The same seed gives the same files.")] = 0,
    tokenizer: Annotated[
        str, typer.Option(metavar="NAME", help="built: some hundred tokens; qwen: all of Qwen2.5's, downloaded once.")
    ] = "built",
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="float32 or bfloat16; default: the size's own.")] = "",
    verbose: Verbose = False,
) -> None:
    """Make a checkpoint with random weights, for trials.

    In the layout of a published one.
    """
    from omnistage.cli.show.bars import make
    from omnistage.models.tiny.makers import CheckpointOrder

    with errors_reported(verbose):
        make(architecture, directory, CheckpointOrder(size, seed, tokenizer, dtype))
        print(directory)


_INSTALLED = Path(__file__).resolve().parents[2] / "v1"
_CHECKOUT = Path(__file__).resolve().parents[4] / "protos" / "omnistage" / "v1"

PROTO_PACKAGE = Path("omnistage", "v1")
ERROR_PACKAGE = Path("google", "rpc")
ERROR_FILES = ("error_details.proto", "status.proto")

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write into; it is made if it is not there.")]
Errors = Annotated[
    bool,
    typer.Option(
        "--errors", help="Also google/rpc/status.proto and error_details.proto, the form of errors, for languages that lack them."
    ),
]


def protos(directory: Directory, errors: Errors = False) -> None:
    """Write the contract, to make a client in any language.

    The .proto files that clients and stages speak are DIR/omnistage/v1/*.proto, so DIR is the folder to give to protoc with -I. Prints the
    files that it wrote.
    """
    with errors_reported():
        for path in write_protos(directory, errors=errors):
            typer.echo(path)


def write_protos(directory: Path, *, errors: bool = False) -> list[Path]:
    """Write the contract into `directory`, over older files. Returns the files written. errors: write the protos of google.rpc too. Raises
    RequestError if `directory` is a file, OSError."""
    if directory.exists() and not directory.is_dir():
        from omnistage.client.errors import RequestError

        raise RequestError(f"{directory} is no folder", hint="Give a folder to write into, such as protos.")
    texts = {PROTO_PACKAGE / path.name: path.read_bytes() for path in _contract()}
    if errors:
        texts |= _error_texts()
    paths = []
    for name, text in texts.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
        paths.append(path)
    return paths


def _contract() -> list[Path]:
    """The .proto files of the contract: in a wheel in the folder of the stubs, in a checkout in protos/. Raises FileNotFoundError if an
    install lacks them."""
    paths = sorted(_INSTALLED.glob("*.proto")) or sorted(_CHECKOUT.glob("*.proto"))
    if not paths:
        raise FileNotFoundError(f"no .proto files in {_INSTALLED}: omnistage is not whole here; install it again")
    return paths


def _error_texts() -> dict[Path, bytes]:
    """The .proto files of google.rpc, from the package googleapis-common-protos, on which the client depends."""
    from importlib import resources

    folder = resources.files("google.rpc")
    return {ERROR_PACKAGE / name: folder.joinpath(name).read_bytes() for name in ERROR_FILES}
