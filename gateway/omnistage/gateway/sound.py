"""Sound in the forms that OpenAI's interface knows."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from omnistage.client.encoder import SoundEncoder
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


class Encoder(Protocol):
    """Samples to bytes, which are a file, or raw samples, wherever they end. Both may use the processor for milliseconds."""

    def encode(self, samples: Samples) -> bytes: ...

    def finish(self) -> bytes: ...


class _Raw:
    """16 bit, little-endian, mono."""

    def encode(self, samples: Samples) -> bytes:
        return to_pcm16(samples)

    def finish(self) -> bytes:
        return b""


def new_encoder(name: str, sample_rate_hz: int, param: str) -> Encoder:
    """For a format by its name. param: the field that named it. Raises ApiError, OmniError where it cannot be made here."""
    if name not in MEDIA_TYPES:
        raise ApiError(400, f"{param}: '{name[:64]}' is no format; give one of {', '.join(MEDIA_TYPES)}", param=param, code="invalid_value")
    if name in ("pcm", "pcm16"):
        return _Raw()
    return SoundEncoder(f".{name}", sample_rate_hz)
