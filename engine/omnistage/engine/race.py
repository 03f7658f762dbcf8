"""Which token of each row comes first: the largest score, or the winner of a race (see `noise`) among the tokens that pass the filters.

Few tokens of a vocabulary are looked at. It is cut into blocks that are known by their peaks: the n largest scores lie in the n blocks with
the highest peaks, and a block whose peak would not win even with the block's first time needs no other noise. Top-k and top-p see a
window of the largest scores, and say of which rows that was enough; the others are to be asked again with a larger one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from omnistage.engine.noise import BLOCK, first_times, times
from omnistage.engine.types import Sampling

_SLACK = 1e-9
"""More than the library's logarithm is wrong by: a block is left out only if it is worse by so much."""


_PROMISING = 8
"""Blocks of a row that are looked at first."""

WINDOWS = (128, 1024, 16384, 1 << 40)
"""Largest scores of a row that top-k and top-p see: nearly every row is final with the first window, every row with the last."""


class Scores:
    """Scores of some rows, without a copy of them.

    tops: largest score of each row, float64 [rows, 1]; peaks: those of its blocks, float32 [rows, blocks].
    """

    __slots__ = ("_all", "_at", "peaks", "tops")

    def __init__(self, blocks: torch.Tensor, at: torch.Tensor | None = None, peaks: torch.Tensor | None = None) -> None:
        """blocks: float32 [all rows, blocks, BLOCK], -inf behind the last token. at: int64 [rows], which of them."""
        self._all = blocks
        self._at = torch.arange(len(blocks), device=blocks.device) if at is None else at
        self.peaks = blocks.amax(-1) if peaks is None else peaks
        self.tops = self.peaks.amax(-1, keepdim=True).double()

    def some(self, places: Sequence[int]) -> Scores:
        """Those of some of the rows, in ascending order."""
        if len(places) == len(self._at):
            return self
        some = torch.tensor(places, device=self._at.device)
        return Scores(self._all, self._at[some], self.peaks[some])

    def whole(self) -> torch.Tensor:
        """[rows, blocks, BLOCK]"""
        return self._all if len(self._at) == len(self._all) else self._all[self._at]

    def of(self, at: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """Scores of blocks of rows. at, blocks: int64, broadcast to [..]. Returns [.., BLOCK]."""
        return self._all[self._at[at], blocks]

    def largest(self) -> torch.Tensor:
        """Lowest id of the largest score of each row, int64 [rows]."""
        block = self.peaks.argmax(-1)
        return block * BLOCK + self.of(torch.arange(len(block), device=block.device), block).argmax(-1)

    def window(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The `size` largest scores of each row, descending, and their ids. [rows, min(size, vocab)]"""
        if size >= self.peaks.shape[1]:
            scores = self.whole().flatten(1)
            values, ids = scores.topk(min(size, scores.shape[1]), -1)
            return values, ids
        best = self.peaks.topk(size, -1).indices
        rows = torch.arange(len(best), device=best.device)[:, None]
        values, places = self.of(rows, best).flatten(1).topk(size, -1)
        return values, best.gather(1, places // BLOCK) * BLOCK + places % BLOCK


class Filters:
    """Settings of some rows as columns [rows, 1] on a device, float64 but top_k. needs_totals: whether a row has top-p and no top-k."""

    __slots__ = ("min_p", "needs_totals", "temperature", "top_k", "top_p")

    def __init__(self, settings: Sequence[Sampling], device: torch.device) -> None:
        columns = [(sampling.temperature, sampling.top_p, sampling.min_p, sampling.top_k) for sampling in settings]
        table = torch.tensor(columns, dtype=torch.float64, device=device)
        self.temperature, self.top_p, self.min_p, top_k = (table[:, place : place + 1] for place in range(4))
        self.top_k = top_k.to(torch.int64)
        self.needs_totals = any(sampling.top_p < 1 and not sampling.top_k for sampling in settings)


def race(scores: Scores, filters: Filters, keys: torch.Tensor) -> torch.Tensor:
    """One token a row, int64 [rows], for rows without top-k and top-p. keys: see `noise`."""
    numbers = torch.arange(scores.peaks.shape[1], device=keys.device)[None]
    floors = _floors_of_min_p(scores, filters)
    peaks = scores.peaks.double()
    first, _ = first_times(keys, numbers)
    bounds = ((peaks - scores.tops) / filters.temperature).sub_(first.log_()).masked_fill_(peaks < floors, float("-inf"))
    # The most promising blocks tell what has to be beaten; a few more could.
    promising = bounds.topk(min(_PROMISING, numbers.shape[1]), -1).indices
    rows = torch.arange(len(keys), device=keys.device)
    best = _raced(scores, filters, floors, keys, rows.repeat_interleave(promising.shape[1]), promising.flatten())[0]
    to_beat = best.view(promising.shape).amax(-1, keepdim=True)
    at, blocks = (bounds >= to_beat - _SLACK).nonzero(as_tuple=True)
    values, tokens = _raced(scores, filters, floors, keys, at, blocks)
    highest = torch.full_like(to_beat[:, 0], float("-inf")).scatter_reduce_(0, at, values, "amax")
    return torch.zeros_like(rows).scatter_reduce_(0, at, tokens.masked_fill_(values < highest[at], 0), "amax")


def _raced(
    scores: Scores, filters: Filters, floors: torch.Tensor, keys: torch.Tensor, at: torch.Tensor, blocks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The winner of each block `blocks[i]` of row `at[i]`: how early it is, float64 [n], and its id, int64 [n]. at, blocks: int64 [n]."""
    values = scores.of(at, blocks).double()
    inside = torch.arange(BLOCK, device=keys.device)
    noisy = ((values - scores.tops[at]) / filters.temperature[at]).sub_(times(keys[at], blocks[:, None], inside)[:, 0].log_())
    best = noisy.masked_fill_(values < floors[at], float("-inf")).max(-1)
    return best.values, blocks * BLOCK + best.indices


def race_in_window(scores: Scores, filters: Filters, keys: torch.Tensor, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `race`, for rows with top-k or top-p or both. Returns tokens, int64 [rows], and which are final, bool [rows]."""
    values, ids = scores.window(window)
    values = values.double()
    width = values.shape[1]
    is_whole = width == scores.peaks.shape[1] * BLOCK
    tempered = (values - values[:, :1]) / filters.temperature
    has_k, has_p = filters.top_k > 0, filters.top_p < 1
    of_rank = values.gather(1, (filters.top_k - 1).clamp_(0, width - 1)).masked_fill_(~has_k, float("-inf"))
    kept = (values >= of_rank) & torch.isfinite(values)
    reached = tempered.exp().masked_fill_(~kept, 0.0).cumsum(-1)
    # Shares are of what top-k left, and without top-k of the whole vocabulary.
    totals = reached[:, -1:]
    if filters.needs_totals and not is_whole:
        totals = torch.where(has_k, totals, _totals(scores, filters))
    goals = filters.top_p * totals
    # The first place at which the shares reach top-p is the last one that stays.
    last = torch.minimum((reached < goals).sum(-1, keepdim=True), kept.sum(-1, keepdim=True) - 1).clamp_(min=0)
    floors = torch.where(has_p, values.gather(1, last), of_rank)
    floors = torch.maximum(floors, _floors_of_min_p(scores, filters))
    gone = (values < floors) | ~kept
    places, blocks = (ids % BLOCK)[:, :, None], ids // BLOCK
    noisy = tempered.sub_(times(keys, blocks, places)[:, :, 0].log_()).masked_fill_(gone, float("-inf"))
    tokens = ids.gather(1, noisy.argmax(-1, keepdim=True))[:, 0]
    if is_whole:
        return tokens, torch.ones_like(tokens, dtype=torch.bool)
    # Equal scores stand or fall together: those of the last rank, and of the last place that stays, must all lie in the window.
    seen = torch.where(has_k, values[:, -1:] < of_rank, reached[:, -1:] >= goals)
    return tokens, (seen & (values[:, -1:] < floors))[:, 0]


def _floors_of_min_p(scores: Scores, filters: Filters) -> torch.Tensor:
    """The least score that passes min-p, float64 [rows, 1]; -inf where it is 0."""
    return scores.tops + filters.min_p.log() * filters.temperature


def _totals(scores: Scores, filters: Filters) -> torch.Tensor:
    """Sum of exp((score - top) / temperature) of each row, float64 [rows, 1]. Summed in float32 inside a block: wrong by 1e-5 at most."""
    # A temperature near zero would have an infinite reciprocal here, and zero times that is no number.
    colder = filters.temperature.reciprocal().clamp_(max=torch.finfo(torch.float32).max).float()
    weights = (scores.whole() - scores.tops.float()[:, :, None]).mul_(colder[:, :, None]).exp_()
    return weights.sum(-1).double().sum(-1, keepdim=True)
