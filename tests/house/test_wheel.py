"""The installed packages: the wheels hold the code, their data, the command and a page of their own, and nothing else; pip finds versions
for the client together with other packages."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
import zipfile
from email import message_from_bytes
from email.message import Message
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from helpers.lengths import LONG
from helpers.wheels import environment
from omnistage.client.private_stack import ALL_EXTRAS, install
from tools import wheels
from tools.groups import PICTURES_PACKAGE

ROOT = Path(__file__).resolve().parents[2]

AREAS = ("sdk", "host", "models", "gateway", "router", "services", "engine", "link", "wire")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The wheels of this checkout."""
    return wheels.build(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def wheel(built: list[Path]) -> zipfile.ZipFile:
    """The wheel of omnistage."""
    return zipfile.ZipFile(next(one for one in built if one.name.startswith("omnistage-")))


@pytest.fixture(scope="module")
def pictures(built: list[Path]) -> zipfile.ZipFile:
    """The wheel of omnistage-pictures."""
    return zipfile.ZipFile(next(one for one in built if one.name.startswith("omnistage_pictures-")))


def about(wheel: zipfile.ZipFile) -> Message:
    """The metadata of a wheel."""
    (name,) = [one for one in wheel.namelist() if one.endswith(".dist-info/METADATA")]
    return message_from_bytes(wheel.read(name))


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
    assert len(contract) == 6
    wheel.extractall(tmp_path / "installed")
    spec = spec_from_file_location("installed_protos", tmp_path / "installed" / "omnistage" / "cli" / "show" / "commands.py")
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


def test_the_picture_model_comes_with_the_extra_that_runs_models(wheel: zipfile.ZipFile, pictures: zipfile.ZipFile) -> None:
    needs = [Requirement(line) for line in about(wheel).get_all("Requires-Dist", [])]
    (named,) = [one for one in needs if one.name == PICTURES_PACKAGE]
    assert str(named.marker) == 'extra == "models"'
    assert about(pictures)["Name"] == PICTURES_PACKAGE and named.specifier.contains(about(pictures)["Version"])
    model = ROOT / "pictures" / "omnistage_pictures"
    files = {path.relative_to(model.parent).as_posix() for path in model.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert files == {name for name in pictures.namelist() if ".dist-info/" not in name}


def test_the_same_files_give_the_same_bytes_wherever_they_lie_and_older_wheels_go(
    built: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files lie in another folder, were written at another time, are readable by nobody else, and the environment gives another day."""
    copy = tmp_path / "copy"
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(listing, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file() and not name.startswith(("tests/", "docs/", "benchmarks/", "examples/")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, copy / name)
            (copy / name).chmod(0o600)
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "omnistage-0.0.1-py3-none-any.whl").write_bytes(b"of an older version")
    (tmp_path / "dist" / "mine.whl").write_bytes(b"")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    again = wheels.build(tmp_path / "dist", copy)
    assert {one.name: one.read_bytes() for one in again} == {one.name: one.read_bytes() for one in built}
    assert {one.name for one in (tmp_path / "dist").iterdir()} == {*(one.name for one in built), "mine.whl"}


def test_the_page_of_each_stands_alone(wheel: zipfile.ZipFile, pictures: zipfile.ZipFile) -> None:
    """An index shows the page without the repository: a link to a file beside it, or a picture of one, would lead nowhere."""
    for one, page in ((wheel, ROOT / "sdk" / "README.md"), (pictures, ROOT / "pictures" / "README.md")):
        text = about(one).get_payload()
        assert text == page.read_text(encoding="utf-8") and about(one)["Description-Content-Type"] == "text/markdown"
        assert re.findall(r"\]\(|\]\[|<img|<a |^\[[^\]]+\]:", str(text), re.MULTILINE) == []
        assert about(one)["Keywords"] and {line.partition(" :: ")[0] for line in about(one).get_all("Classifier", [])} >= {"Topic"}


def test_the_page_begins_with_the_client_and_names_every_extra_that_is_for_users(wheel: zipfile.ZipFile) -> None:
    text = str(about(wheel).get_payload())
    code = re.search(r"^```\w*\n(.*)$", text, re.MULTILINE)
    assert code is not None and code[1] == "from omnistage.client import Omni"
    listed = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    assert listed == {*about(wheel).get_all("Provides-Extra", [])} - {"asr", "dev"}
    versions = {line.rpartition(" ")[2] for line in about(wheel).get_all("Classifier", []) if ":: Python :: 3." in line}
    assert versions == {"3.11", "3.12", "3.13"}
    installs = re.findall(r"pip install(?! takes).*", text)
    assert installs and all("--find-links dist" in line for line in installs)


def test_whoever_tells_what_to_install_has_the_words_of_the_page_of_the_client() -> None:
    """Messages, hints and pages tell to install from what `make wheels` writes, as the packages are on no index, with extras that the page
    names."""
    page = (ROOT / "docs" / "client.md").read_text()
    named = set(re.findall(r"`omnistage\[([a-z,]+)\]`", page)) | {"{','.join(extras)}", "cli,convert,models,otel"}
    assert install(*ALL_EXTRAS) in [f"`make wheels` in a clone, then {line}" for line in re.findall(r"`(pip install .*)`", page)]
    sources = [path for area in AREAS for path in (ROOT / area).rglob("*.py") if "build" not in path.parts]
    told = 0
    for path in (*sources, *(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "sdk" / "README.md"):
        for line in path.read_text().splitlines():
            for before, extras in re.findall(r"((?:pipx?|uv tool) install.*?)['\"]omnistage\[(.+?)\]['\"]", line):
                told += 1
                assert "--find-links dist" in before, f"{path}: {line}"
                assert extras in named, f"{path}: {line}"
    assert told > 9, "they were looked at"


def test_the_floors_of_the_client_are_what_is_tested() -> None:
    core = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    listed = re.findall(r"^(\S+)==(\S+)", (ROOT / "requirements" / "oldest.txt").read_text(), re.MULTILINE)
    for one in map(Requirement, core):
        floor = min(Version(each.version) for each in one.specifier if each.operator == ">=")
        assert floor == min(Version(version) for name, version in listed if name == one.name), one


OTHERS = ("pipecat-ai", "livekit-agents", "tritonclient[grpc]", "mlflow", "streamlit")
"""Packages that hold protobuf or grpcio to versions of their own."""


def resolved(python: Path, dist: Path, *names: str) -> dict[str, str]:
    """The versions that pip chooses, by name."""
    report = dist / f"{names[-1]}.json"
    command = [str(python), "-m", "pip", "install", "--dry-run", "--quiet", "--only-binary=:all:", f"--report={report}"]
    done = subprocess.run([*command, f"--find-links={dist}", *names], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return {one["metadata"]["name"]: one["metadata"]["version"] for one in json.loads(report.read_text())["install"]}


@pytest.mark.parametrize("other", [pytest.param(one, marks=LONG) for one in OTHERS])
def test_they_are_had_in_the_version_that_they_have_alone(other: str, built: list[Path], tmp_path: Path) -> None:
    """Nothing is installed; the test needs the index, and minutes."""
    python = environment(tmp_path / "venv") / "bin" / "python"
    name = other.partition("[")[0]
    alone, both = (resolved(python, built[0].parent, *names) for names in ((other,), ("omnistage", other)))
    assert "omnistage" in both
    assert both[name] == alone[name], "an older one was taken, for the sake of the client"
