"""Models by name, from the command and from Python: what a person sees, and what is served."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.hub_server import BLOCK, File, HubServer, hub_server
from helpers.processes import Family, Started
from helpers.terminal import CTRL_C, Terminal
from omnistage.client import BadRequestError, Omni, StackError
from omnistage.models.smol.store import model_directory
from omnistage.models.toy import formulas

BRINGING = """
from omnistage.models.family import Family, Mark, ModelEntry

class Thinker:
    @classmethod
    def loaded(cls, folder, options):
        from omnistage.models.toy.stages import ToyThinker
        assert (folder / "model.safetensors").read_bytes() == b"weights"
        return ToyThinker.loaded(None, options)

THINKER = ModelEntry("bringing:Thinker", files=("config.json", "model.safetensors"), model_type="words")
FAMILY = Family({"thinker": THINKER}, marks=((Mark("config.json", "architectures", ("WordsModel",)),),))
"""
PIPELINE = """
name: words
description: x
inputs: [text]
outputs: [text]
stages: [{kind: thinker, family: words}]
defaults: {thinker: {max_tokens: 256}}
"""
WORDS = {
    "config.json": File(b'{"architectures": ["WordsModel"], "model_type": "words"}'),
    "model.safetensors": File(b"weights"),
    "pytorch_model.bin": File(b"a pickle"),
}
PART = 10 * BLOCK
LARGE = bytes(PART + 2 * BLOCK)
BERT = "config.json has architectures ['BertModel']"
SMOL = {
    "thinker/config.json": File(b'{"model_type": "qwen2_5_omni_thinker"}'),
    "talker/config.json": File(b'{"model_type": "hibari-talker"}'),
    "code2wav/config.json": File(b'{"model_type": "hibari-code2wav"}'),
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """What commands and stacks of this test ask, and a family that a package brings."""
    site = tmp_path / "site"
    info = site / "bringing-1.dist-info"
    info.mkdir(parents=True)
    (site / "bringing.py").write_text(BRINGING)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bringing\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[omnistage.families]\nwords = bringing:FAMILY\n")
    (tmp_path / "words.yaml").write_text(PIPELINE)
    for name in [name for name in os.environ if name.startswith("HF_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")])))
    monkeypatch.chdir(tmp_path)
    with hub_server() as running:
        for name, value in running.environment(tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        yield running


def omnistage(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "omnistage.cli", *words], capture_output=True, text=True, timeout=60)


def test_a_person_sees_what_comes_and_an_interrupted_fetch_goes_on(hub: HubServer, tmp_path: Path) -> None:
    commit = hub.add("org/smol", {**SMOL, "model.safetensors": File(LARGE)})
    hub.stall["model.safetensors"] = PART + BLOCK
    terminal, pressed = Terminal(200, 24), list[bool]()

    def press(terminal: Terminal) -> None:
        if not pressed and any("83%" in line for line in terminal.lines):
            pressed.append(True)
            terminal.press(CTRL_C)

    assert terminal.run(("pull", "org/smol"), press) == 130
    assert terminal.lines[0] == f"org/smol@main is {commit}"
    assert terminal.lines[1].startswith(f"12.6 MB to fetch of 12.6 MB; {tmp_path}/home/hub has ")
    assert len(terminal.lines) <= 3 and b"fetching smol" in terminal.written, "the bar, and no traceback"
    hub.asked.clear()
    terminal = Terminal(200, 24)
    assert terminal.run(("pull", "org/smol")) == 0
    folder = tmp_path / "home" / "hub" / "models--org--smol" / "snapshots" / commit
    first, second, *others = terminal.lines
    assert first == f"org/smol@main is {commit}"
    assert second.startswith("2.1 MB to fetch of 12.6 MB; ")
    assert others == [f"serve it: omnistage serve org/smol@{commit}", str(folder)], "the bar is gone"
    assert [asked.range for asked in hub.asked if asked.host == "storage"] == [f"bytes={PART}-"]
    assert (folder / "model.safetensors").read_bytes() == LARGE


def test_a_script_gets_the_folder_and_one_line_of_what_is_wrong(hub: HubServer) -> None:
    commit = hub.add("org/words", WORDS)
    done = omnistage("pull", f"org/words@{commit}")
    assert done.returncode == 0 and {path.name for path in Path(done.stdout.strip()).iterdir()} == {"config.json", "model.safetensors"}
    assert done.stderr.splitlines()[0] == f"org/words@{commit}", "without a bar, and without a word of the library"
    assert len(done.stderr.splitlines()) == 3
    done = omnistage("pull", "org/none")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [
        "error: the hub has no org/none, or shows it to nobody without the right token in HF_TOKEN",
        "hint: `omnistage pull org/none@main` tries again.",
    ]


REFUSED = {
    ("pull", "smol"): "BadRequestError NAME: smol is no name of a model: give owner/name, or owner/name@revision",
    ("pull", "org/bert"): f"StackError org/bert is a checkpoint of no family that there is (words, smol): {BERT}",
    ("serve", "org/bert"): f"StackError org/bert is a checkpoint of no family that there is (words, smol): {BERT}",
    ("serve", "org/words"): "StackError org/words is a checkpoint of words, for which no pipeline comes with it",
    (
        "serve",
        "smol",
        "org/words",
    ): "StackError org/words is a checkpoint of no family that there is (smol): config.json has model_type 'words'",
    ("serve", "toy", "org/words"): "StackError the models of toy have no weights: leave the folder",
    ("serve", "org/words", "org/words"): "BadRequestError --checkpoint: org/words is a checkpoint already: name a pipeline with it",
    ("serve", "./org/words"): "UnknownModelError no pipeline './org/words'",
    ("serve", "", "./org/words"): "BadRequestError --checkpoint: ./org/words is not a folder",
    ("serve", "", "org"): "BadRequestError --checkpoint: org is not a folder",
}
REFUSING = """
import json, sys
from omnistage.cli.fetch import pull
from omnistage.cli.pipelines import Choice, layout_of
from omnistage.client.errors import OmniError
for command, name, *checkpoint in json.loads(sys.argv[1]):
    try:
        pull(name) if command == "pull" else layout_of(Choice(name, *checkpoint))
    except OmniError as error:
        print(type(error).__name__, str(error).replace(chr(10), " | "))
"""


def test_what_cannot_be_served_is_told_before_its_weights_are_fetched(hub: HubServer) -> None:
    hub.add("org/words", WORDS)
    hub.add("org/bert", {"config.json": File(b'{"architectures": ["BertModel"]}'), "model.safetensors": File(b"weights")})
    words = [sys.executable, "-c", REFUSING, json.dumps(list(REFUSED))]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for told, expected in zip(done.stdout.splitlines(), REFUSED.values(), strict=True):
        assert told.startswith(expected), told
    assert "model.safetensors" not in hub.fetched()


def test_a_folder_of_that_name_wins_and_is_told(hub: HubServer) -> None:
    folder = Path("org/words")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"architectures": ["BertModel"]}')
    done = omnistage("serve", "org/words")
    assert done.returncode == 1 and hub.asked == []
    told, error = done.stderr.splitlines()
    assert told == "org/words is the folder of this name; the model at the hub is org/words@main"
    assert error.startswith("error: org/words is a checkpoint of no family that there is (words, smol)")
    hub.add("org/words", WORDS)
    assert omnistage("pull", "org/words@main").returncode == 0


def test_python_serves_a_model_by_its_name_and_again_without_network(
    hub: HubServer, family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.add("org/words", WORDS)
    for _ in range(2):
        with Omni(model_path="org/words", pipeline="words.yaml") as omni:
            assert omni.generate("Hi", seed=1).text == formulas.text(1, "Hi", formulas.NATURAL_LENGTH)
            (replica,) = omni.replicas()
            assert replica.settings["checkpoint"] == str(tmp_path / f"home/hub/models--org--words/snapshots/{commit}")
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert [asked.what for asked in hub.asked].count("api info") == 1
    with pytest.raises(StackError, match="org/other@main is not in the cache"):
        Omni(model_path="org/other")
    for absent in ("absent", "./org/words", "a/b/c"):
        with pytest.raises(BadRequestError, match=f"model_path: {absent} is not a folder"):
            Omni(model_path=absent)
    assert family.pids() == []


@pytest.mark.slow
def test_the_pipeline_is_found_by_the_checkpoint(hub: HubServer, family: Family) -> None:
    """The default model, from a hub, in a pipeline that nobody named."""
    folder = model_directory()
    files = {str(path.relative_to(folder)): File(path) for path in folder.rglob("*") if path.is_file() and path.parent != folder}
    commit = hub.add("org/smol", files)
    command = [sys.executable, "-m", "omnistage.cli", "serve", "org/smol", "--address", "127.0.0.1:0"]
    with Started(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        lines = [server.stderr.readline() for _ in range(3)]
        assert lines[0] == f"org/smol@main is {commit}\n" and lines[2].startswith("serving on "), lines
        with Omni(address=lines[2].split()[2]) as omni:
            assert omni.generate("What is a kite?", max_tokens=4, outputs=["text"]).text
            assert [pipeline.name for pipeline in omni.pipelines()] == ["smol"]
            with pytest.raises(Exception, match="no pipeline 'org/smol'"):
                omni.generate("Hi", pipeline="org/smol")
        server.terminate()
        assert server.wait(30) == 0
    assert family.pids() == []
