"""docs/models.md is followed as it stands: its snippets are a package, which is built, installed, tested and served; and each name that a
family of another package imports is where `omnistage.models.kit` says, and loads no more than it needs."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shlex
import subprocess
import sys
import zipfile
from collections import defaultdict
from pathlib import Path

import pytest

from helpers import lengths
from helpers.contract import CHECKS
from helpers.processes import ProcessFamily as Processes
from helpers.processes import StartedProcess
from omnistage.models import kit
from omnistage.models.checkpoint.revision import revision
from omnistage.models.text.answer import AnswerAssembler

ROOT = Path(__file__).resolve().parents[2]
SNIPPET = re.compile(r"(?ms)^```(\w+)(?: (\S+))?\n(.*?)^```$")
LINES = 90
"""Lines of the model, at most, that are neither empty nor imports."""


class Page:
    """files: their text by name; parts of one file stand one after the other. typed: the commands. printed: what the last one prints."""

    def __init__(self) -> None:
        self.files: dict[str, str] = {}
        self.typed: list[list[str]] = []
        self.printed = ""
        for kind, name, text in SNIPPET.findall((ROOT / "docs" / "models.md").read_text(encoding="utf-8")):
            if name:
                self.files[name] = f"{self.files[name]}\n\n{text}" if name in self.files else text
            elif kind == "console":
                self.typed = [shlex.split(line[2:]) for line in text.splitlines() if line.startswith("$ ")]
                self.printed = text.splitlines()[-1]


@pytest.fixture(scope="module")
def page() -> Page:
    return Page()


@pytest.fixture(scope="module")
def package(page: Page, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the page describes."""
    folder = tmp_path_factory.mktemp("bigram")
    for name, text in page.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def installed(package: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """PYTHONPATH with the package installed in a folder of its own: what pip would unpack there."""
    site = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(site)]
    subprocess.run(build, cwd=package, capture_output=True, check=True)
    (wheel,) = site.glob("*.whl")
    with zipfile.ZipFile(wheel) as built:
        built.extractall(site)
    return os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))


def ours(words: list[str]) -> list[str]:
    """A command of the page, run by this Python and with this checkout."""
    program = {"python": [sys.executable], "omnistage": [sys.executable, "-m", "omnistage.cli"]}[words[0]]
    return [*program, *(word.replace("../omnistage", str(ROOT)).replace(":50050", ":0") for word in words[1:])]


def test_the_page_has_all_files_of_a_small_family(page: Page) -> None:
    said = {"bigram/__init__.py", "bigram/thinker.py", "pyproject.toml", "bigram.yaml", "words/config.json", "words/corpus.txt"}
    assert page.files.keys() == {*said, "test_bigram.py"}
    lines = [line for line in page.files["bigram/thinker.py"].splitlines() if line.strip() and not re.match(r"from|import", line)]
    assert len(lines) <= LINES


@lengths.long_form(
    "models/test_models_page.py::test_it_is_served_and_answers_as_the_page_says",
    "models/contract/test_contract.py::test_contract",
    unkept="the family of the page passes the suite as its reader runs it",
)
def test_it_passes_the_contract_suite(page: Page, package: Path, installed: str) -> None:
    environment = {**os.environ, "PYTHONPATH": installed}
    done = subprocess.run(ours(page.typed[1]), cwd=package, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(CHECKS)} passed" in done.stdout


def test_it_is_served_and_answers_as_the_page_says(page: Page, package: Path, installed: str, family: Processes) -> None:
    environment = {**os.environ, "PYTHONPATH": installed}
    _, _, serve, ask = page.typed
    with StartedProcess(ours(serve), cwd=package, env=environment, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        line = server.stderr.readline()
        assert line.startswith("serving on "), line + server.stderr.read()
        asked = [line.split()[2] if word == "127.0.0.1:0" else word for word in ours(ask)]
        answer = subprocess.run(asked, cwd=package, capture_output=True, text=True, timeout=60)
        assert answer.returncode == 0, answer.stderr
        assert answer.stdout.rstrip() == page.printed
        unknown = subprocess.run([*asked[:-1], "hello"], cwd=package, capture_output=True, text=True, timeout=60)
        assert "the question: use 1 to 511 of its words: the kite" in unknown.stderr
        server.terminate()
        assert server.wait(30) == 0
    assert family.pids() == []


# The kit --------------------------------------------------------------------------------------------------------------------------------


def test_type_checkers_and_python_find_the_same_names() -> None:
    (block,) = (node for node in ast.parse(Path(kit.__file__).read_text(encoding="utf-8")).body if isinstance(node, ast.If))
    seen: defaultdict[str, list[str]] = defaultdict(list)
    for one in block.body:
        assert isinstance(one, ast.ImportFrom) and one.module
        seen[one.module] += [name.name for name in one.names]
    assert dict(seen) == {module: list(names) for module, names in kit._NAMES.items()}


def test_each_name_is_there() -> None:
    assert kit.AnswerAssembler is AnswerAssembler and kit.revision is revision
    for name in kit._PLACES:
        assert getattr(kit, name) is not None
        assert name in dir(kit)
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = kit.Nothing


def test_the_entry_of_a_family_loads_no_torch() -> None:
    program = "import sys\nfrom omnistage.models.kit import Family, Mark, ModelEntry\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


OLD_PLACES = {
    "engine.head": "TokenHead",
    "models.common.ahead": "make_ahead",
    "models.common.answer": "AnswerAssembler answer_pieces",
    "models.common.chat": "ChatTokenizer ChatTemplate",
    "models.common.checkpoint": "BadCheckpoint Config read_config",
    "models.common.constraint": "Constraints Grammar",
    "models.common.encoders.encoder": "VisionEncoder AudioSizes",
    "models.common.encoders.prompt": "PromptRows ThinkerSizes",
    "models.common.encoders.starting": "ThinkerParts ThinkerSizes",
    "models.common.encoders.thinker": "MediaThinker",
    "models.common.engine_model": "EngineModel Started",
    "models.common.packed": "PackedWeight find_packed",
    "models.common.requests": "check_constraint check_parts refuse_unfit",
    "models.common.revision": "compute_on_thread revision",
    "models.common.slices": "config_of_part weights_of_part",
    "models.common.speech.opening": "Opening",
    "models.common.speech.schedule": "Schedule Window",
    "models.common.speech.talker": "RowTalker",
    "models.common.speech.trial": "Trials try_windows",
    "models.common.thinker": "EngineThinker",
    "models.common.tokenizer": "TextTokenizer read_tokenizer",
    "models.common.weights": "Weights load_weights",
    "models.common.worker": "Worker",
}
"""By module that docs/models.md named before there was `kit`: names of it."""


@pytest.mark.parametrize("place", OLD_PLACES)
def test_an_old_place_still_has_its_names(place: str) -> None:
    module = importlib.import_module(f"omnistage.{place}")
    for name in OLD_PLACES[place].split():
        assert getattr(module, name) is getattr(kit, name, getattr(module, name))


def test_a_module_that_never_was_there_is_not_found_at_an_old_place() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"omnistage\.models\.common\.nothing"):
        importlib.import_module("omnistage.models.common.nothing")
