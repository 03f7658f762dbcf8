"""Generates the Python stubs of the contract into sdk/omnistage/v1, or with --check says whether the committed ones are fresh.

Stubs run with the protobuf and gRPC of the compiler that made them and with later ones, never with earlier ones. So the compiler has the
oldest version that pyproject.toml lets a client have, and stands apart from the environment (apart.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import typer

from tools import apart
from tools.commands import SetupError
from tools.setup import ROOT

PROTOS = ROOT / "protos"
STUBS = ROOT / "sdk" / "omnistage" / "v1"
OPTIONS = "omnistage/v1/options.proto"


def generate(folder: Path) -> None:
    """Write the stubs below `folder`, as omnistage/v1/*. Raises CalledProcessError if a proto does not compile, SetupError without a
    compiler."""
    outputs = [f"--{kind}_out={folder}" for kind in ("python", "pyi", "grpc_python")]
    # Without `quiet` the plugins name each file that they write on standard error.
    outputs.append(f"--mypy_grpc_out=quiet:{folder}")
    protos = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    compile_protos([f"-I{PROTOS}", *outputs, *protos])
    # protoc gives an extension no type.
    compile_protos([f"-I{PROTOS}", f"--mypy_out=quiet:{folder}", OPTIONS])


def compile_protos(words: Iterable[str]) -> None:
    """Run protoc with these arguments. Raises CalledProcessError if a proto does not compile, SetupError without a compiler."""
    environment = apart.variables(apart.folder_of("protos"))
    # The plugin that writes types is in the environment of this Python: it needs a newer protobuf itself, but what it writes does not.
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    subprocess.run([sys.executable, "-S", "-m", "grpc_tools.protoc", *words], env=environment, check=True)


def read_stubs(folder: Path) -> dict[str, bytes]:
    """The generated files in a folder, by name; the hand-written __init__.py and py.typed are left out."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*_pb2*.py*"))}


def main(check: bool = False) -> None:
    """Generate the stubs. check: compare only, change nothing, and exit with 1 if the committed ones are stale."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            generate(Path(folder))
        except SetupError as error:
            sys.exit(f"protos: {error}")
        fresh, committed = read_stubs(Path(folder) / "omnistage" / "v1"), read_stubs(STUBS)
    stale = sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))
    if check:
        sys.exit(f"stale stubs: {', '.join(stale)}. Run: make protos" if stale else 0)
    for name in stale:
        if name in fresh:
            (STUBS / name).write_bytes(fresh[name])
        else:
            (STUBS / name).unlink()
    print(f"{len(fresh)} stubs, {len(stale)} changed")


if __name__ == "__main__":
    typer.run(main)
