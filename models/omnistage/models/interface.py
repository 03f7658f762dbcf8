"""What a model of each stage kind offers to the server of that kind.

    request --prepare--> prepared --generate | speak | decode | draw--> pieces

Plain Python and numpy: a model knows neither protobuf nor its neighbours. `prepare` is awaited once for every request: it refuses what the
model cannot do, with the field and what to do instead, or returns what the run needs, in a type of the model's own. The run is an async
generator from what comes in to what goes out; closing the generator (`aclose`) cancels the work and frees everything it held before
`aclose` returns. A model may be asked for many sessions at once from one event loop, and never computes on that loop: it has a thread of
its own.

The server has checked the form and the ranges of a request that stage.proto states; the model checks what it is able to do. Nothing is
checked by both.
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
from omnistage.models.conversation import Constraint, Media, Medium, Turn

Array = NDArray[np.generic]

P = TypeVar("P")
"""What a model makes of a request in `prepare`, and what only that model reads."""


class BadRequest(ValueError):
    """The caller asked for something this model cannot do. `field` names the request field, in proto spelling; the text says what to do.

    place: which of several it is: `medium`, its number among the media of a conversation, from 1; or `port`, on which it is streamed."""

    def __init__(self, field: str, description: str, **place: str) -> None:
        super().__init__(": ".join([field, *(f"{name} {which}" for name, which in place.items()), description]))
        self.field = field
        self.description = description
        self.place = place


class Full(RuntimeError):
    """The model can do what is asked, but not now, beside all that it does: another replica may. The text says what is full."""


class Failed(RuntimeError):
    """What is asked cannot be made with these weights, which only making it showed, and no replica of this revision could. The text, which
    the caller reads, says what came of it."""


# What a model is -------------------------------------------------------------------------------------------------------------------


class Content(enum.Enum):
    """What a port carries."""

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
        """Of the arrays that carry it. NumPy has no bfloat16: its bits travel as uint16 (`torch.from_numpy(a).view(torch.bfloat16)`)."""
        return np.dtype("uint16" if self is ElementType.BFLOAT16 else self.value)


@dataclass(frozen=True, slots=True)
class PortSpec:
    """One input or output port of a model.

    rate_hz: frames (codes, tensors that are frames) or samples (audio) per second, 0 where that means nothing.
    width: size of a row (tensor), codebooks (codes) or channels (audio). element_type: of a tensor.
    compact: small enough to be kept by the caller as a checkpoint. window: input only; a replacement replica needs a window of it, not all.
    """

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

    revision: changes whenever equal input could give other output (weights, dtype, code, schedule). accepts, produces: its ports.
    inputs: what a message or request may hold. constraints: forms of Constraint that it can keep to.
    settings: what it chose and why, by name of the setting, for humans.
    draws: whether another seed can give another output: always, or never. None, of a Thinker or Talker: where a temperature is asked for,
    and of a Thinker no text is given to be said; of another kind: that is not known.
    tells_unspoken: a Talker that yields Unspoken.
    usual_tokens: of a Thinker's text at most, where neither request nor pipeline says it. 0: one of them must.
    """

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
    """steps: of the model. stepped: sessions that were in them, each counted once a step."""

    steps: int = 0
    stepped: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a model is now. Pages are KV-cache pages; both 0 where there is no such cache.

    batches: counted since the start, for a model that computes several sessions in one step; None for others.
    """

    queued: int = 0
    kv_pages_used: int = 0
    kv_pages_total: int = 0
    batches: Batches | None = None


class Model(Protocol):
    """What every kind has in common."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def threads(self) -> Sequence[Activity]:
        """Every thread of the model that computes. One that hangs ends the process; see docs/failover.md."""

    def load(self) -> Load: ...

    async def warm_up(self) -> None:
        """Run small sessions, so that the first real one is not the slow one. What is measured with them becomes one of `info.settings`."""

    async def close(self) -> None:
        """Stop the thread and free the memory. No session is running."""


# What goes in and out ------------------------------------------------------------------------------------------------------------------

Wanted = Mapping[str, int]
"""Output ports that somebody takes, and the first item wanted of each: 0, or later in a session that was begun elsewhere. A port that is
not named is neither computed nor put out. At least one is named."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token that could have been drawn. piece: its bytes, perhaps a part of a character; empty for one that is no text."""

    token_id: int
    logprob: float
    piece: bytes


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text whose characters are final, and the tokens it came from.

    logprobs: natural log, one per token, empty if not asked for. top_logprobs: the likeliest tokens in the place of each, descending, empty
    if not asked for. pieces: the text of each token in UTF-8, where logprobs are asked for. finish_reason: set on the last piece and only
    there.
    queued_s, cached_tokens: on the first piece, seconds the request waited before its first step, and tokens of its prompt that need not be
    computed again. prompt_tokens: of the whole prompt, on the first piece; None: that is not told.
    thought: what the model thinks before it answers: the tokens are those of it, and text is empty; None: they are those of the answer.
    """

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
class Rows:
    """Consecutive rows of a tensor port, [n, width] in the port's element type; n may be 0 only where `last`, after which the port has
    nothing more. A port counts its own rows: those of a token may come later than the token."""

    port: str
    rows: Array
    last: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """What came in on a port. first: index of its first item. last: the port has nothing more.

    content, by the content of the port: text: TextPiece; tensor: [n, width] in its element type; codes: uint32 [n, codebooks]; audio:
    float32 [n, channels]; image, video, media: encoded bytes. n may be 0. An array is valid until the next piece is asked for.
    """

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
    prebuffer_s: of the first sound of a speech: how long a player should wait before it plays, so that it never runs dry; None: the model
    cannot tell."""

    samples: NDArray[np.float32]
    needs: int = 0
    prebuffer_s: float | None = None


# Thinker ---------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TextRequest:
    """What a Thinker is asked. logprobs: those of the tokens are wanted too; top_logprobs: with them, of so many of the likeliest ones.
    verbatim: say exactly this instead of generating, with the rows that an answer of its tokens has; no media go with it; empty: generate.
    client: who asks, a name without meaning, equal for all requests of one client; empty: nobody in particular. scope: nothing that was
    kept of a request is used for one of another scope.

    To go on with an answer that an equal request began: history: all tokens it has so far. finished: the answer has ended so; then only
    rows are wanted.
    """

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
    constraint: Constraint | None = None
    client: str = ""
    scope: str = ""
    history: tuple[int, ...] = ()
    finished: FinishReason | None = None


class ThinkerModel(Model, Protocol[P]):
    """Text, and rows, from a conversation."""

    async def prepare(self, request: TextRequest) -> P:
        """What `generate` needs. What is too long is refused before anything is done with it, and what takes long is done on a thread that
        `threads` names. What only the media tell may be found by `generate`, before it yields anything. Raises BadRequest."""

    def generate(self, prepared: P, inputs: AsyncIterator[Piece], wanted: Wanted) -> AsyncGenerator[TextPiece | Rows, None]:
        """Yield pieces as they are ready; stop computing, within a stated bound, while nobody takes them. inputs: media that are streamed.

        With a history the answer goes on after it, token for token as if it had never stopped: text from the first new token on, each row
        port from its wanted row on. A history costs a prefill, not a repetition. Nobody has rows that come from tokens which are not in the
        history, and a row is put out only when the text of its token is final: what a stop string cuts off has no rows either. A family
        whose Talker was made so puts out no row of a last token that no end was drawn after, because of max_tokens or a stop string; then
        it never does.
        """


# Talker ----------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SpeechRequest:
    """What a Talker is asked. voice: empty is the default. max_frames: 0 is no limit but the model's own. speed: 0.5 to 2. plain: every
    character of the text is meant as it is, none of it is Markdown. client, scope: as in TextRequest.

    To go on with speech that an equal request began: history: [frames, codebooks], the codes made so far, for a model whose codes are kept
    by the caller; None for others.
    """

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
    """Consecutive speech frames. rows: [n, width], uint32 for a codes port, the port's element type for a tensor port; n may be 0 only on
    the last, which has the finish_reason."""

    rows: Array
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class SpokenWord:
    """A word of the text, or several that are read as one thing. first_character: of all text, from 0; character_count: up to its end.
    begin_us, end_us: of its sound, microseconds from the beginning of the speech on."""

    first_character: int
    character_count: int
    begin_us: int
    end_us: int


@dataclass(frozen=True, slots=True)
class Alignment:
    """When the next words are spoken, as SpokenWord in chunk.proto says. words may be empty only where `last`, after which none comes."""

    words: tuple[SpokenWord, ...]
    last: bool = False


@dataclass(frozen=True, slots=True)
class Unspoken:
    """Characters of the text that the voice has no sound for, in their order; what stands together is one run."""

    runs: tuple[str, ...]


class TalkerModel(Model, Protocol[P]):
    """Speech frames from text, rows, or both: one port of them. A model that knows when it speaks which word has a second port, of content
    ALIGNMENT; it is no function of how the text was cut into pieces."""

    async def prepare(self, request: SpeechRequest) -> P:
        """What `speak` needs. Raises BadRequest."""

    def speak(self, prepared: P, inputs: AsyncIterator[Piece], wanted: Wanted) -> AsyncGenerator[Frames | Alignment | Unspoken, None]:
        """inputs: pieces of all input ports in order of arrival; always all of them, from item 0. Yields the frames, and words where they
        are wanted, from the wanted ones on; words before or right after their frames. Raises BadRequest for speech that ends before
        them.

        A model that `tells_unspoken` yields what it does not speak of the whole text, whatever is wanted. It is also asked where nothing is
        wanted any more, in a session that goes on elsewhere: for that alone."""


# Code2Wav --------------------------------------------------------------------------------------------------------------------------


class Profile(enum.StrEnum):
    """What a Code2Wav may be asked for, as in stage.proto: from the soonest first sound to that of the whole speech at once. Every model
    has all of them."""

    LATENCY = "latency"
    BALANCED = "balanced"
    QUALITY = "quality"
    OFFLINE = "offline"


USUAL_PROFILE = Profile.BALANCED


@dataclass(frozen=True, slots=True)
class WaveRequest:
    """What a Code2Wav is asked. profile: a Profile. client: as in TextRequest. A model makes sound at its own
    rate; other rates are the stage's business."""

    seed: int
    profile: str = USUAL_PROFILE
    voice: str = ""
    client: str = ""


class Code2WavModel(Model, Protocol[P]):
    """Sound from speech frames."""

    async def prepare(self, request: WaveRequest) -> P:
        """What `decode` needs. Raises BadRequest."""

    def first_frame(self, prepared: P, sample: int) -> int:
        """First frame needed for sound from that sample (per channel) on, left context included; 0 where only the frames themselves
        tell."""

    def decode(self, prepared: P, inputs: AsyncIterator[Piece], wanted: Wanted) -> AsyncGenerator[Sound, None]:
        """inputs: frames without gap, from frame `first_frame` of the wanted sample, or from the `Sound.needs` of a sound before it, or
        from any frame between. Yields the sound from the wanted sample on; chunk borders that change the samples are a function of the
        frame index, never of how the frames arrived or where they began. Raises BadRequest for sound that ends before the wanted sample."""


# Diffusion -------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DrawRequest:
    """What a Diffusion model is asked: `results` pictures, or each as so many layers; a film of so many frames; seconds of sound.

    images: to edit or start from. width, height in pixels, steps: 0 is the model's default. guidance_scale: how far from what
    negative_prompt says towards what prompt says; None is the default. guidance_scale_2: the same in the steps of a second transformer;
    None is as guidance_scale. frames_per_second, flow_shift, begin_s: as stage.proto says; 0 is the default. previews: how many are wanted
    on the way. preview_side: the longer side of one in pixels, 0 is the model's default. step_cache, sigmas, strength, mask_image,
    control_image, options: as stage.proto says; None, or empty, is the default. media_type: of what comes out; empty is the default.
    client: as in TextRequest.

    To go on with a drawing that an equal request began: history: [rows, width], all that came on the port of codes, for a model that has
    one.
    """

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
class Progress:
    """So many of the steps are done; steps: 0 if unknown."""

    step: int
    steps: int


@dataclass(frozen=True, slots=True)
class Preview:
    """An encoded picture of how far the work is. step: that it shows."""

    data: bytes
    media_type: str
    step: int


@dataclass(frozen=True, slots=True)
class Picture:
    """One encoded picture, or one layer of it: an item of the image port. layer: its index, 0 at the bottom."""

    data: bytes
    media_type: str
    layer: int = 0


MAX_CLIP_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Clip:
    """A piece of an encoded film, at most MAX_CLIP_BYTES. frames: that become showable with it, one at least: they are the items of the
    video port, and what has none would come twice in a session that goes on elsewhere. codecs: as a browser has to know them (RFC 6381);
    empty where nobody says."""

    data: bytes
    media_type: str
    frames: int
    codecs: str = ""


@dataclass(frozen=True, slots=True)
class Note:
    """What whoever asked may want to know of this answer: a sentence of at most 200 characters. Four of an answer are told."""

    text: str


Drawn = Progress | Preview | Picture | Clip | Sound | Rows | Note


class DiffusionModel(Model, Protocol[P]):
    """Pictures, films and sound from a prompt."""

    async def prepare(self, request: DrawRequest) -> P:
        """What `draw` needs. Raises BadRequest."""

    def items(self, prepared: P) -> Mapping[str, int]:
        """How many will come on each port in all. A port of progress, and one that keeps states, has none to tell."""

    def draw(self, prepared: P, inputs: AsyncIterator[Piece], wanted: Wanted) -> AsyncGenerator[Drawn, None]:
        """Yield what is drawn: pictures, frames and samples from the wanted one of their ports on. Progress begins anew in a session that
        was begun elsewhere."""


StageModel = Model
"""A model of any kind."""
