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
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from omnistage.engine.types import Activity as Activity
from omnistage.engine.types import FinishReason as FinishReason
from omnistage.engine.types import Sampling as Sampling
from omnistage.models.conversation import Media, Medium, TextConstraint, Turn

Array = NDArray[np.generic]

P = TypeVar("P")
"""The type of the result of `prepare`, which only the same model reads."""


class BadRequest(ValueError):
    """The caller asked for something that this model cannot do. field: the field of the request, in proto spelling. description: what is
    wrong and what to do.

    place: which of several parts is bad: `medium`: its number among the media of a conversation, from 1; or `port`: the port on which it
    comes."""

    def __init__(self, field: str, description: str, **place: str) -> None:
        super().__init__(": ".join([field, *(f"{name} {which}" for name, which in place.items()), description]))
        self.field = field
        self.description = description
        self.place = place


class Full(RuntimeError):
    """The model cannot do this now because of its other work; another replica may be able to. The text says what is full."""


class Failed(RuntimeError):
    """The model tried the request and failed, and any replica of this revision would fail too. The text, which the caller reads, says how
    it failed."""


# Models ----------------------------------------------------------------------------------------------------------------------------


class Content(enum.Enum):
    """The kind of items that a port carries."""

    TEXT = "text"
    CODES = "codes"
    AUDIO = "audio"
    IMAGE = "image"
    VIDEO = "video"
    TENSOR = "tensor"
    PROGRESS = "progress"
    MEDIA = "media"
    ALIGNMENT = "alignment"


class ElementType(enum.Enum):
    """Type of the elements of a tensor port, as in tensor.proto."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    INT64 = "int64"
    INT32 = "int32"
    INT16 = "int16"
    UINT8 = "uint8"
    BOOL = "bool"

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """NumPy type of arrays of such elements. NumPy has no bfloat16, so its bits travel as uint16
        (`torch.from_numpy(a).view(torch.bfloat16)`)."""
        return np.dtype("uint16" if self is ElementType.BFLOAT16 else self.value)


@dataclass(frozen=True, slots=True)
class PortSpec:
    """One input or output port of a model.

    rate_hz: frames (codes, tensors that are frames) or samples (audio) in a second; 0: the port has no rate. width: size of a row (tensor),
    codebooks (codes) or channels (audio). element_type: of a tensor port. compact: whether its items are small enough for the caller to
    keep as a checkpoint. window: for an input: whether a replica that takes over a session needs only its later items."""

    name: str
    content: Content
    rate_hz: float = 0.0
    width: int = 0
    element_type: ElementType = ElementType.FLOAT32
    compact: bool = False
    window: bool = False


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts of a loaded model that do not change.

    revision: changes whenever equal input could give other output (weights, dtype, code, schedule). accepts, produces: its ports. inputs:
    kinds of content that a message or request may hold. constraints: forms of TextConstraint that it supports. settings: name of a setting
    -> its value and reason, for humans. draws: whether another seed can give another output. None for a Thinker or Talker: only if a
    temperature is requested and, for a Thinker, no verbatim text; None for another kind: not known. tells_unspoken: whether it is a Talker
    that yields Unspoken. usual_tokens: largest number of tokens of a Thinker's text if neither request nor pipeline sets it; 0: one of them
    must."""

    name: str
    revision: str
    accepts: tuple[PortSpec, ...]
    produces: tuple[PortSpec, ...]
    max_sessions: int
    voices: tuple[str, ...] = ()
    inputs: tuple[Medium, ...] = ("text",)
    constraints: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    draws: bool | None = None
    tells_unspoken: bool = False
    usual_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Batches:
    """Counts that show how many sessions a model computes together. steps: number of steps since the start. stepped: sum of the numbers of
    sessions in these steps."""

    steps: int = 0
    stepped: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a model now. queued: number of requests that wait. kv_pages_used, kv_pages_total: pages of the KV cache; both 0: it has
    none. preemptions: how often a session has lost its pages to others so far, and was computed anew.

    batches: None: the model never computes several sessions in one step."""

    queued: int = 0
    kv_pages_used: int = 0
    kv_pages_total: int = 0
    preemptions: int = 0
    batches: Batches | None = None


class Model(Protocol):
    """The part of the interface that models of all kinds implement."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def threads(self) -> Sequence[Activity]:
        """The activity of each computing thread of the model. If a thread hangs, the process ends; see docs/failover.md."""

    def load(self) -> Load: ...

    async def warm_up(self) -> None:
        """Run small sessions, so that the first real session is not slow. A measurement made with them becomes an entry of
        `info.settings`."""

    async def close(self) -> None:
        """Stop the threads and free the memory. No session may be running."""


# Inputs and outputs --------------------------------------------------------------------------------------------------------------------

Wanted = Mapping[str, int]
"""Name of each output port that somebody reads -> index of its first wanted item: 0, or larger in a session that was begun elsewhere. Other
ports are neither computed nor sent. There is at least one entry."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token that could have been drawn. logprob: natural log of its probability. piece: its bytes, perhaps a part of a character; empty:
    the token is no text."""

    token_id: int
    logprob: float
    piece: bytes


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text whose characters are final, and the tokens that it came from.

    logprobs: natural log of each token's probability; empty: not requested. top_logprobs: for each token, the tokens that were likeliest
    there, descending; empty: not requested. pieces: the text of each token in UTF-8, if logprobs are requested. finish_reason: None except
    on the last piece. On the first piece: queued_s: seconds that the request waited before its first step; cached_tokens: tokens of its
    prompt that need no computing; prompt_tokens: tokens of the whole prompt, None: not known. thought: text that the model thinks before
    its answer; then the tokens belong to the thought, and `text` is empty. None: the tokens belong to the answer."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    finish_reason: FinishReason | None = None
    queued_s: float = 0.0
    cached_tokens: int = 0
    prompt_tokens: int | None = None
    pieces: tuple[bytes, ...] = ()
    thought: str | None = None


@dataclass(frozen=True, slots=True)
class TensorRows:
    """Consecutive rows of a tensor port, [n, width] in the port's element type; n may be 0 only with `last`, which ends the port. Each port
    counts its own rows, because the row of a token may come later than the token."""

    port: str
    rows: Array
    last: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece that came on an input port. first: index of its first item on the port. last: whether the port ends with this piece.

    content, by the content of the port: text: TextPiece; tensor: [n, width] in its element type; codes: uint32 [n, codebooks]; audio:
    float32 [n, channels]; image, video, media: encoded bytes. n may be 0. An array is valid until the next piece is requested."""

    port: str
    first: int
    last: bool
    content: TextPiece | Array | bytes


async def no_inputs() -> AsyncIterator[Piece]:
    """The inputs of a model without input ports."""
    return
    yield


@dataclass(frozen=True, slots=True)
class Sound:
    """Consecutive samples, [n, channels] float32 in -1..1. needs: first frame that another Code2Wav would need to go on after these
    samples. prebuffer_s: on the first sound of a speech, seconds that a player should wait before it plays, so that it never runs out of
    sound; None: not known."""

    samples: NDArray[np.float32]
    needs: int = 0
    prebuffer_s: float | None = None


# Thinker ---------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A request to a Thinker. logprobs: whether the logprobs of the tokens are wanted. top_logprobs: for how many of the likeliest tokens
    logprobs are wanted too. verbatim: text to say unchanged, with the rows that an answer of its tokens has; then the request has no media;
    empty: the model writes the answer. client: an arbitrary name, equal for all requests of one client; empty: no particular client. scope:
    results that are kept of a request are used only for requests of the same scope.

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


@dataclass(frozen=True, slots=True)
class DrawRequest:
    """A request to a Diffusion model: for `results` pictures, each of `layers` layers if that is not 0; for a film of `frames` frames; or
    for `seconds` of sound.

    images: images to edit or start from. width, height (in pixels), steps: 0: the model's default. guidance_scale: how far from the
    negative_prompt towards the prompt; None: the default. guidance_scale_2: the same in the steps of a second transformer; None: as
    guidance_scale. frames_per_second, flow_shift, begin_s: see stage.proto; 0: the default. previews: number of previews before the result.
    preview_side: the longer side of a preview in pixels; 0: the model's default. step_cache, sigmas, strength, mask_image, control_image,
    options: see stage.proto; 0, None or empty: the default. media_type: type of the result; empty: the default. client: as in TextRequest.

    To go on with a drawing that an equal request began: history: all rows of the port of codes so far, [rows, width], for a model with such
    a port; None: there are none."""

    seed: int
    prompt: str
    negative_prompt: str = ""
    images: tuple[Media, ...] = ()
    width: int = 0
    height: int = 0
    frames: int = 0
    seconds: float = 0.0
    layers: int = 0
    steps: int = 0
    guidance_scale: float | None = None
    guidance_scale_2: float | None = None
    frames_per_second: float = 0.0
    flow_shift: float = 0.0
    begin_s: float = 0.0
    results: int = 1
    previews: int = 0
    preview_side: int = 0
    step_cache: float = 0.0
    sigmas: tuple[float, ...] = ()
    strength: float | None = None
    mask_image: Media | None = None
    control_image: Media | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    history: NDArray[np.uint32] | None = None
    media_type: str = ""
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


Drawn = StepsDone | Preview | EncodedPicture | Clip | Sound | TensorRows | Note


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
