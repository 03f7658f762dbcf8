"""The size of each package is a decision: it is at most the one that `tools/budget.json` allows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import budget
from tools.budget import PackageSize, SourceFile, measure


def test_no_package_is_larger_than_the_table_allows() -> None:
    sizes, allowed = measure(budget.read_sources()), budget.read_table()
    assert sizes.keys() == allowed.keys(), (
        "write the row of a new package into tools/budget.json by hand, `python tools/budget.py --write` removes old ones"
    )
    larger = {package: texts for package, size in sizes.items() if (texts := size.exceeds(allowed[package]))}
    assert larger == {}, "delete something, or change tools/budget.json by hand and say why in the commit"


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


def test_lines_imports_and_names_are_counted() -> None:
    (size,) = measure([SourceFile("link/omnistage/link/one.py", SOURCE)]).values()
    assert size == PackageSize(code_lines=35, import_lines=4, vague_functions=5, vague_names=4, lone_functions=2)


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


def test_a_table_is_read_as_it_was_written_and_only_smaller_numbers_are_stored(tmp_path: Path) -> None:
    allowed = {"b": PackageSize(10, 5, 3, 1, 2), "a": PackageSize(4, 2, 0, 0, 0)}
    budget.write_table(allowed, tmp_path / "budget.json")
    assert budget.read_table(tmp_path / "budget.json") == allowed
    assert len((tmp_path / "budget.json").read_text().splitlines()) == 4
    measured = PackageSize(12, 4, 3, 1, 1)
    assert allowed["b"].smaller(measured) == PackageSize(10, 4, 3, 1, 1)
    assert measured.exceeds(allowed["b"]) == ["code_lines: 12, allowed 10"]


def test_the_command_prints_what_is_too_large_and_writes_what_is_smaller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(budget, "TABLE", tmp_path / "budget.json")
    monkeypatch.setattr(budget, "read_sources", lambda: [SourceFile("link/omnistage/link/one.py", SOURCE)])
    for row, status, stored in ((PackageSize(34, 30, 5, 4, 2), 1, 34), (PackageSize(40, 30, 9, 9, 9), 0, 35)):
        budget.write_table({"link": row, "gone": row}, budget.TABLE)
        monkeypatch.setattr("sys.argv", ["budget", "--write"])
        assert budget.main() == status
        assert budget.read_table(budget.TABLE) == {"link": PackageSize(stored, 4, 5, 4, 2)}
        assert ("link: code_lines: 35, allowed 34" in capsys.readouterr().err) == bool(status)
