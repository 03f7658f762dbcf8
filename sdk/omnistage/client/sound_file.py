"""A sound file that grows while an answer is spoken."""

from __future__ import annotations

from io import BufferedWriter
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from omnistage.client.encoder import SoundEncoder, channels_of, format_of
from omnistage.client.errors import RequestError
from omnistage.client.events import AudioChunk


class SoundFile:
    """A sound file that grows with the answer. It can be played as far as the answer has come, even if the answer, or this program, is
    broken off.

    ::

        with SoundFile("answer.opus") as file:
            for event in omni.stream("What is a kite?"):
                if isinstance(event, AudioChunk):
                    file.write(event)

    path: its ending decides the format: .wav, .flac, .ogg, .opus or .mp3. The file is made when the first sound comes. Raises RequestError
    for another ending, NotAvailableError for a kind that this machine cannot write; so make it before you ask."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self._path = Path(path)
        self._format = format_of(self._path)
        self._format.check()
        self._encoder: SoundEncoder | None = None
        self._file: BufferedWriter  # A file is open exactly while there is an encoder.
        self._form = (0, "", 0)  # sample rate, encoding and channels of the first chunk
        self._samples = 0  # written so far
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        written_s = self._samples / self._form[0] if self._samples else 0.0
        return f"SoundFile({str(self._path)!r}, {written_s:.2f} s of sound, {'closed' if self._closed else 'open'})"

    def write(self, chunk: AudioChunk) -> None:
        """Write the next piece of sound; the first one sets the file's sample rate and encoding. Raises RequestError for a rate that such a
        file cannot have or that changes, ValueError after `close`, OSError."""
        form = (chunk.sample_rate_hz, chunk.encoding, channels_of(chunk.samples))
        if self._closed:
            raise ValueError(f"{self._path} is closed")
        if self._encoder is None:
            encoding = chunk.encoding if self._format.is_wav else "pcm16"
            self._encoder = SoundEncoder(self._path, chunk.sample_rate_hz, encoding, channels_of(chunk.samples))
            self._file = self._path.open("wb")
            self._form = form
        elif form != self._form:
            old, new = (f"{rate_hz} samples a second as {encoding}, {count} at once" for rate_hz, encoding, count in (self._form, form))
            raise RequestError(f"{self._path} has {old}, these are {new}")
        self._file.write(self._encoder.encode(chunk.samples))
        self._samples += len(chunk.samples)
        if self._format.is_wav:
            self._correct_head()
        self._file.flush()

    def close(self) -> None:
        """Write the rest, and the facts that are known only at the end. Raises OSError."""
        if self._closed:
            return
        self._closed = True
        if self._encoder is not None:
            with self._file:
                self._file.write(self._encoder.finish())
                self._correct_head()

    def _correct_head(self) -> None:
        """Write the encoder's present beginning of the file over the old one."""
        assert self._encoder is not None
        self._file.seek(0)
        self._file.write(self._encoder.head)
        self._file.seek(0, 2)


def write_sound(path: str | PathLike[str], samples: NDArray[np.float32], sample_rate_hz: int, encoding: str, kind: str = "") -> None:
    """Write a whole sound, float32 [n] or [n, channels]. kind: the ending that decides the format; empty: the ending of `path`. Raises as
    SoundEncoder does, and RequestError if there is no sample and the file needs one."""
    encoder = SoundEncoder(kind or path, sample_rate_hz, encoding, channels_of(samples))
    if not len(samples) and not format_of(kind or path).is_wav:
        raise RequestError(f"{path} was not written: the sound has no sample")
    body = encoder.encode(samples) + encoder.finish()
    head = encoder.head
    Path(path).write_bytes(head + body[len(head) :])
