"""`omnistage protos`: the contract, for clients and stages in any language."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from omnistage.cli.report import errors_reported

_INSTALLED = Path(__file__).resolve().parents[1] / "v1"
_CHECKOUT = Path(__file__).resolve().parents[3] / "protos" / "omnistage" / "v1"

PACKAGE = Path("omnistage", "v1")
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
    texts = {PACKAGE / path.name: path.read_bytes() for path in _contract()}
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
