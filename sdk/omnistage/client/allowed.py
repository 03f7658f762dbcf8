"""Whether the value of a keyword is what its type and its `About` allow, and what to say where it is not."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Union, get_args, get_origin

from omnistage.client.about import About, Range

PLAIN = {int: "a whole number", float: "a number", bool: "True or False", str: "text"}
BY_STAGE = {int: 2, float: 0.5, bool: True, str: "cpu"}
"""Values for an example."""

STAGES = ("thinker", "talker", "code2wav", "diffusion")


FORMS = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float", "int_parsing_size"), PLAIN[int]),
    **dict.fromkeys(("float_type", "float_parsing", "finite_number"), PLAIN[float]),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("string_type",), PLAIN[str]),
    **dict.fromkeys(("list_type", "tuple_type"), "a list"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "an object"),
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "greater_than": "above {gt}",
    "less_than": "below {lt}",
    "literal_error": "{expected}",
    "enum": "{expected}",
}
"""By a kind of fault that pydantic finds, what a value must be. Its places are filled from what pydantic says beside it."""


def fault_found(fault: Mapping[str, Any], shown: str = "") -> str:
    """Of a fault as pydantic tells it, the same words as `fault_of`. shown: the value, where that is to be told."""
    if fault["type"] == "missing":
        return "is missing"
    must = FORMS.get(fault["type"])
    if must is None:
        return str(fault["msg"]).removeprefix("Value error, ").replace("Input should", "must")
    beside = dict(fault.get("ctx", {}))
    beside = {name: int(one) if isinstance(one, float) and one.is_integer() else one for name, one in beside.items()}
    told = f"must be {must.format_map(beside)}"
    return f"is {shown}; it {told}" if shown else told


def fault_of(annotation: Any, value: object) -> str:
    """Of a value for a keyword that is annotated so; empty where there is none."""
    kind, about = get_args(annotation)
    return "" if any(_fits(one, about, value) for one in _kinds(kind)) else f"is {_shown(value)}; it must be {_told(kind, about)}"


def fault_of_stages(annotation: Any, value: object) -> str:
    """The same of a setting, which may be given by stage, or by pipeline and stage."""
    if fault := fault_of(annotation, value):
        return fault
    for key in value if isinstance(value, Mapping) else ():
        if key.rpartition("/")[2] not in STAGES:
            return f"has {_shown(key)}; the stages are {', '.join(STAGES)}, or PIPELINE/STAGE"
    return ""


def _kinds(kind: Any) -> Sequence[Any]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _fits(kind: Any, about: About, value: object) -> bool:
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
    return math.isfinite(value) and (not isinstance(about.allowed, Range) or about.allowed.has(float(value)))


def _told(kind: Any, about: About) -> str:
    if isinstance(about.allowed, Sequence):
        *others, last = about.allowed
        return f"{', '.join(others)} or {last}"
    said = list[str]()
    for one in _kinds(kind):
        if one in PLAIN:
            said.append(", ".join([PLAIN[one], *([about.allowed_text] if about.allowed_text else [])]))
        elif get_origin(one) is Sequence:
            said.append("a list of texts" if get_args(one)[0] is str else "a list of numbers")
        else:
            inner = get_args(one)[1]
            said.append("a dict" if inner is Any else f"a dict by stage, such as {{'talker': {BY_STAGE[inner]!r}}}")
    return ", or ".join(said)


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 64 else f"{shown[:60]} ..."
