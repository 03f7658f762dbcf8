"""WAV files: signed 16 bit, mono, standard library."""

from __future__ import annotations

import wave
from os import PathLike
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


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
