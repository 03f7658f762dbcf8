"""The interface between the server of each kind of stage and the models of that kind.

request --prepare--> prepared --generate | speak | decode | draw--> pieces

A model sees only plain Python and numpy, no protobuf and no other stage. `prepare` is awaited once for every request. It refuses a request
that the model cannot do, with the field and what to do instead, or returns what the run needs, in a type of the model's own. The run is an
async generator from inputs to outputs. Closing it (`aclose`) cancels the work, and everything that it held is free when `aclose` returns.
One event loop may run many sessions of a model at once; the model never computes on that loop, but on a thread of its own.

The server has checked the form of a request and the ranges that stage.proto states; the model checks whether it can do what is requested.
Nothing is checked twice.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from omnistage.engine.types import Activity as Activity
from omnistage.engine.types import FinishReason as FinishReason
from omnistage.engine.types import Sampling as Sampling
from omnistage.models.conversation import Media, TextConstraint, Turn
from omnistage.models.drawing_options import DrawingOptions
from omnistage.models.ports import Array as Array
from omnistage.models.ports import BadRequest as BadRequest
from omnistage.models.ports import Batches as Batches
from omnistage.models.ports import Content as Content
from omnistage.models.ports import ElementType as ElementType
from omnistage.models.ports import Failed as Failed
from omnistage.models.ports import Full as Full
from omnistage.models.ports import Load as Load
from omnistage.models.ports import Model as Model
from omnistage.models.ports import ModelInfo as ModelInfo
from omnistage.models.ports import Piece as Piece
from omnistage.models.ports import PortSpec as PortSpec
from omnistage.models.ports import Sound as Sound
from omnistage.models.ports import TensorRows as TensorRows
from omnistage.models.ports import TextPiece as TextPiece
from omnistage.models.ports import TokenLogprob as TokenLogprob
from omnistage.models.ports import Wanted as Wanted
from omnistage.models.ports import inputs_of as inputs_of

P = TypeVar("P")
"""The type of the result of `prepare`, which only the same model reads."""


# Thinker ---------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A request to a Thinker. logprobs: whether the logprobs of the tokens are wanted. top_logprobs: for how many of the likeliest tokens
    logprobs are wanted too. verbatim: text to say unchanged, with the rows that an answer of its tokens has; then the request has no media;
    empty: the model writes the answer. client: an arbitrary name, equal for all requests of one client; empty: no particular client. scope:
    results that are kept of a request are used only for requests of the same scope. is_usual_length: whether neither the request nor the
    pipeline states max_tokens, so that it is the model's usual_tokens.

    To go on with an answer that an equal request began: history: all its tokens so far. finished: how the answer has ended already, so that
    only rows are wanted; None: it has not."""

    turns: tuple[Turn, ...]
    seed: int
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 256
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    verbatim: str = ""
    constraint: TextConstraint | None = None
    client: str = ""
    scope: str = ""
    is_usual_length: bool = False
    history: tuple[int, ...] = ()
    finished: FinishReason | None = None


class ThinkerModel(Model, Protocol[P]):
    """Makes text, and rows, from a conversation."""

    async def prepare(self, request: TextRequest) -> P:
        """The prepared run for `generate`. A text that is too long is refused before any work; long work is done on one of `threads`.
        Faults that only the media show may be raised by `generate`, before it yields anything. Raises BadRequest."""

    def generate(self, prepared: P, inputs: AsyncIterator[Piece], ports: Wanted) -> AsyncGenerator[TextPiece | TensorRows, None]:
        """Yields pieces as they are ready. While nobody takes them, it stops computing after a limited number of pieces. inputs: streamed
        media.

        With a history, the answer goes on after it, token for token as if it had never stopped: text from the first new token on, the rows
        of a port from its wanted row on. A history is read like a prompt. Rows that went out earlier belong to tokens of the history. A row
        goes out only when the text of its token is final, so text that a stop string cuts off has no rows. If max_tokens or a stop string
        ends the answer, no end token follows its last token. Some families never put out the row of such a last token, because their Talker
        was trained without it."""


# Talker ----------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SpeechRequest:
    """A request to a Talker. voice: empty: the default voice. max_frames: largest number of frames of the speech; 0: the model's own limit.
    speed: 0.5 to 2. plain: whether the text is no Markdown. client, scope: as in TextRequest.

    To go on with speech that an equal request began: history: the codes made so far, [frames, codebooks]; None: there are none, or the
    caller keeps no codes of this model."""

    seed: int
    voice: str = ""
    sampling: Sampling = field(default_factory=Sampling)
    max_frames: int = 0
    speed: float = 1.0
    plain: bool = False
    client: str = ""
    scope: str = ""
    history: NDArray[np.uint32] | None = None

    @property
    def history_items(self) -> tuple[tuple[int, ...], ...]:
        """The history, frame by frame."""
        return () if self.history is None else tuple(map(tuple, self.history.tolist()))


@dataclass(frozen=True, slots=True)
class Frames:
    """Consecutive frames of speech. rows: [n, width], uint32 for a codes port, the port's element type for a tensor port; n may be 0 only
    in the last Frames. finish_reason: None except in the last Frames."""

    rows: Array
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class SpokenWord:
    """A word of the text, or several that are read as one. first_character: its index in the whole text, from 0. character_count: number of
    its characters. begin_us, end_us: when its sound begins and ends, in microseconds from the beginning of the speech."""

    first_character: int
    character_count: int
    begin_us: int
    end_us: int


@dataclass(frozen=True, slots=True)
class Alignment:
    """The times of the next spoken words, see SpokenWord in chunk.proto. words: may be empty only with `last`. last: no more words come."""

    words: tuple[SpokenWord, ...]
    last: bool = False


@dataclass(frozen=True, slots=True)
class Unspoken:
    """Characters of the text for which the voice has no sound. runs: in the order of the text; a run is such characters in a row."""

    runs: tuple[str, ...]


class TalkerModel(Model, Protocol[P]):
    """Makes frames of speech, which go out on one port, from text, rows, or both. A model that knows the time of each word has a second
    port, of content ALIGNMENT, which does not depend on how the text was cut into pieces."""

    async def prepare(self, request: SpeechRequest) -> P:
        """The prepared run for `speak`. Raises BadRequest."""

    def speak(self, prepared: P, inputs: AsyncIterator[Piece], ports: Wanted) -> AsyncGenerator[Frames | Alignment | Unspoken, None]:
        """Yields the frames from the first wanted frame on, and the words, if they are wanted, before or right after their frames. inputs:
        the pieces of all input ports in order of arrival, from item 0 even in a session that goes on elsewhere. Raises BadRequest for
        speech that ends before the first wanted item.

        A model that `tells_unspoken` yields the unspoken characters of the whole text, whatever is wanted. In a session that goes on
        elsewhere, it is called for these alone even if nothing else is wanted any more."""


# Code2Wav --------------------------------------------------------------------------------------------------------------------------


class Profile(enum.StrEnum):
    """The profiles of a Code2Wav, as in stage.proto, from the earliest first sound to the sound of the whole speech at once. Every model
    has all profiles."""

    LATENCY = "latency"
    BALANCED = "balanced"
    QUALITY = "quality"
    OFFLINE = "offline"


USUAL_PROFILE = Profile.BALANCED


@dataclass(frozen=True, slots=True)
class WaveRequest:
    """A request to a Code2Wav. profile: value of a Profile. voice: empty: the default voice. client: as in TextRequest. A model makes sound
    at its own rate; the stage converts it to other rates."""

    seed: int
    profile: str = USUAL_PROFILE
    voice: str = ""
    client: str = ""


class Code2WavModel(Model, Protocol[P]):
    """Makes sound from frames of speech."""

    async def prepare(self, request: WaveRequest) -> P:
        """The prepared run for `decode`. Raises BadRequest."""

    def first_frame(self, prepared: P, sample: int) -> int:
        """The first frame on which the sound from this sample (of each channel) on depends; 0 if that is not known before the frames
        come."""

    def decode(self, prepared: P, inputs: AsyncIterator[Piece], ports: Wanted) -> AsyncGenerator[Sound, None]:
        """Yields the sound from the wanted sample on. inputs: frames without a gap. The first is the frame `first_frame` of the wanted
        sample, or the `Sound.needs` of an earlier sound, or any frame between these two. The samples depend only on the frames, never on
        the pieces in which they came, or on the first frame that came. Raises BadRequest for sound that ends before the wanted sample."""


# Diffusion -------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawRequest(DrawingOptions):
    """A request to a Diffusion model: for `results` pictures, each of `layers` layers if that is not 0; for a film of `frames` frames; or
    for `seconds` of sound.

    images: images to edit or start from. client: as in TextRequest.

    To go on with a drawing that an equal request began: history: all rows of the port of codes so far, [rows, width], for a model with such
    a port; None: there are none."""

    seed: int
    prompt: str
    images: tuple[Media, ...] = ()
    results: int = 1
    history: NDArray[np.uint32] | None = None
    client: str = ""


@dataclass(frozen=True, slots=True)
class StepsDone:
    """Progress of a drawing. step: number of steps that are done. steps: number of all steps; 0: unknown."""

    step: int
    steps: int


@dataclass(frozen=True, slots=True)
class Preview:
    """An encoded picture of an unfinished result. step: number of the step after which the result looked like this."""

    data: bytes
    media_type: str
    step: int


@dataclass(frozen=True, slots=True)
class EncodedPicture:
    """One encoded picture, or one layer of it: an item of the image port. layer: its index, 0 at the bottom."""

    data: bytes
    media_type: str
    layer: int = 0


MAX_CLIP_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Clip:
    """A piece of an encoded film, at most MAX_CLIP_BYTES. frames: number of frames that can be shown with it, at least one. Frames are the
    items of the video port, so a piece without frames would come twice in a session that goes on elsewhere. codecs: names of its codecs for
    a browser (RFC 6381); empty: unknown."""

    data: bytes
    media_type: str
    frames: int
    codecs: str = ""


@dataclass(frozen=True, slots=True)
class Note:
    """A note on this answer for the client: a sentence of at most 200 characters. The client gets at most four notes of an answer."""

    text: str


@dataclass(frozen=True, slots=True)
class PromptRead:
    """The number of tokens of a drawing's prompt, as the model reads it."""

    tokens: int


Drawn = StepsDone | Preview | EncodedPicture | Clip | Sound | TensorRows | Note | PromptRead


class DiffusionModel(Model, Protocol[P]):
    """Makes pictures, films and sound from a prompt."""

    async def prepare(self, request: DrawRequest) -> P:
        """The prepared run for `draw`. Raises BadRequest."""

    def items(self, prepared: P) -> Mapping[str, int]:
        """Name of each output port -> number of items that will come on it, without ports of progress and ports that keep states."""

    def draw(self, prepared: P, inputs: AsyncIterator[Piece], ports: Wanted) -> AsyncGenerator[Drawn, None]:
        """Yields the results: pictures, frames and samples from the wanted item of their ports on. Progress begins anew in a session that
        was begun elsewhere."""


StageModel = Model
"""A model of any kind."""
