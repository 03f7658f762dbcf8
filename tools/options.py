"""Writes the tables of options and settings in docs/client.md from the client's own descriptions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omnistage.client import options
from omnistage.client.options import SETTINGS, keywords

PAGE = Path(__file__).resolve().parent.parent / "docs" / "client.md"

GROUPS = {
    "every call": options.EVERY_CALL,
    "media": options.MEDIA,
    "text": (*options.THINKER, *options.CONSTRAINTS, *options.SAMPLING),
    "speech": (*options.TALKER, *options.CODE2WAV),
    "pictures": options.DIFFUSION,
}
"""The tables of options, by the first words of their heads."""


def table(head: str, annotations: Mapping[str, Any]) -> str:
    """A table of Markdown with a row for each keyword. head: the title of its first column. annotations: by keyword, its type with the
    description."""
    rows = [
        (f"`{one.name}`", f"`{one.type_text}`", one.about.allowed_text, one.about.default, one.about.meaning)
        for one in keywords(annotations)
    ]
    lines = [(head, "type", "values", "default", "meaning"), ("---",) * 5, *rows]
    return "".join(f"| {' | '.join(cells)} |\n".replace("|  |", "| |") for cells in lines)


def fresh(page: str) -> str:
    """The text of the page with fresh tables. Raises ValueError if the page lacks a table, or has it twice."""
    tables = {f"of {group}": {name: options.OPTIONS[name] for name in names} for group, names in GROUPS.items()}
    for head, table_text in {**tables, "setting": SETTINGS}.items():
        before = re.findall(rf"^\| {head} \|.*\n(?:\|.*\n)*", page, re.MULTILINE)
        if len(before) != 1:
            raise ValueError(f"docs/client.md has {len(before)} tables that begin with {head!r}, and should have one")
        page = page.replace(before[0], table(head, table_text))
    return page


if __name__ == "__main__":
    PAGE.write_text(fresh(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
