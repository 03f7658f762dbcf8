"""The state of an answer at the client: how far each port is, and all text, with which another router can go on with the answer; and the
parts of tensors, which are checked and put together until they are whole arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omnistage.client.errors import ProtocolError
from omnistage.v1 import chunk_pb2, omni_pb2, tensor_pb2


@dataclass(slots=True)
class _Port:
    """How far one port is. seq: number of its next chunk. item: position of its next item. is_ended: whether its last chunk has come."""

    seq: int = 0
    item: int = 0
    is_ended: bool = False

    def advance(self, chunk: chunk_pb2.Chunk) -> None:
        """Count a chunk. Raises ProtocolError if it leaves a gap, repeats items, or comes after the last chunk."""
        if self.is_ended:
            raise ProtocolError(f"port {chunk.port}: a chunk came after the last")
        if chunk.seq != self.seq:
            raise ProtocolError(f"port {chunk.port}: chunk {chunk.seq} came, {self.seq} is next")
        if chunk.first != self.item:
            kind = "gap" if chunk.first > self.item else "repeat"
            raise ProtocolError(f"port {chunk.port}: {kind}, position {chunk.first} came, {self.item} is next")
        self.seq += 1
        self.item += chunk.count
        self.is_ended = chunk.last


class Received:
    """The state of one answer, whose connections may have changed."""

    def __init__(self) -> None:
        self.started: omni_pb2.Started | None = None
        """The first message of the latest connection."""
        self.finish_reason = chunk_pb2.FINISH_REASON_UNSPECIFIED
        """Why the text ended."""
        self._ports: dict[str, _Port] = {}
        self._text_port = ""
        """The name of the port on which text came; empty while none has come."""
        # Pieces in lists: a whole answer may be long, and adding each piece to a message would copy it again and again.
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []

    @property
    def open_ports(self) -> list[str]:
        """Ports that have begun and not ended."""
        return sorted(name for name, port in self._ports.items() if not port.is_ended)

    @property
    def tokens(self) -> int | None:
        """Number of tokens of the text; None if the request asked for no text."""
        text = self._ports.get(self._text_port)
        return None if text is None else text.item

    def has_ended(self, port: str) -> bool:
        return port in self._ports and self._ports[port].is_ended

    def has_items(self, port: str) -> bool:
        return port in self._ports and self._ports[port].item > 0

    def start(self, started: omni_pb2.Started) -> None:
        """Take the first message of a connection. Raises ProtocolError if it belongs to another answer than before."""
        if self.started is not None and (started.seed, started.model) != (self.started.seed, self.started.model):
            expected, answered = (f"seed {one.seed} of {one.model}" for one in (self.started, started))
            raise ProtocolError(f"{expected} was to go on, {answered} answered")
        self.started = started

    def take(self, chunk: chunk_pb2.Chunk) -> None:
        """Take the next chunk of a port. Raises ProtocolError if it is not the next one."""
        self._ports.setdefault(chunk.port, _Port()).advance(chunk)
        if chunk.HasField("text"):
            self._text_port = chunk.port
            self._texts.append(chunk.text.text)
            self._token_ids.extend(chunk.text.token_ids)
            self._logprobs.extend(chunk.text.logprobs)
            self.finish_reason = chunk.text.finish_reason

    def request(self, whole_request: omni_pb2.GenerateRequest) -> omni_pb2.GenerateRequest:
        """The request for the next connection: `whole_request` itself if no answer has started, else a request for the rest of the
        answer."""
        if self.started is None:
            return whole_request
        request = omni_pb2.GenerateRequest()
        request.CopyFrom(whole_request)
        request.model = self.started.model
        request.seed = self.started.seed
        request.revisions[:] = self.started.revisions
        for name, port in self._ports.items():
            request.resume.positions.add(port=name, seq=port.seq, first=port.item, ended=port.is_ended)
        text = self._ports.get(self._text_port)
        if text is not None:
            # One chunk has the whole text: a router does not need to know how it was cut into pieces.
            history = request.resume.history.add(port=self._text_port, count=text.item, last=text.is_ended)
            history.text.text = "".join(self._texts)
            history.text.token_ids.extend(self._token_ids)
            history.text.logprobs.extend(self._logprobs)
            history.text.finish_reason = self.finish_reason
        request.resume.SetInParent()  # even if no chunk has come: the answer has started, so it is resumed
        return request


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
        self._parts: dict[str, bytearray] = {}
        """The parts of a tensor that is not whole yet, by port."""
        self._cut_ports: set[str] = set()
        """Ports on which a server was lost in the middle of a tensor."""
        self._kinds: dict[str, tuple[int, int]] = {}
        """Element type and width of earlier tensors on each port."""

    @property
    def unfinished(self) -> list[str]:
        """Names of the ports with a tensor that is not whole."""
        return sorted(self._parts)

    def note_loss(self) -> None:
        """Note the loss of a server: the next server may send the unfinished tensors from their first part again."""
        self._cut_ports |= self._parts.keys()

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
        parts = self._parts.pop(port, bytearray())
        if not part.offset and port in self._cut_ports:
            parts = bytearray()  # The next server sends the tensor again from its first part.
        self._cut_ports.discard(port)
        data = part.data  # in a variable, because each access copies all bytes
        if part.offset != len(parts) or part.offset + len(data) > part.total_bytes:
            raise ProtocolError(f"port {port}: a part at byte {part.offset} of {part.total_bytes}, {len(parts)} is next")
        parts += data
        is_whole = len(parts) == part.total_bytes
        if chunk.count != (shape[0] if is_whole else 0):  # The last part alone counts the rows.
            raise ProtocolError(f"port {port}: {shape[0]} rows are not {chunk.count}")
        if not is_whole:
            self._parts[port] = parts
            return None
        rows: NDArray[Any] = np.frombuffer(parts, dtype).reshape(shape)
        return _widen(rows) if tensor.element_type == tensor_pb2.ELEMENT_TYPE_BFLOAT16 else rows


def _widen(bits: NDArray[Any]) -> NDArray[np.float32]:
    """float32 with the values of bfloat16 numbers, whose bits come as uint16."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
