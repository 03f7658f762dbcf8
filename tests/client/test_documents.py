"""The Python that the documents show is Python that a strict type checker takes."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

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
