"""Encodes sound in the formats of OpenAI's interface."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omnistage.client.errors import NotAvailableError, RequestError
from omnistage.client.files import FORMATS, SoundEncoder, to_pcm16
from omnistage.client.private_stack import install
from omnistage.gateway.failure import ApiError

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


class Encoder:
    """Turns samples into the bytes of a file, or into raw samples; the bytes can be played at any moment as far as they go. Calls must not
    overlap. This class makes the files that the client library makes."""

    def __init__(self, name: str, sample_rate_hz: int, channels: int) -> None:
        self._file = SoundEncoder(f".{name}", sample_rate_hz, channels=channels)
        self._is_light = name in LIGHT

    def encode(self, samples: Samples) -> bytes:
        """Take the next samples, and return the next bytes of the file, perhaps none yet. samples: float32 [n] or [n, channels], full scale
        1. May use the processor for milliseconds."""
        return self._file.encode(samples)

    def finish(self) -> bytes:
        """The rest of the file, once no more sound comes."""
        return self._file.finish()

    def head(self) -> bytes:
        """The beginning of the finished file, which says its length; empty if no such file says that."""
        return self._file.head

    def encode_whole(self, samples: Samples) -> bytes:
        """The whole file of a sound that is complete: unlike the bytes of `encode`, it says its length at its beginning."""
        body = self.encode(samples) + self.finish()
        return self.head() + body[len(self.head()) :]

    async def grown(self, samples: Samples) -> bytes:
        """Do `encode`, on a thread unless it takes almost no time."""
        return self.encode(samples) if self._is_light else await asyncio.to_thread(self.encode, samples)

    async def finished(self) -> bytes:
        """Do `finish`, on a thread unless it takes almost no time."""
        return self.finish() if self._is_light else await asyncio.to_thread(self.finish)


class _Raw(Encoder):
    """Gives raw samples of 16 bit, little-endian, with one channel, the mean of all."""

    def __init__(self) -> None:
        self._is_light = True

    def head(self) -> bytes:
        return b""

    def encode(self, samples: Samples) -> bytes:
        return to_pcm16(samples if samples.ndim == 1 else samples.mean(axis=1, dtype=np.float32))

    def finish(self) -> bytes:
        return b""


class _Flac(Encoder):
    """Gives a whole FLAC file at the end. Its beginning says its length, and libsndfile, the reader of most programs in Python, opens no
    file that does not; but the length is known only at the end."""

    def __init__(self, name: str, sample_rate_hz: int, channels: int) -> None:
        super().__init__(name, sample_rate_hz, channels)
        self._body = bytearray()

    def encode(self, samples: Samples) -> bytes:
        self._body += super().encode(samples)
        return b""

    def finish(self) -> bytes:
        self._body += super().finish()
        return self.head() + self._body[len(self.head()) :]


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


class _Libav(Encoder):
    """Writes one file with FFmpeg's libraries, at the rate of the samples, or at the highest rate of the format if it does not have that
    rate. The libraries are loaded when the first samples come, on a thread, because that takes a tenth of a second."""

    def __init__(self, form: _LibavForm, sample_rate_hz: int, channels: int) -> None:
        self._form, self._rate_hz, self._channels = form, sample_rate_hz, channels
        self._layout = {1: "mono", 2: "stereo"}.get(channels, f"{channels}c")
        self._sink = _Sink()
        self._is_light = False

    def head(self) -> bytes:
        return b""

    @cached_property
    def _container(self) -> Any:
        import av

        return av.open(self._sink, "w", format=self._form.container, options=dict(self._form.options))

    @cached_property
    def _stream(self) -> Any:
        rate_hz = self._rate_hz if self._rate_hz in self._form.rates_hz else max(self._form.rates_hz)
        return self._container.add_stream(self._form.codec, rate=rate_hz, layout=self._layout, bit_rate=self._form.bit_s * self._channels)

    def encode(self, samples: Samples) -> bytes:
        import av

        if len(samples):
            planes = np.ascontiguousarray(np.clip(samples, -1, 1).reshape(-1, self._channels).T)
            frame = av.AudioFrame.from_ndarray(planes, format="fltp", layout=self._layout)
            frame.sample_rate = self._rate_hz
            self._container.mux(self._stream.encode(frame))
        return self._sink.take_new()

    def finish(self) -> bytes:
        self._container.mux(self._stream.encode(None))
        self._container.close()
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


def check_format(name: str, sample_rate_hz: int, param: str) -> None:
    """Raises ApiError if this gateway cannot write the format. sample_rate_hz: 0 if not known yet. param: the field that named the
    format."""
    form = LIBAV.get(name) or FORMATS.get(f".{name}")
    try:
        if form is not None:
            form.check(sample_rate_hz)
    except RequestError as error:
        raise ApiError(400, f"{param}: {error.message}", param=param, code="unsupported", reason=error.reason, hint=error.hint) from None


def new_encoder(name: str, sample_rate_hz: int, param: str, channels: int = 1) -> Encoder:
    """An encoder for the format of this name. param: the field that named the format. Raises ApiError if this gateway cannot write the
    format."""
    check_format(name, 0 if name in LIBAV else sample_rate_hz, param)
    if name in RAW:
        return _Raw()
    if name in LIBAV:
        return _Libav(LIBAV[name], sample_rate_hz, channels)
    return (_Flac if name == "flac" else Encoder)(name, sample_rate_hz, channels)
