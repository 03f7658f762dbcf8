"""The interface between the server of each kind of stage and the models of that kind.

request --prepare--> prepared --generate | speak | decode | draw--> pieces

Plain Python and numpy: a model knows neither protobuf nor its neighbours. `prepare` is awaited once for every request. It refuses a request
that the model cannot do, with the field and what to do instead, or returns what the run needs, in a type of the model's own. The run is an
async generator from inputs to outputs. To close it (`aclose`) cancels the work; everything that it held is free when `aclose` returns. One
event loop may run many sessions of a model at once; the model never computes on that loop, but on a thread of its own.

The server has checked the form of a request and the ranges that stage.proto states; the model checks its own abilities. Nothing is checked
by both.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from omnistage.engine.activity import Activity as Activity
from omnistage.engine.types import FinishReason as FinishReason
from omnistage.engine.types import Sampling as Sampling
from omnistage.models.conversation import Media, Medium, TextConstraint, Turn

Array = NDArray[np.generic]

P = TypeVar("P")
"""The result of `prepare`, which only its own model reads."""


class BadRequest(ValueError):
    """The caller asked for something that this model cannot do. field: the field of the request, in proto spelling. description: what is
    wrong and what to do.

    place: which of several parts is meant: `medium`, its number among the media of a conversation, from 1; or `port`, on which it is
    streamed."""

    def __init__(self, field: str, description: str, **place: str) -> None:
        super().__init__(": ".join([field, *(f"{name} {which}" for name, which in place.items()), description]))
        self.field = field
        self.description = description
        self.place = place


class Full(RuntimeError):
    """The model cannot do this now because of its other work; another replica may. The text says what is full."""


class Failed(RuntimeError):
    """These weights cannot make the requested result. Only the attempt showed that, and no replica of this revision could do it. The text,
    which the caller reads, says what the attempt gave."""


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
        """NumPy type of the arrays that carry it. NumPy has no bfloat16: its bits travel as uint16
        (`torch.from_numpy(a).view(torch.bfloat16)`)."""
        return np.dtype("uint16" if self is ElementType.BFLOAT16 else self.value)


@dataclass(frozen=True, slots=True)
class PortSpec:
    """One input or output port of a model.

    rate_hz: frames (codes, tensors that are frames) or samples (audio) per second; 0: it has no rate. width: size of a row (tensor),
    codebooks (codes) or channels (audio). element_type: of a tensor port. compact: whether its items are small enough for the caller to
    keep as a checkpoint. window: for an input: a replica that takes over a session needs its items only from some later one on."""

    name: str
    content: Content
    rate_hz: float = 0.0
    width: int = 0
    element_type: ElementType = ElementType.FLOAT32
    compact: bool = False
    window: bool = False


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Constant facts of a loaded model.

    revision: changes whenever equal input could give other output (weights, dtype, code, schedule). accepts, produces: its ports. inputs:
    kinds of content that a message or request may hold. constraints: forms of TextConstraint that it supports. settings: name of a setting
    -> its value and reason, for humans. draws: whether another seed can give another output. None for a Thinker or Talker: only if a
    temperature is requested and, for a Thinker, no verbatim text; None for another kind: not known. tells_unspoken: whether it is a Talker
    that yields Unspoken. usual_tokens: tokens that a Thinker's text may have if neither request nor pipeline says; 0: one of them must."""

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
    """How much a model computes together. steps: number of steps since the start. stepped: number of sessions in them, each counted once a
    step."""

    steps: int = 0
    stepped: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a model now. queued: number of requests that wait. kv_pages_used, kv_pages_total: pages of the KV cache; both 0: there is
    none.

    batches: for a model that computes several sessions in one step; None for others."""

    queued: int = 0
    kv_pages_used: int = 0
    kv_pages_total: int = 0
    batches: Batches | None = None


class Model(Protocol):
    """The part of the interface that models of all kinds have."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def threads(self) -> Sequence[Activity]:
        """The activity of each thread of the model that computes. A thread that hangs ends the process; see docs/failover.md."""

    def load(self) -> Load: ...

    async def warm_up(self) -> None:
        """Run small sessions, so that the first real one is not slow. A measurement made with them becomes one of `info.settings`."""

    async def close(self) -> None:
        """Stop the threads and free the memory. No session may be running."""


# Inputs and outputs --------------------------------------------------------------------------------------------------------------------

Wanted = Mapping[str, int]
"""Name of each output port that somebody reads -> index of its first wanted item: 0, or later in a session that was begun elsewhere. A port
that is not here is neither computed nor sent. There is at least one."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token that could have been drawn. piece: its bytes, perhaps a part of a character; empty for a token that is no text."""

    token_id: int
    logprob: float
    piece: bytes


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text whose characters are final, and the tokens that it came from.

    logprobs: natural log, one for each token; empty if not requested. top_logprobs: for each token, the likeliest tokens at its place,
    descending; empty if not requested. pieces: the text of each token in UTF-8, if logprobs are requested. finish_reason: on the last piece
    only. On the first piece: queued_s: seconds that the request waited before its first step; cached_tokens: tokens of its prompt that need
    no computing; prompt_tokens: tokens of the whole prompt, None: not known. thought: text that the model thinks before its answer; the
    tokens then belong to the thought, and text is empty. None: the tokens belong to the answer."""

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
    """Consecutive rows of a tensor port, [n, width] in the port's element type; n may be 0 only with `last`, which ends the port. A port
    counts its own rows: the row of a token may come later than the token."""

    port: str
    rows: Array
    last: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece that came on an input port. first: index of its first item. last: whether the port ends with it.

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
    """Consecutive samples, [n, channels] float32 in -1..1. needs: first frame that a replacement Code2Wav needs to go on after them.
    prebuffer_s: on the first sound of a speech, seconds that a player should wait before it plays, so that it never runs dry; None: not
    known."""

    samples: NDArray[np.float32]
    needs: int = 0
    prebuffer_s: float | None = None


# Thinker ---------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A request to a Thinker. logprobs: whether the logprobs of the tokens are wanted. top_logprobs: number of the likeliest tokens that
    are wanted with theirs. verbatim: text to say exactly as it is, with the rows that an answer of its tokens has; no media go with it;
    empty: the model writes the answer. client: a name without meaning, equal for all requests of one client; empty: nobody in particular.
    scope: results that are kept of a request are used only for requests of the same scope.

    To go on with an answer that an equal request began: history: all its tokens so far. finished: how the answer has ended already; then
    only rows are wanted."""

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
        Faults that only the media show may be found by `generate`, before it yields anything. Raises BadRequest."""

    def generate(self, prepared: P, inputs: AsyncIterator[Piece], wanted: Wanted) -> AsyncGenerator[TextPiece | TensorRows, None]:
        """Yields pieces as they are ready. While nobody takes them, it stops computing after a bounded number. inputs: streamed media.

        With a history, the answer goes on after it, token for token as if it had never stopped: text from the first new token on, the rows
        of a port from its wanted row on. A history is read like a prompt, not generated again. Rows that went out earlier belong to tokens
        of the history. A row goes out only when the text of its token is final: text that a stop string cuts off has no rows either. If
        max_tokens or a stop string ends the answer, no end token follows its last token: some families never put out the row of such a
        token, because their Talker was trained so."""


# Talker ----------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SpeechRequest:
    """A request to a Talker. voice: empty: the default. max_frames: frames that the speech may have; 0: the model's own limit. speed: 0.5
    to 2. plain: whether the text is no Markdown, so that every character stands for itself. client, scope: as in TextRequest.

    To go on with speech that an equal request began: history: the codes made so far, [frames, codebooks], for a model whose codes the
    caller keeps; None for others."""

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
    on the last, which has the finish_reason."""

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
    """When the next words are spoken, as SpokenWord in chunk.proto says. words: may be empty only with `last`, after which no words
    come."""

    words: tuple[SpokenWord, ...]
    last: bool = False


@dataclass(frozen=True, slots=True)
class Unspoken:
    """Characters of the text that the voice has no sound for, in their order; each run is characters that stand together."""

    runs: tuple[str, ...]


class TalkerModel(Model, Protocol[P]):
    """Makes frames of speech, which go out on one port, from text, rows, or both. A model that knows when it speaks which word has a second
    port, of content ALIGNMENT, which does not depend on how the text was cut into pieces."""

    async def prepare(self, request: SpeechRequest) -> P:
        """The prepared run for `speak`. Raises BadRequest."""

    def speak(self, prepared: P, inputs: AsyncIterator[Piece], wanted: Wanted) -> AsyncGenerator[Frames | Alignment | Unspoken, None]:
        """Yields the frames from the first wanted one on, and the words, if they are wanted, before or right after their frames. inputs:
        the pieces of all input ports in order of arrival, from item 0 even in a session that goes on elsewhere. Raises BadRequest for
        speech that ends before the first wanted item.

        A model that `tells_unspoken` yields the unspoken characters of the whole text, whatever is wanted. In a session that goes on
        elsewhere, it is called for these alone even if nothing else is wanted any more."""


# Code2Wav --------------------------------------------------------------------------------------------------------------------------


class Profile(enum.StrEnum):
    """The profiles of a Code2Wav, as in stage.proto: from the earliest first sound to the sound of the whole speech at once. Every model
    has all of them."""

    LATENCY = "latency"
    BALANCED = "balanced"
    QUALITY = "quality"
    OFFLINE = "offline"


USUAL_PROFILE = Profile.BALANCED


@dataclass(frozen=True, slots=True)
class WaveRequest:
    """A request to a Code2Wav. profile: a Profile. voice: empty: the default. client: as in TextRequest. A model makes sound at its own
    rate; the stage converts it to other rates."""

    seed: int
    profile: str = USUAL_PROFILE
    voice: str = ""
    client: str = ""


class Code2WavModel(Model, Protocol[P]):
    """Makes sound from frames of speech."""

    async def prepare(self, request: WaveRequest) -> P:
        """The prepared run for `decode`. Raises BadRequest."""

    def first_frame(self, prepared: P, sample: int) -> int:
        """The first frame that the sound from this sample (of each channel) on depends on; 0 if only the frames themselves show that."""

    def decode(self, prepared: P, inputs: AsyncIterator[Piece], wanted: Wanted) -> AsyncGenerator[Sound, None]:
        """Yields the sound from the wanted sample on. inputs: frames without gap, from frame `first_frame` of the wanted sample, or from
        the `Sound.needs` of a sound before it, or from any frame between. The samples depend only on the frames, never on how these arrived
        or with which one they began. Raises BadRequest for sound that ends before the wanted sample."""


# Diffusion -------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DrawRequest:
    """A request to a Diffusion model: for `results` pictures, each of `layers` layers if that is not 0; for a film of `frames` frames; or
    for `seconds` of sound.

    images: images to edit or start from. width, height in pixels, steps: 0 is the model's default. guidance_scale: how far from the
    negative_prompt towards the prompt; None is the default. guidance_scale_2: the same in the steps of a second transformer; None is as
    guidance_scale. frames_per_second, flow_shift, begin_s: as stage.proto says; 0 is the default. previews: number of previews on the way.
    preview_side: the longer side of a preview in pixels; 0 is the model's default. step_cache, sigmas, strength, mask_image, control_image,
    options: as stage.proto says; None, or empty, is the default. media_type: type of the result; empty is the default. client: as in
    TextRequest.

    To go on with a drawing that an equal request began: history: [rows, width], all rows of the port of codes, for a model that has one."""

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
    """Progress of a drawing. step: number of steps that are done. steps: number of all; 0: unknown."""

    step: int
    steps: int


@dataclass(frozen=True, slots=True)
class Preview:
    """An encoded picture of the work so far. step: the step that it shows."""

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
    """A piece of an encoded film, at most MAX_CLIP_BYTES. frames: number of frames that can be shown with it, at least one. They are the
    items of the video port: a piece without any would come twice in a session that goes on elsewhere. codecs: their names for a browser
    (RFC 6381); empty: unknown."""

    data: bytes
    media_type: str
    frames: int
    codecs: str = ""


@dataclass(frozen=True, slots=True)
class Note:
    """A note on this answer for the client: a sentence of at most 200 characters. At most four notes of an answer are told."""

    text: str


Drawn = StepsDone | Preview | EncodedPicture | Clip | Sound | TensorRows | Note


class DiffusionModel(Model, Protocol[P]):
    """Makes pictures, films and sound from a prompt."""

    async def prepare(self, request: DrawRequest) -> P:
        """The prepared run for `draw`. Raises BadRequest."""

    def items(self, prepared: P) -> Mapping[str, int]:
        """For each output port, the number of items that will come in all; without ports of progress and ports that keep states."""

    def draw(self, prepared: P, inputs: AsyncIterator[Piece], wanted: Wanted) -> AsyncGenerator[Drawn, None]:
        """Yields the results: pictures, frames and samples from the wanted item of their ports on. Progress begins anew in a session that
        was begun elsewhere."""


StageModel = Model
"""A model of any kind."""
