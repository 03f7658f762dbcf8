"""The tables of this package: what is written, and what is said. A line that begins with "# " is a remark."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from importlib.resources import files


def read_lines(name: str) -> Iterator[str]:
    """The lines of a table, without remarks."""
    text = files(__package__).joinpath("tables", name).read_text(encoding="utf-8")
    yield from (line for line in text.split("\n") if line and not line.startswith("# "))


def read_rows(name: str) -> Iterator[list[str]]:
    """The rows of a table, split at tabs."""
    yield from (line.split("\t") for line in read_lines(name))


def read_table(name: str) -> dict[str, str]:
    """A table of two columns: the words for each sign."""
    return {row[0]: row[1] for row in read_rows(name)}


def digest() -> str:
    """A hash of all tables: two voices with other tables speak otherwise."""
    tables = sorted(files(__package__).joinpath("tables").iterdir(), key=lambda table: table.name)
    return hashlib.sha256(b"".join(table.read_bytes() for table in tables)).hexdigest()[:12]


@functools.cache
def read_short_forms() -> dict[str, dict[str, str]]:
    """The table of abbreviations: for each kind, its short forms and their words."""
    forms = dict[str, dict[str, str]]()
    for kind, short, words in read_rows("abbreviations.tsv"):
        forms.setdefault(kind, {})[short] = words
    return forms


@functools.cache
def read_lists() -> dict[str, tuple[str, ...]]:
    """The lists of words, by name."""
    return {name: tuple(words.split()) for name, words in read_rows("words.tsv")}
