"""Draws tokens from logits, for many sequences at once; each sequence gets the token that it would get alone.

Order: repetition penalty (Keskar et al. 2019: divides positive and multiplies negative logits of every token seen in prompt or answer),
frequency and presence penalty (OpenAI: subtract count * frequency + presence, answer only), logit bias, banned tokens and those that a
constraint does not allow, temperature, top-k, top-p among the tokens that top-k left (Holtzman et al. 2019), min-p (Nguyen et al. 2024),
then a race (see `race`) among the remaining tokens. Tokens with equal logits pass or fail a filter together, so that nothing depends on
the order of a sort. Temperature 0 takes the largest logit, and the lowest id among equals.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import torch

from omnistage.engine.devices import to_device
from omnistage.engine.race import BLOCK, Filters, Scores, floors_of_all, floors_of_min_p, race, race_in_window, seed_bits
from omnistage.engine.race import keys as noise_keys
from omnistage.engine.request import Walk
from omnistage.engine.types import Sampling


class TokenTally:
    """The ids that penalties apply to, each once, and how often each id occurs in the answer. prompt: ids that count as seen before the
    answer. The tensors have unused elements at the end, which `ids` and `counts` leave out; `note` doubles full tensors. `_places`: id ->
    its index."""

    __slots__ = ("_counts", "_ids", "_places")

    def __init__(self, prompt: Iterable[int]) -> None:
        self._places = {token_id: place for place, token_id in enumerate(dict.fromkeys(prompt))}
        self._ids = torch.tensor([*self._places, 0], dtype=torch.int64)
        self._counts = torch.zeros(len(self._ids))

    def note(self, token_id: int) -> None:
        """Count one more occurrence of a token in the answer."""
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):
            self._ids = torch.cat((self._ids, torch.zeros_like(self._ids)))
            self._counts = torch.cat((self._counts, torch.zeros_like(self._counts)))
        self._ids[place] = token_id
        self._counts[place] += 1

    @property
    def ids(self) -> torch.Tensor:
        """The n ids, int64 [n]."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> torch.Tensor:
        """How often each of `ids` occurs in the answer, float32 [n]."""
        return self._counts[: len(self._places)]


class Draws:
    """The state of one sequence that the sampler needs; `note` adds each token of the answer. logprobs: whether the logprob of each drawn
    token is wanted. top_logprobs: how many of the likeliest tokens are wanted, with their logprobs. tokenless: ids that are never among the
    likeliest. ids: ids that the repetition penalty counts as seen before the answer begins. walk: the state of the answer's constraint;
    None: there is no constraint. step: number of tokens of the answer so far."""

    __slots__ = ("bias_amounts", "bias_ids", "logprobs", "sampling", "seed", "step", "tally", "tokenless", "top_logprobs", "walk")

    def __init__(
        self,
        sampling: Sampling,
        seed: int,
        logprobs: bool = False,
        ids: Iterable[int] = (),
        *,
        top_logprobs: int = 0,
        tokenless: frozenset[int] = frozenset(),
    ) -> None:
        self.sampling, self.seed, self.logprobs, self.top_logprobs, self.step = sampling, seed, logprobs, top_logprobs, 0
        self.tokenless = tokenless
        repetition = sampling.repetition_penalty != 1
        penalised = repetition or sampling.frequency_penalty or sampling.presence_penalty
        self.tally = TokenTally(ids if repetition else ()) if penalised else None
        self.bias_ids = torch.tensor(list(sampling.logit_bias), dtype=torch.int64)
        self.bias_amounts = torch.tensor(list(sampling.logit_bias.values()), dtype=torch.float32)
        self.walk: Walk | None = None

    def note(self, token_id: int) -> None:
        """Add the next token of the answer."""
        self.step += 1
        if self.tally is not None:
            self.tally.note(token_id)
        if self.walk is not None:
            self.walk.note(token_id)


@dataclass(frozen=True, slots=True)
class DrawnToken:
    """A drawn token. logprob: natural log of its probability under the model's own logits, before penalties and filters; None: not wanted.
    top: the likeliest tokens by the same measure, as (id, logprob), descending. The probabilities of all ids of the head add up to 1,
    including ids without a token."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """Draws the tokens of each step, on one thread.

    Its memory for scores is used again in each step: allocating as much would cost more than filling it."""

    def __init__(self) -> None:
        self._scratch = torch.empty(0)

    def __call__(self, logits: torch.Tensor, rows: Sequence[Draws], banned: Sequence[Collection[int]]) -> list[DrawnToken | None]:
        """See `sample`."""
        # Each row has whole blocks: its vocabulary is rounded up.
        size = len(rows) * -(-logits.shape[1] // BLOCK) * BLOCK
        if self._scratch.numel() < size or self._scratch.device != logits.device:
            self._scratch = torch.empty(size, device=logits.device)
        return _sample(logits, rows, banned, self._scratch[:size].view(len(rows), -1))


def sample(logits: torch.Tensor, rows: Sequence[Draws], banned: Sequence[Collection[int]]) -> list[DrawnToken | None]:
    """Draw one token for each row; None for a row with a logit that is not finite, or without a token that may be drawn. logits:
    [len(rows), vocab]. banned: for each row, ids that may not be drawn."""
    return Sampler()(logits, rows, banned)


def _sample(
    logits: torch.Tensor, rows: Sequence[Draws], banned: Sequence[Collection[int]], memory: torch.Tensor
) -> list[DrawnToken | None]:
    """As `sample`. memory: for the scores, float32 [rows, vocab rounded up to whole blocks]; it is overwritten."""
    scores = _edit_scores(logits, rows, banned, memory)
    chosen_tokens, final = _choose(scores, rows)
    # One copy from the device, except for the few rows that must be drawn again, and for logprobs.
    tokens, are_final, are_finite = torch.stack((chosen_tokens, final.long(), torch.isfinite(scores.tops[:, 0]).long())).tolist()
    # A choice is not final where it looked only at the highest scores and a lower one might have won.
    retry_places = [place for place, is_final in enumerate(are_final) if are_finite[place] and not is_final]
    if retry_places:
        retry_scores, retry_rows = scores.some(retry_places), [rows[place] for place in retry_places]
        settings, device = [row.sampling for row in retry_rows], scores.tops.device
        retried = race(retry_scores, Filters(settings, device), floors_of_all(retry_scores, settings), _keys(retry_rows, device))
        for place, token in zip(retry_places, retried.tolist(), strict=True):
            tokens[place] = token
    items = [DrawnToken(token, None) if good else None for token, good in zip(tokens, are_finite, strict=True)]
    _tell_logprobs(logits, rows, items)
    return items


def _choose(scores: Scores, rows: Sequence[Draws]) -> tuple[torch.Tensor, torch.Tensor]:
    """(a token for each row, int64 [rows]; whether it is final, bool [rows]). The other rows must be drawn again from all of their
    scores."""
    device = scores.tops.device
    tokens = torch.zeros(len(rows), dtype=torch.int64, device=device)
    final = torch.ones(len(rows), dtype=torch.bool, device=device)
    settings = [row.sampling for row in rows]
    greedy = [place for place, sampling in enumerate(settings) if sampling.temperature == 0]
    ranked = [place for place, s in enumerate(settings) if s.temperature > 0 and (s.top_k > 0 or s.top_p < 1)]
    unranked = [place for place, s in enumerate(settings) if s.temperature > 0 and not (s.top_k > 0 or s.top_p < 1)]
    if greedy:
        tokens[to_device(torch.tensor(greedy), device)] = scores.some(greedy).largest()
    for places in (ranked, unranked):
        if places:
            selected, filters = scores.some(places), Filters([settings[place] for place in places], device)
            keys, at = _keys([rows[place] for place in places], device), to_device(torch.tensor(places), device)
            if places is ranked:
                tokens[at], final[at] = race_in_window(selected, filters, keys)
            else:
                tokens[at] = race(selected, filters, floors_of_min_p(selected, filters), keys)
    return tokens, final


def _keys(rows: Sequence[Draws], device: torch.device) -> torch.Tensor:
    """The keys of the noise for the next draw of each row, int64 [rows]; see `race`."""
    seeds, steps = to_device(torch.tensor([(seed_bits(row.seed), row.step) for row in rows]), device).unbind(1)
    return noise_keys(seeds, steps)


def _edit_scores(logits: torch.Tensor, rows: Sequence[Draws], banned: Sequence[Collection[int]], scores: torch.Tensor) -> Scores:
    """The scores: the logits after penalties, bias, bans and constraints, in this order. scores: memory for the scores, float32 [rows,
    vocab rounded up to whole blocks]."""
    device, width, vocab = scores.device, scores.shape[1], logits.shape[1]
    scores[:, :vocab] = logits
    scores[:, vocab:] = float("-inf")
    _penalise(scores, rows)
    flat = scores.view(-1)
    biased = [(row, place) for place, row in enumerate(rows) if len(row.bias_ids)]
    if biased:
        score_places = to_device(torch.cat([row.bias_ids + place * width for row, place in biased]), device)
        flat[score_places] += to_device(torch.cat([row.bias_amounts for row, _ in biased]), device)
    banned_places = [_tensor_of(frozenset(ids)) + place * width for place, ids in enumerate(banned) if ids]
    if banned_places:
        # -inf is added, not stored, so that a NaN stays a NaN and its row is refused.
        flat[to_device(torch.cat(banned_places), device)] += float("-inf")
    blocks = scores.view(len(rows), -1, BLOCK)
    walks = [(row.walk, place) for place, row in enumerate(rows) if row.walk is not None]
    if walks:
        bits = to_device(torch.stack([walk.allowed() for walk, _ in walks]), device)
        addends = torch.nn.functional.embedding(bits.view(torch.uint8).int(), _addends(device))  # [walks, bytes of a walk, 8]
        for row_addends, (_, place) in zip(addends, walks, strict=True):
            blocks[place] += row_addends.view(-1, BLOCK)
    return Scores(blocks)


def _penalise(scores: torch.Tensor, rows: Sequence[Draws]) -> None:
    """Change the scores by the repetition penalties of the rows, then by their frequency and presence penalties. scores: float32 [rows,
    vocab rounded up to whole blocks]."""
    tallied = [(row.tally, row.sampling, place) for place, row in enumerate(rows) if row.tally is not None]
    if not tallied:
        return
    device, width, flat = scores.device, scores.shape[1], scores.view(-1)
    lengths = torch.tensor([len(tally.ids) for tally, _, _ in tallied])
    counts = to_device(torch.cat([tally.counts for tally, _, _ in tallied]), device)
    starts = torch.tensor([place * width for _, _, place in tallied])
    score_places = to_device(torch.cat([tally.ids for tally, _, _ in tallied]).add_(starts.repeat_interleave(lengths)), device)
    penalties = torch.tensor([(s.repetition_penalty, s.frequency_penalty, s.presence_penalty) for _, s, _ in tallied])
    repetition, frequency, presence = to_device(penalties.repeat_interleave(lengths, 0), device).unbind(1)
    values = flat[score_places]
    values = torch.where(values < 0, values * repetition, values / repetition)
    flat[score_places] = values - (counts * frequency + presence * (counts > 0))


@lru_cache(maxsize=64)
def _tensor_of(ids: frozenset[int]) -> torch.Tensor:
    """The ids in ascending order, int64 [n]. Cached: a model of speech bans the same hundreds of ids in every step."""
    return torch.tensor(sorted(ids))


@cache
def _addends(device: torch.device) -> torch.Tensor:
    """The numbers to add to the scores of 8 tokens, for each value of a byte of `Walk.allowed`, lowest bit first: 0 for an allowed token,
    -inf for another (a NaN stays a NaN). float32 [256, 8]"""
    bits = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
    return bits.float().log_().to(device)


def _tell_logprobs(logits: torch.Tensor, rows: Sequence[Draws], items: list[DrawnToken | None]) -> None:
    """Replace, in `items`, the tokens of the rows that want logprobs by tokens with their logprob and the likeliest tokens."""
    numbered_rows = zip(range(len(rows)), rows, items, strict=True)
    selected = [(place, row, token) for place, row, token in numbered_rows if row.logprobs and token is not None]
    if not selected:
        return
    raw = logits[to_device(torch.tensor([place for place, _, _ in selected]), logits.device)].double()
    token_ids = to_device(torch.tensor([[token.token_id] for _, _, token in selected]), logits.device)
    totals = raw.logsumexp(-1)
    logprobs = (raw.gather(1, token_ids)[:, 0] - totals).tolist()
    for (place, row, token), row_logits, total, logprob in zip(selected, raw, totals, logprobs, strict=True):
        items[place] = DrawnToken(token.token_id, logprob, _find_likeliest(row_logits, total, row))


def _find_likeliest(logits: torch.Tensor, total: torch.Tensor, row: Draws) -> tuple[tuple[int, float], ...]:
    """The likeliest tokens of one row, see DrawnToken.top. logits: float64 [vocab], which this changes. total: their logsumexp. Each row is
    searched by itself: which of equally likely tokens are found must not depend on how many another row wants."""
    if not row.top_logprobs:
        return ()
    if row.tokenless:
        logits[to_device(_tensor_of(row.tokenless), logits.device)] = float("-inf")
    # No more than there are tokens, so that no id without a token is among them.
    values, ids = logits.topk(min(row.top_logprobs, len(logits) - len(row.tokenless)))
    return tuple(zip(ids.tolist(), (values - total).tolist(), strict=True))
