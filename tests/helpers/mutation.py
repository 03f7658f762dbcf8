"""Any message of the contract, changed anywhere: hypothesis strategies that know the fields from their descriptors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

MAX_DEPTH = 6

_BITS = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(1 << 31), (1 << 31) - 1),
}


def whole(low: int, high: int) -> st.SearchStrategy[int]:
    """Whole numbers of every size, with favour for small ones and for the borders of words."""
    edges = [0, 1, 2, 3, 4, 8, 16, 31, 32, 33, 255, 256, 4096, 1 << 16, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 48, 1 << 63]
    edges += [-1, low, high, high - 1]
    return st.one_of(st.integers(0, 12), st.sampled_from([edge for edge in edges if low <= edge <= high]), st.integers(low, high))


def real() -> st.SearchStrategy[float]:
    odd = [0.0, -0.0, 1.0, 0.5, -1.0, 2.0, 2.5, 101.0, 1e-40, 3e38, math.nan, math.inf, -math.inf]
    return st.one_of(st.sampled_from(odd), st.floats(width=32))


def text(words: Sequence[str]) -> st.SearchStrategy[str]:
    """words: that mean something to the receiver."""
    odd = [
        *("", " ", "a", "A", "a" * 33, "a" * 65, "x" * 3000, "\x00", "\n"),
        *("\N{SNOWMAN}", "\N{GRINNING FACE}" * 300, "../../etc", "%s%n", "unix:x"),
    ]
    return st.one_of(st.sampled_from([*words, *odd]), st.sampled_from([*words, ""]), st.text(max_size=12))


@st.composite
def changed(draw: st.DrawFn, message: Message, words: Sequence[str] = (), most: int = 4) -> Any:
    """A copy of the message in which up to `most` places are changed."""
    copy = type(message)()
    copy.CopyFrom(message)
    for _ in range(draw(st.integers(1, most))):
        _change(draw, copy, words, 0)
    return copy


def _change(draw: st.DrawFn, message: Message, words: Sequence[str], depth: int) -> None:
    """One place, here or deeper down."""
    fields: list[Any] = list(message.DESCRIPTOR.fields)
    if not fields:
        return
    present: list[Any] = [field for field, _ in message.ListFields()]
    again = bool(present) and draw(st.booleans())
    field = draw(st.sampled_from(present if again else fields))
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        _change_map(draw, message, field, words)
    elif field.is_repeated:
        _change_list(draw, message, field, words, depth)
    elif present and draw(st.integers(0, 9)) == 0:
        message.ClearField(field.name)
    elif field.message_type is not None:
        inner = getattr(message, field.name)
        inner.SetInParent()
        if depth < MAX_DEPTH:
            _change(draw, inner, words, depth + 1)
    else:
        setattr(message, field.name, _scalar(draw, field, words))


def _change_list(draw: st.DrawFn, message: Message, field: FieldDescriptor, words: Sequence[str], depth: int) -> None:
    items = getattr(message, field.name)
    act = draw(st.sampled_from(["change", "change", "add", "repeat", "drop"])) if len(items) else "add"
    if act == "drop":
        del items[draw(st.integers(0, len(items) - 1))]
    elif act == "repeat":
        items.extend(list(items) * draw(st.sampled_from([1, 2, 8, 40])))
    elif field.message_type is None and act == "change":
        items[draw(st.integers(0, len(items) - 1))] = _scalar(draw, field, words)
    elif field.message_type is None:
        items.extend([_scalar(draw, field, words)] * draw(st.sampled_from([1, 1, 1, 70])))
    else:
        item = items.add() if act == "add" else items[draw(st.integers(0, len(items) - 1))]
        for _ in range(draw(st.integers(0, 3))):
            if depth < MAX_DEPTH:
                _change(draw, item, words, depth + 1)


def _change_map(draw: st.DrawFn, message: Message, field: FieldDescriptor, words: Sequence[str]) -> None:
    assert field.message_type is not None
    keys, values = (field.message_type.fields_by_name[name] for name in ("key", "value"))
    items = getattr(message, field.name)
    for _ in range(draw(st.integers(0, 3))):
        items[_scalar(draw, keys, words)] = _scalar(draw, values, words)


def _scalar(draw: st.DrawFn, field: FieldDescriptor, words: Sequence[str]) -> Any:
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return draw(st.booleans())
    if field.cpp_type in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return draw(real())
    if field.type == FieldDescriptor.TYPE_BYTES:
        return draw(st.one_of(st.binary(max_size=40), st.sampled_from([b"", bytes(16), bytes(20_000)])))
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return draw(text(words))
    return draw(whole(*_BITS[field.cpp_type]))
