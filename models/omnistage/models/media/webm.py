"""A film as a file that can be played while it grows: VP9 in WebM, by FFmpeg."""

from __future__ import annotations

import io
from collections.abc import Generator, Iterable
from fractions import Fraction
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

MEDIA_TYPE = "video/webm"
TICKS_HZ = 1000
"""Times in the file are whole milliseconds."""
RATE_TICKS = 1001
"""Rates are fractions of it, as those of television are."""
CLUSTER_MS = 500
"""A piece of the file holds the frames of so much time, and can be read as soon as it is there."""
ENCODING = {"deadline": "good", "cpu-used": "4", "crf": "24", "b": "0", "lag-in-frames": "0", "auto-alt-ref": "0"}
"""Of even quality; no frame waits for later ones, so a piece never depends on what comes behind it."""


class _Grown(io.RawIOBase):
    """A file that cannot go back. What was written is taken by whoever sends it."""

    def __init__(self) -> None:
        self._data = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._data += data
        return len(data)

    def take(self) -> bytes:
        data, self._data = bytes(self._data), bytearray()
        return data

    def __len__(self) -> int:
        return len(self._data)


def encode_webm(frames: Iterable[NDArray[np.uint8]], rate_hz: float) -> Generator[tuple[bytes, int], None, None]:
    """Pieces of the file, and how many frames become showable with each, one at least. frames: [height, width, 3], RGB, sides even numbers.
    The same frames make the same bytes on the same machine."""
    file = _Grown()
    options = {"live": "1", "cluster_time_limit": str(CLUSTER_MS), "fflags": "+bitexact"}
    with av.open(file, "w", format="webm", container_options=options) as container:
        stream = _stream(container, rate_hz)
        told = muxed = 0
        for number, pixels in enumerate(frames):
            if not number:
                stream.height, stream.width = pixels.shape[:2]
                container.start_encoding()
                header = len(file)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = round(number * TICKS_HZ / rate_hz), Fraction(1, TICKS_HZ)
            container.mux(stream.encode(frame))
            muxed = number
            if muxed > told and len(file) > header:
                yield file.take(), muxed - told
                told, header = muxed, 0
        container.mux(stream.encode(None))
    yield file.take(), muxed + 1 - told


def _stream(container: Any, rate_hz: float) -> Any:
    stream = container.add_stream("libvpx-vp9", rate=Fraction(rate_hz).limit_denominator(RATE_TICKS), options=ENCODING)
    stream.pix_fmt, stream.time_base = "yuv420p", Fraction(1, TICKS_HZ)
    stream.codec_context.thread_count = 1
    stream.codec_context.gop_size = max(round(rate_hz), 1)
    stream.codec_context.flags |= av.codec.context.Flags.bitexact
    return stream
