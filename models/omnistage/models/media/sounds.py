"""A sound decoded by FFmpeg to its end: its length is counted, and a header is not believed. Runs in the decoding process."""

from __future__ import annotations

import io
import math
import struct
from typing import Any, BinaryIO

import av
import numpy as np
import soxr
from numpy.typing import NDArray

from omnistage.models.media import containers
from omnistage.models.media.mp3 import mp3_header
from omnistage.models.media.sound_files import Stretch, begins, joined_sounds
from omnistage.models.media.terms import BadMedia, FilmPreprocessing, MediaLimits, SoundPreprocessing, UnknownFormat

LOUDEST = 64.0
"""A recording in floating point may be louder than full scale, which is 1, but not louder than this."""

BLOCK = 1 << 18
"""Samples of silence that are added at once."""

GAP_S = 0.1
"""Times of packets are rounded: less than this between two of them is no gap. FFmpeg's command has the same bound."""


def decode(file: BinaryIO, ask: SoundPreprocessing, limits: MediaLimits) -> NDArray[np.float32]:
    """Decode a sound to mono samples, [n]. Raises BadMedia, or any error that the libraries raise for damaged files."""
    mixer = Mixer(ask.rate_hz, limits)
    is_known = False
    for part in joined_sounds(file, limits.sound_bytes):
        container = containers.open_container(_with_count(part, limits), limits)
        if container is None and mixer.seconds:
            raise BadMedia(f"what follows after {mixer.seconds:.1f} s is damaged: send all of it, or encode it anew")
        if container is None:
            continue  # Bytes in front of the first sound are passed over.
        with container:
            if containers.video_stream(container) is not None:
                raise BadMedia("it is a film, not a sound: send it as video/*, with use_audio, or only its sound")
            containers.check_listed(container, part)
            _add(container, mixer, limits)
            is_known = True
    if not is_known and begins(file, 0):
        raise BadMedia("it was cut off or damaged before its first sample: send all of it, or encode it anew")
    if not is_known:
        raise UnknownFormat("it is no sound in a format that is known here: convert it to WAV, FLAC, MP3, Ogg or M4A")
    return mixer.result()


def _with_count(part: BinaryIO, limits: MediaLimits) -> BinaryIO:
    """The file with its real number of frames in the header, if it is an MP3 that states a number: FFmpeg leaves out samples after the
    stated end. Raises BadMedia for a file that was cut off."""
    header = mp3_header(part)
    container = containers.open_container(part, limits) if header else None
    if header is None or container is None:
        return part
    count, last_packet = 0, None
    with container:
        for packet in container.demux(audio=0):
            if packet.size:
                count, last_packet = count + 1, packet
        # A parser gives a frame back when all of its bytes have come.
        is_last_cut = last_packet is not None and not av.CodecContext.create("mp3", "r").parse(bytes(last_packet))
    size, whole_frames = part.seek(0, io.SEEK_END), count - is_last_cut
    if whole_frames < header.frames and header.may_be_cut(size, limits.sound_bytes):
        raise BadMedia(f"it says that it has {header.frames} frames of sound, and {whole_frames} are there: it was cut off, send all of it")
    return io.BufferedReader(Stretch(part, 0, size, {header.place: struct.pack(">I", count)}))


def track(
    container: Any, ask: SoundPreprocessing | FilmPreprocessing, limits: MediaLimits, *, quiet_s: float = 0.0, film: Any = None
) -> NDArray[np.float32]:
    """The sound of a container, mono, [n]. quiet_s: seconds of silence before it. film: the stream of the film, if the sound belongs to
    one: they share a clock, and gaps between the times of the sound become silence. Raises BadMedia if there is no sound."""
    mixer = Mixer(ask.rate_hz, limits)
    _add(container, mixer, limits, quiet_s=quiet_s, film=film)
    return mixer.result()


def _add(container: Any, mixer: Mixer, limits: MediaLimits, *, quiet_s: float = 0.0, film: Any = None) -> None:
    """Add the sound of a container to a mixer, after quiet_s seconds of silence. film: as in `track`."""
    stream = containers.sound_stream(container)
    if stream is None:
        raise BadMedia("there is no sound in it: of a film, ask without use_audio")
    containers.checked_decoder(stream, containers.AUDIO_DECODERS, limits)
    if container.format.name == "caf" and stream.codec_context.name == "alac":
        # FFmpeg would take more samples from the last packet than it has.
        stream.codec_context.flags2 |= av.codec.context.Flags2.skip_manual
    samples = 0
    begin_s = None  # The time by the file's clock at which the silence before the sound begins.
    for frame in containers.frames(container, stream, film):
        at_s = float(frame.time or 0.0)
        if begin_s is None:
            mixer.add_silence(quiet_s, frame.sample_rate)
            begin_s = at_s - quiet_s
        if film and (gap_s := at_s - begin_s - mixer.seconds) > GAP_S:
            mixer.add_silence(gap_s, frame.sample_rate)
        mixer.add(_samples(frame), frame.sample_rate)
        samples += frame.samples
    # A FLAC states the number of its samples in its header.
    if container.format.name == "flac" and samples < (stated_samples := (stream.duration or 0) * stream.time_base * stream.sample_rate):
        raise BadMedia(f"it says that it has {stated_samples} samples, and {samples} are there: it was cut off, send all of it")


def _samples(frame: Any) -> NDArray[np.float32]:
    """The samples of a decoded frame, [n, channels]; full scale is 1."""
    array: NDArray[Any] = frame.to_ndarray()
    block = array.T if frame.format.is_planar else array.reshape(frame.samples, -1)
    samples = block.astype(np.float32)
    if block.dtype.kind != "f":
        full_scale = 2.0 ** (8 * block.dtype.itemsize - 1)
        samples -= full_scale if block.dtype.kind == "u" else 0.0  # The middle of unsigned numbers is silence.
        samples /= full_scale
    return samples


class Mixer:
    """Joins blocks of any rate and number of channels into one mono sound at rate_hz: the mean of the channels, resampled by soxr in high
    quality, as in Transformers' `load_audio`, to the bit. Sound that is louder than full scale stays so. Raises BadMedia."""

    def __init__(self, rate_hz: int, limits: MediaLimits) -> None:
        self._rate_hz, self._limits = rate_hz, limits
        self._source_hz = 0  # The rate of the present run: blocks of one rate in a row.
        self._earlier_s = 0.0  # Seconds of the runs before it.
        self._run_samples = 0  # At the source's rate.
        self._run_parts: list[NDArray[np.float32]] = []  # The present run so far, mono at rate_hz.
        self._earlier_runs: list[NDArray[np.float32]] = []  # Mono at rate_hz.
        self._resampler: soxr.ResampleStream | None = None

    @property
    def seconds(self) -> float:
        """Seconds of the sound added so far."""
        return self._earlier_s + (self._run_samples / self._source_hz if self._run_samples else 0.0)

    def add(self, block: NDArray[np.float32], source_hz: int) -> None:
        """Add a block, [n, channels], of source_hz samples a second."""
        if not len(block):
            return
        if source_hz != self._source_hz:
            self._begin(source_hz)
        channels = block.shape[1]
        if channels > self._limits.sound_channels:
            raise BadMedia(f"it has {channels} channels, and at most {self._limits.sound_channels} may be: convert it to one")
        self._run_samples += len(block)
        self._check(self.seconds)
        # `not (x <= y)` is also true of NaN.
        if not (loudest := np.abs(block).max()) <= LOUDEST:
            if not np.isfinite(loudest):
                raise BadMedia("some of its samples are no numbers: encode it anew, in whole numbers")
            raise BadMedia(f"a sample of it is {loudest:g}, and full scale is 1: divide all by 32768 if they were of 16 bits")
        mono = block.T.mean(axis=0) if channels > 1 else block[:, 0]
        self._run_parts.append(self._resampler.resample_chunk(mono) if self._resampler else mono)

    def add_silence(self, seconds: float, source_hz: int) -> None:
        """Add seconds of silence before the next block, which has source_hz samples a second."""
        self._check(self.seconds + seconds)
        remaining = round(seconds * source_hz)
        while remaining > 0:
            self.add(np.zeros((min(remaining, BLOCK), 1), np.float32), source_hz)
            remaining -= BLOCK

    def result(self) -> NDArray[np.float32]:
        """All samples. Nothing more can be added."""
        self._end()
        if not self._earlier_runs:
            raise BadMedia("it has no samples, or was cut off before the first: send all of a sound that lasts")
        return np.concatenate(self._earlier_runs)

    def _check(self, seconds: float) -> None:
        if seconds > self._limits.sound_s:
            raise BadMedia(f"its sound lasts {seconds:.0f} s or more, and at most {self._limits.sound_s:g} s may be: send a part of it")

    def _begin(self, source_hz: int) -> None:
        """Begin a run of sound at another rate, after ending the run before it."""
        if not 0 < source_hz <= self._limits.sound_rate_hz:
            max_rate_hz = self._limits.sound_rate_hz
            raise BadMedia(f"it has {source_hz} samples per second, and at most {max_rate_hz} may be: convert it to {self._rate_hz}")
        self._end()
        self._source_hz = source_hz
        if source_hz != self._rate_hz:
            self._resampler = soxr.ResampleStream(source_hz, self._rate_hz, 1, dtype="float32", quality="HQ")

    def _end(self) -> None:
        """End a run of sound at one rate: add its resampled samples to the result."""
        if not self._run_samples:
            return
        if self._resampler:
            self._run_parts.append(self._resampler.resample_chunk(np.zeros(0, np.float32), last=True))
        samples = np.concatenate(self._run_parts)
        length = math.ceil(self._run_samples * self._rate_hz / self._source_hz)
        self._earlier_runs.append(np.pad(samples, (0, max(0, length - len(samples))))[:length])
        self._earlier_s += self._run_samples / self._source_hz
        self._resampler, self._run_samples, self._run_parts = None, 0, []
