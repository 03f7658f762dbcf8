"""Helpers of tests: each says what it is for, and more than one file of tests needs it."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
HELPERS = sorted(path for path in (TESTS / "helpers").glob("*.py") if path.stem != "__init__")
MIN_WORDS = 5
SHARED_BY_ONE = {
    "breaking": "runs by itself, in place of a stage",
    "asker": "runs by itself, in a container of another network",
    "client_program": "runs by itself, in environments at both ends of the dependencies",
    "misled": "runs by itself, in place of a router",
    "sharing": "is a plugin of pytest",
    "forkserver": "is a program, which `program` starts",
    "saved_versions": "is a program too, which writes the files that a test compares with",
    "reader": "its functions run in other processes, which import them by name",
    "corpus_sounds": "is data of the corpus",
    "daemon": "serves the container test, which would have 600 lines with it",
    "images": "serves the container test, which would have 600 lines with it",
    "omni_answers": "serves the test of omni speech, which would have 500 lines with it",
    "page_picture": "takes a picture of the docs anew, and a test runs it",
}
"""Helpers with fewer than two users, and why they stand alone."""


@pytest.mark.parametrize("helper", HELPERS, ids=lambda path: path.stem)
def test_a_helper_says_what_it_is_for(helper: Path) -> None:
    text = ast.get_docstring(ast.parse(helper.read_text(encoding="utf-8"))) or ""
    assert len(text.split()) >= MIN_WORDS, "begin the file with a docstring that says what tests use it for"


def test_what_one_file_of_tests_needs_stands_in_that_file() -> None:
    users = Counter(name for path in TESTS.rglob("*.py") for name in _helpers_of(path.read_text(encoding="utf-8")) - {path.stem})
    assert {helper.stem for helper in HELPERS if users[helper.stem] < 2} == set(SHARED_BY_ONE)


def _helpers_of(text: str) -> set[str]:
    """The names of the helpers that a file of tests imports, has as plugins, or starts as programs."""
    lists = [list_ for pair in re.findall(r"from helpers import (?:\(([^)]*)\)|(.*))", text) for list_ in pair]
    return {*re.findall(r"helpers\.(\w+)", text), *re.findall(r"\w+", " ".join(lists))}
