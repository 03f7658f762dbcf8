"""Sound in the forms that OpenAI's interface knows."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from omnistage.client.encoder import FORMATS, SoundEncoder
from omnistage.client.errors import NotAvailableError, RequestError
from omnistage.client.wav import to_pcm16
from omnistage.gateway.failure import ApiError

Samples = NDArray[np.float32]

RATE_HZ = 24_000
"""Of raw samples: clients of OpenAI take them for this rate, since nothing says it."""

MEDIA_TYPES = {
    "wav": "audio/wav",
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "flac": "audio/flac",
    "aac": "audio/aac",
    "pcm": "audio/pcm",
    "pcm16": "audio/pcm",
}
"""By the name of a format."""

RAW = ("pcm", "pcm16")
LIGHT = (*RAW, "wav")
"""Samples stand in these as they are: nothing is worked out."""

AAC_RATES_HZ = (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000)
AAC_BIT_S = 64_000
AAC_INSTALL = "Install the package av (pip install 'omnistage[gateway]'), or ask for mp3, opus, flac, wav or pcm."


class _Form(Protocol):
    """Samples to bytes, which are a file wherever they end."""

    def encode(self, samples: Samples) -> bytes: ...

    def finish(self) -> bytes: ...


class Encoder:
    """Samples to bytes, which are a file, or raw samples, wherever they end. Calls come one after the other."""

    def __init__(self, form: _Form, *, is_light: bool) -> None:
        self._form, self._is_light = form, is_light

    def encode(self, samples: Samples) -> bytes:
        """What the file grows by with float32 [n]; perhaps nothing yet. May use the processor for milliseconds."""
        return self._form.encode(samples)

    def finish(self) -> bytes:
        """The rest of the file."""
        return self._form.finish()

    def whole(self, samples: Samples) -> bytes:
        """A file of all samples, at once: its head knows how long it is."""
        body = self._form.encode(samples) + self._form.finish()
        head = self._form.head if isinstance(self._form, SoundEncoder) else b""
        return head + body[len(head) :]

    async def grown(self, samples: Samples) -> bytes:
        """`encode`, beside the event loop where it takes the processor."""
        return self.encode(samples) if self._is_light else await asyncio.to_thread(self.encode, samples)

    async def finished(self) -> bytes:
        """`finish`, in the same way."""
        return self.finish() if self._is_light else await asyncio.to_thread(self.finish)


def check_format(name: str, sample_rate_hz: int, param: str) -> None:
    """Whether it can be written here. sample_rate_hz: 0 if not known yet. param: the field that named the format. Raises ApiError."""
    if name not in MEDIA_TYPES:
        raise ApiError(400, f"{param}: '{name[:64]}' is no format; give one of {', '.join(MEDIA_TYPES)}", param=param, code="invalid_value")
    try:
        if name == "aac":
            _check_aac(sample_rate_hz)
        elif name not in RAW:
            FORMATS[f".{name}"].check(sample_rate_hz)
    except RequestError as error:
        raise ApiError(400, f"{param}: {error.message}", param=param, code="unsupported", reason=error.reason, hint=error.hint) from None


def new_encoder(name: str, sample_rate_hz: int, param: str) -> Encoder:
    """For a format by its name. param: the field that named it. Raises ApiError where it cannot be made here."""
    check_format(name, sample_rate_hz, param)
    form: _Form = _Raw() if name in RAW else _Aac(sample_rate_hz) if name == "aac" else SoundEncoder(f".{name}", sample_rate_hz)
    return Encoder(form, is_light=name in LIGHT)


class _Raw:
    """16 bit, little-endian, mono."""

    def encode(self, samples: Samples) -> bytes:
        return to_pcm16(samples)

    def finish(self) -> bytes:
        return b""


def _check_aac(sample_rate_hz: int) -> None:
    if sample_rate_hz and sample_rate_hz not in AAC_RATES_HZ:
        possible = ", ".join(map(str, AAC_RATES_HZ))
        raise RequestError(f"AAC cannot have {sample_rate_hz} samples a second, only {possible}", hint="Ask for one of these sample rates.")
    _av()


def _av() -> Any:
    """The package av. Raises NotAvailableError."""
    try:
        import av  # It loads all of FFmpeg, for a format that hardly anybody asks for.
    except ImportError as error:
        raise NotAvailableError("AAC needs a package that is not installed: av", hint=AAC_INSTALL) from error
    return av


class _Aac:
    """AAC in frames that say for themselves what they are (ADTS, ISO/IEC 13818-7): they need no container, and can be heard from any of
    them on."""

    def __init__(self, sample_rate_hz: int) -> None:
        self._av = _av()
        self._sink = _Sink()
        self._rate_hz = sample_rate_hz
        self._file = self._av.open(self._sink, "w", format="adts")
        self._stream = self._file.add_stream("aac", rate=sample_rate_hz, layout="mono", bit_rate=AAC_BIT_S)

    def encode(self, samples: Samples) -> bytes:
        if len(samples):
            frame = self._av.AudioFrame.from_ndarray(np.clip(samples, -1, 1).reshape(1, -1), format="fltp", layout="mono")
            frame.sample_rate = self._rate_hz
            self._file.mux(self._stream.encode(frame))
        return self._sink.taken()

    def finish(self) -> bytes:
        self._file.mux(self._stream.encode(None))
        self._file.close()
        return self._sink.taken()


class _Sink:
    """A file that is only written, and from which what is new is taken away."""

    def __init__(self) -> None:
        self._new = bytearray()

    def taken(self) -> bytes:
        new, self._new = bytes(self._new), bytearray()
        return new

    def write(self, data: Any) -> int:
        self._new += data
        return len(data)
