"""Sentences of docstrings and comments name their subject: none of them starts with Who, What or Of."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ROOT / "sdk" / "omnistage" / "v1"
WORD = re.compile(r"\b(?:Who|What|Of)\b")
BAD = re.compile(r"[#`*/ -]*(?:Who|What|Of)\b")
BOUNDARY = re.compile(r"(?<=[.!?:;])\s+(?=[A-Z`'\"])")
SCRIPT = re.compile(r"/\*.*?\*/|(?:(?<=\s)|^)//[^\n]*(?:\n\s*//[^\n]*)*", re.DOTALL)
"""A comment of JavaScript or CSS: `/* ... */`, or lines of `//` below each other."""


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """The line and the text of each string that is a statement: docstrings, and strings below an attribute."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def comments(source: str) -> Iterator[tuple[int, str]]:
    """The first line and the text of each comment; comments on lines below each other are one."""
    first, last, words = 0, -1, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != last + 1:
                yield first, " ".join(words)
                first, words = token.start[0], []
            last = token.start[0]
            words.append(token.string.lstrip("# "))
    yield first, " ".join(words)


def script_comments(source: str) -> Iterator[tuple[int, str]]:
    """The first line and the text of each comment in JavaScript or CSS."""
    for found in SCRIPT.finditer(source):
        yield source.count("\n", 0, found.start()) + 1, re.sub(r"(?m)^\s*(?://|/?\*+/?)|\*/$", " ", found[0])


def bad_sentences(source: str, suffix: str) -> Iterator[tuple[int, str]]:
    """The sentences of a file that start with one of the words, with the first line of their docstring or comment."""
    if not WORD.search(source):  # Spares the parser: 2 s for all files.
        return
    for line, text in (*docstrings(source), *comments(source)) if suffix == ".py" else script_comments(source):
        yield from ((line, one) for one in BOUNDARY.split(" ".join(text.split())) if BAD.match(one))


def test_no_sentence_starts_without_its_subject() -> None:
    listed = subprocess.run(["git", "ls-files", "-z", "*.py", "*.js", "*.css"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [path for name in listed.split("\0") if name and (path := ROOT / name).is_file() and GENERATED not in path.parents]
    assert len(files) > 100
    found = [
        f"{path.relative_to(ROOT)}:{line}: {sentence}"
        for path in files
        for line, sentence in bad_sentences(path.read_text(encoding="utf-8"), path.suffix)
    ]
    assert found == [], "begin these with their subject:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("source", "suffix", "line"),
    [
        ('"""Of a file."""', ".py", 1),
        ('"""One.\n\nWhat two is."""', ".py", 1),
        ('class A:\n    b = 1\n    """Who has it."""', ".py", 3),
        ("a = 1\nb = 2  # What it is.", ".py", 2),
        ("# It is long and\n# ends here. Of this nothing follows.", ".py", 1),
        ("# one: What it is", ".py", 1),
        ("let a;\n// What it is.", ".js", 2),
        ("a {}\n/* It is long.\n * Of this nothing follows. */", ".css", 2),
    ],
)
def test_each_place_of_a_sentence_is_looked_at(source: str, suffix: str, line: int) -> None:
    assert [place for place, _ in bad_sentences(source, suffix)] == [line]


@pytest.mark.parametrize(
    ("source", "suffix"),
    [
        ('a = "What is it? Of all things."', ".py"),
        ('"""It says what it is, of which\nOffice and `Whatever` are none."""', ".py"),
        ('ask("What is it?") // which a user asks', ".js"),
    ],
)
def test_other_text_passes(source: str, suffix: str) -> None:
    assert list(bad_sentences(source, suffix)) == []
