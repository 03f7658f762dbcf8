"""`omnistage protos`: the contract as files, which any protoc takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from omnistage.cli.show.commands import write_protos
from tools.protos import compile_protos

PROTOS = Path(__file__).resolve().parents[2] / "protos"
ERROR_FILES = {"google/rpc/status.proto", "google/rpc/error_details.proto"}


def contents(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in folder.rglob("*.proto")}


def compiled(folder: Path, out: Path) -> set[str]:
    """The names in protoc's output for all files in the folder, as Python."""
    out.mkdir()
    compile_protos([f"-I{folder}", f"--python_out={out}", f"--grpc_python_out={out}", *contents(folder)])
    return {path.relative_to(out).as_posix() for path in out.rglob("*_pb2.py")}


def typed(*words: str) -> subprocess.CompletedProcess[str]:
    program = "import typer; from omnistage.cli.show.commands import protos; typer.run(protos)"
    return subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=60)


def test_the_command_names_what_it_wrote(tmp_path: Path) -> None:
    done = typed(str(tmp_path / "protos"), "--errors")
    assert (done.returncode, done.stderr) == (0, "")
    names = {Path(line).relative_to(tmp_path / "protos").as_posix() for line in done.stdout.splitlines()}
    assert names == {*contents(PROTOS), *ERROR_FILES}


def test_the_command_says_that_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = typed(str(tmp_path / "file"))
    assert (done.returncode, done.stdout) == (1, "")
    assert "is no folder" in done.stderr and "hint: Give a folder" in done.stderr


def test_it_writes_the_contract_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "protos"
    files = write_protos(folder)
    assert contents(folder) == contents(PROTOS)
    assert {path.relative_to(folder).as_posix() for path in files} == set(contents(PROTOS)) and len(files) == 5


@pytest.mark.parametrize("errors", [False, True])
def test_protoc_takes_what_it_wrote(tmp_path: Path, errors: bool) -> None:
    write_protos(tmp_path / "protos", errors=errors)
    names = set(contents(PROTOS)) | (ERROR_FILES if errors else set())
    assert compiled(tmp_path / "protos", tmp_path / "out") == {name.replace(".proto", "_pb2.py") for name in names}


def test_files_of_an_earlier_version_are_replaced_and_others_stay(tmp_path: Path) -> None:
    write_protos(tmp_path)
    (tmp_path / "omnistage" / "v1" / "omni.proto").write_text("old")
    (tmp_path / "mine.proto").write_text("mine")
    write_protos(tmp_path)
    assert contents(tmp_path) == {**contents(PROTOS), "mine.proto": "mine"}
