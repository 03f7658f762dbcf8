"""Marks that give tests a short form, for `make test`, and a long one, for `make test-long`."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from typing import Any

import pytest

from helpers.randomness import SEED

DRAWN = "drawn-"
LONG = pytest.mark.long
"""For cells of a parametrized test."""


def long_form(*keepers: str, unkept: str = "") -> pytest.MarkDecorator:
    """Moves a test, or a file of tests, to the long form. keepers: the tests that prove its claim in the short form, each as "FILE::TEST",
    where FILE is a path in tests/. unkept: what only the long form proves, if no other test proves it. The house test test_sentences.py
    checks that each keeper is a test of the short form."""
    return pytest.mark.long(*keepers, unkept=unkept)


TOOLING = pytest.mark.tooling
"""For tests of the tools of this repository. A short run of all tests draws one file that has such tests, and runs only its; a run of named
files runs all of theirs (`helpers/collection.py`)."""


def rounds(short: int, long: int) -> pytest.MarkDecorator:
    """Gives a test its argument `rounds`: `short`, and in its long form `long`. Both make the same claim; the long form meets rarer
    things."""
    return pytest.mark.parametrize("rounds", [pytest.param(short, id="short"), pytest.param(long, id="long", marks=LONG)])


def drawn_cells(count: int, names: str | tuple[str, ...], cells: Iterable[object], **options: Any) -> pytest.MarkDecorator:
    """As pytest.mark.parametrize, but the short form has only `count` of the cells, drawn anew in each run. For cells that need no more
    than their values; `one_or_all` is for tests that look at the whole matrix. Raises ValueError if there are no more cells than
    `count`."""
    return pytest.mark.parametrize(names, undrawn_long(count, names, cells), **options)


def undrawn_long(count: int, names: str | tuple[str, ...], cells: Iterable[object]) -> list[object]:
    """The cells, for a parametrized test or fixture; in the short form only `count` of them, which are drawn. names: of the arguments."""
    listed = [*cells]
    if count >= len(listed):
        raise ValueError(f"all {len(listed)} cells of {names} are in the short form: use pytest.mark.parametrize")
    drawn = {*random.Random(f"{os.environ[SEED]} {names} {len(listed)}").sample(range(len(listed)), count)}
    return [
        cell if number in drawn else _long(cell, single=isinstance(names, str) and "," not in names) for number, cell in enumerate(listed)
    ]


def _long(cell: object, *, single: bool) -> object:
    """The cell, as one of the long form. single: whether the test has one argument, which the cell is then."""
    if isinstance(cell, type(pytest.param())):
        return pytest.param(*cell.values, id=cell.id, marks=[*cell.marks, LONG])
    values = (cell,) if single or not isinstance(cell, tuple | list) else cell
    return pytest.param(*values, marks=LONG)


def one_or_all(name: str, values: Iterable[str], *, indirect: bool = False) -> pytest.MarkDecorator:
    """Gives a test its argument `name`: one of the values that is drawn anew in each run, and in the long form each of them. For a matrix
    whose every cell takes seconds; `draw` tells which it was. indirect: its fixture `name` gets the value."""
    cells = [pytest.param("", id="drawn"), *[pytest.param(value, marks=LONG) for value in values]]
    return pytest.mark.parametrize(name, cells, indirect=indirect)


def draw(value: str, values: Iterable[str], seed: int) -> str:
    """The value that `one_or_all` gave, or the one of this seed; printed, so that a failure shows it."""
    cells = sorted(values)
    # If a test has two matrices, each one has draws of its own.
    drawn = value or random.Random(f"{seed} {cells}").choice(cells)
    print(drawn)
    return drawn


def some_or_all(name: str, values: Iterable[str], count: int) -> pytest.MarkDecorator:
    """As `one_or_all`, with several values that are drawn; `draw_of` tells which."""
    drawn = [pytest.param(f"{DRAWN}{number}", id=f"{DRAWN}{number}") for number in range(count)]
    return pytest.mark.parametrize(name, [*drawn, *[pytest.param(value, marks=LONG) for value in values]])


def draw_of(value: str, values: Iterable[str], count: int, place: str) -> str:
    """The value that `some_or_all` gave, or one of `count` different ones that the seed of the run and the place make; printed."""
    if value.startswith(DRAWN):
        drawn = random.Random(f"{os.environ[SEED]} {place}").sample(sorted(values), count)
        value = drawn[int(value.removeprefix(DRAWN))]
    print(value)
    return value
