"""The size of each package is a decision: it is at most the one that `tools/budget.json` allows."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from tools import budget
from tools.budget import NUMBERS, Size, SourceFile, excesses, measure


def test_no_package_is_larger_than_the_table_allows() -> None:
    sizes, allowed = measure(budget.read_sources()), budget.read_table()
    assert sizes.keys() == allowed.keys(), (
        "write the row of a new package into tools/budget.json by hand, `python tools/budget.py --write` removes old ones"
    )
    assert excesses(sizes, allowed) == [], "delete something, or change tools/budget.json by hand and say why in the commit"


SOURCE = '''"""Of this
file."""

import os  # of the system
from pathlib import (
    Path,
)

COUNT, LEFT = 3, 4
"""Numbers."""


class Stage:
    told: str
    kept_bytes: int

    def whole(self) -> str:
        self._made = self.told
        self._made_at_s = self.kept_bytes
        return self._made


def path_of(told: str, _most: int) -> Path:
    """A path."""
    # The reason.
    text = """two
    lines"""
    return Path(os.fspath(told) + text)


def lone(name: str) -> str:
    return name.upper()


def twice(name: str) -> str:
    return name.lower()


def uses() -> object:
    found = [lone, twice]
    def inner(lost: int) -> int:
        return lost
    return found, twice, inner


def matches(names: list[str]) -> object:
    match names:
        case [first, *kept]:
            return lambda name: (first, kept, name)
    return None


def refuses(number: str) -> int:
    try:
        return (lambda given: int(given))(number)
    except ValueError as bad:
        return hash(bad)
'''


def size_of(*numbers: int) -> Size:
    return Size(dict(zip(NUMBERS, numbers, strict=True)))


def test_lines_imports_and_names_are_counted() -> None:
    (size,) = measure([SourceFile("link/omnistage/link/one.py", SOURCE)]).values()
    assert size == size_of(35, 4, 5, 4, 2)


@pytest.mark.parametrize(
    ("path", "package"),
    [
        ("link/omnistage/link/chain.py", "link"),
        ("models/omnistage/models/smol/voice.py", "models/smol"),
        ("models/omnistage/models/registry.py", "models"),
        ("sdk/omnistage/cli/main.py", "sdk/cli"),
        ("services/stage/omnistage/stage/server.py", "services/stage"),
        ("tests/models/media/test_process.py", "tests/models"),
        ("tests/conftest.py", "tests"),
        ("tools/budget.py", "tools"),
    ],
)
def test_the_package_of_a_file(path: str, package: str) -> None:
    assert SourceFile(path, "").package == package


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    allowed = {"b": size_of(10, 5, 3, 1, 2), "a": size_of(4, 2, 0, 0, 0)}
    budget.write_table(allowed, tmp_path / "budget.json")
    assert budget.read_table(tmp_path / "budget.json") == allowed
    assert len((tmp_path / "budget.json").read_text().splitlines()) == 4


def test_the_command_prints_what_is_too_large_and_writes_what_is_smaller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "TABLE", tmp_path / "budget.json")
    monkeypatch.setattr(budget, "read_sources", lambda: [SourceFile("link/omnistage/link/one.py", SOURCE)])
    too_large = pytest.raises(SystemExit, match="link: code_lines: 35, allowed 34")
    for row, end, stored in ((size_of(34, 30, 5, 4, 2), too_large, 34), (size_of(40, 30, 9, 9, 9), nullcontext(), 35)):
        budget.write_table({"link": row, "gone": row}, budget.TABLE)
        with end:
            budget.main(write=True)
        assert budget.read_table(budget.TABLE) == {"link": size_of(stored, 4, 5, 4, 2)}
