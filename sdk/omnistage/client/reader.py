"""Turns the messages of `Generate` calls into events: checks positions, decodes sound and notes arrivals."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import numpy as np
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from numpy.typing import NDArray

from omnistage.client.errors import NotSpokenError, ProtocolError, RequestError
from omnistage.client.events import (
    Alignment,
    AudioArrival,
    AudioChunk,
    Done,
    Event,
    Failover,
    Picture,
    Progress,
    Rows,
    SpeechCodes,
    SpokenWord,
    StageReport,
    TextArrival,
    TextDelta,
    ThoughtDelta,
    Timing,
    TokenLogprob,
    Usage,
    VideoDelta,
    is_audible,
)
from omnistage.client.received import Received, Tensors
from omnistage.client.remarks import unspoken_text
from omnistage.v1 import chunk_pb2, omni_pb2, stage_pb2

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

STATUS_WAIT_S = 1.0
"""Seconds to wait for the gRPC status after the account (`Usage`), which is the last message of a complete answer."""

AUDIO_PORT = "audio"
CODES_PORT = "codes"

MAX_PICTURE_BYTES = 256 * 1024 * 1024

PICTURE_TYPES = ("image/png", "image/jpeg", "image/webp")

ENCODINGS: dict[int, tuple[np.dtype[Any], float]] = {
    chunk_pb2.AUDIO_ENCODING_PCM16: (np.dtype("<i2"), 1.0 / 32768.0),
    chunk_pb2.AUDIO_ENCODING_FLOAT32: (np.dtype("<f4"), 1.0),
}
"""By encoding: the type of samples on the wire, and the factor by which they are multiplied to make full scale 1."""


DIFFUSION = "diffusion"
PRODUCTS = {
    "image": ("picture", "Leave out what makes it something else: {frames}, {seconds}."),
    "video": ("film", "Say how long it is: {frames}."),
    "audio": ("sound", "Say how long it is: {seconds}."),
}
"""By output port: the name of the thing that is drawn, and the hint of the error if the pipeline made none."""

Delta = TypeVar("Delta", TextDelta, ThoughtDelta)
Record = TypeVar("Record", bound="DataclassInstance")


@dataclass(frozen=True, slots=True)
class ConnectionLoss:
    """A connection that broke during an answer. address: of the router. reason: why it broke. at_s: when, in seconds after t0."""

    address: str
    reason: str
    at_s: float


class Reader:
    """Makes the events of one answer from the messages of its connections: of the first, and of the next one if that is lost.

    t0: time.perf_counter() at the call. due: names of ports. If none of them has an item at the end, `read` raises an error."""

    def __init__(self, t0: float, due: Collection[str] = ()) -> None:
        self._t0 = t0
        self._due = due
        self._received = Received()
        self._loss: ConnectionLoss | None = None
        self._text: list[TextArrival] = []
        self._thought_tokens = 0
        self._unspoken: deque[str] = deque()
        """Pieces of the text that may contain spoken words still to come, from the piece of the next word on."""
        self._unspoken_from = 0
        """How many characters of the text come before these pieces."""
        self._spoken_to = 0
        """How many characters the text has up to the end of the last spoken word."""
        self._audio: list[AudioArrival] = []
        self._failovers: list[Failover] = []
        self._sample_rate_hz = 0
        self._channels = 0
        self._picture = bytearray()
        self._previews: set[tuple[int, int, int]] = set()  # (position, layer, step) of those that were shown
        self._tensors = Tensors()
        self.is_started = False
        """True once the present connection has sent the start of the answer."""

    @property
    def is_lost(self) -> bool:
        """True from the loss of a connection until the answer goes on."""
        return self._loss is not None

    def request(self, request: omni_pb2.GenerateRequest) -> omni_pb2.GenerateRequest:
        """The request for the next connection: `request` itself at first, later a request for the rest of its answer."""
        return self._received.request(request)

    def lose(self, address: str, reason: str) -> None:
        """Note that the connection to this router broke. The next `read` goes on from here."""
        if self._loss is None:
            self._loss = ConnectionLoss(address, reason, time.perf_counter() - self._t0)
        self.is_started = False
        self._picture.clear()  # its pieces come again from the first
        self._tensors.note_loss()

    async def read(self, messages: AsyncIterable[omni_pb2.GenerateResponse], address: str = "") -> AsyncGenerator[Event, None]:
        """Yield every event; `Done` is the last. address: the router that sends the messages.

        Raises ProtocolError if messages are missing, repeated or unreadable; NotSpokenError if sound was due and none came, RequestError
        for a drawing without an output that was due."""
        stream = aiter(messages)
        async for message in stream:
            arrival_s = time.perf_counter() - self._t0
            kind = message.WhichOneof("event")
            event: Event | None = None
            if kind == "started":
                event = self._start(message.started, address, arrival_s)
            elif kind == "chunk":
                event = self._take(message.chunk, arrival_s)
            elif kind == "chunks":
                for chunk in message.chunks.chunks:
                    chunk_event = self._take(chunk, arrival_s)
                    if chunk_event is not None:
                        yield chunk_event
            elif kind == "failover":
                if message.failover.kind == stage_pb2.STAGE_KIND_DIFFUSION:
                    self._picture.clear()  # Its pieces come anew: another replica begins the picture again.
                self._tensors.note_loss()
                stage = stage_name(message.failover.kind)
                event = self._note(read_record(Failover, message.failover, stage=stage, arrival_s=arrival_s))
            elif kind == "usage":
                done = self._finish(message.usage, arrival_s)
                await _until_over(stream)
                yield done
                return
            if event is not None:
                yield event
        raise ProtocolError("the stream ended before its account: the answer may be cut")

    def _start(self, started: omni_pb2.Started, address: str, arrival_s: float) -> Failover | None:
        """Take the first message of a connection. Returns the Failover to report if an earlier connection was lost; None: this is the first
        connection."""
        if self.is_started:
            raise ProtocolError("the answer started twice")
        self._received.start(started)
        self.is_started = True
        loss, self._loss = self._loss, None
        if loss is None:
            return None
        return self._note(Failover("router", loss.address, address, loss.reason, arrival_s - loss.at_s, arrival_s))

    def _note(self, failover: Failover) -> Failover:
        """Keep a failover for `Done`, and return it."""
        self._failovers.append(failover)
        return failover

    def _take(self, chunk: chunk_pb2.Chunk, arrival_s: float) -> Event | None:
        """Check the position of a chunk and return its event; None if the caller gets nothing for it yet. Raises ProtocolError."""
        if not self.is_started:
            raise ProtocolError("output came before the start of the answer")
        payload = chunk.WhichOneof("payload")
        if payload is None and chunk.count:
            raise ProtocolError(f"port {chunk.port}: {chunk.count} items without content")
        self._received.take(chunk)
        match payload:
            case "text":
                return self._take_text(chunk, arrival_s)
            case "audio":
                return self._take_audio(chunk, arrival_s)
            case "codes":
                return _codes_event(chunk, arrival_s)
            case "alignment":
                return self._take_alignment(chunk, arrival_s)
            case "image":
                return self._take_image(chunk, arrival_s)
            case "video":
                return _film_event(chunk, arrival_s)
            case "progress":
                return Progress(chunk.progress.done, chunk.progress.total, arrival_s)
            case "tensor":
                rows = self._tensors.take(chunk)
                return Rows(chunk.port, rows, chunk.first, arrival_s) if rows is not None and len(rows) else None
            case None:
                return None
        raise ProtocolError(f"port {chunk.port}: this client cannot read {payload}; ask for other outputs")

    def _take_text(self, chunk: chunk_pb2.Chunk, arrival_s: float) -> TextDelta | ThoughtDelta | None:
        """The event of a piece of text or thought, whose size is noted for the figures; None for a chunk that only ends its port."""
        if chunk.text.HasField("thought"):
            self._thought_tokens += chunk.count
            return _text_event(ThoughtDelta, chunk.text.thought, chunk, arrival_s)
        text = chunk.text.text
        self._text.append(TextArrival(arrival_s, len(text)))
        self._unspoken.append(text)
        return _text_event(TextDelta, text, chunk, arrival_s)

    def _take_audio(self, chunk: chunk_pb2.Chunk, arrival_s: float) -> AudioChunk | None:
        """The event of a piece of sound, which is noted for the figures; None for an empty chunk. Raises ProtocolError if rate or
        channels change."""
        rate_hz = chunk.audio.sample_rate_hz
        samples = _decode(chunk)
        if not len(samples):
            return None
        if not rate_hz or self._sample_rate_hz not in (0, rate_hz):  # 0: this is the first sound.
            raise ProtocolError(f"port {chunk.port}: the sample rate is {rate_hz}, before it was {self._sample_rate_hz}")
        self._sample_rate_hz = rate_hz
        count = chunk.audio.channel_count
        if self._channels not in (0, count):
            raise ProtocolError(f"port {chunk.port}: there are {count} channels, before there were {self._channels}")
        self._channels = count
        encoding = "float32" if chunk.audio.encoding == chunk_pb2.AUDIO_ENCODING_FLOAT32 else "pcm16"
        prebuffer_s = chunk.audio.prebuffer_ms / 1000 if chunk.audio.HasField("prebuffer_ms") else None
        self._audio.append(AudioArrival(arrival_s, chunk.first, len(samples), rate_hz, is_audible(samples), prebuffer_s))
        return AudioChunk(samples, chunk.first, rate_hz, arrival_s, encoding, prebuffer_s)

    def _take_alignment(self, chunk: chunk_pb2.Chunk, arrival_s: float) -> Alignment | None:
        """The event of spoken words; None for an empty chunk. Raises ProtocolError."""
        words = chunk.alignment.words
        if len(words) != chunk.count:
            raise ProtocolError(f"port {chunk.port}: {len(words)} words are not {chunk.count}")
        return Alignment(tuple(map(self._spoken_word, words)), arrival_s) if words else None

    def _spoken_word(self, word: chunk_pb2.SpokenWord) -> SpokenWord:
        """The event of a word, with its text from `_unspoken`. Words come in order, so pieces before it are dropped. Raises
        ProtocolError."""
        first, end = word.first_character, word.first_character + word.character_count
        if first < self._spoken_to or word.end_us < word.begin_us:
            raise ProtocolError(f"the word at character {first} came out of its turn")
        self._spoken_to = end
        while self._unspoken and self._unspoken_from + len(self._unspoken[0]) <= first:
            self._unspoken_from += len(self._unspoken.popleft())
        text, text_first = "", self._unspoken_from
        for piece in self._unspoken:
            text += piece
            if text_first + len(text) >= end:
                break
        return SpokenWord(text[first - text_first : end - text_first], first, word.begin_us / 1e6, word.end_us / 1e6)

    def _take_image(self, chunk: chunk_pb2.Chunk, arrival_s: float) -> Picture | None:
        """Add a piece to a picture. Returns the picture when it is whole; None before that, and for a preview that was shown. Raises
        ProtocolError."""
        image = chunk.image
        part = image.data
        if part.offset != len(self._picture) or part.total_bytes > MAX_PICTURE_BYTES:
            raise ProtocolError(f"port {chunk.port}: a piece at byte {part.offset} of {part.total_bytes}, {len(self._picture)} is next")
        self._picture += part.data
        if len(self._picture) < part.total_bytes:
            return None
        data = bytes(self._picture)
        self._picture.clear()
        if image.media_type not in PICTURE_TYPES:  # Other types are refused, because they may be more than a picture: SVG has scripts.
            raise ProtocolError(f"port {chunk.port}: a picture of type {image.media_type[:64]!r}; it must be {', '.join(PICTURE_TYPES)}")
        preview_step = image.preview_step if image.HasField("preview_step") else None
        if preview_step is not None:
            # Previews are not counted as items: a stage that resumes may send earlier ones again.
            shown = (chunk.first, image.layer, preview_step)
            if shown in self._previews:
                return None
            self._previews.add(shown)
        return Picture(data, image.media_type, chunk.first, image.layer, preview_step, arrival_s)

    def _finish(self, usage: omni_pb2.Usage, arrival_s: float) -> Done:
        """The event `Done`. Raises ProtocolError if an output has not ended, NotSpokenError or RequestError if all ports in `due` are
        empty."""
        started = self._received.started
        if started is None or not self.is_started:
            raise ProtocolError("the account came before the start of the answer")
        open_ports = self._received.open_ports or self._tensors.unfinished
        if open_ports or self._picture:
            raise ProtocolError(f"the answer is cut: {', '.join(open_ports) or 'a picture'} did not end")
        stages = tuple(read_record(StageReport, report, stage=stage_name(report.kind)) for report in usage.stages)
        counts = {"completion_tokens": self._received.tokens, "thought_tokens": self._thought_tokens}  # As this client counted them.
        account = read_record(Usage, usage, stages=stages, **counts)
        if self._due and not any(map(self._received.has_items, self._due)):
            is_spoken = AUDIO_PORT in self._due and not any(report.stage == DIFFUSION for report in account.stages)
            raise self._not_spoken(started.model, account) if is_spoken else _not_made(started.model, self._due)
        return Done(
            session_id=started.session_id,
            pipeline=started.model,
            seed=started.seed,
            # A router that took over after the end of the text does not know why it ended, so the reason that came with the text is used.
            finish_reason=finish_reason_name(usage.finish_reason or self._received.finish_reason),
            usage=account,
            timing=Timing(tuple(self._text), tuple(self._audio), arrival_s),
            failovers=tuple(self._failovers),
        )

    def _not_spoken(self, pipeline: str, account: Usage) -> NotSpokenError:
        """The error for an answer without the sound that was due; its text says why there is none."""
        message = f"nothing of this text could be spoken by {pipeline}"
        if self._received.has_ended(AUDIO_PORT):
            return NotSpokenError(f"{message}: {unspoken_text(account.unspoken, account.unspoken_words) or 'no sound came'}")
        stage = "Code2Wav" if self._received.has_ended(CODES_PORT) else "Talker"
        return NotSpokenError(f"{message}: it has no {stage}", hint="Name a pipeline with a voice: {pipelines} tells which have some.")


def _not_made(pipeline: str, due: Collection[str]) -> RequestError:
    """The error for a drawing that is complete but has no item on any port in `due`."""
    port = next(iter(due))
    return RequestError(f"the drawing ended without a {PRODUCTS[port][0]}: {pipeline} made none of this prompt", hint=PRODUCTS[port][1])


def _text_event(kind: type[Delta], text: str, chunk: chunk_pb2.Chunk, arrival_s: float) -> Delta | None:
    """The event of a chunk of text, of the class `kind`; None for a chunk that only ends its port."""
    if not text and not chunk.count:
        return None
    top = tuple(tuple(map(TokenLogprob, at.token_ids, at.logprobs, at.pieces)) for at in chunk.text.top_logprobs)
    logprobs, pieces = tuple(chunk.text.logprobs), tuple(chunk.text.pieces)
    return kind(text, chunk.first, tuple(chunk.text.token_ids), arrival_s, logprobs, top, pieces)


def _film_event(chunk: chunk_pb2.Chunk, arrival_s: float) -> VideoDelta:
    """The event of a piece of a film. Raises ProtocolError."""
    video = chunk.video
    if not video.media_type.startswith("video/"):
        raise ProtocolError(f"port {chunk.port}: a film of type {video.media_type[:64]!r}")
    return VideoDelta(video.data, video.media_type, chunk.count, chunk.first, arrival_s, video.codecs)


def _codes_event(chunk: chunk_pb2.Chunk, arrival_s: float) -> SpeechCodes:
    """The event of a chunk of codes of speech, uint32 [frames, codebooks]. Raises ProtocolError if their number does not fit."""
    codes, books = np.array(chunk.codes.codes, np.uint32), chunk.codes.codebook_count
    if codes.size != chunk.count * books:
        raise ProtocolError(f"port {chunk.port}: {codes.size} codes are not {chunk.count} frames of {books}")
    return SpeechCodes(codes.reshape(chunk.count, books), chunk.first, arrival_s)


async def _until_over(stream: AsyncIterator[omni_pb2.GenerateResponse]) -> None:
    """Read on, after the account of a complete answer, to the gRPC status, which has no news.

    Without this the call would be cancelled before its status is there, and the router would count the answer as cancelled."""
    with suppress(TimeoutError, grpc.aio.AioRpcError):
        async with asyncio.timeout(STATUS_WAIT_S):
            async for message in stream:
                if message.WhichOneof("event") is not None:
                    raise ProtocolError("the answer went on after its account")


def _decode(chunk: chunk_pb2.Chunk) -> NDArray[np.float32]:
    """The samples of a chunk, full scale 1: float32 [count], or [count, channels] if there are several channels. Raises ProtocolError."""
    audio = chunk.audio
    if chunk.count == 0:
        return np.zeros(0, np.float32)
    if audio.encoding not in ENCODINGS or not audio.channel_count:
        raise ProtocolError(f"port {chunk.port}: sound in encoding {audio.encoding} with {audio.channel_count} channels")
    dtype, scale = ENCODINGS[audio.encoding]
    data = audio.data  # in a variable, because each access copies all bytes
    if len(data) != chunk.count * audio.channel_count * dtype.itemsize:
        raise ProtocolError(f"port {chunk.port}: {len(data)} bytes are not {chunk.count} samples of {audio.channel_count} channels")
    samples: NDArray[np.float32] = np.frombuffer(data, dtype).astype(np.float32) * np.float32(scale)
    if audio.channel_count > 1:
        samples = samples.reshape(chunk.count, audio.channel_count)
    return samples


def read_record(kind: type[Record], message: Message, **values: object) -> Record:
    """An object of a dataclass, from the fields of equal names of a message. A field queued_s has the seconds of the Duration `queued`. A
    field that may be None is None if the message lacks it. values: those of fields that the message has in another form."""
    for one in fields(kind):
        name = one.name.removesuffix("_s")
        if one.name in values or name not in message.DESCRIPTOR.fields_by_name:
            continue
        value = getattr(message, name)
        if "None" in str(one.type) and not message.HasField(name):
            value = None
        elif isinstance(value, Duration):
            value = value.ToTimedelta().total_seconds()
        elif isinstance(value, Mapping):
            value = dict(value)
        elif isinstance(value, Sequence) and not isinstance(value, str):
            value = tuple(value)
        values[one.name] = value
    return kind(**values)


def stage_name(kind: stage_pb2.StageKind) -> str:
    """The name of a kind of stage: thinker, talker, code2wav or diffusion; a number for a kind that only a newer server knows."""
    return _enum_name(stage_pb2.StageKind, kind, "STAGE_KIND_")


def finish_reason_name(reason: chunk_pb2.FinishReason) -> str:
    """The reason why a text ended: stop, length, repetition or interrupted; empty if there is none."""
    return "" if reason == chunk_pb2.FINISH_REASON_UNSPECIFIED else _enum_name(chunk_pb2.FinishReason, reason, "FINISH_REASON_")


def state_name(state: omni_pb2.ReplicaState) -> str:
    """The state of a replica: serving, draining or lost."""
    return _enum_name(omni_pb2.ReplicaState, state, "REPLICA_STATE_")


def _enum_name(enum: object, value: int, prefix: str) -> str:
    """The name of an enum's value in lower case, without `prefix`; the number if this client knows no name."""
    names: dict[int, str] = {number: name for name, number in enum.items()}  # type: ignore[attr-defined]
    return names.get(value, str(value)).removeprefix(prefix).lower()
