"""Docstrings and comments are plain English: a sentence begins with its subject."""

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
PLACES = ("sdk", "connector", "host", "wire", "link", "engine", "models", "services", "router", "gateway", "tools")
LEFT_OUT = ("sdk/omnistage/v1/", "models/omnistage/models/diffusers/", "models/omnistage/models/media/")
"""The first folder is generated. The others are still to be rewritten."""
NO_SUBJECT = re.compile(r"(?:Who|What|Of)\b(?![^?]*\?$)")
"""Such a sentence names its subject late or never. A question is none of them."""
SENTENCE = re.compile(r"(?<=[.!?:;])\s+(?=[A-Z`'\"])")
JAVASCRIPT = re.compile(r"/\*\*?(.*?)\*/|(?<!:)//([^\n]*)", re.DOTALL)


def prose(file: Path) -> Iterator[tuple[int, str]]:
    """Each docstring and comment of a file, with the number of its line."""
    source = file.read_text(encoding="utf-8")
    if file.suffix == ".js":
        for found in JAVASCRIPT.finditer(source):
            yield source.count("\n", 0, found.start()) + 1, found[1] or found[2] or ""
        return
    for node in ast.walk(ast.parse(source)):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant) and isinstance(child.value.value, str):
                yield child.lineno, child.value.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("#")


def faults(file: Path) -> list[str]:
    """The sentences of a file that begin without a subject, each with its line."""
    return [
        f"{file}:{line}: {sentence}"
        for line, text in prose(file)
        for sentence in SENTENCE.split(" ".join(text.split()))
        if NO_SUBJECT.match(sentence.lstrip("`*-# "))
    ]


def test_sentences_begin_with_their_subject() -> None:
    listed = subprocess.run(["git", "ls-files", *PLACES], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    files = [ROOT / name for name in listed if name.endswith((".py", ".js")) and not name.startswith(LEFT_OUT)]
    assert len(files) > 500
    found = [fault for file in files for fault in faults(file)]
    assert not found, "say who does what, the subject first:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ('"""Of each row the last."""', "Of each row the last."),
        ('x = 1\n"""Rows. What nobody reads."""', "What nobody reads."),
        ("x = 1  # Who asks waits.", "Who asks waits."),
        ('"""Rows of an array. Often they are few. Who would ask?"""', ""),
    ],
)
def test_a_sentence_without_its_subject_is_found(source: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text(source)
    assert [fault.rpartition(": ")[2] for fault in faults(file)] == ([told] if told else [])
