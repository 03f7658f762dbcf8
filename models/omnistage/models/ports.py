"""The part of the interface of models that is the same for all kinds: errors, ports, facts and load of a model, and the pieces that go
through ports. `omnistage.models.interface` has all of its names, and is where others import them from."""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from omnistage.engine.types import Activity, FinishReason
from omnistage.models.conversation import Medium

Array = NDArray[np.generic]


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


async def inputs_of(*pieces: Piece) -> AsyncIterator[Piece]:
    """These pieces as the inputs of a model; none for a model without input ports."""
    for piece in pieces:
        yield piece


@dataclass(frozen=True, slots=True)
class Sound:
    """Consecutive samples, [n, channels] float32 in -1..1. needs: first frame that another Code2Wav would need to go on after these
    samples. prebuffer_s: on the first sound of a speech, seconds that a player should wait before it plays, so that it never runs out of
    sound; None: not known."""

    samples: NDArray[np.float32]
    needs: int = 0
    prebuffer_s: float | None = None
