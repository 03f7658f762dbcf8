"""What a model of each stage kind offers to the server of that kind.

Plain Python and numpy: a model knows neither protobuf nor its neighbours. Each kind is one async generator from what comes in to
what goes out; closing the generator (`aclose`) cancels the work and frees everything it held before `aclose` returns. A model may be
asked for many sessions at once from one event loop, and never computes on that loop: it has a thread of its own.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from omnistage.engine.activity import Activity
from omnistage.engine.types import FinishReason, Sampling


class BadRequest(ValueError):
    """The caller asked for something this model cannot do. `field` names the request field, in proto spelling; the text says what to do."""

    def __init__(self, field: str, description: str) -> None:
        super().__init__(f"{field}: {description}")
        self.field = field
        self.description = description


class Content(enum.Enum):
    """What a port carries."""

    TEXT = "text"
    CODES = "codes"
    AUDIO = "audio"
    IMAGE = "image"
    TENSOR = "tensor"
    PROGRESS = "progress"


@dataclass(frozen=True, slots=True)
class PortSpec:
    """One input or output port of a model.

    rate_hz: frames (codes, tensors that are frames) or samples (audio) per second, 0 where that means nothing.
    width: size of a row (tensor, float32), codebooks (codes) or channels (audio).
    compact: small enough to be kept by the caller as a checkpoint. window: input only; a replacement replica needs a window of it, not all.
    """

    name: str
    content: Content
    rate_hz: float = 0.0
    width: int = 0
    compact: bool = False
    window: bool = False


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Constant facts of a loaded model. revision: changes whenever equal input could give other output (weights, dtype, code, schedule)."""

    name: str
    revision: str
    accepts: tuple[PortSpec, ...]
    produces: tuple[PortSpec, ...]
    max_sessions: int
    voices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a model is now. Pages are KV-cache pages; both 0 where there is no such cache."""

    queued: int = 0
    kv_pages_used: int = 0
    kv_pages_total: int = 0


class Model(Protocol):
    """What every kind has in common."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def threads(self) -> Sequence[Activity]:
        """Every thread of the model that computes. One that hangs ends the process; see docs/failover.md."""

    def load(self) -> Load: ...

    async def warm_up(self) -> None:
        """Run one small session, so that the first real one is not the slow one."""

    async def close(self) -> None:
        """Stop the thread and free the memory. No session is running."""


# Thinker ---------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a conversation. role: system, user or assistant."""

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class TextRequest:
    """What a Thinker is asked. max_tokens >= 1. verbatim: say exactly this instead of generating; empty: generate.

    To go on with an answer that an equal request began: history: all tokens it has so far. rows_from: hidden rows are wanted
    from this token on, at most len(history). finished: the answer has ended so; only rows of its history are wanted.

    token_ids: what the model made of the text when it prepared the request; empty before, and for models that need none.
    """

    turns: tuple[Turn, ...]
    seed: int
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 256
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    verbatim: str = ""
    history: tuple[int, ...] = ()
    rows_from: int = 0
    finished: FinishReason | None = None
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text whose characters are final, and the tokens it came from.

    logprobs: natural log, one per token, empty if not asked for. hidden: float32 [len(token_ids), width] for models with a hidden port.
    finish_reason: set on the last piece and only there. queued_s: on the first piece, seconds the request waited before its first step.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    hidden: NDArray[np.float32] | None = None
    finish_reason: FinishReason | None = None
    queued_s: float = 0.0


class ThinkerModel(Model, Protocol):
    """Text from a conversation."""

    async def prepare(self, request: TextRequest) -> TextRequest:
        """The request as `generate` takes it without doing the same work again. Called before a session is opened, for every request, so
        nothing that takes long is done on the event loop, and what is too long is refused before anything is done with it. Raises
        BadRequest for what `generate` would refuse."""

    def generate(self, request: TextRequest) -> AsyncGenerator[TextPiece, None]:
        """Yield pieces as they are ready; stop computing, within a stated bound, while nobody takes them.

        With a history, a model with hidden rows first yields pieces for the tokens history[rows_from:] again, with their rows and without
        text; no piece has tokens of both sides. Then, and in a model without rows at once, the answer goes on: token for token as if it had
        never stopped. `finished` is on the last piece. A history costs a prefill, not a repetition.
        """


# Talker ----------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SpeechRequest:
    """What a Talker is asked. voice: empty is the default. max_frames: 0 is no limit but the model's own. speed: 0.5 to 2.

    To go on with speech that an equal request began: first: the frame that is to come first. history: [first, codebooks], the codes made so
    far, for a model whose codes are kept by the caller; None for others.
    """

    seed: int
    voice: str = ""
    sampling: Sampling = field(default_factory=Sampling)
    max_frames: int = 0
    speed: float = 1.0
    first: int = 0
    history: NDArray[np.uint32] | None = None


@dataclass(frozen=True, slots=True)
class Frames:
    """Consecutive speech frames. rows: [n, width], uint32 for a codes port, float32 for a tensor port; n may be 0 only on the last."""

    rows: NDArray[np.uint32] | NDArray[np.float32]
    finish_reason: FinishReason | None = None


class TalkerModel(Model, Protocol):
    """Speech frames from text pieces or hidden rows."""

    def check(self, request: SpeechRequest) -> None: ...

    def speak(self, request: SpeechRequest, inputs: AsyncIterator[TextPiece | NDArray[np.float32]]) -> AsyncGenerator[Frames, None]:
        """inputs: TextPiece for a text port, [n, width] rows for a tensor port (a row array is valid until the next is asked for); always
        all of them, from the first. Raises BadRequest for speech that ends before frame `request.first`."""


# Code2Wav --------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WaveRequest:
    """What a Code2Wav is asked. profile: latency, balanced, quality, offline. sample_rate_hz: 0 is the model's own. first: the sample (per
    channel) that is to come first, for a sound that an equal request began."""

    seed: int
    profile: str = "balanced"
    sample_rate_hz: int = 0
    voice: str = ""
    first: int = 0


@dataclass(frozen=True, slots=True)
class SpeechFrames:
    """Consecutive frames that go into a Code2Wav. first: index of the first one. rows: [n, width], valid until the next are asked for."""

    first: int
    rows: NDArray[np.uint32] | NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Sound:
    """Consecutive samples, [n, channels] float32 in -1..1. needs: first frame that a replacement would need to go on after them."""

    samples: NDArray[np.float32]
    needs: int = 0


class Code2WavModel(Model, Protocol):
    """Sound from speech frames."""

    def check(self, request: WaveRequest) -> None: ...

    def first_frame(self, request: WaveRequest) -> int:
        """First frame needed for sound from sample `request.first` on: left context included, 0 where only the frames themselves tell."""

    def decode(self, request: WaveRequest, frames: AsyncIterator[SpeechFrames]) -> AsyncGenerator[Sound, None]:
        """frames: without gap, from frame first_frame(request), or from the `Sound.needs` of a sound before sample `request.first`, or from
        any frame between. Yields the sound from that sample on; chunk borders that change the samples are a function of the frame index,
        never of how the frames arrived or where they began. Raises BadRequest for sound that ends before sample `request.first`."""


# Diffusion -------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DrawRequest:
    """What a Diffusion model is asked. Pixels, steps: 0 is the model's default. results: 1 to 8. first: the picture that is to come first,
    below `results`, for a request that an equal one began."""

    seed: int
    prompt: str
    negative_prompt: str = ""
    width: int = 0
    height: int = 0
    steps: int = 0
    guidance_scale: float | None = None
    results: int = 1
    previews: int = 0
    first: int = 0


@dataclass(frozen=True, slots=True)
class Picture:
    """One encoded picture, a preview of one, or progress (data empty). step, steps: how far the work is."""

    data: bytes
    media_type: str
    step: int
    steps: int
    preview: bool = False


class DiffusionModel(Model, Protocol):
    """Pictures from a prompt."""

    def check(self, request: DrawRequest) -> None: ...

    def draw(self, request: DrawRequest) -> AsyncGenerator[Picture, None]: ...


StageModel = ThinkerModel | TalkerModel | Code2WavModel | DiffusionModel
