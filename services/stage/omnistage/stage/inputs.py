"""The input side of a session: checks every chunk, holds a bounded queue, and gives credit and memory back as the stage takes chunks. Rows
of a neighbour that computes in another floating type are converted."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from omnistage.connector.tensors import InvalidReference, StaleReference
from omnistage.connector.transport import Receiver, TensorView
from omnistage.models.interface import Array
from omnistage.stage.logic import Input, InputPayload
from omnistage.v1 import chunk_pb2, stage_pb2, tensor_pb2
from omnistage.wire.chunks import PortReader, converts
from omnistage.wire.errors import StageError, protocol_error

_DTYPES = {tensor_pb2.ELEMENT_TYPE_FLOAT32: np.float32, tensor_pb2.ELEMENT_TYPE_FLOAT16: np.float16}


def convert_rows(rows: Array, source: tensor_pb2.ElementType, target: tensor_pb2.ElementType) -> Array:
    """The rows in the wanted type, rounded to the nearest; the same array if it has that type already. A bfloat16 array is uint16 bits."""
    if source == target:
        return rows
    values = _from_bfloat16(rows) if source == tensor_pb2.ELEMENT_TYPE_BFLOAT16 else rows.astype(np.float32)
    if target == tensor_pb2.ELEMENT_TYPE_BFLOAT16:
        return _to_bfloat16(values)
    with np.errstate(over="ignore"):  # A value too large for float16 becomes infinite.
        return values.astype(_DTYPES[target])


def _from_bfloat16(bits: Array) -> NDArray[np.float32]:
    """The values of bfloat16 numbers, which come as uint16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of the values as bfloat16, rounded to the nearest, ties to even; NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)  # 0x7FC0 is the NaN of bfloat16.


WINDOW = 32
"""Chunks of one port that may be on their way to a stage or wait in its queue."""

MEDIA_WINDOW = 8
"""The same for a port of encoded media: a chunk may have 2 MiB, and a model may have several such ports."""

CODES_WINDOW = 2
"""The same for a port of codes: Code2Wav needs the codes of its next window only, and the Talker computes at the same time."""

_WINDOWS = {stage_pb2.PAYLOAD_MEDIA: MEDIA_WINDOW, stage_pb2.PAYLOAD_CODES: CODES_WINDOW}

_PAYLOAD_FIELD = {
    stage_pb2.PAYLOAD_TEXT: "text",
    stage_pb2.PAYLOAD_CODES: "codes",
    stage_pb2.PAYLOAD_AUDIO: "audio",
    stage_pb2.PAYLOAD_IMAGE: "image",
    stage_pb2.PAYLOAD_VIDEO: "video",
    stage_pb2.PAYLOAD_TENSOR: "tensor",
    stage_pb2.PAYLOAD_PROGRESS: "progress",
    stage_pb2.PAYLOAD_MEDIA: "media",
    stage_pb2.PAYLOAD_ALIGNMENT: "alignment",
}

Reply = Callable[[stage_pb2.RunResponse], Awaitable[None]]


class Inputs:
    """The inputs of one session as an async iterator, in the order in which they came, until every port has ended."""

    def __init__(self, ports: Sequence[stage_pb2.Port], receiver: Receiver, reply: Reply, window: int = WINDOW) -> None:
        """ports: the input ports of the stage. receiver: reads tensors. reply: sends a message to the caller. window: see WINDOW."""
        self._specs = {port.name: port for port in ports}
        self._windows = {port.name: min(window, _WINDOWS.get(port.payload, window)) for port in ports}
        self._readers = {port: PortReader(port, granted=granted) for port, granted in self._windows.items()}
        self._taken_chunks = dict.fromkeys(self._readers, 0)  # chunks that the stage has taken, by port
        self._receiver = receiver
        self._reply = reply
        self._queue: deque[tuple[chunk_pb2.Chunk, TensorView | None]] = deque()
        self._arrived = asyncio.Event()
        self._view: TensorView | None = None  # the tensor of the last returned input
        self._half_closed = False
        self._interrupted = False
        self._closed = False
        self._needs: Mapping[str, int] = {}  # see `go_on_from`
        self._began: set[str] = set()  # replayed ports on which a chunk has come
        self.items = dict.fromkeys(self._readers, 0)
        """Items that the stage has taken, by port."""

    def credits(self) -> list[stage_pb2.Credit]:
        """The first credit of every port, for Opened."""
        return [stage_pb2.Credit(port=port, total=reader.granted) for port, reader in self._readers.items()]

    def go_on_from(self, needs: Mapping[str, int]) -> None:
        """Call it if the session began on another replica, so that the caller sends its input once more. needs: number of the first item
        that this replica needs, by port; earlier items are cut off."""
        self._needs = dict.fromkeys(self._readers, 0) | dict(needs)

    def put(self, chunk: chunk_pb2.Chunk) -> None:
        """Check a chunk of the caller and queue it. Raises PROTOCOL, CREDIT_EXCEEDED, BAD_REQUEST or STALE_REFERENCE for a bad chunk. After
        `close` chunks are dropped unseen, because the caller may not have read Ended yet."""
        if self._closed:
            return
        reader = self._readers.get(chunk.port)
        if reader is None:
            raise protocol_error(f"no input port {chunk.port[:32]!r}; this stage takes {sorted(self._readers)}")
        if chunk.port in self._needs and chunk.port not in self._began:
            self._begin(reader, chunk)
        reader.accept(chunk)
        expected = _PAYLOAD_FIELD[self._specs[chunk.port].payload]
        field = chunk.WhichOneof("payload")
        if field not in (None, expected):
            raise protocol_error(f"port {chunk.port!r} carries {expected}, not {field}", port=chunk.port)
        self._queue.append((chunk, self._view_of(chunk) if field == "tensor" else None))
        self._arrived.set()

    def _begin(self, reader: PortReader, chunk: chunk_pb2.Chunk) -> None:
        """Begin a port whose input is replayed: its first chunk must hold the first needed item. Otherwise `accept` refuses the chunk.
        On a port with REPLAY_WINDOW the input may begin later, because an earlier replica may have sent Keep, which lets the caller forget
        items."""
        may_be_later = self._specs[chunk.port].replay == stage_pb2.REPLAY_WINDOW
        if chunk.first <= self._needs[chunk.port] or may_be_later:
            reader.first = chunk.first
        self._began.add(chunk.port)

    def half_close(self) -> None:
        """Note that the caller sends nothing more. The iteration raises HALF_CLOSED if it would wait for a port that has not ended."""
        self._half_closed = True
        self._arrived.set()

    def interrupt(self) -> None:
        """Note that the caller wants no more output: the iteration ends as if every port had ended after the inputs that were returned so
        far; waiting inputs are dropped."""
        self._interrupted = True
        self._drop()
        self._arrived.set()

    def __aiter__(self) -> Inputs:
        return self

    async def __anext__(self) -> Input:
        """The next whole input. The memory of the previous input's tensor is given back. Raises HALF_CLOSED."""
        while True:
            self._release_view()
            await self._wait_for_chunk()
            chunk, view = self._queue.popleft()
            await self._took(chunk)
            if chunk.count == 0 and not chunk.last and view is None:
                continue  # Part of a tensor whose other parts have not come yet.
            self._view = view
            piece = Input(chunk.port, chunk.first, chunk.count, chunk.last, self._payload(chunk, view))
            if chunk.port in self._needs:
                piece = _trim(piece, self._needs[chunk.port])
            if piece.count == 0 and chunk.count and not chunk.last:
                continue  # All its items were cut off.
            self.items[chunk.port] += piece.count
            return piece

    async def _wait_for_chunk(self) -> None:
        """Wait until a chunk is in the queue. Raises StopAsyncIteration if none can come any more, HALF_CLOSED."""
        while not self._queue:
            unended_ports = sorted(port for port, reader in self._readers.items() if not reader.is_ended)
            if self._interrupted or not unended_ports:
                await self.give_memory_back()
                raise StopAsyncIteration
            if self._half_closed:
                raise StageError("HALF_CLOSED", f"the caller half-closed before input {unended_ports} ended")
            # Cleared before the write below: an input that arrives during the write must wake this wait.
            self._arrived.clear()
            await self.give_memory_back()
            await self._arrived.wait()

    def close(self) -> None:
        """Give the memory of all tensors back: the session does not read them any more."""
        self._closed = True
        self._release_view()
        self._drop()

    def _drop(self) -> None:
        """Drop the waiting inputs, and give their memory back."""
        for _, view in self._queue:
            if view is not None:
                view.release()
        self._queue.clear()

    async def _took(self, chunk: chunk_pb2.Chunk) -> None:
        """Count a chunk that the stage took from the queue. Grant more credit once half of the window was taken, so that one message grants
        many chunks."""
        port = chunk.port
        reader = self._readers[port]
        self._taken_chunks[port] += 1
        window = self._windows[port]
        if reader.is_ended or reader.granted - self._taken_chunks[port] > window // 2:
            return
        reader.granted = self._taken_chunks[port] + window
        await self.give_memory_back()
        await self._reply(stage_pb2.RunResponse(credit=stage_pb2.Credit(port=port, total=reader.granted)))

    async def give_memory_back(self) -> None:
        """Tell the caller which memory is free again, if any is."""
        release = self._receiver.take_release()
        if release is not None:
            await self._reply(stage_pb2.RunResponse(release=release))

    def _release_view(self) -> None:
        if self._view is not None:
            self._view.release()
            self._view = None

    def _payload(self, chunk: chunk_pb2.Chunk, view: TensorView | None) -> InputPayload | None:
        """The content of a chunk; rows are converted to the type of the port."""
        if view is None:
            return _message(chunk)
        return convert_rows(view.array, view.element_type, self._specs[chunk.port].element_type)

    def _view_of(self, chunk: chunk_pb2.Chunk) -> TensorView | None:
        """The checked tensor of a chunk; None while parts of it are still to come. Raises PROTOCOL or STALE_REFERENCE."""
        spec = self._specs[chunk.port]
        try:
            view = self._receiver.unpack(chunk.tensor, port=chunk.port)
        except InvalidReference as error:
            raise protocol_error(f"port {chunk.port!r}: {error}", port=chunk.port) from None
        except StaleReference as error:
            raise StageError("STALE_REFERENCE", f"port {chunk.port!r}: {error}", metadata={"port": chunk.port}) from None
        if view is None:
            return None
        shape = view.array.shape
        if not converts(view.element_type, spec.element_type) or shape != (chunk.count, spec.width):
            view.release()
            expected, got = (
                tensor_pb2.ElementType.Name(kind).removeprefix("ELEMENT_TYPE_") for kind in (spec.element_type, view.element_type)
            )
            raise protocol_error(
                f"port {chunk.port!r}: {expected} [{chunk.count}, {spec.width}] was expected, got {got} {list(shape)}", port=chunk.port
            )
        return view


def _trim(piece: Input, first_needed: int) -> Input:
    """The input without the items before `first_needed`. Raises PROTOCOL for text, which cannot be cut between its tokens."""
    skipped = min(max(first_needed - piece.first, 0), piece.count)
    if not skipped:
        return piece
    remaining = piece.count - skipped
    payload = piece.payload
    match payload:
        case chunk_pb2.CodeChunk():
            width = payload.codebook_count
            payload = chunk_pb2.CodeChunk(codes=payload.codes[skipped * width :], codebook_count=width) if remaining else None
        case np.ndarray():
            payload = payload[skipped:] if remaining else None
        case _:
            raise protocol_error(f"port {piece.port!r} cannot be cut at item {first_needed}", port=piece.port)
    return Input(piece.port, piece.first + skipped, remaining, piece.last, payload)


def _message(chunk: chunk_pb2.Chunk) -> InputPayload | None:
    """The payload of a chunk that is not a tensor: text, codes, sound or media; None if the chunk only ends its port."""
    field = chunk.WhichOneof("payload")
    message: InputPayload | None = None if field is None else getattr(chunk, field)
    return message
