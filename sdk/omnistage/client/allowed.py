"""Checks the value of a keyword by its type and its `About`, and describes the fault in words."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral, Real
from typing import Any, Union, get_args, get_origin

from omnistage.client.about import About, Range

PLAIN = {int: "a whole number", float: "a number", bool: "True or False", str: "text"}
"""The words of a message for each type."""
BY_STAGE = {int: 2, float: 0.5, bool: True, str: "cpu"}
"""An example of a value of each type."""

STAGES = ("thinker", "talker", "code2wav", "diffusion")


def fault_of(annotation: Any, value: object, *, of_kind: bool = False) -> str:
    """The fault of a value in words; empty: there is none. annotation: of the keyword, `Annotated[type, About]`. of_kind: check only the
    type, because a server checks the range."""
    kind, about = get_args(annotation)
    allowed = replace(about, allowed=None) if of_kind else about
    return (
        ""
        if any(_fits(one, allowed, plain(value)) for one in _kinds(kind))
        else f"is {show_value(value)}; it must be {_allowed_text(kind, about)}"
    )


def plain(value: Any) -> Any:
    """A number of NumPy, or of another array library, as a number of Python; any other value unchanged."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def fault_of_stages(annotation: Any, value: object) -> str:
    """The fault of a setting's value in words; empty: there is none. The value may be a mapping by stage, or by pipeline and stage."""
    if fault := fault_of(annotation, value):
        return fault
    for key in value if isinstance(value, Mapping) else ():
        if key.rpartition("/")[2] not in STAGES:
            return f"has {show_value(key)}; the stages are {', '.join(STAGES)}, or PIPELINE/STAGE"
    return ""


def _kinds(kind: Any) -> Sequence[Any]:
    """The types in a union, or [kind] if `kind` is no union."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _fits(kind: Any, about: About, value: object) -> bool:
    """Whether a value (as `plain` gives it) is of this type, and `about` allows it. In a list or a dict this holds for each value."""
    match get_origin(kind) or kind:
        case origin if origin is Mapping:
            inner = get_args(kind)[1]
            return isinstance(value, Mapping) and all(
                isinstance(key, str) and (inner is Any or _fits(inner, about, one)) for key, one in value.items()
            )
        case origin if origin is Sequence:
            inner = get_args(kind)[0]
            return isinstance(value, Sequence) and not isinstance(value, str | bytes) and all(_fits(inner, about, one) for one in value)
        case plain if plain is bool:
            return isinstance(value, bool)
        case plain if plain is str:
            return isinstance(value, str) and (about.allowed is None or isinstance(about.allowed, Range) or value in about.allowed)
    if isinstance(value, bool) or not isinstance(value, Integral if kind is int else Real):
        return False
    if not isinstance(value, Integral) and not math.isfinite(value):
        return False
    if isinstance(about.allowed, Range):
        return about.allowed.has(value)  # type: ignore[arg-type]  # As it is: not every whole number is a float.
    return about.allowed is None or str(value) in about.allowed


def _allowed_text(kind: Any, about: About) -> str:
    """The allowed values in words that follow "it must be"."""
    if isinstance(about.allowed, Sequence):
        *others, last = about.allowed
        return f"{', '.join(others)} or {last}"
    words = list[str]()
    for one in _kinds(kind):
        if one in PLAIN:
            words.append(", ".join([PLAIN[one], *([about.allowed_text] if about.allowed_text else [])]))
        elif get_origin(one) is Sequence:
            words.append("a list of texts" if get_args(one)[0] is str else "a list of numbers")
        else:
            inner = get_args(one)[1]
            words.append("a dict" if inner is Any else f"a dict by stage, such as {{'talker': {BY_STAGE[inner]!r}}}")
    return ", or ".join(words)


def show_value(value: object) -> str:
    """A value as a message shows it."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to convert a whole number of thousands of digits to text.
        return "a number of too many digits"
    return text if len(text) <= 64 else f"{text[:60]} ..."
