"""What the documents and the page of the package show runs: their Python, which a strict type checker takes too, their commands, and the
examples, also those in other languages."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
import wave
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from typer.main import get_command

from helpers import lengths
from helpers.ports import take_address
from omnistage.cli.main import app
from omnistage.client import Omni
from omnistage.models.toy.files import png
from tools.examples import LANGUAGES, Example, build, check_answer, check_full_and_cancelled, check_unknown, get_expected, slow_pipeline

ROOT = Path(__file__).resolve().parents[2]

PRELUDE = """
from contextlib import aclosing

import numpy as np
from numpy.typing import NDArray

from omnistage.client import AsyncOmni, Omni

omni = Omni(address="127.0.0.1:50050")
"""
"""The names that the text around a snippet has introduced."""

WRONG = {
    'omni.generate("Hi", max_token=3)\n': "max_token",
    'omni.generate("Hi", temperature="hot")\n': "temperature",
    'Omni(devise="cpu")\n': "devise",
    'omni.chat([{"role": "user", "content": "Hi"}]).txt\n': "txt",
}
"""Snippets as they must never be, and what is told of each."""


def pages() -> list[Path]:
    """All that people read, with Python in it. Files that a page shows by name are run by tests of their own."""
    return [page for page in documents() if snippets(page)]


def documents() -> list[Path]:
    return [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("examples/*/*.md")]


def snippets(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def program(snippet: str) -> str:
    """A snippet with what it takes for granted; one that waits is the body of a coroutine."""
    waits = (ast.AsyncWith, ast.AsyncFor, ast.Await)
    if any(isinstance(node, waits) for statement in ast.parse(snippet).body for node in _outside_functions(statement)):
        snippet = "async def main() -> None:\n" + "".join(f"    {line}\n" for line in snippet.splitlines())
    return PRELUDE + snippet


def _outside_functions(node: ast.AST) -> Sequence[ast.AST]:
    if isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef):
        return ()
    return [node, *(found for child in ast.iter_child_nodes(node) for found in _outside_functions(child))]


def checked(paths: Sequence[Path]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", str(ROOT / "pyproject.toml"), *map(str, paths)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)


def test_snippets_have_types(tmp_path: Path) -> None:
    found = {page.relative_to(ROOT).as_posix(): snippets(page) for page in pages()}
    assert {"README.md", "docs/client.md"} <= found.keys()
    paths = []
    for name, several in found.items():
        for number, snippet in enumerate(several):
            paths.append(tmp_path / f"{re.sub(r'[^a-z]', '_', name.lower())}_{number}.py")
            paths[-1].write_text(program(snippet), encoding="utf-8")
    done = checked(paths)
    assert done.returncode == 0, done.stdout


def test_a_snippet_that_is_wrong_is_told(tmp_path: Path) -> None:
    path = tmp_path / "wrong.py"
    path.write_text(PRELUDE + "".join(WRONG), encoding="utf-8")
    first = len(PRELUDE.splitlines()) + 1
    told: dict[str, str] = {}
    for line, error in re.findall(r"wrong\.py:(\d+): (?:error|note): (.*)", checked([path]).stdout):
        told[line] = f"{told.get(line, '')} {error}"
    assert {int(line) for line in told} == set(range(first, first + len(WRONG)))
    assert all(word in told[str(line)] for line, word in enumerate(WRONG.values(), first))


def test_what_is_on_no_index_is_installed_from_the_folder_where_it_was_built() -> None:
    """Until both wheels are given out; `make wheels` fills the folder."""
    install = re.compile(r"\b(?:pip|pipx|uv tool) install [^`|\n]*\bomnistage\b[^`|\n]*")
    told = [page for page in documents() if page.name != "CHANGELOG.md"]  # that one tells what was
    found = {page.relative_to(ROOT).as_posix(): install.findall(page.read_text(encoding="utf-8")) for page in told}
    assert {"docs/client.md", "docs/http.md", "docs/tracing.md", "sdk/README.md"} <= {page for page, lines in found.items() if lines}
    assert {page: lines for page, lines in found.items() if any("--find-links dist" not in line for line in lines)} == {}


def test_the_idiom_of_a_conversation_is_among_them() -> None:
    shown = "".join(snippets(ROOT / "docs" / "client.md"))
    assert "conversation += [answer, " in shown


PAGE = Path(__file__).resolve().parents[2] / "sdk" / "README.md"


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [text for named, text in found if named == language]


def test_its_python_runs(toy_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = blocks("python")
    monkeypatch.setenv("OMNISTAGE_ROUTER", toy_address)
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.split()
    assert (tmp_path / "kite.wav").read_bytes()[:4] == b"RIFF"


def test_its_commands_are_commands_with_these_options() -> None:
    """None of them runs: the words alone are read."""
    root = get_command(app)
    lines = [shlex.split(line) for block in blocks("") for line in block.splitlines() if line.startswith("omnistage ")]
    assert {line[1] for line in lines} >= {"ask", "draw", "say", "chat", "serve", "stop", "status"}
    for _, name, *words in lines:
        command = root.commands[name]  # type: ignore[attr-defined]
        command.make_context(name, words)


EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(name: str, *words: str, text: str = "", folder: Path, told: str = "") -> str:
    """The output of an example. told: how its text on stderr begins; empty: there is none."""
    command = [sys.executable, str(EXAMPLES / name), *words]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(told) if told else done.stderr == ""
    return done.stdout


def test_ask(toy_address: str, tmp_path: Path) -> None:
    output = run("ask.py", "Hi", "--address", toy_address, folder=tmp_path)
    assert "s of sound in answer.wav" in output
    with wave.open(str(tmp_path / "answer.wav")) as file:
        assert file.getnframes() > 0


def test_stream(toy_address: str, tmp_path: Path) -> None:
    assert "real-time factor" in run("stream.py", "Hi", "--address", toy_address, folder=tmp_path)


def test_omni(toy_address: str, tmp_path: Path) -> None:
    output = run("omni.py", "Hi", "--address", toy_address, "--seconds", "2", "--out", "answer.flac", folder=tmp_path)
    assert "[first sound after " in output and output.endswith(" s of sound in answer.flac\n")
    assert (tmp_path / "answer.flac").read_bytes().startswith(b"fLaC")


def test_chat(toy_address: str, tmp_path: Path) -> None:
    output = run("chat.py", "--address", toy_address, text="Hello\n\nAnd then?\n", folder=tmp_path)
    first, second = output.splitlines()
    assert first and second and first != second


@lengths.long_form(
    "client/test_drawing.py::test_a_film_is_a_file_with_its_type_and_frames",
    "client/test_drawing.py::test_a_sound_is_heard_and_saved",
    unkept="the examples of films and sounds work",
)
def test_film_and_sound(tmp_path: Path) -> None:
    (tmp_path / "hill.png").write_bytes(png(np.full((4, 4), 3, np.uint8)))
    with Omni(pipeline="toy-film") as omni:
        words = ["a walk", "--frames", "5", "--image", "hill.png", "--out", "walk.grey", "--address", omni.address]
        assert "step 6 of 6\n5 frames in walk.grey, seed " in run("film.py", *words, folder=tmp_path)
        assert len((tmp_path / "walk.grey").read_bytes()) == 5 * 32 * 32
        words = ["rain", "--seconds", "0.5", "--address", omni.address]
        assert run("sound.py", *words, folder=tmp_path).startswith("0.50 s of sound in sound.wav, seed ")
    assert (tmp_path / "sound.wav").read_bytes().startswith(b"RIFF")


def test_rescue(tmp_path: Path) -> None:
    words = ["Hi", "--pipeline", "toy", "--chunks", "1", "--timeline", "rescue.png"]
    output = run("rescue.py", *words, folder=tmp_path, told="lost talker-")
    assert "killed the talker at 127.0.0.1:" in output
    assert output.endswith("the same words and the same samples as without the kill\n")
    assert (tmp_path / "rescue.png").stat().st_size > 10_000


MAKES_MINUTES = [pytest.mark.long, pytest.mark.timeout(900)]
"""A compiler of C++, beside other tests."""


@pytest.fixture(scope="module", params=[pytest.param(name, marks=[] if name == "node" else MAKES_MINUTES) for name in LANGUAGES])
def example(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Example:
    """It is built, in a folder of its own."""
    language = LANGUAGES[request.param]
    if missing := language.missing():
        pytest.skip(f"not on this machine: {', '.join(missing)}; `make examples` says what to install")
    return Example(build(language), tmp_path_factory.mktemp(language.name))


@pytest.fixture(scope="module")
def full_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a router with one place, whose answers take half an hour."""
    with Omni(pipeline=str(slow_pipeline(tmp_path_factory.mktemp("slow"))), max_sessions=1) as omni:
        yield omni.address


def test_it_gets_the_text_and_the_samples_of_the_python_client(example: Example, toy_address: str) -> None:
    check_answer(example, toy_address, get_expected(toy_address))


def test_it_tells_what_is_wrong_with_a_request(example: Example, toy_address: str) -> None:
    check_unknown(example, toy_address)


def test_it_tells_when_to_ask_again_and_ctrl_c_cancels(example: Example, full_address: str) -> None:
    assert float(check_full_and_cancelled(example, full_address)) > 0


def test_it_tells_that_nobody_is_there(example: Example) -> None:
    status, out, err = example.run(take_address())
    assert (status, out.strip()) == (1, "") and err.strip().startswith("error: ")
