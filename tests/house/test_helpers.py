"""Rules of the tests: a helper says what it is for, and more than one file of tests needs it. A test of the long form names the tests that
prove its claim in the short form, or says what nothing else proves."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
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


LONG_MARKS = ("long_form", "LONG", "long")
"""Last names of the expressions that make a test long."""


@dataclass
class _TestFile:
    """tests: names of the test functions, with the decorators that make them long. module_marks: such marks of the whole file."""

    tests: dict[str, list[ast.expr]] = field(default_factory=dict)
    module_marks: list[ast.expr] = field(default_factory=list)

    @property
    def short_tests(self) -> set[str]:
        return set() if self.module_marks else {name for name, marks in self.tests.items() if not marks}


def read(text: str) -> _TestFile:
    """The tests of a file's text, and their marks of the long form."""
    file = _TestFile()
    for node in ast.parse(text).body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if name.startswith("test_"):
                file.tests[name] = [mark for decorator in node.decorator_list for mark in long_marks(decorator)]
            case ast.Assign(targets=[ast.Name(id="pytestmark")], value=value):
                file.module_marks += long_marks(value)
            case _:
                pass
    return file


def long_marks(node: ast.expr) -> Iterator[ast.expr]:
    """The marks of the long form in a decorator or in a list of marks, but not those of single cells of a parametrized test."""
    match node:
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            for element in elements:
                yield from long_marks(element)
        case ast.Starred(value=several):
            yield from long_marks(several)
        case _:
            pass
    name = ast.unparse(node.func if isinstance(node, ast.Call) else node)
    if name.rpartition(".")[2] in LONG_MARKS:
        yield node


def faults(files: dict[str, _TestFile]) -> list[str]:
    """The faults of the marks in these files, a line each. files: by path in tests/."""
    return [
        f"{path}: {name or 'the file'}: {fault}"
        for path, file in files.items()
        for name, marks in [("", file.module_marks), *file.tests.items()]
        for mark in marks
        for fault in _faults_of(mark, files)
    ]


def _faults_of(mark: ast.expr, files: dict[str, _TestFile]) -> Iterator[str]:
    """The faults of one mark."""
    if not isinstance(mark, ast.Call) or not ast.unparse(mark.func).endswith("long_form"):
        yield "write lengths.long_form(...) with the tests that keep its claim"
        return
    unkept = [keyword.value for keyword in mark.keywords if keyword.arg == "unkept"]
    if not mark.args and not unkept:
        yield "name the tests that keep its claim, or say what nothing else proves: unkept=..."
    for keeper in map(ast.literal_eval, mark.args):
        file, _, test = keeper.partition("::")
        if file not in files or test not in files[file].tests:
            yield f"there is no test {keeper}"
        elif test not in files[file].short_tests:
            yield f"{keeper} is long itself"


def test_each_long_test_names_short_tests_that_keep_its_claim() -> None:
    paths = sorted(TESTS.rglob("test_*.py"))
    assert faults({path.relative_to(TESTS).as_posix(): read(path.read_text(encoding="utf-8")) for path in paths}) == []


@pytest.mark.parametrize(
    ("marks", "fault"),
    [
        ("@lengths.long_form('a.py::test_short')", None),
        ("@lengths.long_form(unkept='an hour of load')", None),
        ("@lengths.long_form()", "name the tests that keep its claim"),
        ("@pytest.mark.long", "write lengths.long_form"),
        ("@LONG", "write lengths.long_form"),
        ("@lengths.long_form('a.py::test_gone')", "there is no test a.py::test_gone"),
        ("@lengths.long_form('b.py::test_short')", "there is no test b.py::test_short"),
        ("@lengths.long_form('a.py::test_long')", "a.py::test_long is long itself"),
    ],
)
def test_a_mark_that_keeps_no_claim_is_seen(marks: str, fault: str | None) -> None:
    file = read(f"def test_short(): pass\n{marks}\ndef test_long(): pass")
    shown = faults({"a.py": file})
    assert (shown == []) if fault is None else (fault in shown[0])


def test_no_test_of_a_long_file_keeps_a_claim() -> None:
    long = read("pytestmark = [*[lengths.long_form('b.py::test_it')], pytest.mark.serial]\ndef test_it(): pass")
    other = read("@lengths.long_form('a.py::test_it')\ndef test_other(): pass\ndef test_it(): pass")
    assert faults({"a.py": long, "b.py": other}) == ["b.py: test_other: a.py::test_it is long itself"]
