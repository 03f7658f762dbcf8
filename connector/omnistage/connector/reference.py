"""The element type, shape and size of a Tensor message, checked once when the message arrives."""

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from omnistage.connector.errors import ConnectorError, InvalidReference
from omnistage.v1 import tensor_pb2

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
