"""The events of a stream: text, thoughts, sound, codes of speech, pictures, their progress and rows as they come, servers that were lost
on the way, and the account at the end. Times are seconds by the client's clock after t0, the moment of the call on a connected channel.

The playback model computes what a listener hears if sound is played while it arrives. The names of its figures are those of the published
benchmarks of omni-modality servers:

- ttft: arrival of the first text that is not empty
- ttfa: arrival of the chunk that holds the first sample above -40 dBFS, so that a chunk of leading silence does not count as sound
- e2e: arrival of the last event
- audio: samples / sample rate
- rtf: arrival of the last sound / audio
- underrun: play at real time from the first chunk; the largest lateness of a chunk, max(arrival - first arrival - sound before it, 0)
- starved: the underrun of a player that first waits as the first chunk says"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omnistage.client.files import pictures_html
from omnistage.client.remarks import end_notes


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token that the model could have chosen. logprob: natural log of its probability. piece: its text in UTF-8, maybe a part of a
    character."""

    token_id: int
    logprob: float
    piece: bytes


@dataclass(frozen=True, slots=True)
class TokensDelta:
    """The next tokens of a text; its characters are final. first_token: position of the first token, counted through thought and answer.
    logprobs: natural log of each token's probability. pieces: the text of each token in UTF-8, perhaps a part of a character. top_logprobs:
    for each token, the likeliest tokens at its position, likeliest first. All three are empty if the call did not ask for them; pieces also
    if the server is too old to send them."""

    text: str
    first_token: int
    token_ids: tuple[int, ...]
    arrival_s: float
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    pieces: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class TextDelta(TokensDelta):
    """The next piece of the answer."""


@dataclass(frozen=True, slots=True)
class ThoughtDelta(TokensDelta):
    """The next piece of the thoughts that a model may write before it answers; they are no part of the answer. `text` is empty for the
    tokens that mark the beginning and the end of a thought."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class AudioChunk:
    """The next piece of sound. samples: float32 [n], or [n, channels] if there are several, -1 to 1. first_sample: position of samples[0]
    in the answer. encoding: the type of the samples as they were sent, pcm16 or float32. prebuffer_s: in the first piece, how many seconds
    a player should wait after this piece before it begins to play, so that it never runs dry, as far as the server can foretell. None: the
    server does not say."""

    samples: NDArray[np.float32]
    first_sample: int
    sample_rate_hz: int
    arrival_s: float
    encoding: str = "pcm16"
    prebuffer_s: float | None = None

    @property
    def duration_s(self) -> float:
        return len(self.samples) / self.sample_rate_hz

    def __repr__(self) -> str:
        form = f"{array(self.samples)}, first_sample={self.first_sample}, sample_rate_hz={self.sample_rate_hz}, {self.encoding!r}"
        return f"AudioChunk({form}, {figures(self, 'duration_s', 'arrival_s', 'prebuffer_s')})"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SpeechCodes:
    """The next frames of speech as codes, if the pipeline has codes among its outputs. codes: uint32 [frames, codebooks]. first_frame:
    position of codes[0] in the answer."""

    codes: NDArray[np.uint32]
    first_frame: int
    arrival_s: float

    def __repr__(self) -> str:
        return f"SpeechCodes({array(self.codes)}, first_frame={self.first_frame}, {figures(self, 'arrival_s')})"


@dataclass(frozen=True, slots=True)
class SpokenWord:
    """A spoken word of the answer, or several that are read as one, such as a date. text: the same characters as in the
    answer; empty if the call asked for no text. first_character: index of its first character in the answer. begin_s, end_s: when its sound
    begins and ends, in seconds from the first sample; the sound begins at sample `round(begin_s * sample_rate)`."""

    text: str
    first_character: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Alignment:
    """When the next words are spoken, if the pipeline can report it and the call asks for it: `outputs=["text", "audio", "alignment"]`. It
    comes no later than their sound."""

    words: tuple[SpokenWord, ...]
    arrival_s: float


@dataclass(frozen=True, slots=True, repr=False)
class Picture:
    """One encoded picture. index: how many pictures come before it; each layer of a layered picture counts. layer: the number of the layer
    in a layered picture. preview_step: for a preview, the step that it shows; None: a finished picture."""

    data: bytes
    media_type: str
    index: int
    layer: int
    preview_step: int | None
    arrival_s: float

    def _repr_html_(self) -> str:
        """The picture, for a notebook."""
        return pictures_html([(self.media_type, self.data)])

    def __repr__(self) -> str:
        place = figures(self, "index", "layer", "preview_step", "arrival_s")
        return f"Picture({self.media_type}, {len(self.data)} bytes, {place})"


@dataclass(frozen=True, slots=True, repr=False)
class VideoDelta:
    """The next piece of a film. data: the next bytes of its file. frames: how many frames this piece adds.
    first_frame: how many frames came before it. codecs: what a browser must know in addition to the media type, such as "vp9, opus";
    empty if the server does not say."""

    data: bytes
    media_type: str
    frames: int
    first_frame: int
    arrival_s: float
    codecs: str = ""

    def __repr__(self) -> str:
        return f"VideoDelta({self.media_type}, {len(self.data)} bytes, {figures(self, 'frames', 'first_frame', 'arrival_s')})"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a drawing is. done: steps done so far; after the loss of a server perhaps from 0 again. total: all steps; 0: not known."""

    done: int
    total: int
    arrival_s: float


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Rows:
    """The next rows of an output that is tensors, such as the latents or pixels of a drawing. port: its name. rows: [n, width], in the
    element type of the port; bfloat16 comes as float32. first_row: position of rows[0] on its port."""

    port: str
    rows: NDArray[Any]
    first_row: int
    arrival_s: float

    def __repr__(self) -> str:
        return f"Rows({self.port!r}, {array(self.rows)}, first_row={self.first_row}, {figures(self, 'arrival_s')})"


@dataclass(frozen=True, slots=True)
class Failover:
    """A server was lost in the middle of the answer and the answer went on; nothing is missing and nothing comes twice.

    stage: thinker, talker, code2wav or diffusion; router if this client's own connection was lost. lost: address of the server that was
    lost. replica: address of the server that went on, which may be the same one, started again. reason: why the first server was given
    up. pause_s: seconds from the moment when the loss was seen until the other server was ready."""

    stage: str
    lost: str
    replica: str
    reason: str
    pause_s: float
    arrival_s: float

    @property
    def at_s(self) -> float:
        """When the loss was seen, as near as a client can know: `pause_s` before this event came."""
        return max(0.0, self.arrival_s - self.pause_s)


@dataclass(frozen=True, slots=True)
class StageReport:
    """The report of one stage about its work. Times are seconds after that stage was opened. input_items, output_items: numbers of tokens,
    rows, frames or samples, by port. audio_underruns, audio_starved_s: only from a Code2Wav. How often, and for how many seconds in all, a
    player would run dry that waits `AudioChunk.prebuffer_s` and then plays the sound as it is made. prompt_tokens: reported by a Thinker;
    None: the stage does not say. unspoken, unspoken_words, notes, drew: as in Usage, for this stage alone."""

    stage: str
    replica: str
    queued_s: float
    first_output_s: float
    total_s: float
    input_items: dict[str, int]
    output_items: dict[str, int]
    failovers: int
    cached_tokens: int
    audio_underruns: int = 0
    audio_starved_s: float = 0.0
    prompt_tokens: int | None = None
    unspoken: int = 0
    unspoken_words: str = ""
    notes: tuple[str, ...] = ()
    drew: bool | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Usage:
    """The server's account of an answer. Times are seconds by the router's clock after it got the request. first_text_s, first_audio_s:
    when the first text and the first sound came; None: there was none. completion_tokens: tokens of the text, without the one that ends it;
    None if no text was asked for. thought_tokens: how many of these tokens belong to a thought."""

    stages: tuple[StageReport, ...]
    queued_s: float
    first_text_s: float | None
    first_audio_s: float | None
    total_s: float
    completion_tokens: int | None = None
    thought_tokens: int = 0

    @property
    def prompt_tokens(self) -> int | None:
        """Number of tokens of the prompt: text, media, and the text that the model puts around them. None: the server does not say."""
        return next((report.prompt_tokens for report in self.stages if report.prompt_tokens is not None), None)

    @property
    def cached_tokens(self) -> int:
        """Number of tokens of the prompt that were not computed, because a cache had them."""
        return sum(report.cached_tokens for report in self.stages)

    @property
    def unspoken(self) -> int:
        """How many characters of the text were not spoken, because the voice has no sound for them."""
        return sum(report.unspoken for report in self.stages)

    @property
    def unspoken_words(self) -> str:
        """The first 64 of the characters that were not spoken, with a space between characters that are not neighbours in the text."""
        return " ".join(report.unspoken_words for report in self.stages if report.unspoken_words)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences of the stages for the user, such as what a model cannot draw."""
        return tuple(note for report in self.stages for note in report.notes)

    @property
    def drew(self) -> bool | None:
        """Whether another seed could have given another answer; None if the server does not say."""
        draws = {report.drew for report in self.stages}
        if True in draws:
            return True
        return None if None in draws or not draws else False

    def __repr__(self) -> str:
        """Leaves out the accounts of the stages, which are ten times as long."""
        stages = ", ".join(report.stage for report in self.stages) or "none"
        prompt_figures = () if self.prompt_tokens is None else ("prompt_tokens", "cached_tokens")
        names = (*prompt_figures, "completion_tokens", "queued_s", "first_text_s", "first_audio_s", "total_s")
        return f"Usage({figures(self, *names)}, stages: {stages})"


@dataclass(frozen=True, slots=True)
class Done:
    """The end of an answer. finish_reason: stop, length, repetition or interrupted; empty for an answer without text. failovers: oldest
    first. unspoken, unspoken_words, drew: as in `usage`. notes: those of `usage`, and one if the model did not end the answer itself."""

    session_id: str
    pipeline: str
    seed: int
    finish_reason: str
    usage: Usage
    timing: Timing
    failovers: tuple[Failover, ...] = ()

    @property
    def unspoken(self) -> int:
        return self.usage.unspoken

    @property
    def unspoken_words(self) -> str:
        return self.usage.unspoken_words

    @property
    def notes(self) -> tuple[str, ...]:
        return self.usage.notes + self.end_notes("max_tokens=N")

    def end_notes(self, longer: str) -> tuple[str, ...]:
        """See remarks.end_notes."""
        return end_notes(self.finish_reason, self.usage.completion_tokens, self.usage.thought_tokens, longer)

    @property
    def drew(self) -> bool | None:
        return self.usage.drew


def array(values: NDArray[Any]) -> str:
    """The type and shape of an array, as a repr shows them: float32 [4800]."""
    return f"{values.dtype} {list(values.shape)}"


Event = TextDelta | ThoughtDelta | AudioChunk | Alignment | SpeechCodes | Picture | VideoDelta | Progress | Rows | Failover | Done


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
    arrived_s = np.array([chunk.arrival_s for chunk in chunks])
    received_s = np.cumsum([0.0, *(chunk.duration_s for chunk in chunks)])  # received_s[count]: the sound of the first `count` chunks.
    corners_s = np.array([(chunk.start_s, chunk.end_s) for chunk in play(chunks, start_buffer_s)])
    times_s = np.unique([*arrived_s, *corners_s.ravel()])
    played_s = np.interp(times_s, corners_s.ravel(), np.stack([received_s[:-1], received_s[1:]], axis=1).ravel())
    levels: list[BufferLevel] = []
    counts_before = np.searchsorted(arrived_s, times_s, "left")
    counts_after = np.searchsorted(arrived_s, times_s, "right")
    for at_s, sound_s, count_before, count_after in zip(times_s, played_s, counts_before, counts_after, strict=True):
        # At an arrival the line has two corners: without and with the chunks that come at this moment.
        for count in sorted({count_before, count_after}):
            levels.append(BufferLevel(float(at_s), max(float(received_s[count] - sound_s), 0.0)))
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
