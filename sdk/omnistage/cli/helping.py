"""What the help texts of all commands have: examples, and the version."""

from __future__ import annotations

import typer


def examples(*lines: str) -> str:
    """The end of a help text. lines: what can be typed."""
    # The first character keeps the lines apart: a paragraph is filled otherwise.
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])


def show_version(is_wanted: bool) -> None:
    """For an option --version."""
    if is_wanted:
        print(version_line())
        raise typer.Exit


def version_line() -> str:
    """Of the package as it is installed."""
    from importlib.metadata import version

    return f"omnistage {version('omnistage')}"
