"""The engine's view of a model: where scheduling and mathematics meet.

The engine decides which rows run in a step and where their keys and values are stored. A `Decoder` turns rows into hidden rows and calls
back for attention, because only the engine knows which rows belong to which sequence. A `Head` draws the next item of a sequence from a
hidden row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from omnistage.engine.sampler import Draws, Sampler
from omnistage.engine.types import Item

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Sizes and types of a decoder.

    item_ids: the first id of an item is below this number. drawn_ids: only ids below this number have logits and can be drawn; 0: item_ids.
    context: rows that one sequence may have, prompt and answer together; positions are below it too. codebooks: number of ids in an item: 1
    for tokens, more for frames of codes. further_ids: the other ids of an item are below this number; 0: item_ids. axes: number of axes of
    a position. given_width: numbers of a vector that a request gives for a row; 0: none are given. tap_width: numbers of a vector that the
    decoder puts out for a row; 0: it puts out none. The family decides what such vectors hold, even parts that are added to a row after
    later layers."""

    layers: int
    query_heads: int
    kv_heads: int
    head_size: int
    item_ids: int
    context: int
    dtype: torch.dtype
    codebooks: int = 1
    axes: int = 1
    given_width: int = 0
    tap_width: int = 0
    device: torch.device = CPU
    drawn_ids: int = 0
    further_ids: int = 0

    def __post_init__(self) -> None:
        if not self.drawn_ids:
            object.__setattr__(self, "drawn_ids", self.item_ids)
        if not self.further_ids:
            object.__setattr__(self, "further_ids", self.item_ids)

    @property
    def ids(self) -> tuple[int, ...]:
        """For each codebook, the number that its ids are below."""
        return (self.item_ids, *[self.further_ids] * (self.codebooks - 1))


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of one step; the rows of a sequence are next to each other.

    items: int64 [rows, codebooks]. positions: int64 [axes, rows]. given_vectors: the vectors of the rows, [rows, given_width] in the
    decoder's dtype; zeros for a row without a vector. has_given: whether a row has a vector, bool [rows, 1]. Both are None if no row has a
    vector. taps: whether taps of a row of this step are wanted. padding: number of rows at the end whose results are not used."""

    items: torch.Tensor
    positions: torch.Tensor
    given_vectors: torch.Tensor | None = None
    has_given: torch.Tensor | None = None
    taps: bool = False
    padding: int = 0


class Attention(Protocol):
    """Attention of the rows of one step over all rows of their sequences."""

    def __call__(self, layer: int, queries: torch.Tensor, keys_values: torch.Tensor) -> torch.Tensor:
        """Store the rows' keys and values in a layer of the cache, then attend.

        queries: [rows, query_heads, head_size], rotated and scaled by 1/sqrt(head_size). keys_values: [rows, 2 * kv_heads, head_size]:
        rotated keys first, then values. Returns [rows, query_heads * head_size]."""


@dataclass(frozen=True, slots=True)
class Hidden:
    """The results of a decoder. last: hidden rows after the last norm, [rows, hidden]. taps: [rows, tap_width]; None: not wanted."""

    last: torch.Tensor
    taps: torch.Tensor | None = None


class Decoder(Protocol):
    """Turns rows into hidden rows. It holds no state of any sequence, and a hidden row does not depend on the rows of other sequences."""

    @property
    def spec(self) -> DecoderSpec: ...

    def hidden(self, rows: StepRows, attention: Attention) -> Hidden: ...


@dataclass(frozen=True, slots=True)
class DrawnItem:
    """A drawn item. logprob: of its first id; None: not wanted. top: the likeliest first ids, as in DrawnToken."""

    item: Item
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Head(Protocol):
    """Turns hidden rows into items."""

    def draw(self, hidden: torch.Tensor, draws: Sequence[Draws], banned: Sequence[Collection[int]]) -> list[DrawnItem | None]:
        """Draw one item for each row; None for a row with logits that are not finite, or without an id that may be drawn. hidden: [rows,
        hidden]; rows after the first len(draws) are padding. banned: for each row, the first ids that may not be drawn."""


class TokenHead:
    """Implements `Head` for items of one token: computes logits, then draws one token for each row. logits: maps [rows, hidden] to
    [rows, vocabulary]."""

    def __init__(self, logits: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._logits, self._sample = logits, Sampler()

    def draw(self, hidden: torch.Tensor, draws: Sequence[Draws], banned: Sequence[Collection[int]]) -> list[DrawnItem | None]:
        tokens = self._sample(self._logits(hidden)[: len(draws)], draws, banned)
        return [None if token is None else DrawnItem((token.token_id,), token.logprob, token.top) for token in tokens]
