"""The events of a stream: text, thoughts, sound, codes of speech, pictures, their progress and rows as they come, servers that were lost
on the way, and the account at the end. Times are seconds by the client's clock after t0, the moment of the call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omnistage.client.notebook import pictures
from omnistage.client.playback import Timing, figures


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
        return pictures([(self.media_type, self.data)])

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
        return True if True in draws else None if None in draws or not draws else False

    def __repr__(self) -> str:
        """Leaves out the accounts of the stages, which are ten times as long."""
        stages = ", ".join(report.stage for report in self.stages) or "none"
        tokens = (*(() if self.prompt_tokens is None else ("prompt_tokens", "cached_tokens")), "completion_tokens")
        return f"Usage({figures(self, *tokens, 'queued_s', 'first_text_s', 'first_audio_s', 'total_s')}, stages: {stages})"


def unspoken_text(account: Usage) -> str:
    """The characters that were not spoken and their number, in words for people; empty if all were spoken."""
    if not account.unspoken:
        return ""
    ellipsis = "..." if account.unspoken > len(account.unspoken_words) - account.unspoken_words.count(" ") else ""
    return f"{account.unspoken_words}{ellipsis} ({account.unspoken} character{'s' * (account.unspoken != 1)})"


@dataclass(frozen=True, slots=True)
class Done:
    """The end of an answer. finish_reason: stop, length or interrupted; empty for an answer without text. failovers: oldest first.
    unspoken, unspoken_words, notes, drew: as in `usage`."""

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
        return self.usage.notes

    @property
    def drew(self) -> bool | None:
        return self.usage.drew


def array(values: NDArray[Any]) -> str:
    """The type and shape of an array, as a repr shows them: float32 [4800]."""
    return f"{values.dtype} {list(values.shape)}"


Event = TextDelta | ThoughtDelta | AudioChunk | Alignment | SpeechCodes | Picture | VideoDelta | Progress | Rows | Failover | Done
