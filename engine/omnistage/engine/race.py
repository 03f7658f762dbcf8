"""Chooses a token for each row: the token with the largest score, or the winner of a race among the tokens that pass the filters. The noise
of the race is a pure function of (seed, step, token id), so that a draw depends on nothing else.

Tokens race: each token gets an exponentially distributed time, divided by its probability, and the token with the earliest time is drawn.
That is a draw by these probabilities; with logits it is the arg max of `logit - log(time)` (Gumbel 1954; Maddison et al. 2014: Gumbel-max).
Because the noise depends on the token id, a tiny change of the logits almost never changes the choice, and a sequence that another replica
continues gets the same draws.

The times of a block of 32 tokens are made from the earliest of them. The least of 32 exponential times is distributed like an exponential
time divided by 32, and belongs to each of the 32 tokens with equal chance. Each other token comes later by a further exponential time,
because the exponential distribution has no memory. So these are still 32 independent times, and the earliest one alone shows whether any
token of the block can be early enough. The hash is the finaliser of SplitMix64 (Steele, Lea, Flood 2014).

Only few tokens of a vocabulary are looked at. It is cut into blocks, and the peak of a block is its largest score. The n largest scores lie
in the n blocks with the highest peaks. The tokens of a block need no noise of their own if the peak would not win even with the block's
earliest time. Each filter becomes a floor, the least score that passes. Top-k and top-p look for their floors in a window of the largest
scores, and report for which rows the window was enough; for the other rows, all of their scores are sorted."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from omnistage.engine.devices import to_device
from omnistage.engine.types import Sampling

BLOCK = 32
"""Number of tokens of a block, whose noise is made together: token id // BLOCK is a token's block."""

_STEP_STRIDE = 0x9E3779B97F4A7C15
_TOKEN_STRIDE = 0xD1B54A32D192ED03
_BLOCK_STRIDE = 0xAEF17502108EF2D9
_MASK = (1 << 64) - 1


def _to_int64(value: int) -> int:
    """The int64 with the same bits as the uint64 `value`."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


_FIRST = _to_int64(0xBF58476D1CE4E5B9)
_SECOND = _to_int64(0x94D049BB133111EB)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift int64 to the right and fill up with zeros; torch would fill up with the sign."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of SplitMix64, applied to each int64."""
    x = (_shift_right(x, 30).bitwise_xor_(x)).mul_(_FIRST)
    x = (_shift_right(x, 27).bitwise_xor_(x)).mul_(_SECOND)
    return _shift_right(x, 31).bitwise_xor_(x)


def _times(bits: torch.Tensor) -> torch.Tensor:
    """Exponentially distributed float64 from the upper 52 of 64 random bits: with one more bit the uniform number could round to 1."""
    return _shift_right(bits, 12).to(torch.float64).add_(0.5).mul_(2.0**-52).log_().neg_()


def keys(seeds: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """The key of each row's noise in one step, int64 [rows]. seeds (see `seed_bits`), steps: int64 [rows]."""
    return _mix(_mix(seeds + _to_int64(_STEP_STRIDE)) + steps * _to_int64(_STEP_STRIDE))


def first_times(keys: torch.Tensor, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(the earliest time among the tokens of each block, the index in the block of the token that has this time).

    keys: int64 [rows]. blocks: int64, broadcast to [rows, n]. Returns float64 and int64, both [rows, n]; times lie strictly between 0 and
    1.2."""
    bits = _mix(_mix(keys + _to_int64(_BLOCK_STRIDE))[:, None] + blocks * _to_int64(_BLOCK_STRIDE))
    return _times(bits).mul_(1 / BLOCK), bits & (BLOCK - 1)


def times(keys: torch.Tensor, blocks: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The times of tokens, float64 [rows, n, m].

    keys: int64 [rows]. blocks: the tokens' blocks, int64 [rows, n]. places: the tokens' places in their blocks, int64, broadcast to [rows,
    n, m]."""
    first, place = first_times(keys, blocks)
    tokens = blocks[:, :, None] * BLOCK + places
    later = _times(_mix(keys[:, None, None] + tokens * _to_int64(_TOKEN_STRIDE)))
    # The block's earliest time belongs to one token. The others come later than that, each by a time of its own.
    return later.masked_fill_(places == place[:, :, None], 0.0).add_(first[:, :, None])


def seed_bits(seed: int) -> int:
    """An unsigned 64-bit seed as the int64 that the functions above take."""
    return _to_int64(seed)


_SLACK = 1e-9
"""A block is left out only if it is worse by more than this, which is larger than the error of the library's logarithm."""

_PROMISING = 8
"""Number of the best blocks of a row that race first, to find a score that other blocks must beat."""

_WINDOW = 128
"""Number of the largest scores of a row that top-k and top-p look at first: enough for nearly every row."""

_PIECE = 8
"""Number of neighbouring scores that the search for the window treats as one piece. It divides BLOCK."""

_TOTALS_ERROR = 1e-5
"""A bound that is larger than the relative error of a total, whose exponents and sums inside blocks are float32."""


class Scores:
    """The scores of some rows of a larger tensor, without a copy of them.

    tops: largest score of each row, float64 [rows, 1]. peaks: largest score of each block of each row, float32 [rows, blocks]."""

    __slots__ = ("_all", "_at", "peaks", "tops")

    def __init__(self, blocks: torch.Tensor, at: torch.Tensor | None = None, peaks: torch.Tensor | None = None) -> None:
        """blocks: all scores, float32 [all rows, blocks, BLOCK], -inf after the last token. at: numbers of the rows to use, int64 [rows];
        None: all rows. peaks: of these rows; None: they are computed."""
        self._all = blocks
        self._at = torch.arange(len(blocks), device=blocks.device) if at is None else at
        self.peaks = blocks.amax(-1) if peaks is None else peaks
        self.tops = self.peaks.amax(-1, keepdim=True).double()

    def some(self, places: Sequence[int]) -> Scores:
        """The scores of some of these rows. places: their numbers among these rows, from 0, ascending."""
        if len(places) == len(self._at):
            return self
        selected = to_device(torch.tensor(places), self._at.device)
        return Scores(self._all, self._at[selected], self.peaks[selected])

    def gather_rows(self) -> torch.Tensor:
        """All scores of these rows, [rows, blocks, BLOCK]."""
        return self._all if len(self._at) == len(self._all) else self._all[self._at]

    def of(self, at: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """The scores of block `blocks[i]` of row `at[i]`, for each i. at, blocks: int64, broadcast to one shape [..]. Returns [..,
        BLOCK]."""
        return self._all[self._at[at], blocks]

    def largest(self) -> torch.Tensor:
        """The token with the largest score in each row, int64 [rows]; the lowest id among equals."""
        block = self.peaks.argmax(-1)
        return block * BLOCK + self.of(torch.arange(len(block), device=block.device), block).argmax(-1)

    def window(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest scores of each row, descending, and their token ids; both [rows, n], n is _WINDOW, or the number of all scores if
        that is less."""
        if self.peaks.shape[1] <= _WINDOW:
            scores = self.gather_rows().flatten(1)
            values, ids = scores.topk(min(_WINDOW, scores.shape[1]), -1)
            return values, ids
        blocks = self.peaks.topk(_WINDOW, -1, sorted=False).indices
        rows = torch.arange(len(blocks), device=blocks.device)[:, None]
        # The n largest scores also lie in the n pieces of these blocks with the largest scores: finding the largest among a quarter of the
        # scores takes less than half the time.
        scores = self.of(rows, blocks).view(len(rows), -1, _PIECE)
        pieces = scores.amax(-1).topk(_WINDOW, -1, sorted=False).indices
        values, piece_places = scores[rows, pieces].flatten(1).topk(_WINDOW, -1)
        # Places among the scores of the pieces become places among the scores of the blocks, and these become token ids.
        block_places = pieces.gather(1, piece_places // _PIECE) * _PIECE + piece_places % _PIECE
        return values, blocks.gather(1, block_places // BLOCK) * BLOCK + block_places % BLOCK

    def descending(self, place: int) -> torch.Tensor:
        """All scores of one row, descending, [1, blocks * BLOCK]. place: number of the row among these rows."""
        scores = self._all[self._at[place]].view(1, -1)
        if scores.device.type != "cpu":
            return scores.sort(-1, descending=True).values
        # torch would sort the indices too, which takes more than ten times as long.
        negated = scores.neg()
        negated.numpy().sort(-1)
        return negated.neg_()


class Filters:
    """The sampling settings of some rows, each a column [rows, 1] on a device: top_k int64, the others float64. any_top_k, any_top_p:
    whether any row has this filter. top_p_alone: indices of the rows with top-p but without top-k; their top-p is a share of the whole
    vocabulary."""

    __slots__ = ("any_top_k", "any_top_p", "min_p", "temperature", "top_k", "top_p", "top_p_alone")

    def __init__(self, settings: Sequence[Sampling], device: torch.device) -> None:
        columns = [(sampling.temperature, sampling.top_p, sampling.min_p, sampling.top_k) for sampling in settings]
        table = to_device(torch.tensor(columns, dtype=torch.float64), device)
        self.temperature, self.top_p, self.min_p, top_k = (table[:, place : place + 1] for place in range(4))
        self.top_k = top_k.to(torch.int64)
        self.any_top_k = any(sampling.top_k > 0 for sampling in settings)
        self.any_top_p = any(sampling.top_p < 1 for sampling in settings)
        self.top_p_alone = [place for place, sampling in enumerate(settings) if sampling.top_p < 1 and not sampling.top_k]


def floors_of_min_p(scores: Scores, filters: Filters) -> torch.Tensor:
    """The least score that passes min-p in each row, float64 [rows, 1]; -inf if min-p is 0."""
    return scores.tops + filters.min_p.log() * filters.temperature


def floors_of_all(scores: Scores, settings: Sequence[Sampling]) -> torch.Tensor:
    """The least score that passes top-k, top-p and min-p in each row, float64 [rows, 1], found by sorting all scores of the row."""
    # Row by row: its data stays in the processor's cache, and its sums depend on no other row.
    floors = [_floors(scores.descending(place), Filters([sampling], scores.peaks.device))[0] for place, sampling in enumerate(settings)]
    return torch.maximum(torch.cat(floors), floors_of_min_p(scores, Filters(settings, scores.peaks.device)))


def _floors(values: torch.Tensor, filters: Filters, totals: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(the least score that passes top-k and top-p, float64 [rows, m]; the least score that passes top-k alone, [rows, 1]). -inf: all pass.

    values: the largest scores of each row, descending, float32 [rows, n]. totals: float64 [rows, m], m estimates of the sum of exp((score -
    top) / temperature) over the vocabulary, of which top-p takes a share in rows without top-k; each estimate gives a floor. None: the sum
    over `values` is used, and m is 1."""
    last_place, has_k = values.shape[1] - 1, filters.top_k > 0
    rank_floors = values.gather(1, (filters.top_k - 1).clamp_(0, last_place)).masked_fill_(~has_k, float("-inf"))
    if not filters.any_top_p:
        return rank_floors.double(), rank_floors.double()
    weights = values.double()
    weights = weights.sub_(weights[:, :1].clone()).div_(filters.temperature).exp_()
    if filters.any_top_k:
        weights.masked_fill_(values < rank_floors, 0.0)
    running_sums = weights.cumsum_(-1)
    # Top-p is a share of the tokens that pass top-k; in a row without top-k, it is a share of the whole vocabulary.
    totals = running_sums[:, -1:] if totals is None else torch.where(has_k, running_sums[:, -1:], totals)
    # The first token with which the shares reach top-p is the last token that passes.
    share_floors = values.gather(1, torch.searchsorted(running_sums, filters.top_p * totals).clamp_(max=last_place))
    return torch.maximum(share_floors.masked_fill_(filters.top_p >= 1, float("-inf")), rank_floors).double(), rank_floors.double()


def race(scores: Scores, filters: Filters, floors: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Draw one token for each row among the tokens whose score is not below the row's floor, int64 [rows]. floors: float64 [rows, 1]. keys:
    of the noise, int64 [rows], see `keys`."""
    block_numbers = torch.arange(scores.peaks.shape[1], device=keys.device)[None]
    peaks = scores.peaks.double()
    earliest, _ = first_times(keys, block_numbers)
    # No token of a block can have a larger score with noise than its peak would have with the block's earliest time.
    bounds = ((peaks - scores.tops) / filters.temperature).sub_(earliest.log_()).masked_fill_(peaks < floors, float("-inf"))
    # The winner among the most promising blocks gives the score to beat; only a few others could beat it.
    promising = bounds.topk(min(_PROMISING, block_numbers.shape[1]), -1).indices
    rows = torch.arange(len(keys), device=keys.device)
    best = _race_blocks(scores, filters, floors, keys, rows.repeat_interleave(promising.shape[1]), promising.flatten())[0]
    to_beat = best.view(promising.shape).amax(-1, keepdim=True)
    # The host waits here for an asynchronous device: the number of blocks decides how much is computed next.
    at, blocks = (bounds >= to_beat - _SLACK).nonzero(as_tuple=True)
    values, tokens = _race_blocks(scores, filters, floors, keys, at, blocks)
    # The highest winner of a row gives its token; of equal winners, the largest token id.
    highest = torch.full_like(to_beat[:, 0], float("-inf")).scatter_reduce_(0, at, values, "amax")
    return torch.zeros_like(rows).scatter_reduce_(0, at, tokens.masked_fill_(values < highest[at], 0), "amax")


def _race_blocks(
    scores: Scores, filters: Filters, floors: torch.Tensor, keys: torch.Tensor, at: torch.Tensor, blocks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The winner of block `blocks[i]` of row `at[i]`, for each i: its score with noise, float64 [n], and its token id, int64 [n]. The
    earlier a token arrives in the race, the larger its score with noise."""
    values = scores.of(at, blocks).double()
    places = torch.arange(BLOCK, device=keys.device)
    noisy = ((values - scores.tops[at]) / filters.temperature[at]).sub_(times(keys[at], blocks[:, None], places)[:, 0].log_())
    best = noisy.masked_fill_(values < floors[at], float("-inf")).max(-1)
    return best.values, blocks * BLOCK + best.indices


def race_in_window(scores: Scores, filters: Filters, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `race`, but with floors from a window of the largest scores. Returns (the tokens, int64 [rows]; whether the window was enough for
    the row, bool [rows]). If it was not, the row's token is void."""
    values, ids = scores.window()
    # Two estimates of each total, one too small and one too large. So `floors` has two columns, or one if no row has top-p.
    errors = torch.tensor([1 - _TOTALS_ERROR, 1 + _TOTALS_ERROR], dtype=torch.float64)
    totals = _totals(scores, filters) * to_device(errors, keys.device)
    floors, rank_floors = _floors(values, filters, totals)
    floors = torch.maximum(floors, floors_of_min_p(scores, filters))
    places, blocks = (ids % BLOCK)[:, :, None], ids // BLOCK
    noisy = ((values.double() - scores.tops) / filters.temperature).sub_(times(keys, blocks, places)[:, :, 0].log_())
    noisy.masked_fill_(values < floors[:, :1], float("-inf"))
    tokens = ids.gather(1, noisy.argmax(-1, keepdim=True))[:, 0]
    # Equal scores pass or fail together, so all that equal a floor must lie in the window; and both estimates of the total must give one
    # floor.
    lowest = values[:, -1:]
    rank_is_inside = (filters.top_k == 0) | (rank_floors > lowest)
    final = (floors > lowest).all(-1, keepdim=True) & (floors[:, :1] == floors[:, -1:]) & rank_is_inside
    return tokens, final[:, 0]


def _totals(scores: Scores, filters: Filters) -> torch.Tensor:
    """The sum of exp((score - top) / temperature) over the vocabulary for each row of `filters.top_p_alone`, float64 [rows, 1]; 0 for the
    other rows."""
    totals = torch.zeros_like(scores.tops)
    if filters.top_p_alone:
        selected, at = scores.some(filters.top_p_alone), to_device(torch.tensor(filters.top_p_alone), totals.device)
        # A temperature near zero would have an infinite reciprocal here, and zero times infinity is not a number.
        reciprocals = filters.temperature[at].reciprocal().clamp_(max=torch.finfo(torch.float32).max).float()
        weights = (selected.gather_rows() - selected.tops.float()[:, :, None]).mul_(reciprocals[:, :, None]).exp_()
        totals[at] = weights.sum(-1).double().sum(-1, keepdim=True)
    return totals
