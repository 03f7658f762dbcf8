"""Descriptions of keyword arguments, in one place: a TypedDict has the description of each key in its type, and `help` and
docs/client.md are made from it."""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from inspect import cleandoc
from typing import Any, TypeVar, Union, get_args, get_origin

F = TypeVar("F", bound=Callable[..., object])


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers from `low` to `high`. high: None: there is no upper bound. is_above: `low` itself is excluded. is_below: `high` itself is
    excluded."""

    low: float
    high: float | None = None
    is_above: bool = False
    is_below: bool = False

    def has(self, value: float) -> bool:
        is_low = value < self.low or (self.is_above and value == self.low)
        return not is_low and (self.high is None or value < self.high or (value == self.high and not self.is_below))

    def __str__(self) -> str:
        if self.high is None:
            return f"{'above' if self.is_above else 'from'} {_number(self.low)}"
        if not self.is_above and not self.is_below:
            return f"{_number(self.low)} to {_number(self.high)}"
        return f"{'above' if self.is_above else 'from'} {_number(self.low)}, {'below' if self.is_below else 'at most'} {_number(self.high)}"


@dataclass(frozen=True, slots=True)
class About:
    """The description of one keyword. meaning: a sentence for users. default: the value if the keyword is absent, in words. allowed: the
    numbers or the words that its value may be; None: any value."""

    meaning: str
    default: str
    allowed: Range | Sequence[str] | None = None

    @property
    def allowed_text(self) -> str:
        """The allowed values in words; empty if any value of the type is allowed."""
        if self.allowed is None or isinstance(self.allowed, Range):
            return str(self.allowed or "")
        return ", ".join(self.allowed)


@dataclass(frozen=True, slots=True)
class Keyword:
    """One keyword: its name, its type as people write it, and its description."""

    name: str
    type_text: str
    about: About

    def __str__(self) -> str:
        allowed = f"; {self.about.allowed_text}" if self.about.allowed else ""
        return f"    {self.name} ({self.type_text}{allowed}; default: {self.about.default})\n        {self.about.meaning}\n"


def keywords(annotations: Mapping[str, Any]) -> list[Keyword]:
    """The keywords of annotations that are all `Annotated[..., About(...)]`, such as those of a TypedDict, in the same order."""
    return [Keyword(name, type_text(kind), about) for name, (kind, about) in ((name, get_args(one)) for name, one in annotations.items())]


def type_text(kind: Any) -> str:
    """A type as people write it: `str or Mapping[str, Any]`."""
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(map(type_text, get_args(kind)))
    if inner := get_args(kind):
        return f"{get_origin(kind).__name__}[{', '.join(map(type_text, inner))}]"
    return getattr(kind, "__name__", str(kind))


def takes(annotations: Mapping[str, Any], names: Collection[str] | None = None) -> Callable[[F], F]:
    """A decorator that adds descriptions of keywords to the docstring. names: the keywords to describe; None: all of `annotations`."""
    lines = [str(keyword) for keyword in keywords(annotations) if names is None or keyword.name in names]

    def extended(function: F) -> F:
        if function.__doc__:  # With -OO there is no docstring.
            function.__doc__ = f"{cleandoc(function.__doc__)}\n\nKeyword arguments:\n{''.join(lines)}"
        return function

    return extended


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"
