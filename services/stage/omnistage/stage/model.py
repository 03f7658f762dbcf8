"""A model as the logic of a stage: what the four kinds of stages share, and the start of a server of a kind.

A model's own description (ModelInfo) becomes the answer of Describe. Parameters that more than one kind has are checked here; their ranges
are those of stage.proto. Chunks of every kind of input port become the pieces that models take, and the rows, codes and sound that models
make become outputs."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import structlog
from numpy.typing import NDArray

from omnistage.host.watchdog import Watched
from omnistage.models.checkpoint.files import say_offline
from omnistage.models.conversation import Media, Streamed
from omnistage.models.interface import (
    Array,
    BadRequest,
    Content,
    ElementType,
    Failed,
    Full,
    Load,
    Model,
    ModelInfo,
    Piece,
    PortSpec,
    Sampling,
    TextPiece,
)
from omnistage.models.options import LoadOptions
from omnistage.models.registry import load, loading_texts
from omnistage.models.reports import LoadError
from omnistage.stage.logic import Input, Start, Work
from omnistage.stage.server import main
from omnistage.stage.settings import StageSettings
from omnistage.v1 import chunk_pb2, stage_pb2, tensor_pb2
from omnistage.wire.chunks import Output
from omnistage.wire.errors import StageError, protocol_error
from omnistage.wire.errors import bad_request as bad_request
from omnistage.wire.limits import MAX_LOGIT_BIASES
from omnistage.wire.limits import MAX_TOP_LOGPROBS as MAX_TOP_LOGPROBS
from omnistage.wire.proto_values import kind_name

log = structlog.get_logger(__name__)

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


def describe(kind: stage_pb2.StageKind, info: ModelInfo) -> stage_pb2.DescribeResponse:
    """The answer of Describe for a model that is served as a stage of this kind."""
    return stage_pb2.DescribeResponse(
        kind=kind,
        model=info.name,
        revision=info.revision,
        accepts=[_port(port, is_input=True) for port in info.accepts],
        produces=[_port(port, is_input=False) for port in info.produces],
        max_sessions=info.max_sessions,
        voices=info.voices,
        inputs=info.inputs,
        constraints=info.constraints,
    )


def _port(port: PortSpec, *, is_input: bool) -> stage_pb2.Port:
    """A port of a model as the contract describes it."""
    is_tensor = port.content is Content.TENSOR
    replay = stage_pb2.REPLAY_WINDOW if port.window else stage_pb2.REPLAY_ALL
    return stage_pb2.Port(
        name=port.name,
        payload=f"PAYLOAD_{port.content.name}",
        rate_millihertz=round(port.rate_hz * 1000),
        compact=port.compact,
        replay=replay if is_input else stage_pb2.REPLAY_UNSPECIFIED,
        element_type=element_type(port) if is_tensor else tensor_pb2.ELEMENT_TYPE_UNSPECIFIED,
        width=port.width,
    )


def element_type(port: PortSpec) -> tensor_pb2.ElementType:
    """The element type of a tensor port, as the contract names it."""
    return _ELEMENT_TYPES[port.element_type]


POSITIONS = "resume.positions"
HISTORY = "resume.history"

MAX_LOGIT_BIAS = 100.0

_COLOUR = re.compile(r"#[0-9a-fA-F]{6}")
_CODECS = re.compile(r'\s*codecs\s*=\s*("[a-z0-9., -]{1,64}"|[a-z0-9.-]{1,64})\s*')
_MEDIA_TYPE = re.compile(r"(image|audio|video)/[a-z0-9][a-z0-9.+-]{0,63}")


@contextmanager
def refusals() -> Iterator[None]:
    """Turn the models' own exceptions into stage errors with the models' words: a request that the model cannot do is BAD_REQUEST, one that
    it cannot do now is OVERLOADED, and a result that its weights cannot make is INTERNAL."""
    try:
        yield
    except BadRequest as refusal:
        raise bad_request(refusal.field, refusal.description, **refusal.place) from None
    except Full as error:
        raise StageError("OVERLOADED", f"{error}; try again") from None
    except Failed as failure:
        log.warning("model.failed", message=str(failure))
        raise StageError("", str(failure)) from None


def media_of(media: stage_pb2.Media, field: str) -> Media:
    """A picture, sound or film as models take it. field: its path in the request. Raises BAD_REQUEST for media without a type or bytes; the
    model finds out whether it can read them."""
    media_type = media_type_of(media.media_type, field, "image/png")
    data = media.data
    if not data:
        raise bad_request(f"{field}.data", "is empty")
    return Media(media_type, data, media.use_audio, _background_of(media.background, media_type, field))


def streamed_of(part: stage_pb2.Part, field: str) -> Streamed:
    """As `media_of`, for media that the client streams on a port, also for live sound, which has no type."""
    media_type = media_type_of(part.media_type, field, "video/mp4") if part.media_type else ""
    return Streamed(part.port, media_type, part.use_audio, part.total_bytes, _background_of(part.background, media_type, field))


def _background_of(text: str, media_type: str, field: str) -> tuple[int, int, int] | None:
    """The colour `text`, #rrggbb, as red, green and blue, 0 to 255; None: no colour is named. Raises BAD_REQUEST."""
    if not text:
        return None
    if not media_type.startswith(("image/", "video/")):
        raise bad_request(f"{field}.background", "is for pictures and films: leave it out")
    if _COLOUR.fullmatch(text) is None:
        raise bad_request(f"{field}.background", "must be a colour as #rrggbb, such as #ffffff for white")
    red, green, blue = bytes.fromhex(text[1:])
    return red, green, blue


def media_type_of(text: str, field: str, example: str) -> str:
    """Check a media type and return it in lower case: its case means nothing. example: a valid type, for the error. Raises
    BAD_REQUEST."""
    if _MEDIA_TYPE.fullmatch(text.lower()) is None:
        raise bad_request(f"{field}.media_type", f"must be image/..., audio/... or video/..., such as {example}")
    return text.lower()


def output_type_of(text: str, field: str, example: str) -> str:
    """As `media_type_of`, for the media type of the wanted output. It may also name codecs: video/mp4; codecs="avc1". example: a valid
    type; words after a comma are for the error of a bad type only."""
    plain, semicolon, codecs = text.lower().partition(";")
    if semicolon and not _CODECS.fullmatch(codecs):
        raise bad_request(
            f"{field}.media_type",
            f'may name codecs behind it, and nothing else, such as {example.split(",")[0]} or video/mp4; codecs="avc1"',
        )
    return media_type_of(plain.strip(), field, example) + semicolon + codecs


def sampling_of(params: stage_pb2.Sampling, field: str) -> Sampling:
    """Sampling parameters as models take them. Raises BAD_REQUEST for a value out of range."""
    _check_sampling(params, field)
    return Sampling(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p if params.HasField("top_p") else 1.0,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty if params.HasField("repetition_penalty") else 1.0,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=dict(params.logit_bias),
    )


def _check_sampling(sampling: stage_pb2.Sampling, field: str) -> None:
    """Raises BAD_REQUEST for a value out of range; NaN is in no range."""
    _in_range(sampling.temperature, 0, 2, f"{field}.temperature")
    _in_range(sampling.presence_penalty, -2, 2, f"{field}.presence_penalty")
    _in_range(sampling.frequency_penalty, -2, 2, f"{field}.frequency_penalty")
    if not 0 <= sampling.min_p < 1:
        raise bad_request(f"{field}.min_p", "must be at least 0 and below 1")
    if sampling.HasField("top_p") and not 0 < sampling.top_p <= 1:
        raise bad_request(f"{field}.top_p", "must be above 0 and at most 1")
    if sampling.HasField("repetition_penalty") and not 0 < sampling.repetition_penalty <= 100:
        raise bad_request(f"{field}.repetition_penalty", "must be above 0 and at most 100")
    if len(sampling.logit_bias) > MAX_LOGIT_BIASES:
        raise bad_request(f"{field}.logit_bias", f"at most {MAX_LOGIT_BIASES} tokens")
    for bias in sampling.logit_bias.values():
        _in_range(bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS, f"{field}.logit_bias")


def check_kind(params: stage_pb2.StageParams, kind: str) -> None:
    """Raises BAD_REQUEST for params of another kind of stage; no params at all mean the defaults."""
    sent_kind = params.WhichOneof("kind")
    if sent_kind not in (None, kind):
        raise StageError(
            "BAD_REQUEST", f"open.params: this is a {kind}, the params are for a {sent_kind}", metadata={"field": "open.params"}
        )


def _in_range(value: float, low: float, high: float, field: str) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise bad_request(field, f"must be from {low} to {high}")


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


M = TypeVar("M", bound=Model)


class ModelStage(ABC, Generic[M]):
    """A model as a StageLogic. The subclass for each kind of stage adds `prepare`."""

    kind: ClassVar[stage_pb2.StageKind]

    def __init__(self, model: M) -> None:
        self._model = model
        self.description = describe(self.kind, model.info)
        self.description.settings.update(model.info.settings)

    @property
    def threads(self) -> Sequence[Watched]:
        return self._model.threads

    def load(self) -> Load:
        return self._model.load()

    @abstractmethod
    async def prepare(self, request: stage_pb2.Open, start: Start) -> Work:
        """See StageLogic.prepare."""

    def _drew(self, temperature: float) -> bool:
        """Whether another seed could give another output. temperature: as requested; 0 if nothing is sampled."""
        draws = self._model.info.draws
        return temperature > 0 if draws is None else draws

    async def warm_up(self) -> None:
        """Warm the model up, and add the settings that it measured to the description."""
        await self._model.warm_up()
        settings = self.description.settings
        measured = {name: value for name, value in self._model.info.settings.items() if settings.get(name) != value}
        if measured:
            settings.update(measured)
            log.info("model.measured", model=self._model.info.name, **measured)

    async def close(self) -> None:
        await self._model.close()


def serve_kind(stage: type[ModelStage[Any]]) -> int:
    """`python -m omnistage.<kind>`: serve a model of the family that the settings name. Returns the exit code."""
    kind = kind_name(stage.kind)

    def load_logic(settings: StageSettings) -> ModelStage[Any]:
        options = LoadOptions.of(settings)
        logic = stage(load(settings.family, kind, options))
        for name, value in loading_texts(settings.family, kind, options).items():
            if name not in logic.description.settings:  # The model itself knows these better.
                logic.description.settings[name] = value
        return logic

    say_offline()
    return main(kind, load_logic, LoadError)
