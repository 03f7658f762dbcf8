"""What a user installs: the built wheel holds the packages, their data and the command, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of this checkout, built without network."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    (built,) = folder.glob("*.whl")
    return zipfile.ZipFile(built)


def test_it_holds_every_package_and_only_the_package(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    ours = {
        path.relative_to(portion.parent).as_posix()
        for portion in [*ROOT.glob("*/omnistage"), *ROOT.glob("services/*/omnistage")]
        for path in portion.rglob("*.py")
    }
    assert ours <= names
    assert "omnistage/__init__.py" not in names
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"omnistage"}


def test_it_holds_the_pipelines_as_data_of_the_router(wheel: zipfile.ZipFile) -> None:
    pipelines = {f"omnistage/router/pipelines/{path.name}" for path in (ROOT / "deploy" / "pipelines").glob("*.yaml")}
    assert pipelines
    assert pipelines <= set(wheel.namelist())


def test_it_holds_the_files_of_the_page(wheel: zipfile.ZipFile) -> None:
    folder = ROOT / "gateway" / "omnistage"
    files = {path.relative_to(folder.parent).as_posix() for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert "omnistage/gateway/py.typed" in files
    assert files <= set(wheel.namelist())


def test_it_holds_the_contract_which_its_command_writes(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    contract = {path.relative_to(ROOT / "protos").as_posix(): path.read_bytes() for path in (ROOT / "protos").rglob("*.proto")}
    assert len(contract) == 5
    wheel.extractall(tmp_path / "installed")
    spec = spec_from_file_location("installed_protos", tmp_path / "installed" / "omnistage" / "cli" / "protos.py")
    assert spec is not None and spec.loader is not None
    command = module_from_spec(spec)
    spec.loader.exec_module(command)
    written = command.write_protos(tmp_path / "written")
    assert {path.relative_to(tmp_path / "written").as_posix(): path.read_bytes() for path in written} == contract
    shutil.rmtree(tmp_path / "installed" / "omnistage" / "v1")
    with pytest.raises(OSError, match=r"no \.proto files"):
        command.write_protos(tmp_path / "written")


def test_it_holds_the_type_marker_the_licence_and_the_command(wheel: zipfile.ZipFile) -> None:
    by_name = {name.split("/", 1)[1]: name for name in wheel.namelist() if ".dist-info/" in name}
    assert "omnistage/v1/py.typed" in wheel.namelist()
    assert {"licenses/LICENSE", "licenses/NOTICE"} <= by_name.keys()
    assert "omnistage = omnistage.cli.__main__:main" in wheel.read(by_name["entry_points.txt"]).decode()
