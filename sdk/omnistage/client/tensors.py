"""Puts the parts of tensors of rows together, checks shapes and sizes, and makes arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omnistage.client.errors import ProtocolError
from omnistage.v1 import chunk_pb2, tensor_pb2

MAX_TENSOR_BYTES = 256 * 1024 * 1024
"""The most bytes of one chunk, in all its parts together; our stages put 1 MiB, or one row, into a chunk."""

DTYPES: Mapping[int, np.dtype[Any]] = {
    tensor_pb2.ELEMENT_TYPE_FLOAT32: np.dtype("<f4"),
    tensor_pb2.ELEMENT_TYPE_FLOAT16: np.dtype("<f2"),
    tensor_pb2.ELEMENT_TYPE_BFLOAT16: np.dtype("<u2"),
    tensor_pb2.ELEMENT_TYPE_INT64: np.dtype("<i8"),
    tensor_pb2.ELEMENT_TYPE_INT32: np.dtype("<i4"),
    tensor_pb2.ELEMENT_TYPE_INT16: np.dtype("<i2"),
    tensor_pb2.ELEMENT_TYPE_UINT8: np.dtype("u1"),
    tensor_pb2.ELEMENT_TYPE_BOOL: np.dtype("?"),
}
"""The element types in a message, as in connector/tensors.py, which a client does not import. NumPy has no bfloat16, so its bits are
read as integers."""


class Tensors:
    """The rows of all tensor ports of one answer."""

    def __init__(self) -> None:
        self._begun: dict[str, bytearray] = {}
        """The parts of a tensor that is not whole yet, by port."""
        self._cut: set[str] = set()
        """Ports on which a server was lost in the middle of a tensor."""
        self._kinds: dict[str, tuple[int, int]] = {}
        """Element type and width of earlier tensors on each port."""

    @property
    def unfinished(self) -> list[str]:
        """Names of the ports with a tensor that is not whole."""
        return sorted(self._begun)

    def lost(self) -> None:
        """Note the loss of a server: the next server may send the unfinished tensors from their first part again."""
        self._cut |= self._begun.keys()

    def take(self, chunk: chunk_pb2.Chunk) -> NDArray[Any] | None:
        """The rows of a chunk, [count, width]; None until all its parts have come. bfloat16 becomes float32, which has all values of
        bfloat16. Raises ProtocolError."""
        port, tensor = chunk.port, chunk.tensor
        if tensor.WhichOneof("place") != "inline":
            raise ProtocolError(f"port {port}: a tensor outside of its message, where a client cannot read it")
        dtype, shape, part = DTYPES.get(tensor.element_type), tuple(tensor.shape), tensor.inline
        if dtype is None or len(shape) != 2:
            raise ProtocolError(f"port {port}: {list(shape)} elements of type {tensor.element_type} are no rows")
        kind = (tensor.element_type, shape[1])
        if self._kinds.setdefault(port, kind) != kind:
            raise ProtocolError(f"port {port}: rows of another type or width than before")
        if part.total_bytes != math.prod(shape) * dtype.itemsize or part.total_bytes > MAX_TENSOR_BYTES:
            raise ProtocolError(f"port {port}: {part.total_bytes} bytes are not {shape[0]} rows of {shape[1]}, or too many")
        parts = self._begun.pop(port, bytearray())
        if not part.offset and port in self._cut:
            parts = bytearray()
        self._cut.discard(port)
        data = part.data  # in a variable, because each access copies all bytes
        if part.offset != len(parts) or part.offset + len(data) > part.total_bytes:
            raise ProtocolError(f"port {port}: a part at byte {part.offset} of {part.total_bytes}, {len(parts)} is next")
        parts += data
        is_whole = len(parts) == part.total_bytes
        if chunk.count != (shape[0] if is_whole else 0):
            raise ProtocolError(f"port {port}: {shape[0]} rows are not {chunk.count}")
        if not is_whole:
            self._begun[port] = parts
            return None
        rows: NDArray[Any] = np.frombuffer(parts, dtype).reshape(shape)
        return _widen(rows) if tensor.element_type == tensor_pb2.ELEMENT_TYPE_BFLOAT16 else rows


def _widen(bits: NDArray[Any]) -> NDArray[np.float32]:
    """float32 with the values of bfloat16 numbers, whose bits come as uint16."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
