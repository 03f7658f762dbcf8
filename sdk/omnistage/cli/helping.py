"""What the help texts of all commands have: examples, and the version."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperArgument, TyperCommand


class Command(TyperCommand):
    """Its help calls an argument by its name alone, without a type of Python's such as <str>."""

    def get_params(self, ctx: Any) -> list[Any]:
        params = super().get_params(ctx)
        for argument in params:
            if isinstance(argument, TyperArgument):
                argument.display_type_rich = lambda ctx: None  # type: ignore[method-assign]  # Typer has no other place for it.
        return params


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
