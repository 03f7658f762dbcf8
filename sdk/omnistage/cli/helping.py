"""What the help texts of all commands have: examples, and the version."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import wrap
from typing import Any

import typer
from typer._click.formatting import HelpFormatter
from typer.core import TyperArgument, TyperCommand, TyperGroup

WIDEST, NARROWEST = 78, 20
"""Columns of a help text."""

MAX_SHOWN = 64
"""Characters of a value that cannot be."""

WIDE = 50
"""From here on the names of options have room beside what they are."""


class _Formatter(HelpFormatter):
    """As wide as the terminal, where that is narrow too; lines that are to stand as they are are broken between words there."""

    def __init__(self, indent_increment: int = 2, width: int | None = None, max_width: int | None = None) -> None:
        columns = shutil.get_terminal_size().columns
        super().__init__(indent_increment, width or max(min(columns - 2, WIDEST), NARROWEST), max_width)

    def write_dl(self, rows: Any, col_max: int = 30, col_spacing: int = 2) -> None:
        super().write_dl(rows, col_max if self.width >= WIDE else self.width // 6, col_spacing)

    def getvalue(self) -> str:
        return fitted(super().getvalue(), self.width) if self.width < WIDEST else super().getvalue()


class _Context(typer.Context):
    formatter_class = _Formatter


def fitted(text: str, columns: int) -> str:
    """The lines of a text, those that are too long broken between words, with a deeper indent behind the first part."""

    def parts(line: str) -> list[str]:
        indent = " " * (len(line) - len(line.lstrip()))
        if len(line) <= columns:
            return [line]
        return wrap(line, columns, subsequent_indent=f"{indent}  ", break_long_words=False, break_on_hyphens=False)

    return "".join(f"{part}\n" for line in text.splitlines() for part in parts(line))


class Group(TyperGroup):
    """All commands."""

    context_class = _Context


@contextmanager
def _in_our_words() -> Iterator[None]:
    """What pydantic, by which Typer reads values, has against one of them is told as everything else."""
    try:
        yield
    except typer.BadParameter as error:
        if faults := getattr(error.__cause__, "errors", None):
            from omnistage.host.faults import fault_found  # Not for a help text.

            first = faults()[0]
            error.message = fault_found(first, ascii(str(first["input"])[:MAX_SHOWN]))
        raise


class Command(TyperCommand):
    """Its help calls an argument by its name alone, without a type of Python's such as <str>."""

    context_class = _Context

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _in_our_words():
            return super().parse_args(ctx, args)

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
