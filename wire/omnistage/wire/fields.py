"""The rules of the contract for its fields (options.proto): values are checked by them, and get the names that programs use.

An absent field is always allowed. A field without presence that is 0 or empty is absent. The counts of repeated fields are checked before
a message is built, see limits.py."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from omnistage.v1 import options_pb2
from omnistage.wire.errors import bad_request


def rule_of(field: FieldDescriptor) -> options_pb2.About:
    """The rule of a field; an empty one for a field that has none."""
    return field.GetOptions().Extensions[options_pb2.about]


def descriptor_of(message: type[Message]) -> Descriptor:
    """The descriptor of a message; its type of protobuf's own is a union."""
    return cast(Descriptor, message.DESCRIPTOR)


def check(message: Message, path: str = "") -> None:
    """Raise BAD_REQUEST for the first field, also of a message within this one, that holds a value which the contract does not allow. path:
    of the message; empty: a field's path is its name."""
    rules = _rules(message.DESCRIPTOR)
    for field, value in message.ListFields():
        is_zero = value == 0 and not (field.has_presence or field.is_repeated)  # -0.0, which protobuf sends, is absent too.
        if (rule := rules.get(field.number)) is None or is_zero:
            continue
        field_path = f"{path}.{field.name}" if path else field.name
        values = value.values() if _is_map(field) else value if field.is_repeated else (value,)
        for each in values:
            if rule is _WITHIN:
                check(each, field_path)
            elif fault := _fault(each, field, rule):
                raise bad_request(field_path, fault)


def values_for(kind: type, message: Message) -> dict[str, Any]:
    """The present fields of a message that a dataclass has too, by the names that programs use: arguments for the dataclass. A repeated
    field becomes a tuple, a map a dict; a field that is a message itself is left out."""
    names, arguments = _shared(kind, message.DESCRIPTOR), dict[str, Any]()
    for field, value in message.ListFields():
        if name := names.get(field.number):
            arguments[name] = dict(value) if _is_map(field) else tuple(value) if field.is_repeated else value
    return arguments


def _fault(value: Any, field: FieldDescriptor, rule: options_pb2.About) -> str:
    """The fault of a value, in words; empty: it has none."""
    if field.enum_type is not None:
        names = [each.name for each in field.enum_type.values if each.number]  # 0 is "not set".
        return "" if value in field.enum_type.values_by_number else f"must be one of {', '.join(names)}"
    if rule.words and str(value) not in rule.words:
        return f"must be one of {', '.join(rule.words)}"
    if rule.max_characters and len(value) > rule.max_characters:
        return f"must have at most {rule.max_characters} characters"
    if not rule.HasField("min"):
        return ""
    is_low = value <= rule.min if rule.above_min else value < rule.min
    is_high = rule.HasField("max") and (value >= rule.max if rule.below_max else value > rule.max)
    return f"must be {bounds(rule)}" if is_low or is_high or not math.isfinite(value) else ""


def bounds(rule: options_pb2.About) -> str:
    """The bounds of a number, in words."""
    least = f"{'above' if rule.above_min else 'from'} {rule.min:.10g}"
    if not rule.HasField("max"):
        return least
    if rule.above_min or rule.below_max:
        return f"{least}, {'below' if rule.below_max else 'at most'} {rule.max:.10g}"
    return f"{least} to {rule.max:.10g}"


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


_WITHIN = options_pb2.About(text="the fields of this message have rules")


@cache
def _rules(message: Descriptor) -> Mapping[int, options_pb2.About]:
    """The rules of the fields whose values need a look, by number; `_WITHIN` for a message that has such fields."""
    rules = {field.number: rule for field in message.fields if _has_rule(rule := rule_of(field))}
    within = {field.number: _WITHIN for field in message.fields if field.number not in rules and _reaches_rule(field, frozenset())}
    return {**rules, **within}


def _has_rule(rule: options_pb2.About) -> bool:
    return bool(rule.HasField("min") or rule.words or rule.max_characters)


def _reaches_rule(field: FieldDescriptor, outer: frozenset[str]) -> bool:
    """Whether a field, or one of a message within it, has a rule. outer: the messages around it, for a message may hold itself."""
    inner = field.message_type
    if _has_rule(rule_of(field)) or inner is None or _is_map(field) or inner.full_name in outer:
        return _has_rule(rule_of(field))
    return any(_reaches_rule(each, outer | {inner.full_name}) for each in inner.fields)


@cache
def _shared(kind: type, message: Descriptor) -> Mapping[int, str]:
    """The names in programs of the fields that a dataclass has too, by number."""
    names = {each.name for each in fields(kind)}
    plain = [field for field in message.fields if field.message_type is None or _is_map(field)]
    return {field.number: name for field in plain if (name := rule_of(field).option or field.name) in names}
