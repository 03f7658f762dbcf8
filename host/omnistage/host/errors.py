"""Errors in plain words: why a server cannot start, and what is wrong with a value that pydantic refuses. The command, HTTP and the
servers' own settings report the latter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class StartError(RuntimeError):
    """The server cannot start; the text says why and what to do."""


FORMS = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float", "int_parsing_size"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing", "finite_number"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("string_type",), "text"),
    **dict.fromkeys(("list_type", "tuple_type"), "a list"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "an object"),
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "greater_than": "above {gt}",
    "less_than": "below {lt}",
    "literal_error": "{expected}",
    "enum": "{expected}",
}
"""The right form of a value, by pydantic's kind of fault. The places in braces are filled from the context that pydantic gives."""

DESCRIPTIONS = {"missing": "is missing", "extra_forbidden": "is no name of a setting here"}
"""The whole description of a fault, by pydantic's kind of fault, for kinds that are not about a form."""


def fault_found(fault: Mapping[str, Any], shown: str = "") -> str:
    """Describe a fault, one entry of pydantic's `errors()`. shown: the value, if it may be quoted."""
    if fault["type"] in DESCRIPTIONS:
        return DESCRIPTIONS[fault["type"]]
    form = FORMS.get(fault["type"])
    if form is None:
        return str(fault["msg"]).removeprefix("Value error, ").replace("Input should", "must")
    context = fault.get("ctx", {}).items()
    # A limit shows as 8 even if pydantic gives 8.0.
    limits = {name: int(value) if isinstance(value, float) and value.is_integer() else value for name, value in context}
    rule = f"must be {form.format_map(limits)}"
    return f"is {shown}; it {rule}" if shown else rule
