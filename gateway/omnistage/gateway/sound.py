"""Encodes sound in the formats of OpenAI's interface."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from omnistage.client.errors import NotAvailableError, RequestError
from omnistage.client.events import AudioChunk, Done, Event
from omnistage.client.files import FORMATS, SoundEncoder, channels_of, to_pcm16
from omnistage.client.private_stack import install
from omnistage.gateway.failure import ApiError, invalid

Samples = NDArray[np.float32]

RATE_HZ = 24_000
"""Rate of raw samples: OpenAI's clients assume it, because nothing in the samples says it."""

MEDIA_TYPES = {
    "wav": "audio/wav",
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "flac": "audio/flac",
    "aac": "audio/aac",
    "pcm": "audio/pcm",
    "pcm16": "audio/pcm",
}
"""The media type of a format, by its name."""

RAW = ("pcm", "pcm16")
LIGHT = (*RAW, "wav")
"""Formats that hold unchanged samples, so that encoding takes almost no time."""

OPUS_RATES_HZ = (8000, 12000, 16000, 24000, 48000)
AAC_RATES_HZ = (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000)
PAGE_S = 0.1
"""Seconds of sound in one page of Ogg: a listener waits for a whole page before hearing anything. libsndfile would make pages of one
second."""


async def encode_sound(events: AsyncGenerator[Event, None], form: str, param: str) -> AsyncGenerator[bytes | Event, None]:
    """Yield an answer's events, but in place of its sound the pieces of a sound file, none of them empty. form: the format's name. param:
    as in `new_encoder`."""
    encoder: Encoder | None = None
    async with aclosing(events):
        async for event in events:
            if isinstance(event, AudioChunk):
                encoder = encoder or new_encoder(form, event.sample_rate_hz, param, channels_of(event.samples))
                if grown := await encoder.grown(event.samples):
                    yield grown
                continue
            if isinstance(event, Done) and encoder is not None:
                rest = await encoder.finished()
                if rest:
                    yield rest
            yield event


async def file_of(events: AsyncGenerator[Event, None], form: str, param: str) -> AsyncGenerator[bytes, None]:
    """Yield the bytes of the file of an answer's sound, without the other events."""
    async with aclosing(encode_sound(events, form, param)) as encoded:
        async for piece in encoded:
            if isinstance(piece, bytes):
                yield piece


class _Form(Protocol):
    """Turns samples into bytes, which can be played at any moment as far as they go; those of FLAC come all at the end."""

    def encode(self, samples: Samples) -> bytes: ...

    def finish(self) -> bytes: ...


class Encoder:
    """Turns samples into the bytes of a file, or into raw samples; the bytes can be played at any moment as far as they go. Calls must not
    overlap. is_light: whether encoding takes almost no time."""

    def __init__(self, form: _Form, *, is_light: bool) -> None:
        self._form, self._is_light = form, is_light

    def encode(self, samples: Samples) -> bytes:
        """Take the next samples, and return the next bytes of the file, perhaps none yet. samples: float32 [n] or [n, channels], full scale
        1. May use the processor for milliseconds."""
        return self._form.encode(samples)

    def finish(self) -> bytes:
        """The rest of the file, once no more sound comes."""
        return self._form.finish()

    def encode_whole(self, samples: Samples) -> bytes:
        """The whole file of a sound that is complete: unlike the bytes of `encode`, it says its length at its beginning."""
        body = self._form.encode(samples) + self._form.finish()
        head = self._form.head if isinstance(self._form, SoundEncoder) else b""
        return head + body[len(head) :]

    async def grown(self, samples: Samples) -> bytes:
        """Do `encode`, on a thread unless `is_light`."""
        return self.encode(samples) if self._is_light else await asyncio.to_thread(self.encode, samples)

    async def finished(self) -> bytes:
        """Do `finish`, on a thread unless `is_light`."""
        return self.finish() if self._is_light else await asyncio.to_thread(self.finish)


def check_format(name: str, sample_rate_hz: int, param: str) -> None:
    """Raises ApiError if this gateway cannot write the format. sample_rate_hz: 0 if not known yet. param: the field that named the
    format."""
    if name not in MEDIA_TYPES:
        raise invalid(param, f"'{name[:64]}' is no format; give one of {', '.join(MEDIA_TYPES)}")
    form = LIBAV.get(name) or FORMATS.get(f".{name}")
    try:
        if form is not None:
            form.check(sample_rate_hz)
    except RequestError as error:
        raise ApiError(400, f"{param}: {error.message}", param=param, code="unsupported", reason=error.reason, hint=error.hint) from None


def new_encoder(name: str, sample_rate_hz: int, param: str, channels: int = 1) -> Encoder:
    """An encoder for the format of this name. Raw samples get one channel, the mean of all. param: the field that named the format.
    Raises ApiError if this gateway cannot write the format."""
    check_format(name, 0 if name in LIBAV else sample_rate_hz, param)
    form: _Form
    if name in RAW:
        form = _Raw()
    elif name in LIBAV:
        form = _Libav(LIBAV[name], sample_rate_hz, channels)
    elif name == "flac":
        form = _Flac(sample_rate_hz, channels)
    else:
        form = SoundEncoder(f".{name}", sample_rate_hz, channels=channels)
    return Encoder(form, is_light=name in LIGHT)


class _Raw:
    """Gives raw samples of 16 bit, little-endian, with one channel."""

    def encode(self, samples: Samples) -> bytes:
        return to_pcm16(samples if samples.ndim == 1 else samples.mean(axis=1, dtype=np.float32))

    def finish(self) -> bytes:
        return b""


class _Flac:
    """Gives a whole FLAC file at the end. Its beginning says its length, and libsndfile, the reader of most programs in Python, opens no
    file that does not; but the length is known only at the end."""

    def __init__(self, sample_rate_hz: int, channels: int) -> None:
        self._file = SoundEncoder(".flac", sample_rate_hz, channels=channels)
        self._body = bytearray()

    def encode(self, samples: Samples) -> bytes:
        self._body += self._file.encode(samples)
        return b""

    def finish(self) -> bytes:
        self._body += self._file.finish()
        head = self._file.head
        return head + bytes(self._body[len(head) :])


@dataclass(frozen=True, slots=True)
class _LibavForm:
    """A kind of file that FFmpeg's libraries write. codec, container, options: in the libraries' words. bit_s: bits a second for each
    channel. rates_hz: the sample rates that it can have."""

    name: str
    codec: str
    container: str
    bit_s: int
    rates_hz: tuple[int, ...]
    options: Mapping[str, str] = field(default_factory=dict)

    def check(self, sample_rate_hz: int) -> None:
        """Raises RequestError for a rate that the format cannot have, NotAvailableError if the package av is missing."""
        if sample_rate_hz and sample_rate_hz not in self.rates_hz:
            possible = ", ".join(map(str, self.rates_hz))
            hint = "Ask for one of these sample rates."
            raise RequestError(f"{self.name} cannot have {sample_rate_hz} samples a second, only {possible}", hint=hint)
        if find_spec("av") is None:
            hint = f"Install it ({install('gateway')}), or ask for mp3, flac, wav or pcm."
            raise NotAvailableError(f"{self.name} needs a package that is not installed: av", hint=hint)


LIBAV = {
    "opus": _LibavForm("Opus", "libopus", "ogg", 40_000, OPUS_RATES_HZ, {"page_duration": str(round(PAGE_S * 1e6))}),
    # Each frame describes itself (ADTS, ISO/IEC 13818-7), so a player can begin at any of them.
    "aac": _LibavForm("AAC", "aac", "adts", 64_000, AAC_RATES_HZ),
}
"""The formats that FFmpeg's libraries write, by name."""


class _Libav:
    """Writes one file with FFmpeg's libraries, at the rate of the samples, or at the highest rate of the format if it does not have that
    rate. The libraries are loaded when the first samples come, on a thread, because that takes a tenth of a second."""

    def __init__(self, form: _LibavForm, sample_rate_hz: int, channels: int) -> None:
        self._form, self._rate_hz, self._channels = form, sample_rate_hz, channels
        self._layout = {1: "mono", 2: "stereo"}.get(channels, f"{channels}c")
        self._sink = _Sink()

    @cached_property
    def _file(self) -> Any:
        import av

        return av.open(self._sink, "w", format=self._form.container, options=dict(self._form.options))

    @cached_property
    def _stream(self) -> Any:
        rate_hz = self._rate_hz if self._rate_hz in self._form.rates_hz else max(self._form.rates_hz)
        return self._file.add_stream(self._form.codec, rate=rate_hz, layout=self._layout, bit_rate=self._form.bit_s * self._channels)

    def encode(self, samples: Samples) -> bytes:
        import av

        if len(samples):
            planes = np.ascontiguousarray(np.clip(samples, -1, 1).reshape(-1, self._channels).T)
            frame = av.AudioFrame.from_ndarray(planes, format="fltp", layout=self._layout)
            frame.sample_rate = self._rate_hz
            self._file.mux(self._stream.encode(frame))
        return self._sink.take_new()

    def finish(self) -> bytes:
        self._file.mux(self._stream.encode(None))
        self._file.close()
        return self._sink.take_new()


class _Sink:
    """The file object that the library writes to; `take_new` hands out the new bytes."""

    def __init__(self) -> None:
        self._new = bytearray()

    def take_new(self) -> bytes:
        new, self._new = bytes(self._new), bytearray()
        return new

    def write(self, data: Any) -> int:
        self._new += data
        return len(data)
