"""From the messages of one `Generate` call to events: positions are checked, sound is decoded, arrivals are noted."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.duration_pb2 import Duration
from numpy.typing import NDArray

from omnistage.client.errors import ProtocolError
from omnistage.client.events import AudioChunk, Done, Event, Picture, StageReport, TextDelta, Usage
from omnistage.client.playback import AudioArrival, TextArrival, Timing, is_audible
from omnistage.v1 import chunk_pb2, omni_pb2, stage_pb2

MAX_PICTURE_BYTES = 256 * 1024 * 1024

ENCODINGS: dict[int, tuple[np.dtype[Any], float]] = {
    chunk_pb2.AUDIO_ENCODING_PCM16: (np.dtype("<i2"), 1.0 / 32768.0),
    chunk_pb2.AUDIO_ENCODING_FLOAT32: (np.dtype("<f4"), 1.0),
}


@dataclass(slots=True)
class _Port:
    """How far one port is."""

    seq: int = 0
    item: int = 0
    ended: bool = False

    def advance(self, chunk: chunk_pb2.Chunk) -> None:
        """Take the next chunk. Raises ProtocolError on a gap, a repeat, or anything after the last."""
        if self.ended:
            raise ProtocolError(f"port {chunk.port}: a chunk came after the last")
        if chunk.seq != self.seq:
            raise ProtocolError(f"port {chunk.port}: chunk {chunk.seq} came, {self.seq} is next")
        if chunk.first != self.item:
            kind = "gap" if chunk.first > self.item else "repeat"
            raise ProtocolError(f"port {chunk.port}: {kind}, position {chunk.first} came, {self.item} is next")
        self.seq += 1
        self.item += chunk.count
        self.ended = chunk.last


class Reader:
    """Reads one answer. t0: time.perf_counter() at the call."""

    def __init__(self, t0: float) -> None:
        self._t0 = t0
        self._ports: dict[str, _Port] = {}
        self._started: omni_pb2.Started | None = None
        self._text: list[TextArrival] = []
        self._audio: list[AudioArrival] = []
        self._sample_rate_hz = 0
        self._picture = bytearray()

    async def read(self, messages: AsyncIterable[omni_pb2.GenerateResponse]) -> AsyncGenerator[Event, None]:
        """Yield every event; `Done` is the last. Raises ProtocolError for a stream that is not whole."""
        async for message in messages:
            arrival_s = time.perf_counter() - self._t0
            kind = message.WhichOneof("event")
            if kind == "started":
                if self._started is not None:
                    raise ProtocolError("the answer started twice")
                self._started = message.started
            elif kind == "chunk":
                event = self._take(message.chunk, arrival_s)
                if event is not None:
                    yield event
            elif kind == "usage":
                yield self._finish(message.usage, arrival_s)
                return
        raise ProtocolError("the stream ended before its account: the answer may be cut")

    def _take(self, chunk: chunk_pb2.Chunk, arrival_s: float) -> Event | None:
        if self._started is None:
            raise ProtocolError("output came before the start of the answer")
        payload = chunk.WhichOneof("payload")
        if payload is None and chunk.count:
            raise ProtocolError(f"port {chunk.port}: {chunk.count} items without content")
        self._ports.setdefault(chunk.port, _Port()).advance(chunk)
        match payload:
            case "text":
                return self._take_text(chunk, arrival_s)
            case "audio":
                return self._take_audio(chunk, arrival_s)
            case "image":
                return self._take_image(chunk, arrival_s)
            case None | "progress":
                return None
        raise ProtocolError(f"port {chunk.port}: this client cannot read {payload}; ask for other outputs")

    def _take_text(self, chunk: chunk_pb2.Chunk, arrival_s: float) -> TextDelta | None:
        text = chunk.text.text
        self._text.append(TextArrival(arrival_s, len(text)))
        if not text and not chunk.count:
            return None
        return TextDelta(text, chunk.first, tuple(chunk.text.token_ids), arrival_s)

    def _take_audio(self, chunk: chunk_pb2.Chunk, arrival_s: float) -> AudioChunk | None:
        rate_hz = chunk.audio.sample_rate_hz
        samples = _decode(chunk)
        if not len(samples):
            return None
        if rate_hz != (self._sample_rate_hz or rate_hz) or not rate_hz:
            raise ProtocolError(f"port {chunk.port}: the sample rate is {rate_hz}, before it was {self._sample_rate_hz}")
        self._sample_rate_hz = rate_hz
        self._audio.append(AudioArrival(arrival_s, chunk.first, len(samples), rate_hz, is_audible(samples)))
        return AudioChunk(samples, chunk.first, rate_hz, arrival_s)

    def _take_image(self, chunk: chunk_pb2.Chunk, arrival_s: float) -> Picture | None:
        """Put the pieces of a picture together; None until it is whole."""
        image = chunk.image
        part = image.data
        if part.offset != len(self._picture) or part.total_bytes > MAX_PICTURE_BYTES:
            raise ProtocolError(f"port {chunk.port}: a piece at byte {part.offset} of {part.total_bytes}, {len(self._picture)} is next")
        self._picture += part.data
        if len(self._picture) < part.total_bytes:
            return None
        data = bytes(self._picture)
        self._picture.clear()
        preview_step = image.preview_step if image.HasField("preview_step") else None
        return Picture(data, image.media_type, chunk.first, image.layer, preview_step, arrival_s)

    def _finish(self, usage: omni_pb2.Usage, arrival_s: float) -> Done:
        if self._started is None:
            raise ProtocolError("the account came before the start of the answer")
        open_ports = sorted(name for name, port in self._ports.items() if not port.ended)
        if open_ports or self._picture:
            raise ProtocolError(f"the answer is cut: {', '.join(open_ports) or 'a picture'} did not end")
        return Done(
            session_id=self._started.session_id,
            model=self._started.model,
            seed=self._started.seed,
            finish_reason=finish_reason_name(usage.finish_reason),
            usage=_usage(usage),
            timing=Timing(tuple(self._text), tuple(self._audio), arrival_s),
        )


def _decode(chunk: chunk_pb2.Chunk) -> NDArray[np.float32]:
    """float32 [count], mono (channels are averaged), full scale 1."""
    audio = chunk.audio
    if chunk.count == 0:
        return np.zeros(0, np.float32)
    if audio.encoding not in ENCODINGS or not audio.channel_count:
        raise ProtocolError(f"port {chunk.port}: sound in encoding {audio.encoding} with {audio.channel_count} channels")
    dtype, scale = ENCODINGS[audio.encoding]
    data = audio.data  # each access copies
    if len(data) != chunk.count * audio.channel_count * dtype.itemsize:
        raise ProtocolError(f"port {chunk.port}: {len(data)} bytes are not {chunk.count} samples of {audio.channel_count} channels")
    samples: NDArray[np.float32] = np.frombuffer(data, dtype).astype(np.float32) * np.float32(scale)
    if audio.channel_count > 1:
        samples = samples.reshape(chunk.count, audio.channel_count).mean(axis=1, dtype=np.float32)
    return samples


def _usage(usage: omni_pb2.Usage) -> Usage:
    return Usage(
        stages=tuple(_report(report) for report in usage.stages),
        queued_s=_seconds(usage.queued),
        first_text_s=_seconds(usage.first_text),
        first_audio_s=_seconds(usage.first_audio),
        total_s=_seconds(usage.total),
    )


def _report(report: stage_pb2.Report) -> StageReport:
    return StageReport(
        stage=stage_name(report.kind),
        replica=report.replica,
        queued_s=_seconds(report.queued),
        first_output_s=_seconds(report.first_output),
        total_s=_seconds(report.total),
        input_items=dict(report.input_items),
        output_items=dict(report.output_items),
        failovers=report.failovers,
        cached_tokens=report.cached_tokens,
    )


def _seconds(duration: Duration) -> float:
    return duration.ToTimedelta().total_seconds()


def stage_name(kind: stage_pb2.StageKind) -> str:
    """thinker, talker, code2wav, diffusion; a number for a kind of a newer server."""
    return _short(stage_pb2.StageKind, kind, "STAGE_KIND_")


def finish_reason_name(reason: chunk_pb2.FinishReason) -> str:
    """stop, length, interrupted; empty if there is none."""
    return "" if reason == chunk_pb2.FINISH_REASON_UNSPECIFIED else _short(chunk_pb2.FinishReason, reason, "FINISH_REASON_")


def state_name(state: omni_pb2.ReplicaState) -> str:
    """serving, draining, lost."""
    return _short(omni_pb2.ReplicaState, state, "REPLICA_STATE_")


def _short(enum: object, value: int, prefix: str) -> str:
    names: dict[int, str] = {number: name for name, number in enum.items()}  # type: ignore[attr-defined]
    return names.get(value, str(value)).removeprefix(prefix).lower()
