"""WAV files of 16 or 32 bit integers or of 32-bit floating point, written with the standard library."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

PCM, FLOAT = 1, 3
"""Tags of the sample format in the head."""

UNKNOWN_BYTES = (1 << 32) - 1
"""The length in the head of a file whose end is not known yet. Players then read to the end of the file."""


def to_pcm16(samples: NDArray[np.float32]) -> bytes:
    """float32 samples of any shape, full scale 1, as little-endian 16 bit integers; louder samples are clipped. Exact for sound that
    came as 16 bit."""
    pcm: bytes = np.clip(np.rint(samples * 32768.0), -32768, 32767).astype("<i2").tobytes()
    return pcm


def wav_head(dtype: np.dtype[Any], channels: int, sample_rate_hz: int, samples: int | None) -> bytes:
    """The head of a file. dtype: the type of the samples that follow it, int16, int32 or float32. samples: their number in each channel;
    None: not known yet."""
    width = dtype.itemsize
    size = UNKNOWN_BYTES if samples is None else samples * channels * width
    tag = PCM if dtype.kind == "i" else FLOAT
    form = struct.pack("<HHIIHH", tag, channels, sample_rate_hz, sample_rate_hz * channels * width, channels * width, 8 * width)
    chunks = [(b"fmt ", form)]
    if tag == FLOAT:
        count = UNKNOWN_BYTES if samples is None else samples
        chunks = [(b"fmt ", form + b"\0\0"), (b"fact", struct.pack("<I", min(count, UNKNOWN_BYTES)))]
    body = b"WAVE" + b"".join(name + struct.pack("<I", len(content)) + content for name, content in chunks) + b"data"
    total_bytes = len(body) + 4 + size
    return b"RIFF" + struct.pack("<I", min(total_bytes, UNKNOWN_BYTES)) + body + struct.pack("<I", min(size, UNKNOWN_BYTES))


def wav_bytes(samples: NDArray[Any], sample_rate_hz: int) -> bytes:
    """The bytes of a file with these samples, int16, int32 or float32 [samples, channels], unchanged."""
    data = samples.astype(samples.dtype.newbyteorder("<"), copy=False).tobytes()
    return wav_head(samples.dtype, samples.shape[1], sample_rate_hz, len(samples)) + data
