"""Helpers of tests are found by their index in docs/development.md, which names each of them once."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"(?m)^\| `(\w+)` \| .+ \|$")


def test_the_index_names_every_helper_once_and_nothing_else() -> None:
    page = (ROOT / "docs" / "development.md").read_text(encoding="utf-8")
    index = page.partition("## Helpers of tests")[2].partition("\n## ")[0]
    assert sorted(ROW.findall(index)) == sorted(path.stem for path in (ROOT / "tests" / "helpers").glob("*.py"))
