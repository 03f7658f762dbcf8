"""The files that toys write and read: grey pictures as PNG, sound as WAV."""

from __future__ import annotations

import io
import struct
import wave
import zlib

import numpy as np
from numpy.typing import NDArray

MAX_SIDE = 512
"""The limit of pixels of a side of a picture that is read."""

MAX_SAMPLES = 240_000
"""The limit of samples of a sound that is read."""

MAX_BYTES = 1 << 20
"""The limit of bytes of a file that is read, because toys read on the event loop."""

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_HEADER = ">IIBBBBB"
_GREY = (8, 0, 0, 0, 0)
"""The rest of the header of a grey picture: bits, colour type, compression, filter method, interlace."""


class Unreadable(ValueError):
    """The bytes are not of this type of file, or in a form that toys do not read; the text says which forms they read."""


def png(pixels: NDArray[np.uint8]) -> bytes:
    """A grey 8-bit PNG of [height, width] pixels (PNG specification, third edition: IHDR, IDAT with filter 0, IEND)."""
    height, width = pixels.shape
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels], axis=1).tobytes()
    header = struct.pack(_HEADER, width, height, *_GREY)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    return _SIGNATURE + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )


def pixels_of(data: bytes) -> NDArray[np.uint8]:
    """Pixels [height, width] of a PNG as `png` writes it. Raises Unreadable."""
    _check_size(data)
    parts: dict[bytes, bytes] = {}
    at = len(_SIGNATURE)
    try:
        while at < len(data):
            size, name = struct.unpack_from(">I4s", data, at)
            part = data[at + 8 : at + 8 + size]
            if struct.unpack_from(">I", data, at + 8 + size) != (zlib.crc32(name + part),):
                raise Unreadable(f"the part {name!r} of this PNG is damaged")
            parts[name] = parts.get(name, b"") + part
            at += size + 12
        width, height, *form = struct.unpack(_HEADER, parts.get(b"IHDR", b""))
        if not data.startswith(_SIGNATURE) or tuple(form) != _GREY or not (0 < width <= MAX_SIDE and 0 < height <= MAX_SIDE):
            raise Unreadable(f"send an 8-bit grey PNG of at most {MAX_SIDE} by {MAX_SIDE} pixels")
        lines = zlib.decompressobj().decompress(parts.get(b"IDAT", b""), height * (width + 1))
        pixels = np.frombuffer(lines, np.uint8).reshape(height, width + 1)
    except (struct.error, zlib.error, ValueError) as error:
        raise error if isinstance(error, Unreadable) else Unreadable("this is no whole PNG: send all of it") from None
    if pixels[:, 0].any():
        raise Unreadable("send a PNG without filters")
    return pixels[:, 1:]


def wav(samples: NDArray[np.int16], rate_hz: int) -> bytes:
    """A WAV file of one channel of 16-bit samples [n]."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(rate_hz)
        out.writeframes(samples.astype("<i2").tobytes())
    return file.getvalue()


def samples_of(data: bytes, rate_hz: int) -> NDArray[np.int16]:
    """Samples [n] of a WAV as `wav` writes it. Raises Unreadable."""
    _check_size(data)
    try:
        with wave.open(io.BytesIO(data)) as file:
            if (file.getnchannels(), file.getsampwidth(), file.getframerate()) != (1, 2, rate_hz):
                raise Unreadable(f"send one channel of 16-bit samples at {rate_hz} Hz")
            return np.frombuffer(file.readframes(MAX_SAMPLES), "<i2")
    except (wave.Error, EOFError, ValueError) as error:
        raise error if isinstance(error, Unreadable) else Unreadable("this is no whole WAV: send all of it") from None


def _check_size(data: bytes) -> None:
    if len(data) > MAX_BYTES:
        raise Unreadable(f"send a file of at most {MAX_BYTES} bytes")
