"""Messages as bytes, built without protobuf: millions of elements cost as much as one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5


def varint(value: int) -> bytes:
    """Base-128, least first."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def tag(number: int, wire_type: int) -> bytes:
    return varint(number << 3 | wire_type)


def field(number: int, content: bytes) -> bytes:
    """A field with a length: text, bytes, a message or packed numbers."""
    return tag(number, LENGTH) + varint(len(content)) + content


@dataclass(frozen=True)
class Path:
    """The way to a field from a request: the messages around it, and the field."""

    root: Descriptor
    around: tuple[FieldDescriptor, ...]
    field: FieldDescriptor

    @property
    def full_name(self) -> str:
        assert self.field.containing_type is not None
        return f"{self.field.containing_type.name}.{self.field.name}"

    def __str__(self) -> str:
        return ".".join(each.name for each in (*self.around, self.field))

    def holding(self, content: bytes) -> bytes:
        """A request that holds this content, whole fields, where the field stands."""
        for each in reversed(self.around):
            content = field(each.number, content)
        return content

    def times(self, count: int) -> bytes:
        """A request with so many elements of the least size: empty text and messages, or zeros that are packed."""
        if self.field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_MESSAGE):
            return self.holding(field(self.field.number, b"") * count)
        return self.holding(field(self.field.number, bytes(count * width_of(self.field))))

    def one_by_one(self, count: int) -> bytes:
        """The same for numbers, which a parser also takes unpacked."""
        wire_type = {1: VARINT, 4: FIXED32, 8: FIXED64}[width_of(self.field)]
        return self.holding((tag(self.field.number, wire_type) + bytes(width_of(self.field))) * count)


def width_of(number: FieldDescriptor) -> int:
    """Bytes of a zero."""
    if number.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_FIXED32, FieldDescriptor.TYPE_SFIXED32):
        return 4
    if number.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FIXED64, FieldDescriptor.TYPE_SFIXED64):
        return 8
    return 1


def is_map(of: FieldDescriptor) -> bool:
    return of.message_type is not None and of.message_type.GetOptions().map_entry


def root_of(kind: type[Message]) -> Descriptor:
    return cast(Descriptor, kind.DESCRIPTOR)


def fields(root: Descriptor) -> Iterator[Path]:
    """Every field of a request, at every depth; not those of the entries of a map, which repeat with it."""

    def walk(message: Descriptor, around: tuple[FieldDescriptor, ...]) -> Iterator[Path]:
        for each in message.fields:
            yield Path(root, around, each)
            if each.message_type is not None and not is_map(each):
                yield from walk(each.message_type, (*around, each))

    return walk(root, ())


def repeated(root: Descriptor) -> list[Path]:
    return [path for path in fields(root) if path.field.is_repeated]


def sized(root: Descriptor) -> list[Path]:
    return [path for path in fields(root) if path.field.type == FieldDescriptor.TYPE_BYTES]
