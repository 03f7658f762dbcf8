"""Tensor messages: their element type, shape and size, checked once when they arrive, tensors inside messages, cut into parts of at most 1
MiB and put together again, and errors of the connector, most of them about a tensor that a peer names.

ConnectorError (ValueError)
    InvalidReference    the peer sent something that can never be right
        ForeignSegment  into memory that another user holds
    StaleReference      the reference is or was right; its memory has been reused since, or cannot be mapped now

No message here ever holds the name of a shared-memory segment: the text may travel to a client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from omnistage.v1 import tensor_pb2


class ConnectorError(ValueError):
    """Base of all errors of the connector; raised itself if this process misuses it."""


class InvalidReference(ConnectorError):
    """A reference, part or release breaks the contract. Maps to INVALID_ARGUMENT, reason PROTOCOL; sending it again cannot help."""


class ForeignSegment(InvalidReference):
    """A reference into memory that another user could take away under a reader: it is not mapped."""


class StaleReference(ConnectorError):
    """A reference cannot be used any more: its block was freed, its producer is gone, or its reader has no descriptor or address space left
    to map it. Maps to ABORTED, reason STALE_REFERENCE; go on inline."""


class ArenaFull(Exception):
    """No block of the wanted size is free and the arena may not or cannot grow. Internal: a sender goes inline instead."""


Array: TypeAlias = npt.NDArray[np.generic]
Raw: TypeAlias = npt.NDArray[np.uint8]

MAX_RANK = 8
"""Largest number of dimensions of a tensor."""

_MAX_BYTES = (1 << 63) - 1  # numpy counts bytes in a signed 64-bit integer

# NumPy has no bfloat16; its bit patterns are held as unsigned 16-bit integers (torch: `torch.from_numpy(a).view(torch.bfloat16)`).
_DTYPES: dict[tensor_pb2.ElementType, np.dtype[np.generic]] = {
    tensor_pb2.ELEMENT_TYPE_FLOAT32: np.dtype("<f4"),
    tensor_pb2.ELEMENT_TYPE_FLOAT16: np.dtype("<f2"),
    tensor_pb2.ELEMENT_TYPE_BFLOAT16: np.dtype("<u2"),
    tensor_pb2.ELEMENT_TYPE_INT64: np.dtype("<i8"),
    tensor_pb2.ELEMENT_TYPE_INT32: np.dtype("<i4"),
    tensor_pb2.ELEMENT_TYPE_INT16: np.dtype("<i2"),
    tensor_pb2.ELEMENT_TYPE_UINT8: np.dtype("u1"),
    tensor_pb2.ELEMENT_TYPE_BOOL: np.dtype("?"),
}
_ELEMENT_TYPES = {(dtype.kind, dtype.itemsize): kind for kind, dtype in _DTYPES.items() if kind != tensor_pb2.ELEMENT_TYPE_BFLOAT16}


class TensorLayout(NamedTuple):
    """Element type, shape and size of a dense, row-major, little-endian tensor."""

    element_type: tensor_pb2.ElementType
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    size: int
    """Bytes: product(shape) * itemsize."""


def layout_of(array: Array, element_type: tensor_pb2.ElementType | None = None) -> TensorLayout:
    """The layout in which `array` is sent; `element_type` is needed only for uint16 arrays, which are sent as BFLOAT16.

    Raises ConnectorError for a dtype that the contract does not know or more than 8 dimensions.
    """
    if array.ndim > MAX_RANK:
        raise ConnectorError(f"a tensor has at most {MAX_RANK} dimensions, this one has {array.ndim}: reshape it")
    kind = (array.dtype.kind, array.dtype.itemsize)
    if element_type is None:
        element = _ELEMENT_TYPES.get(kind)
        if element is None:
            raise ConnectorError(f"dtype {array.dtype} cannot be sent: convert it, or send uint16 bits with element_type BFLOAT16")
        element_type = element
    dtype = _DTYPES.get(element_type)
    if dtype is None or kind != (dtype.kind, dtype.itemsize):
        raise ConnectorError(f"dtype {array.dtype} cannot be sent as element type {element_type}")
    return TensorLayout(element_type, array.shape, dtype, array.nbytes)


def header_of(layout: TensorLayout) -> tensor_pb2.Tensor:
    """A Tensor message that says the element type and the shape, and does not yet say where the bytes are."""
    return tensor_pb2.Tensor(element_type=layout.element_type, shape=layout.shape)


def parse_layout(tensor: tensor_pb2.Tensor) -> TensorLayout:
    """Read element type and shape of a message from a peer. Raises InvalidReference."""
    dtype = _DTYPES.get(tensor.element_type)
    if dtype is None:
        raise InvalidReference(f"unknown element type {tensor.element_type}")
    shape = tuple(tensor.shape)
    if len(shape) > MAX_RANK:
        raise InvalidReference(f"a tensor has at most {MAX_RANK} dimensions, this one has {len(shape)}")
    size = extent = dtype.itemsize
    for dimension in shape:
        size *= dimension
        extent *= dimension or 1  # numpy refuses a huge dimension even if another one is 0
    if extent > _MAX_BYTES:
        raise InvalidReference("the shape names more bytes than can be addressed")
    return TensorLayout(tensor.element_type, shape, dtype, size)


def view_bytes(raw: Raw, layout: TensorLayout) -> Array:
    """View `layout.size` bytes (uint8, one dimension) as the tensor that they hold: without a copy, always read-only.

    Raises InvalidReference for a BOOL tensor with a byte other than 0 and 1, which NumPy would accept unchecked.
    """
    if layout.element_type == tensor_pb2.ELEMENT_TYPE_BOOL and raw.size and int(raw.max()) > 1:
        raise InvalidReference("a BOOL tensor has a byte other than 0 and 1")
    array = raw.view(layout.dtype).reshape(layout.shape)
    array.flags.writeable = False
    return array


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
