"""From logits to tokens, for many sequences at once and for each as if it were alone.

Order: repetition penalty (Keskar et al. 2019: divides positive and multiplies negative logits of every token seen in prompt or
answer), frequency and presence penalty (OpenAI: subtract count * frequency + presence, answer only), logit bias, banned tokens,
temperature, top-k, top-p (Holtzman et al. 2019), min-p (Nguyen et al. 2024), then Gumbel-max over what is left. Tokens with equal
logits stand or fall together at each filter, so that nothing depends on the order of a sort. Temperature 0 takes the largest logit,
the lowest id among equals.

The vocabulary is read in few passes: filters work on the largest `_WINDOWS[0]` logits and on a larger window only for rows whose
filters reach the window's end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as functional

from omnistage.engine.noise import gumbel, seed_bits
from omnistage.engine.types import Sampling

_WINDOWS = (64, 1024)
_CHUNK = 32


@dataclass(slots=True)
class Draws:
    """What sampling needs to know of one sequence. Grows by `note` with each token of the answer."""

    sampling: Sampling
    seed: int
    logprobs: bool = False
    seen: set[int] = field(default_factory=set)
    counts: Counter[int] = field(default_factory=Counter)
    step: int = 0

    def note(self, token_id: int) -> None:
        self.seen.add(token_id)
        self.counts[token_id] += 1
        self.step += 1


@dataclass(frozen=True, slots=True)
class Drawn:
    """A drawn token. logprob: natural log of its softmax probability under the model's own logits, before penalties and filters."""

    token_id: int
    logprob: float | None


def sample(logits: torch.Tensor, rows: Sequence[Draws], banned: Sequence[Collection[int]]) -> list[Drawn | None]:
    """Draw one token a row. logits: [len(rows), vocab]; banned: ids that may not be drawn, per row. None where a logit is not finite."""
    scores = logits.to(torch.float32, copy=True)
    raw = logits if any(row.logprobs for row in rows) else None
    _penalise(scores, rows)
    _ban(scores, banned)
    tops = scores.amax(-1)
    finite = torch.isfinite(tops).tolist()
    chosen = torch.zeros(len(rows), dtype=torch.int64)
    greedy = [index for index, row in enumerate(rows) if finite[index] and row.sampling.temperature == 0]
    random = [index for index, row in enumerate(rows) if finite[index] and row.sampling.temperature > 0]
    if greedy:
        chosen[greedy] = _largest(scores if len(greedy) == len(rows) else scores[greedy])
    if random:
        chosen[random] = _draw(scores if len(random) == len(rows) else scores[random], [rows[index] for index in random])
    tokens = chosen.tolist()
    logprobs = _logprobs(raw, chosen) if raw is not None else [None] * len(rows)
    return [
        Drawn(token, logprob if row.logprobs else None) if good else None
        for token, logprob, good, row in zip(tokens, logprobs, finite, rows, strict=True)
    ]


def _logprobs(logits: torch.Tensor, chosen: torch.Tensor) -> list[float]:
    raw = logits.float()
    return (raw.gather(1, chosen[:, None])[:, 0] - raw.logsumexp(-1)).tolist()


def _penalise(scores: torch.Tensor, rows: Sequence[Draws]) -> None:
    """Apply penalties and bias in place, as sparse updates."""
    index: list[tuple[int, Collection[int], float]] = [
        (at, row.seen, row.sampling.repetition_penalty) for at, row in enumerate(rows) if row.sampling.repetition_penalty != 1 and row.seen
    ]
    if index:
        at = torch.tensor([row for row, ids, _ in index for _ in ids])
        ids = torch.tensor([token for _, ids, _ in index for token in ids])
        penalty = torch.tensor([penalty for _, ids, penalty in index for _ in ids], dtype=torch.float32)
        values = scores[at, ids]
        scores[at, ids] = torch.where(values < 0, values * penalty, values / penalty)
    shifts: list[tuple[int, int, float]] = []
    for place, row in enumerate(rows):
        frequency, presence = row.sampling.frequency_penalty, row.sampling.presence_penalty
        if frequency or presence:
            shifts += [(place, token, -(count * frequency + presence)) for token, count in row.counts.items()]
        shifts += [(place, token, bias) for token, bias in row.sampling.logit_bias.items()]
    if shifts:
        places, tokens, amounts = zip(*shifts, strict=True)
        where = (torch.tensor(places), torch.tensor(tokens))
        scores.index_put_(where, torch.tensor(amounts, dtype=torch.float32), accumulate=True)


def _ban(scores: torch.Tensor, banned: Sequence[Collection[int]]) -> None:
    pairs = [(row, token) for row, tokens in enumerate(banned) for token in tokens]
    if pairs:
        rows, tokens = zip(*pairs, strict=True)
        # A NaN row must stay one: adding, not storing, keeps it.
        scores[torch.tensor(rows), torch.tensor(tokens)] += float("-inf")


def _chunks(scores: torch.Tensor) -> torch.Tensor:
    """[rows, vocab] as [rows, chunks, _CHUNK], padded with -inf."""
    short = -scores.shape[1] % _CHUNK
    padded = functional.pad(scores, (0, short), value=float("-inf")) if short else scores
    return padded.view(scores.shape[0], -1, _CHUNK)


def _largest(scores: torch.Tensor) -> torch.Tensor:
    """Lowest id of the largest score of each row. The vectorised maximum of chunks is many times faster than an arg max of the row."""
    chunks = _chunks(scores)
    best = chunks.amax(-1).argmax(-1)
    inside = chunks[torch.arange(len(best)), best].argmax(-1)
    return best * _CHUNK + inside


def _window(scores: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `size` largest scores of each row, descending, and their ids. They lie in the `size` chunks with the largest maxima."""
    chunks = _chunks(scores)
    if size >= chunks.shape[1]:
        values, ids = scores.topk(min(size, scores.shape[1]), -1)
        return values, ids
    best = chunks.amax(-1).topk(size, -1).indices
    members = chunks.gather(1, best[:, :, None].expand(-1, -1, _CHUNK)).flatten(1)
    values, places = members.topk(size, -1)
    ids = best.gather(1, places // _CHUNK) * _CHUNK + places % _CHUNK
    return values, ids


def _draw(scores: torch.Tensor, rows: Sequence[Draws]) -> torch.Tensor:
    """One Gumbel-max draw a row, from the smallest window that holds all survivors of the row's filters."""
    chosen = torch.zeros(len(rows), dtype=torch.int64)
    remaining: list[int] = []
    for index, row in enumerate(rows):
        if _filters(row.sampling):
            remaining.append(index)
        else:
            chosen[index] = _draw_unfiltered(scores[index : index + 1], row)
    for size in (*_WINDOWS, scores.shape[1]):
        if not remaining:
            break
        members = [rows[index] for index in remaining]
        drawn, complete = _draw_from_window(scores[remaining], members, min(size, scores.shape[1]))
        chosen[torch.tensor(remaining)[complete]] = drawn[complete]
        remaining = [index for index, done in zip(remaining, complete.tolist(), strict=True) if not done]
    return chosen


def _filters(sampling: Sampling) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0


def _draw_unfiltered(scores: torch.Tensor, row: Draws) -> torch.Tensor:
    """A draw among the whole vocabulary. scores: [1, vocab]."""
    ids = torch.arange(scores.shape[1])[None]
    tempered = (scores / row.sampling.temperature).double()
    return (tempered + gumbel(torch.tensor([seed_bits(row.seed)]), torch.tensor([row.step]), ids)).argmax(-1)[0]


def _draw_from_window(scores: torch.Tensor, rows: Sequence[Draws], size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws among the `size` largest scores, and for which rows the window was large enough (bool): only those draws count."""
    values, ids = _window(scores, size)
    kept, values = _survivors(scores, values, rows)
    seeds = torch.tensor([seed_bits(row.seed) for row in rows])
    steps = torch.tensor([row.step for row in rows])
    noisy = (values.double() + gumbel(seeds, steps, ids)).masked_fill_(~kept, float("-inf"))
    drawn = ids.gather(1, noisy.argmax(-1, keepdim=True))[:, 0]
    return drawn, ~kept[:, -1] | (size >= scores.shape[1])


def _survivors(scores: torch.Tensor, values: torch.Tensor, rows: Sequence[Draws]) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of the window's tokens pass the filters, and the tempered values. values: [rows, n], descending.

    A row whose last place passes may have survivors beyond the window: its answer is not final.
    """
    settings = [row.sampling for row in rows]
    temperature = torch.tensor([sampling.temperature for sampling in settings], dtype=torch.float32)[:, None]
    values = values / temperature
    width = values.shape[1]
    ranks = torch.tensor([min(sampling.top_k or width, width) for sampling in settings])
    kept = values >= values.gather(1, ranks[:, None] - 1)
    kept &= torch.isfinite(values)
    top_p = torch.tensor([sampling.top_p for sampling in settings], dtype=torch.float32)[:, None]
    if any(sampling.top_p < 1 for sampling in settings):
        # The share of each token among those that top-k left; without top-k that is the whole vocabulary.
        total = values.masked_fill(~kept, float("-inf")).logsumexp(-1)
        unbounded = [index for index, sampling in enumerate(settings) if not sampling.top_k or sampling.top_k > width]
        if unbounded:
            total[unbounded] = (scores[unbounded] / temperature[unbounded]).logsumexp(-1)
        shares = (values - total[:, None]).exp().masked_fill_(~kept, 0.0)
        before = shares.cumsum(-1) - shares
        last = ((before < top_p) & kept).sum(-1, keepdim=True).clamp_(min=1) - 1
        kept &= (values >= values.gather(1, last)) | (top_p >= 1)
    if any(sampling.min_p > 0 for sampling in settings):
        floor = torch.tensor([sampling.min_p for sampling in settings], dtype=torch.float32)[:, None].log()
        kept &= values >= values[:, :1] + floor
    return kept, values
