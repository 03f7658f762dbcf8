"""What the engine needs to know of a model: the seam between scheduling and mathematics.

The engine decides which tokens run in a step and where their keys and values live; a `Decoder` turns token ids into hidden rows and
hidden rows into logits. It calls back for attention, because only the engine knows which rows belong to which sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Sizes of a decoder. context: most tokens of one sequence, prompt and answer together."""

    layers: int
    query_heads: int
    kv_heads: int
    head_size: int
    vocab_size: int
    context: int
    dtype: torch.dtype


class Attention(Protocol):
    """Attention of the rows of one step over everything their sequences hold."""

    def __call__(self, layer: int, queries: torch.Tensor, keys_values: torch.Tensor) -> torch.Tensor:
        """Store the rows' keys and values, then attend.

        queries: [rows, query_heads, head_size], rotated and scaled by 1/sqrt(head_size).
        keys_values: [rows, 2 * kv_heads, head_size]: rotated keys first, then values. Returns [rows, query_heads * head_size].
        """


class Decoder(Protocol):
    """A dense decoder, from token ids to logits. Holds no state of any sequence."""

    @property
    def spec(self) -> DecoderSpec: ...

    def hidden(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        """token_ids, positions: int64 [rows], positions counted from 0 in each sequence. Returns [rows, hidden], after the last norm."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [rows, hidden]. Returns [rows, vocab_size] in the decoder's dtype."""
