"""Sentences name their subject: no docstring or comment starts with Who, What or Of. One word, one thing: a name is that
of one public class."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
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
