"""The playback model, which computes what a listener hears if sound is played while it arrives, and the figures of an answer.

Definitions (client clock, seconds after t0; t0 is the call on a connected channel; the names are those of the published benchmarks of
omni-modality servers):

- ttft: arrival of the first text that is not empty
- ttfa: arrival of the chunk that holds the first sample above -40 dBFS, so that a chunk of leading silence does not count as sound
- e2e: arrival of the last event
- audio: samples / sample rate
- rtf: arrival of the last sound / audio
- underrun: play at real time from the first chunk; the largest lateness of a chunk, max(arrival - first arrival - sound before it, 0)
- starved: the underrun of a player that first waits as the first chunk says
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

AUDIBLE = 10.0 ** (-40.0 / 20.0)
"""-40 dBFS as an amplitude; full scale is 1."""

START_BUFFER_S = 0.5
"""Seconds of sound that a player with a buffer collects before it starts, as players of live sound do."""

CONTINUITY_LIMIT_S = 0.1
"""An answer with less underrun than this counts as continuous."""


def is_audible(samples: NDArray[np.float32]) -> bool:
    """True if any sample is above -40 dBFS. samples: any shape, full scale 1."""
    return bool(samples.size) and bool(np.max(np.abs(samples)) > AUDIBLE)


@dataclass(frozen=True, slots=True)
class TextArrival:
    """A piece of text. arrival_s: when it came, in seconds after t0. characters: its length."""

    arrival_s: float
    characters: int


@dataclass(frozen=True, slots=True)
class AudioArrival:
    """A chunk of sound. arrival_s: seconds after t0. first_sample: its position in the answer. samples: their number in each channel.
    prebuffer_s: how many seconds the player should wait before it plays; None: the server did not say."""

    arrival_s: float
    first_sample: int
    samples: int
    sample_rate_hz: int
    audible: bool
    prebuffer_s: float | None = None

    @property
    def duration_s(self) -> float:
        return self.samples / self.sample_rate_hz


@dataclass(frozen=True, slots=True)
class Played:
    """One chunk as a player plays it: it starts at start_s, in seconds after t0, after gap_s seconds of silence."""

    start_s: float
    duration_s: float
    gap_s: float

    @property
    def end_s(self) -> float:
        return self.start_s + self.duration_s


def play(arrivals: Iterable[AudioArrival], start_buffer_s: float = 0.0, wait_s: float = 0.0) -> list[Played]:
    """The chunks as a player plays them: each begins when it has come and the chunk before it has ended.

    start_buffer_s: seconds of sound that must have come before the first chunk is played, unless all sound has come. wait_s: the fewest
    seconds from the arrival of the first chunk to its play. If both are 0, the gaps add up to the underrun."""
    chunks = [chunk for chunk in arrivals if chunk.samples]
    played: list[Played] = []
    for chunk in chunks:
        due_s = played[-1].end_s if played else max(_begin_s(chunks, start_buffer_s), chunk.arrival_s + wait_s)
        start_s = max(due_s, chunk.arrival_s)
        played.append(Played(start_s, chunk.duration_s, start_s - due_s))
    return played


def _begin_s(chunks: Sequence[AudioArrival], start_buffer_s: float) -> float:
    """The moment, in seconds after t0, when `start_buffer_s` seconds of sound, or all chunks, have come. chunks: at least one."""
    received_s = 0.0
    for chunk in chunks:
        received_s += chunk.duration_s
        if received_s >= start_buffer_s:
            break
    return chunk.arrival_s


@dataclass(frozen=True, slots=True)
class BufferLevel:
    """A point of the line of `buffer_levels`: at at_s the player holds buffered_s seconds of sound that it has not played yet."""

    at_s: float
    buffered_s: float


def buffer_levels(arrivals: Iterable[AudioArrival], start_buffer_s: float = START_BUFFER_S) -> list[BufferLevel]:
    """The seconds of sound that a player holds (received minus played) in the course of time, as the corners of a line.

    The line jumps up at each arrival (two corners at one time), falls with slope 1 while sound is played, and is 0 while the listener
    waits."""
    chunks = [chunk for chunk in arrivals if chunk.samples]
    if not chunks:
        return []
    played = play(chunks, start_buffer_s)
    arrived_s = np.array([chunk.arrival_s for chunk in chunks])
    received_s = np.cumsum([0.0, *(chunk.duration_s for chunk in chunks)])
    corners_s = np.array([(chunk.start_s, chunk.end_s) for chunk in played])
    times_s = np.unique([*arrived_s, *corners_s.ravel()])
    heard_s = np.interp(times_s, corners_s.ravel(), np.stack([received_s[:-1], received_s[1:]], axis=1).ravel())
    levels: list[BufferLevel] = []
    for at_s, played_s, before, after in zip(
        times_s, heard_s, np.searchsorted(arrived_s, times_s, "left"), np.searchsorted(arrived_s, times_s, "right"), strict=True
    ):
        for count in (before,) if before == after else (before, after):
            levels.append(BufferLevel(float(at_s), max(float(received_s[count] - played_s), 0.0)))
    return levels


@dataclass(frozen=True, slots=True, repr=False)
class Timing:
    """All arrivals of an answer, and the figures that this module defines. Figures are in seconds; None: no such output came."""

    text: Sequence[TextArrival]
    audio: Sequence[AudioArrival]
    e2e_s: float

    @property
    def ttft_s(self) -> float | None:
        return next((piece.arrival_s for piece in self.text if piece.characters), None)

    @property
    def ttfa_s(self) -> float | None:
        return next((chunk.arrival_s for chunk in self.audio if chunk.audible), None)

    @property
    def audio_s(self) -> float:
        return sum(chunk.duration_s for chunk in self.audio)

    @property
    def last_audio_s(self) -> float | None:
        return next((chunk.arrival_s for chunk in reversed(self.audio) if chunk.samples), None)

    @property
    def rtf(self) -> float | None:
        """Real-time factor: below 1 the sound is made faster than it is played."""
        last_s = self.last_audio_s
        return None if last_s is None else last_s / self.audio_s

    @property
    def underrun_s(self) -> float:
        """Seconds of silence that a listener hears inside the answer because a chunk came late."""
        return sum(chunk.gap_s for chunk in play(self.audio))

    @property
    def prebuffer_s(self) -> float | None:
        """How many seconds after the first sound a player should begin, by the server's word; None: the server did not say."""
        return next((chunk.prebuffer_s for chunk in self.audio if chunk.samples), None)

    @property
    def starved_s(self) -> float:
        """Seconds of silence inside the answer for a listener who first waits as the server says."""
        return sum(chunk.gap_s for chunk in play(self.audio, wait_s=self.prebuffer_s or 0.0))

    @property
    def is_continuous(self) -> bool:
        return self.underrun_s <= CONTINUITY_LIMIT_S

    def __repr__(self) -> str:
        """The figures. There may be hundreds of arrivals."""
        sound_figures = ("audio_s", "rtf", "underrun_s", "prebuffer_s", "starved_s") if self.audio else ()
        return f"Timing({figures(self, 'ttft_s', 'ttfa_s', 'e2e_s', *sound_figures)})"


def figures(record: object, *names: str) -> str:
    """A text "NAME=VALUE, ..." of these attributes of `record`, numbers to a thousandth; an attribute that is None is left out."""
    return ", ".join(f"{name}={round(value, 3)}" for name in names if (value := getattr(record, name)) is not None)
