"""Tensors inside messages: cut into parts of at most 1 MiB, and put together again."""

from collections.abc import Iterator

import numpy as np

from omnistage.connector.errors import InvalidReference
from omnistage.connector.reference import Raw, TensorLayout, header_of
from omnistage.v1 import tensor_pb2

PART_BYTES = 1 << 20
"""Largest number of bytes in one InlinePart."""


def split(raw: Raw, layout: TensorLayout) -> Iterator[tensor_pb2.Tensor]:
    """Yield the messages that carry `raw` (uint8, one dimension, `layout.size` long): at least one, even for a tensor of no bytes."""
    data = raw.data if layout.size else memoryview(b"")
    for offset in range(0, max(layout.size, 1), PART_BYTES):
        tensor = header_of(layout)
        tensor.inline.data = bytes(data[offset : offset + PART_BYTES])
        tensor.inline.offset = offset
        tensor.inline.total_bytes = layout.size
        yield tensor


class Assembly:
    """A tensor that comes in parts. Each part is copied once, to its place in the tensor. layout: of the whole tensor."""

    def __init__(self, layout: TensorLayout) -> None:
        self._layout = layout
        self._bytes = np.empty(layout.size, np.uint8)  # takes memory only as parts come, so announcing a large tensor costs nothing
        self._received = 0

    @property
    def size(self) -> int:
        """Bytes of the whole tensor."""
        return self._layout.size

    def add(self, layout: TensorLayout, offset: int, data: bytes) -> Raw | None:
        """Add the next part, whose `data` begins at byte `offset`. Return the whole tensor, uint8 in one dimension, after the last part,
        otherwise None.

        Raises InvalidReference for a part of another tensor, or a part that leaves a gap, comes twice or runs over the end."""
        if layout != self._layout:
            raise InvalidReference("a part of a tensor came before the tensor before it was whole")
        if offset != self._received:
            raise InvalidReference(f"the next part begins at byte {self._received}, not {offset}")
        if not data or offset + len(data) > self._layout.size:
            raise InvalidReference("a part is empty or runs over the end of its tensor")
        self._bytes[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
        self._received += len(data)
        return self._bytes if self._received == self._layout.size else None


def check_part(layout: TensorLayout, total_bytes: int, data: bytes) -> None:
    """Raise InvalidReference if a part by itself is wrong: too long, or its total differs from the size of the shape."""
    if total_bytes != layout.size:
        raise InvalidReference(f"the shape says {layout.size} bytes and the part says {total_bytes}")
    if len(data) > PART_BYTES:
        raise InvalidReference(f"a part has at most {PART_BYTES} bytes, this one has {len(data)}")
