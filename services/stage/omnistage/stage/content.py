"""The content of ports: chunks that come become the pieces that models take; rows, codes and sound that models make become outputs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from omnistage.models.interface import Array, Content, ElementType, Piece, PortSpec, TextPiece
from omnistage.stage.logic import Input, Start
from omnistage.stage.params import HISTORY
from omnistage.v1 import chunk_pb2, tensor_pb2
from omnistage.wire.chunks import Output
from omnistage.wire.errors import bad_request, protocol_error

_ELEMENT_TYPES = {
    ElementType.FLOAT32: tensor_pb2.ELEMENT_TYPE_FLOAT32,
    ElementType.FLOAT16: tensor_pb2.ELEMENT_TYPE_FLOAT16,
    ElementType.BFLOAT16: tensor_pb2.ELEMENT_TYPE_BFLOAT16,
    ElementType.INT64: tensor_pb2.ELEMENT_TYPE_INT64,
    ElementType.INT32: tensor_pb2.ELEMENT_TYPE_INT32,
    ElementType.INT16: tensor_pb2.ELEMENT_TYPE_INT16,
    ElementType.UINT8: tensor_pb2.ELEMENT_TYPE_UINT8,
    ElementType.BOOL: tensor_pb2.ELEMENT_TYPE_BOOL,
}


def element_type(port: PortSpec) -> tensor_pb2.ElementType:
    """The element type of a tensor port, as the contract names it."""
    return _ELEMENT_TYPES[port.element_type]


MAX_ROW_BYTES = 1 << 20
"""Largest number of bytes of rows in one chunk, except a single row that is longer. So no copy of many rows holds up the event loop."""

MAX_SOUND_BYTES = 256 << 10
"""Largest number of bytes of samples in one chunk; stated in chunk.proto."""

LOUDEST = 64.0
"""Largest sample in floating point, whose full scale is 1. Larger samples must be whole numbers that were not scaled."""


async def pieces(inputs: AsyncIterator[Input], ports: Sequence[PortSpec]) -> AsyncIterator[Piece]:
    """Yield the inputs as models take them. A piece without items says that its port has ended. Raises PROTOCOL for content that the port
    does not carry, BAD_REQUEST for samples that cannot be sound."""
    specs = {port.name: port for port in ports}
    async for item in inputs:
        yield Piece(item.port, item.first, item.last, _content(item, specs[item.port]))


def _content(item: Input, port: PortSpec) -> TextPiece | Array | bytes:
    """The content of an input in the form of Piece.content; see `pieces`."""
    match item.payload:
        case np.ndarray() as rows:
            return rows
        case chunk_pb2.TextChunk() as text:
            return TextPiece(text.text, tuple(text.token_ids))
        case chunk_pb2.CodeChunk() as codes:
            return _codes(codes, item.count, port)
        case chunk_pb2.AudioChunk() as audio:
            return _samples(audio, item.count, port)
        case chunk_pb2.ImageChunk() as image:
            return image.data.data
        case chunk_pb2.VideoChunk() as video:
            return video.data
        case chunk_pb2.MediaChunk() as media:
            return _bytes(media, item.count, port)
    return _empty_content(port)


def _empty_content(port: PortSpec) -> TextPiece | Array | bytes:
    """The empty content of a port, for an input without items."""
    match port.content:
        case Content.TENSOR:
            return np.empty((0, port.width), port.element_type.dtype)
        case Content.CODES:
            return np.empty((0, port.width), np.uint32)
        case Content.AUDIO:
            return np.empty((0, port.width), np.float32)
        case Content.TEXT:
            return TextPiece("", ())
    return b""


def _bytes(chunk: chunk_pb2.MediaChunk, count: int, port: PortSpec) -> bytes:
    data = chunk.data
    if len(data) != count:
        raise protocol_error(f"port {port.name!r}: {count} bytes were expected, these are {len(data)}", port=port.name)
    return data


def _codes(chunk: chunk_pb2.CodeChunk, count: int, port: PortSpec) -> NDArray[np.uint32]:
    """The codes of a chunk, [count, width]. Raises PROTOCOL."""
    codes = np.array(chunk.codes, np.uint32)
    if chunk.codebook_count != port.width or codes.size != count * port.width:
        raise protocol_error(f"port {port.name!r}: {count} frames of {port.width} codes were expected", port=port.name)
    return codes.reshape(count, port.width)


def _samples(chunk: chunk_pb2.AudioChunk, count: int, port: PortSpec) -> NDArray[np.float32]:
    """The samples of a chunk, [count, channels]; full scale is 1. Raises PROTOCOL or BAD_REQUEST."""
    is_integer = chunk.encoding == chunk_pb2.AUDIO_ENCODING_PCM16
    data = chunk.data
    is_known = is_integer or chunk.encoding == chunk_pb2.AUDIO_ENCODING_FLOAT32
    sample_bytes = 2 if is_integer else 4
    expected = (round(port.rate_hz), port.width, count * port.width * sample_bytes)
    if not is_known or (chunk.sample_rate_hz, chunk.channel_count, len(data)) != expected:
        raise protocol_error(
            f"port {port.name!r}: {count} samples of {port.width} channels at {port.rate_hz:g} Hz were expected", port=port.name
        )
    if is_integer:
        samples = np.frombuffer(data, "<i2").astype(np.float32) / np.float32(32768)
    else:
        samples = np.frombuffer(data, "<f4")
        loudest = np.abs(samples).max(initial=0)  # NaN if any sample is NaN.
        if not np.isfinite(loudest):
            raise bad_request(port.name, "some of its samples are no numbers")
        if loudest > LOUDEST:
            raise bad_request(port.name, f"a sample is {loudest:g}, and full scale is 1: divide all by 32768 if they were of 16 bits")
    return samples.reshape(count, port.width)


def row_outputs(port: PortSpec, rows: Array, *, last: bool) -> Iterator[Output]:
    """Rows [n, width] of a tensor port as outputs of at most 1 MiB. last: the port ends with them. Raises TypeError if a model makes other
    rows than its port says."""
    count = len(rows)
    if not count:
        if last:
            yield Output(port.name, 0, None, last=True)
        return
    if rows.ndim != 2 or rows.shape[1] != port.width or rows.dtype != port.element_type.dtype:
        expected = f"{port.element_type.value} [n, {port.width}]"
        raise TypeError(f"port {port.name!r} carries {expected}, the model made {rows.dtype} {list(rows.shape)}")
    max_rows = max(MAX_ROW_BYTES // (port.width * rows.itemsize), 1)
    for begin in range(0, count, max_rows):
        part = rows[begin : begin + max_rows]
        yield Output(port.name, len(part), part, last and begin + max_rows >= count, element_type(port))


MAX_CODES = 1 << 17
"""Largest number of codes in one chunk; a code takes up to five bytes."""


def codes_of(start: Start, port: PortSpec) -> NDArray[np.uint32]:
    """The frames of codes of a checkpoint port that the caller already has, [frames, width]. Raises BAD_REQUEST for frames that the port
    cannot carry."""
    history, width = start.history.get(port.name, chunk_pb2.Chunk()), port.width
    codes = np.array(history.codes.codes, np.uint32)
    if codes.size != history.count * width or (history.count and history.codes.codebook_count != width):
        raise bad_request(HISTORY, f"{history.count} frames of {width} codes were expected on port {port.name!r}")
    return codes.reshape(history.count, width)


def code_outputs(port: PortSpec, frames: Array) -> Iterator[Output]:
    """Frames [n, width] of a codes port, n at least 1, as outputs of at most MAX_CODES codes."""
    max_frames = MAX_CODES // port.width
    for begin in range(0, len(frames), max_frames):
        part = frames[begin : begin + max_frames]
        yield Output(port.name, len(part), chunk_pb2.CodeChunk(codes=part.ravel().tolist(), codebook_count=port.width))


def sound_outputs(
    port: PortSpec, samples: NDArray[np.float32], rate_hz: int, encoding: chunk_pb2.AudioEncoding, prebuffer_ms: int | None = None
) -> Iterator[Output]:
    """Samples [n, channels] as outputs of at most 256 KiB. prebuffer_ms: sent with the first output; None: nothing is sent."""
    channels = port.width
    max_samples = MAX_SOUND_BYTES // (channels * (2 if encoding == chunk_pb2.AUDIO_ENCODING_PCM16 else 4))
    for begin in range(0, len(samples), max_samples):
        part = samples[begin : begin + max_samples]
        audio = chunk_pb2.AudioChunk(
            data=encode(part, encoding),
            encoding=encoding,
            sample_rate_hz=rate_hz,
            channel_count=channels,
            prebuffer_ms=None if begin else prebuffer_ms,
        )
        yield Output(port.name, len(part), audio)


def encode(samples: NDArray[np.float32], encoding: chunk_pb2.AudioEncoding) -> bytes:
    """Samples [n, channels] in -1..1 as interleaved little-endian bytes."""
    if encoding == chunk_pb2.AUDIO_ENCODING_FLOAT32:
        return samples.astype("<f4").tobytes()
    return np.clip(np.rint(samples * 32768), -32768, 32767).astype("<i2").tobytes()
