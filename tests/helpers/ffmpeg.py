"""Debian's `ffmpeg` command: it makes files for tests, and decodes them by itself as a reference that shares no library with ours."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

MISSING = pytest.mark.skipif(shutil.which("ffmpeg") is None, reason="the command ffmpeg, which is the reference, is not installed here")
LIMIT_S = 120
CLOSE_S = 0.001
UNSEEN, UNHEARD = ("-an", "-c:v", "copy", "-f", "null", "-"), ("-vn", "-c:a", "copy", "-f", "null", "-")
"""A second output, since the clock of ffmpeg begins with the first of the streams that go anywhere."""
SHOWN = re.compile(rb"Parsed_showinfo.* pts_time:(\S+) .* sar:(\d+)/(\d+) s:(\d+)x(\d+) ")


@dataclass(frozen=True, slots=True)
class Frame:
    """shown_at: seconds after the earliest moment of all that is in the file. pixels: [height, width, 3], or 4 with alpha, as stored.
    aspect: how wide a pixel is to be shown, for its height."""

    shown_at: float
    pixels: NDArray[np.uint8]
    aspect: float


def made(*words: str, data: bytes = b"", name: str = "made") -> bytes:
    """The file that ffmpeg makes with these words, in which `{out}` is where it is to be; without it, what comes out of a pipe. data: what
    it reads from its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / name
        piped = _run(*(word.replace("{out}", str(out)) for word in words), data=data).stdout
        return out.read_bytes() if out.exists() else piped


def remade(file: bytes, *words: str, name: str = "made") -> bytes:
    """As `made`, of a file that ffmpeg may seek in: it is `{in}`."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        source.write_bytes(file)
        return made(*(word.replace("{in}", str(source)) for word in words), name=name)


def sound(file: bytes, *filters: str) -> tuple[NDArray[np.float32], int]:
    """[n] mono, the mean of the channels, and its rate. filters: of the sound of a film, on whose clock they are."""
    chain = ["-af", ",".join(filters)] if filters else []
    wave = remade(file, "-i", "{in}", "-vn", *chain, "-c:a", "pcm_f32le", "-f", "wav", "-", *(UNSEEN if filters else ()))
    head, _, rest = wave.partition(b"data")
    at = head.index(b"fmt ") + 8
    channels, rate_hz = int.from_bytes(head[at + 2 : at + 4], "little"), int.from_bytes(head[at + 4 : at + 8], "little")
    return np.frombuffer(rest[4:], "<f4").reshape(-1, channels).mean(axis=1, dtype=np.float32), rate_hz


def frames(file: bytes, *, pixel_format: str = "rgb24", heard: bool = False) -> list[Frame]:
    """All of its film that is shown, upright, as stored otherwise: not resized to its aspect. heard: its sound is on the same clock."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        source.write_bytes(file)
        words = ("-an", "-sn", "-vsync", "passthrough", "-vf", "showinfo", "-pix_fmt", pixel_format, "-f", "rawvideo", "-")
        done = _run("-i", str(source), *words, loud=True)
    told = SHOWN.findall(done.stderr)
    assert told, "ffmpeg shows nothing of it"
    # Frames that are larger or smaller than the first are scaled to its size.
    _, wide, high, width, height = told[0]
    pixels = np.frombuffer(done.stdout, np.uint8).reshape(len(told), int(height), int(width), -1)
    aspect = int(wide) / int(high) or 1.0
    found = [Frame(float(when), one, aspect) for (when, *_), one in zip(told, pixels, strict=True)]
    # For some codecs this version shows what an edit list leaves out.
    return [frame for frame in found if frame.shown_at > -CLOSE_S]


def _run(*words: str, data: bytes = b"", loud: bool = False) -> subprocess.CompletedProcess[bytes]:
    level = "info" if loud else "error"
    command = ["ffmpeg", "-nostdin", "-hide_banner", "-nostats", "-loglevel", level, "-threads", "1", "-filter_threads", "1", "-y"]
    if data:
        command.remove("-nostdin")
    done = subprocess.run([*command, *words], input=data, capture_output=True, timeout=LIMIT_S, check=False)
    if done.returncode and not done.stdout:
        raise AssertionError(f"ffmpeg {' '.join(words)}: {done.stderr.decode(errors='replace')[-2000:]}")
    return done
