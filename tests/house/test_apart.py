"""Packages that stand apart: their folder is made once, is seen alone, and is never incomplete. With pip itself and tiny wheels."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from helpers.wheels import installed, publish, sha256, use_only
from tools import apart
from tools.commands import SetupError

SEEN = "from importlib.metadata import distributions; print(*sorted(one.name for one in distributions()))"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip's only source; the lists and folders are of this test."""
    use_only(tmp_path / "index", monkeypatch)
    monkeypatch.setattr(apart, "ROOT", tmp_path)
    monkeypatch.setattr(apart, "REQUIREMENTS", tmp_path / "requirements")
    (tmp_path / "requirements").mkdir()
    return tmp_path / "index"


def list_package(index: Path, version: str) -> Path:
    wheel = publish(index, "alpha", version, needs=("protobuf==1.0",))
    (apart.REQUIREMENTS / "protos.txt").write_text(f"alpha=={version} --hash=sha256:{sha256(wheel)}\n")
    return wheel


def folders() -> set[str]:
    return {path.name for path in (apart.ROOT / "build").iterdir()}


def test_a_folder_is_made_once_and_another_list_has_another(index: Path) -> None:
    list_package(index, "1.0")
    with ThreadPoolExecutor(2) as both:
        first, same = both.map(apart.folder_of, ["protos", "protos"])
    assert first == same and folders() == {first.name}
    before = first.stat().st_ino
    (index / "alpha" / "index.html").unlink()
    assert apart.folder_of("protos").stat().st_ino == before, "nobody asks an index for what is there"
    list_package(index, "2.0")
    assert folders() == {first.name} and apart.folder_of("protos") != first
    assert len(folders()) == 2


def test_who_sees_it_sees_nothing_else(index: Path) -> None:
    list_package(index, "1.0")
    folder = apart.folder_of("protos")
    seen = subprocess.run([sys.executable, "-S", "-c", SEEN], env=apart.variables(folder), capture_output=True, text=True, check=True)
    assert seen.stdout.split() == ["alpha"]
    assert "alpha" not in installed(sys.executable)


def test_a_wheel_that_is_another_leaves_nothing(index: Path) -> None:
    list_package(index, "1.0")
    publish(index, "alpha", "1.0", needs=("something-else",))
    with pytest.raises(SetupError, match=r"^alpha==1.0: the file .* is not the one whose SHA-256"):
        apart.folder_of("protos")
    assert folders() == set()


def test_all_of_them_are_made_where_one_is_missing_and_it_is_told(
    index: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(apart, "LISTS", ("protos",))
    list_package(index, "1.0")
    assert (apart.main(), apart.main()) == (0, 0)
    assert capsys.readouterr().out.count("setup: apart from the environment: protos") == 1
    list_package(index, "2.0")
    (index / "alpha" / "index.html").write_text("")
    assert apart.main() == 1
    assert "setup: " in capsys.readouterr().err
