"""The counts and sizes of a request, and the decoding of a caller's bytes into a message within them, in bounded time and memory.

The contract states them beside each field (options.proto), and the ranges of values, which fields.py checks. Counts and sizes come first,
because they decide how much memory and time a message costs before any value is looked at. Six million empty parts fit into 11 MiB, and
parsing them makes 1.3 GB of objects before the first check can run. So the bytes are looked at first: a walk over the tags knows which
fields repeat and stops at the first element that is too many. For each field the walk costs about as much as parsing does; the content of
a field costs nothing, however long it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from omnistage.v1 import omni_pb2, stage_pb2
from omnistage.wire.fields import descriptor_of, rule_of

MAX_FIELDS = 1 << 19
"""Largest number of fields of one request on the wire, known or unknown, which limits the time of the walk over them. A message whose type
has no repeated field and no bytes counts as one field, because protobuf makes one object of it, whatever is in it."""

MAX_TEXT_CHARACTERS = 1 << 20
"""Largest number of characters in all messages of one request together."""

TEXT_REQUEST_BYTES = 8 << 20
"""Largest size in bytes of a request to a router whose pipelines take text only: all text at four bytes a character, and as many bytes for
an answer that goes on."""

HOP_ROOM_BYTES = 4 << 20
"""Bytes that a stage accepts above the largest request of a client, because the router and the links add the route, and output that
rebuilds a stage."""

MAX_CALLS = 4096
"""Largest number of open calls of any kind at a router. gRPC refuses further calls before it reads their requests."""

MAX_HOPS = 8
MAX_ADDRESSES = 8
"""Addresses of one hop."""

MAX_LOGIT_BIASES = 1024
"""Largest number of logit biases in the params of one stage; the defaults of its pipeline may be as many again."""


def _limits() -> tuple[Mapping[str, int], Mapping[str, int | None]]:
    """The values of COUNTS and BYTES, as the contract has them. Raises TypeError for a field of requests without a limit."""
    counts, sizes, seen = dict[str, int](), dict[str, int | None](), set[str]()
    messages = [descriptor_of(stage_pb2.RunRequest), descriptor_of(omni_pb2.ConverseRequest)]
    while messages:
        message = messages.pop()
        if message.full_name in seen or message.GetOptions().map_entry:
            continue
        seen.add(message.full_name)
        for field in message.fields:
            rule, name = rule_of(field), f"{message.name}.{field.name}"
            if field.message_type is not None:
                messages.append(field.message_type)
            if field.is_repeated:
                counts[name] = rule.max_count
            if field.type == FieldDescriptor.TYPE_BYTES:
                sizes[name] = rule.max_bytes or None
            if (field.is_repeated and not rule.max_count) or (field.type == FieldDescriptor.TYPE_BYTES and not rule.HasField("max_bytes")):
                raise TypeError(f"{name} is in requests and has no limit in the contract")
    return dict(sorted(counts.items())), dict(sorted(sizes.items()))


COUNTS, BYTES = _limits()
"""By MESSAGE.FIELD of the requests of both services: the largest number of elements of every repeated and map field, counted in one whole
request, and the largest size of every field of bytes; None: only the size of the request limits it."""

MAX_PORTS = COUNTS["Open.credits"]
"""Ports of one stage and all stages after it; a pipeline has a handful."""

MAX_BATCH = COUNTS["Chunks.chunks"]
"""Chunks in one message."""

M = TypeVar("M", bound=Message)

FIELDS_AT_ONCE = 4096
"""Fields that are walked over on the event loop, in about a millisecond. Messages with more fields are decoded in a thread, one by one."""

_MAX_TAG = (1 << 32) - 1
_MAX_TAG_BYTES = 5
_MAX_VARINT_BYTES = 10
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_HIGH_BYTES = bytes(range(0x80, 0x100))

_WIRE_TYPES = {
    **dict.fromkeys((FieldDescriptor.TYPE_FIXED64, FieldDescriptor.TYPE_SFIXED64, FieldDescriptor.TYPE_DOUBLE), _FIXED64),
    **dict.fromkeys((FieldDescriptor.TYPE_FIXED32, FieldDescriptor.TYPE_SFIXED32, FieldDescriptor.TYPE_FLOAT), _FIXED32),
    **dict.fromkeys((FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_MESSAGE), _LENGTH),
}
"""All other types are varints."""

_LARGE = ThreadPoolExecutor(1, "large-requests")


class TooLarge(ValueError):
    """A request exceeds a limit of limits.py. field: path of the field in proto spelling; "request" for the whole request."""

    def __init__(self, field: str, description: str) -> None:
        super().__init__(f"{field}: {description}")
        self.field = field
        self.description = description


class _MoreFields(Exception):
    """The walk has reached its limit of fields to look at."""


@dataclass(frozen=True, slots=True)
class _Field:
    """A field that the walk has to look into. max_count: limit of elements in the whole request; 0: the field does not repeat. size: limit
    of bytes of one element; 0: none. packed: bytes of an element of a packed field; 0: varints; -1: not packed. inside: if the field is a
    message, the fields in it to look into, by tag; else None."""

    name: str
    full_name: str
    max_count: int
    size: int
    packed: int
    inside: dict[int, _Field] | None


async def decode(data: bytes, kind: type[M], turn: Callable[[], AbstractAsyncContextManager[None]] = nullcontext) -> M:
    """Return the message in these bytes. turn: makes a context manager that is entered while a large message is decoded; the large messages
    of a process are decoded one at a time.

    Raises TooLarge before anything is built, DecodeError for bytes that are no such message, and the errors of `turn`."""
    shape = _shape(descriptor_of(kind))
    try:
        _walk(data, shape, FIELDS_AT_ONCE)
    except _MoreFields:
        async with turn():
            return await asyncio.get_running_loop().run_in_executor(_LARGE, _decode_large, data, kind, shape)
    return kind.FromString(data)


def _decode_large(data: bytes, kind: type[M], shape: Mapping[int, _Field]) -> M:
    """Return the message in these bytes, which may have up to MAX_FIELDS fields. Raises TooLarge and DecodeError. Runs in a thread."""
    try:
        _walk(data, shape, MAX_FIELDS)
    except _MoreFields:
        raise TooLarge("request", f"at most {MAX_FIELDS} fields in all") from None
    return kind.FromString(data)


def _walk(data: bytes, shape: Mapping[int, _Field], most_fields: int) -> None:
    """Look at the fields of a message and return if it may be parsed. shape: the fields to look into, by tag. Raises TooLarge, DecodeError,
    or _MoreFields if it has more than `most_fields`."""
    counts: dict[str, int] = {}  # elements so far, by full name of the field
    outer: list[tuple[int, Mapping[int, _Field], str]] = []  # the messages around the present one: end, shape, and name of each
    at, end, name, fields_left = 0, len(data), "", most_fields
    try:
        while True:
            while at < end:
                fields_left -= 1
                if fields_left < 0:
                    raise _MoreFields
                # Tags and lengths of one byte are read here, because nearly all are, and a call for each would take longer.
                tag = data[at]
                at += 1
                if tag > 0x7F:
                    tag, at = _varint(data, at - 1)
                wire = tag & 7  # The lowest three bits are the wire type.
                if wire == _LENGTH:
                    length = data[at]
                    at += 1
                    if length > 0x7F:
                        length, at = _varint(data, at - 1)
                    field_end = at + length
                    if field_end > end:
                        raise DecodeError("a field is longer than its message")
                    field = shape.get(tag)
                    if field is not None:
                        if field.max_count:
                            _count(field, counts, _elements(field, data, at, field_end), outer, name)
                        if field.size and length > field.size:
                            raise TooLarge(_path(outer, name, field), f"at most {field.size} bytes")
                        if field.inside is not None:
                            outer.append((end, shape, name))
                            end, shape, name = field_end, field.inside, field.name
                            continue  # with the fields inside
                    at = field_end
                    continue
                if wire == _VARINT:
                    limit = at + _MAX_VARINT_BYTES
                    while data[at] > 0x7F:
                        at += 1
                        if at >= limit:
                            raise DecodeError("a number is too long")
                    at += 1
                elif wire == _FIXED32:
                    at += 4
                elif wire == _FIXED64:
                    at += 8
                else:
                    raise DecodeError(f"wire type {wire} is of no message of this contract")
                if (field := shape.get(tag)) is not None:
                    _count(field, counts, 1, outer, name)
            if at > end:
                raise DecodeError("a field is longer than its message")
            if not outer:
                return
            end, shape, name = outer.pop()
    except IndexError:
        raise DecodeError("the message ends in the middle of a field") from None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Read the tag or length at this position. Returns it and the position after it."""
    value = 0
    for shift in range(0, 7 * _MAX_TAG_BYTES, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte <= 0x7F and value <= _MAX_TAG:
            return value, at
    raise DecodeError("a tag or a length is too great")


def _elements(field: _Field, data: bytes, start: int, end: int) -> int:
    """How many elements of a repeated field the bytes from `start` to `end` hold; exact only if it is at most `field.max_count`."""
    if field.packed < 0:
        return 1
    if field.packed:
        return (end - start) // field.packed
    if end - start > _MAX_VARINT_BYTES * field.max_count:
        return field.max_count + 1
    return len(data[start:end].translate(None, _HIGH_BYTES))  # Each varint has one byte without the high bit: its last.


def _count(field: _Field, counts: dict[str, int], elements: int, outer: list[tuple[int, Mapping[int, _Field], str]], name: str) -> None:
    """Count `elements` elements of a field. Raises TooLarge. counts, outer, name: see `_walk`."""
    total = counts.get(field.full_name, 0) + elements
    if total > field.max_count:
        raise TooLarge(_path(outer, name, field), f"at most {field.max_count} in all")
    counts[field.full_name] = total


def _path(outer: list[tuple[int, Mapping[int, _Field], str]], name: str, field: _Field) -> str:
    """The path of a field, spelled as in the errors of stages, for example `thinker.stop` for open.params.thinker.stop."""
    path = ".".join(filter(None, [*(outer_name for *_, outer_name in outer), name, field.name])).removeprefix("turn.")
    for envelope in ("open.params.", "open.resume."):
        if path.startswith(envelope):
            return path.removeprefix("open.").removeprefix("params.")
    return path


_shapes: dict[str, dict[int, _Field]] = {}


def _shape(message: Descriptor) -> dict[int, _Field]:
    """The fields that the walk must visit in a message of a type, by tag: fields that repeat, fields of bytes, and messages that have such
    fields. Raises KeyError for a field without a limit in the contract."""
    shape = _shapes.get(message.full_name)
    if shape is None:
        shape = _shapes[message.full_name] = {}  # Stored before it is filled, because a type may contain itself.
        for field in message.fields:
            for tag, entry in _entries(field):
                shape[tag] = entry
    return shape


def _entries(field: FieldDescriptor) -> list[tuple[int, _Field]]:
    """The entries of a field in a shape, with their tags; none if the walk need not look into it. A repeated number has two entries,
    because a parser takes it packed or not."""
    assert field.containing_type is not None
    full_name = f"{field.containing_type.name}.{field.name}"
    max_count = COUNTS[full_name] if field.is_repeated else 0
    size = (BYTES[full_name] or 0) if field.type == FieldDescriptor.TYPE_BYTES else 0
    is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
    inside = _shape(field.message_type) if field.message_type is not None and not is_map else None
    if not (max_count or size or inside):
        return []
    wire = _WIRE_TYPES.get(field.type, _VARINT)
    single = _Field(field.name, full_name, max_count, size, -1, inside)
    entries = [(field.number << 3 | wire, single)]
    if wire != _LENGTH:
        packed_size = {_FIXED32: 4, _FIXED64: 8}.get(wire, 0)
        entries.append((field.number << 3 | _LENGTH, _Field(field.name, full_name, max_count, size, packed_size, None)))
    return entries
