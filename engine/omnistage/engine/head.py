"""The head of a language model: computes logits, then draws one token for each row."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from omnistage.engine.adapter import DrawnItem
from omnistage.engine.sampler import Draws, Sampler


class TokenHead:
    """Implements `Head` for items of one token. logits: maps [rows, hidden] to [rows, vocabulary]."""

    def __init__(self, logits: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._logits, self._sample = logits, Sampler()

    def draw(self, hidden: torch.Tensor, draws: Sequence[Draws], banned: Sequence[Collection[int]]) -> list[DrawnItem | None]:
        tokens = self._sample(self._logits(hidden)[: len(draws)], draws, banned)
        return [None if token is None else DrawnItem((token.token_id,), token.logprob, token.top) for token in tokens]
