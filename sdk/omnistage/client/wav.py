"""WAV files: signed 16 bit or 32-bit floating point, standard library."""

from __future__ import annotations

import struct
import wave
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

PCM, FLOAT = 1, 3
"""Format tags."""


def to_pcm16(samples: NDArray[np.float32]) -> bytes:
    """float32 [samples], full scale 1, to little-endian 16 bit; louder samples are clipped. Exact for sound that came as 16 bit."""
    pcm: bytes = np.clip(np.rint(samples * 32768.0), -32768, 32767).astype("<i2").tobytes()
    return pcm


def write_wav(path: str | PathLike[str], samples: NDArray[np.float32], sample_rate_hz: int) -> None:
    """Write float32 [samples] to `path`."""
    with Path(path).open("wb") as file, wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(sample_rate_hz)
        out.writeframes(to_pcm16(samples))


def wav_bytes(samples: NDArray[Any], sample_rate_hz: int) -> bytes:
    """A file of int16 or float32 [samples, channels], every one of them as it is."""
    channels, width = samples.shape[1], samples.dtype.itemsize
    tag = PCM if samples.dtype.kind == "i" else FLOAT
    data = samples.astype(samples.dtype.newbyteorder("<"), copy=False).tobytes()
    form = struct.pack("<HHIIHH", tag, channels, sample_rate_hz, sample_rate_hz * channels * width, channels * width, 8 * width)
    chunks = [(b"fmt ", form), (b"fact", struct.pack("<I", len(samples))), (b"data", data)]
    body = b"WAVE" + b"".join(name + struct.pack("<I", len(content)) + content for name, content in chunks)
    return b"RIFF" + struct.pack("<I", len(body)) + body
