"""Formats the help of all commands: examples, line breaks, and the version."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import wrap
from typing import Any, cast

import typer
from typer._click.formatting import HelpFormatter
from typer.core import TyperArgument, TyperCommand, TyperGroup

WIDEST, NARROWEST = 78, 20
"""Most and fewest columns of a help text."""

MAX_SHOWN = 64
"""The most characters that are shown of a wrong value."""

WIDE = 50
"""In a terminal with this many columns the descriptions of options have room to the right of their names."""


class _Formatter(HelpFormatter):
    """Formats help to the width of the terminal. On a narrow terminal it also breaks the lines that Click does not break, between words."""

    def __init__(self, indent_increment: int = 2, width: int | None = None, max_width: int | None = None) -> None:
        columns = shutil.get_terminal_size().columns
        super().__init__(indent_increment, width or max(min(columns - 2, WIDEST), NARROWEST), max_width)

    def write_dl(self, rows: Any, col_max: int = 30, col_spacing: int = 2) -> None:
        super().write_dl(rows, col_max if self.width >= WIDE else self.width // 6, col_spacing)

    def getvalue(self) -> str:
        return fit_lines(super().getvalue(), self.width) if self.width < WIDEST else super().getvalue()


class _Context(typer.Context):
    formatter_class = _Formatter


def fit_lines(text: str, columns: int) -> str:
    """Break the long lines of a text between words; the further parts of a line are indented more than its first part."""

    def parts(line: str) -> list[str]:
        indent = " " * (len(line) - len(line.lstrip()))
        if len(line) <= columns:
            return [line]
        return wrap(line, columns, subsequent_indent=f"{indent}  ", break_long_words=False, break_on_hyphens=False)

    return "".join(f"{part}\n" for line in text.splitlines() for part in parts(line))


class CommandGroup(TyperGroup):
    """The group of all commands."""

    context_class = _Context


@contextmanager
def _in_our_words() -> Iterator[None]:
    """A context that raises pydantic's errors, with which Typer refuses values, in the words of all other errors."""
    try:
        yield
    except typer.BadParameter as error:
        if faults := getattr(error.__cause__, "errors", None):
            from omnistage.host.errors import fault_found  # Not for a help text.

            first = faults()[0]
            error.message = fault_found(first, ascii(str(first["input"])[:MAX_SHOWN]))
        raise


class Command(TyperCommand):
    """A command whose help shows an argument by its name alone, without a Python type such as <str>, and whose errors are in our words."""

    context_class = _Context

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _in_our_words():
            rest = super().parse_args(ctx, args)
        for parameter in self.params:
            if isinstance(value := ctx.params.get(parameter.name), float) and not math.isfinite(value):
                raise typer.BadParameter(f"is '{value}'; it must be a number", ctx, cast(Any, parameter))
        return rest

    def invoke(self, ctx: Any) -> Any:
        with _in_our_words():
            return super().invoke(ctx)

    def get_params(self, ctx: Any) -> list[Any]:
        params = super().get_params(ctx)
        for argument in params:
            if isinstance(argument, TyperArgument):
                argument.display_type_rich = lambda ctx: None  # type: ignore[method-assign]  # Typer has no other place for it.
        return params


def examples(*lines: str) -> str:
    """The end of a help text. lines: examples of command lines."""
    # The first character tells Click not to join the lines into one paragraph.
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])


def show_version(is_wanted: bool) -> None:
    """Callback of an option --version."""
    if is_wanted:
        print(version_line())
        raise typer.Exit


def version_line() -> str:
    """The version of the installed package."""
    from importlib.metadata import version

    return f"omnistage {version('omnistage')}"
