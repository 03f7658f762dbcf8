"""A sound decoded, by libsndfile where that knows the format, else by FFmpeg. Runs in the decoding process."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, BinaryIO

import av
import numpy as np
import soundfile
import soxr
from numpy.typing import NDArray

from omnistage.models.media import containers
from omnistage.models.media.errors import BadMedia, UnknownFormat
from omnistage.models.media.limits import MediaLimits
from omnistage.models.media.preprocessing import FilmPreprocessing, SoundPreprocessing

UNKNOWN_LENGTH = 1 << 62
"""libsndfile says so, or more, where the header does not tell."""

BLOCK = 1 << 18
"""Samples of all channels that are read at once."""


def decoded(file: BinaryIO, ask: SoundPreprocessing, limits: MediaLimits) -> NDArray[np.float32]:
    """[n] mono. Raises BadMedia, or whatever the libraries raise for what is damaged."""
    if (sound := opened(file)) is not None:
        with sound:
            frames = sound.frames if sound.frames < UNKNOWN_LENGTH else 0
            mixer = Mixer(sound.samplerate, sound.channels, frames / sound.samplerate, ask.rate_hz, limits)
            while len(block := sound.read(max(BLOCK // sound.channels, 1), dtype="float32", always_2d=True)):
                mixer.add(block)
            return mixer.result()
    container = containers.opened(file, limits)
    if container is None:
        raise UnknownFormat("it is no sound in a format that is known here: convert it to WAV, FLAC, MP3, Ogg or M4A")
    with container:
        if containers.video_stream(container) is not None:
            raise BadMedia("it is a film, not a sound: send it as video/*, with use_audio, or only its sound")
        return track(container, ask, limits)


def opened(file: BinaryIO) -> soundfile.SoundFile | None:
    """A sound of which the header has been read, None for what libsndfile does not know."""
    file.seek(0)
    try:
        return soundfile.SoundFile(file)
    except soundfile.LibsndfileError:
        return None


def track(container: Any, ask: SoundPreprocessing | FilmPreprocessing, limits: MediaLimits) -> NDArray[np.float32]:
    """[n] mono of the first sound in a container. Raises BadMedia if there is none."""
    stream = next(iter(container.streams.audio), None)
    if stream is None:
        raise BadMedia("there is no sound in it: of a film, ask without use_audio")
    containers.checked_decoder(stream, containers.AUDIO_DECODERS, limits)
    declared_s = containers.declared_s(container, stream)
    mixer = None
    for block, rate_hz in _blocks(container, stream):
        mixer = mixer or Mixer(rate_hz, block.shape[1], declared_s, ask.rate_hz, limits)
        if rate_hz != mixer.source_hz:
            raise BadMedia("the rate of its samples changes in the middle: convert it to WAV or FLAC")
        mixer.add(block)
    if mixer is None:
        raise BadMedia("its sound has no samples: send a sound that lasts")
    return mixer.result()


def _blocks(container: Any, stream: Any) -> Iterator[tuple[NDArray[np.float32], int]]:
    """[n, channels] and the rate of each."""
    resampler = av.AudioResampler(format="fltp")
    for frame in container.decode(stream):
        for planar in resampler.resample(frame):
            yield np.asarray(planar.to_ndarray(), np.float32).T, planar.sample_rate


class Mixer:
    """Blocks of many channels in, mono at another rate out: the mean of the channels, resampled by soxr in its high quality, as
    Transformers' `load_audio` does it, to the bit. declared_s: what the header says, 0 if it does not. Raises BadMedia."""

    def __init__(self, source_hz: int, channels: int, declared_s: float, rate_hz: int, limits: MediaLimits) -> None:
        if not 0 < source_hz <= limits.sound_rate_hz:
            raise BadMedia(f"it has {source_hz} samples per second, and at most {limits.sound_rate_hz} may be: convert it to {rate_hz}")
        if not 0 < channels <= limits.sound_channels:
            raise BadMedia(f"it has {channels} channels, and at most {limits.sound_channels} may be: convert it to one")
        self.source_hz = source_hz
        self._rate_hz = rate_hz
        self._most_s = limits.sound_s
        self._count = 0
        self._out: list[NDArray[np.float32]] = []
        self._resampler = soxr.ResampleStream(source_hz, rate_hz, 1, dtype="float32", quality="HQ") if source_hz != rate_hz else None
        self._check(declared_s)

    def add(self, block: NDArray[np.float32]) -> None:
        """[n, channels] float32."""
        self._count += len(block)
        self._check(self._count / self.source_hz)
        if not np.isfinite(block).all():
            raise BadMedia("some of its samples are no numbers: encode it anew, in whole numbers")
        mono = block.T.mean(axis=0) if block.shape[1] > 1 else block[:, 0]
        self._out.append(self._resampler.resample_chunk(mono) if self._resampler else mono)

    def result(self) -> NDArray[np.float32]:
        """All of it. Nothing more can be added."""
        if not self._count:
            raise BadMedia("it has no samples, or was cut off before the first: send all of a sound that lasts")
        if self._resampler:
            self._out.append(self._resampler.resample_chunk(np.zeros(0, np.float32), last=True))
        samples = np.concatenate(self._out)
        length = math.ceil(self._count * self._rate_hz / self.source_hz)
        return np.clip(np.pad(samples, (0, max(0, length - len(samples))))[:length], -1.0, 1.0)

    def _check(self, seconds: float) -> None:
        if seconds > self._most_s:
            raise BadMedia(f"its sound lasts {seconds:.0f} s or more, and at most {self._most_s:g} s may be: send a part of it")
