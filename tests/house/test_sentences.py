"""Sentences name their subject: no docstring or comment starts with Who, What or Of. One word, one thing: a name is that of one class. A
helper of tests says what it is for, and more than one file needs it. A test of the long form names the tests that prove its claim in the
short form, or says what nothing else proves."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tools import budget

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
        ('a = "What is it? Of all things."', ".py", None),
        ('"""It says what it is, of which\nOffice and `Whatever` are none."""', ".py", None),
        ('ask("What is it?") // which a user asks', ".js", None),
    ],
)
def test_each_place_of_a_sentence_is_looked_at_and_other_text_passes(source: str, suffix: str, line: int | None) -> None:
    assert [place for place, _ in bad_sentences(source, suffix)] == ([] if line is None else [line])


MODELS = "models/omnistage/models/"

FAMILIES = (("qwen2_5_omni/", "qwen3_omni/", "encoders/", "options.py"), ("tiny/qwen2_5_omni.py", "tiny/qwen3_omni.py"))
"""Places in which one name may come again: sister families, which make the same part of one kind of model, each in its own way, and the
base of both in encoders/ or options.py. The files of sisters never import each other's."""

ENDS = {f"{MODELS}interface.py", f"{MODELS}ports.py", "sdk/omnistage/client/events.py"}
MESSAGES = {"Alignment", "SpokenWord", "TokenLogprob"}
"""Messages of chunk.proto: the models make them, and the client reads the same ones."""


def is_excused(name: str, files: Iterable[str]) -> bool:
    """Whether these files may each have a class of this name."""
    found = sorted(files)
    if set(found) <= ENDS and len(found) == 2:
        return name in MESSAGES
    folders = [{f"{MODELS}{one}" for one in sisters if any(file.startswith(f"{MODELS}{one}") for file in found)} for sisters in FAMILIES]
    return any(len(each) == len(found) and all(file.startswith(tuple(each)) for file in found) for each in folders)


def classes(root: Path, files: Iterable[str]) -> dict[str, list[str]]:
    """The files of each public class, by its name. A file is there once for each class of that name."""
    found = defaultdict(list)
    for file in sorted(files):
        for node in ast.walk(ast.parse((root / file).read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(file)
    return found


def homonyms(found: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: files for name, files in found.items() if len(files) > 1 and not is_excused(name, files)}


def test_no_name_stands_for_two_classes() -> None:
    files = [file for file in budget.all_files(ROOT) if file.endswith(".py") and not file.startswith("sdk/omnistage/v1/")]
    assert len(files) > 500
    assert not homonyms(classes(ROOT, files))


def test_a_second_class_of_a_name_is_seen(tmp_path: Path) -> None:
    for name, text in (
        ("one.py", "class Plan: ...\n"),
        ("two.py", "def make():\n    class Plan: ...\n"),
        ("three.py", "class Line: ...\n"),
    ):
        (tmp_path / name).write_text(text)
    assert homonyms(classes(tmp_path, ("one.py", "two.py", "three.py"))) == {"Plan": ["one.py", "two.py"]}


def test_sisters_may_share_a_name_and_strangers_may_not() -> None:
    qwen2_5, qwen3, encoders = (f"{MODELS}{folder}/config.py" for folder in ("qwen2_5_omni", "qwen3_omni", "encoders"))
    assert is_excused("AudioConfig", (qwen2_5, qwen3, encoders))
    assert is_excused("WaveConfig", (qwen2_5, qwen3))
    assert not is_excused("AudioConfig", (qwen2_5, qwen2_5)), "twice in one family"
    assert not is_excused("AudioConfig", (qwen2_5, f"{MODELS}smol/config.py"))
    assert not is_excused("AudioConfig", (qwen2_5, qwen3, "engine/omnistage/engine/config.py"))
    interface, client = f"{MODELS}interface.py", "sdk/omnistage/client/events.py"
    assert is_excused("SpokenWord", (interface, client))
    assert not is_excused("Progress", (interface, client))


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
    "lone_stage": "serves a benchmark too",
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
