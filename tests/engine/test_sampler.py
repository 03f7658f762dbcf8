"""Draws follow the filtered distribution; they are those of the definitions, and of Transformers' own processors, with the same random
numbers; no row depends on its neighbours."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from helpers import lengths
from omnistage.engine.race import BLOCK, _times, first_times, keys, seed_bits, times
from omnistage.engine.sampler import DrawnToken, Draws, sample
from omnistage.engine.types import Sampling

FloatArray = NDArray[np.float64]


def draws(sampling: Sampling, seed: int = 0, prompt: tuple[int, ...] = (), answer: tuple[int, ...] = ()) -> Draws:
    result = Draws(sampling, seed, ids=set(prompt))
    for token_id in answer:
        result.note(token_id)
    return result


def reference_probabilities(logits: list[float], sampling: Sampling, prompt: tuple[int, ...], answer: tuple[int, ...]) -> dict[int, float]:
    """The filtered distribution, token by token in plain Python, from the definitions."""
    scores = dict(enumerate(logits))
    for token in {*prompt, *answer}:
        scores[token] = scores[token] * sampling.repetition_penalty if scores[token] < 0 else scores[token] / sampling.repetition_penalty
    for token, count in Counter(answer).items():
        scores[token] -= count * sampling.frequency_penalty + sampling.presence_penalty
    for token, bias in sampling.logit_bias.items():
        scores[token] += bias
    scores = {token: score / sampling.temperature for token, score in scores.items()}
    if sampling.top_k:
        floor = sorted(scores.values(), reverse=True)[min(sampling.top_k, len(scores)) - 1]
        scores = {token: score for token, score in scores.items() if score >= floor}

    def shares(kept: dict[int, float]) -> dict[int, float]:
        top = max(kept.values())
        total = sum(math.exp(score - top) for score in kept.values())
        return {token: math.exp(score - top) / total for token, score in kept.items()}

    if sampling.top_p < 1:
        part, floor = 0.0, -math.inf
        for token, share in sorted(shares(scores).items(), key=lambda item: -item[1]):
            if part >= sampling.top_p:
                break
            part, floor = part + share, scores[token]
        scores = {token: score for token, score in scores.items() if score >= floor}
    if sampling.min_p:
        best = max(shares(scores).values())
        scores = {token: scores[token] for token, share in shares(scores).items() if share >= sampling.min_p * best}
    return shares(scores)


SETTINGS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_k=12),
    Sampling(temperature=1.3, top_p=0.8),
    Sampling(temperature=1.0, min_p=0.1),
    Sampling(temperature=0.9, top_k=40, top_p=0.9, min_p=0.02, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4),
    Sampling(temperature=1.5, top_k=90, top_p=0.99, logit_bias={3: 2.0, 5: -3.0}),
]


@lengths.drawn_cells(3, "sampling", SETTINGS)
def test_draws_follow_the_filtered_distribution(sampling: Sampling, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(300, generator=generator) * 2
    prompt, answer = (1, 2, 3, 50), (4, 4, 60, 3)
    expected = reference_probabilities(logits.double().tolist(), sampling, prompt, answer)
    count, block = 20_000, 500
    found: Counter[int] = Counter()
    for first in range(0, count, block):
        rows = [draws(sampling, seed + first + index, prompt, answer) for index in range(block)]
        found.update(drawn.token_id for drawn in sample(logits.expand(block, -1), rows, [()] * block) if drawn)
    assert found.keys() <= expected.keys()
    likely = {token: share for token, share in expected.items() if share * count >= 5}
    rest = 1 - sum(likely.values())
    chi_square = sum((found[token] - share * count) ** 2 / (share * count) for token, share in likely.items())
    if rest * count >= 5:
        chi_square += (count - sum(found[token] for token in likely) - rest * count) ** 2 / (rest * count)
    # Wilson and Hilferty 1931: the cube root of chi square / n is nearly normal. Six standard deviations: one false alarm in 10^9.
    freedom = max(len(likely) - 1 + (rest * count >= 5), 1)
    deviation = ((chi_square / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert deviation < 6, f"chi square {chi_square:.1f} with {freedom} degrees of freedom"


def test_a_row_draws_the_same_alone_and_in_any_company(seed: int) -> None:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    rows = [
        draws(rng.choice([*SETTINGS, Sampling()]), rng.getrandbits(64), (1, 2), tuple(rng.choices(range(5000), k=7))) for _ in range(40)
    ]
    logits = torch.randn(40, 5000, generator=generator) * 3
    for row in rows[:20]:
        row.logprobs = True
    alone = [sample(logits[index : index + 1], [row], [()])[0] for index, row in enumerate(rows)]
    for _ in range(10):
        company = rng.sample(range(40), rng.randrange(2, 40))
        assert sample(logits[company], [rows[index] for index in company], [()] * len(company)) == [alone[index] for index in company]


def plain_times(seed: int, step: int, vocab: int) -> FloatArray:
    """The time at which each token of a vocabulary arrives, float64 [vocab], from the definition in `race` and with none of its code."""
    key = mixed((mixed((seed + 0x9E3779B97F4A7C15) % 2**64) + step * 0x9E3779B97F4A7C15) % 2**64)
    block_key = mixed((key + 0xAEF17502108EF2D9) % 2**64)
    token = np.arange(vocab, dtype=np.uint64)
    block_bits = mixed_array(np.uint64(block_key) + token // np.uint64(32) * np.uint64(0xAEF17502108EF2D9))
    token_bits = mixed_array(np.uint64(key) + token * np.uint64(0xD1B54A32D192ED03))
    uniform = [((bits >> np.uint64(12)).astype(np.float64) + 0.5) / 2.0**52 for bits in (block_bits, token_bits)]
    is_first = block_bits % np.uint64(32) == token % np.uint64(32)
    result: FloatArray = -np.log(uniform[0]) / 32 + np.where(is_first, 0.0, -np.log(uniform[1]))
    return result


def plain_choices(
    logits: FloatArray, sampling: Sampling, prompt: tuple[int, ...], answer: tuple[int, ...], suppressed: tuple[int, ...], seed: int
) -> set[int]:
    """The token that the whole vocabulary gives by the definitions; two tokens, if the end of top-p depends on the last bits of a sum."""
    scores = logits.astype(np.float32)
    for token in {*prompt, *answer}:
        penalty = np.float32(sampling.repetition_penalty)
        scores[token] = scores[token] * penalty if scores[token] < 0 else scores[token] / penalty
    for token, count in Counter(answer).items():
        scores[token] -= np.float32(count) * np.float32(sampling.frequency_penalty) + np.float32(sampling.presence_penalty)
    for token, bias in sampling.logit_bias.items():
        scores[token] += np.float32(bias)
    scores[list(suppressed)] = -np.inf
    if sampling.temperature == 0:
        return {int(np.argmax(scores))}
    noise = -np.log(plain_times(seed, len(answer), len(scores)))
    choices = set()
    for top_p in (sampling.top_p, sampling.top_p * (1 - 1e-9), min(sampling.top_p * (1 + 1e-9), 1.0)):
        tempered = (scores.astype(np.float64) - scores.max()) / sampling.temperature
        descending = np.sort(tempered)[::-1]
        if sampling.top_k:
            tempered[tempered < descending[min(sampling.top_k, len(scores)) - 1]] = -np.inf
        if top_p < 1:
            descending = np.sort(tempered)[::-1]
            shares = np.exp(descending) / np.exp(descending).sum()
            tempered[tempered < descending[np.argmax(np.cumsum(shares) >= top_p)]] = -np.inf
        if sampling.min_p:
            tempered[np.exp(tempered) < sampling.min_p] = -np.inf
        choices.add(int(np.argmax(tempered + noise)))
    return choices


def any_sampling(rng: random.Random) -> Sampling:
    return Sampling(
        temperature=rng.choice([0.0, 0.3, 0.8, 1.0, 1.0, 1.5, 2.0]),
        top_k=rng.choice([0, 0, 1, 20, 50, 64, 65, 90, 128, 400, 3000]),
        top_p=rng.choice([1.0, 1.0, 0.3, 0.8, 0.95, 0.999]),
        min_p=rng.choice([0.0, 0.0, 0.01, 0.2, 1e-6]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.1, 1.3, 2.0]),
        presence_penalty=rng.choice([0.0, 0.0, 0.7, rng.uniform(-2, 2)]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.4, rng.uniform(-2, 2)]),
        logit_bias={rng.randrange(400): rng.choice([-100.0, 2.5]) for _ in range(rng.choice([0, 5]))},
    )


class AllowedTokens:
    """A walk that allows these tokens at its place."""

    complete = must_end = False

    def __init__(self, token_ids: list[int], vocab: int) -> None:
        bits = np.zeros(-(-vocab // 32) * 32, bool)
        bits[token_ids] = True
        self._bits = torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32))

    def allowed(self) -> torch.Tensor:
        return self._bits

    def note(self, token_id: int) -> None:
        raise AssertionError("no token is noted by a draw")


@pytest.mark.parametrize(("vocab", "rounds"), [(500, 40), (8448, 6), (49_152, 3), (151_936, 2)])
def test_a_draw_is_the_one_that_the_whole_vocabulary_gives(vocab: int, rounds: int, seed: int) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    for _ in range(rounds):
        rows = rng.randrange(1, 12)
        spread, dtype = rng.choice([0.02, 1.0, 3.0, 8.0]), rng.choice([torch.bfloat16, torch.float32])
        logits = (torch.randn(rows, vocab, generator=generator) * spread).to(dtype)
        settings, seeds = [any_sampling(rng) for _ in range(rows)], [rng.getrandbits(64) for _ in range(rows)]
        prompts, answers = ([tuple(rng.choices(range(400), k=rng.randrange(end))) for _ in range(rows)] for end in (300, 60))
        suppressed = [tuple(rng.sample(range(vocab), k=rng.choice([0, 3, 40]))) for _ in range(rows)]
        given = [draws(*row) for row in zip(settings, seeds, prompts, answers, strict=True)]
        never = [set(ids) for ids in suppressed]
        for place in rng.sample(range(rows), rows // 3):
            allowed = rng.sample(range(vocab), k=rng.choice([1, 2, 40, 300]))
            given[place].walk = AllowedTokens(allowed, vocab)
            suppressed[place] = tuple(never[place] - {allowed[0]})
            never[place] = {*suppressed[place], *(set(range(vocab)) - set(allowed))}
        for index, drawn in enumerate(sample(logits, given, suppressed)):
            row = logits[index].double().numpy()
            expected = plain_choices(row, settings[index], prompts[index], answers[index], tuple(never[index]), seeds[index])
            assert drawn is not None and drawn.token_id in expected, f"{settings[index]}, spread {spread}, {dtype}"


def mask(noise: torch.Tensor, chance: torch.Tensor, share: float) -> torch.Tensor:
    """About this share of the logits, and always that of token 7."""
    return noise.masked_fill(chance > share, float("-inf")).index_fill_(0, torch.tensor(7), 0.5)


SHAPES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "flat": lambda noise, _: noise * 0.01,
    "equal": lambda noise, _: torch.full_like(noise, 3.25),
    "tied": lambda noise, _: (noise * 2).round(),
    "two levels": lambda noise, _: (noise > 1.5).float(),
    "one above a plateau": lambda _, chance: torch.zeros_like(chance).index_fill_(0, chance.argmax(), 12.0),
    "few are possible": lambda noise, chance: mask(noise, chance, 5 / len(noise)),
    "half are impossible": lambda noise, chance: mask(noise, chance, 0.5),
    "far from zero": lambda noise, _: noise * 3 - 20_000,
    "peaked": lambda noise, _: noise * 5,
}
"""Logits, float32 [vocab], that a window of the largest decides, or cannot decide: of normal and of uniform numbers."""


@pytest.mark.parametrize("shape", SHAPES)
@lengths.drawn_cells(2, "vocab", [33, 5000, 49_152, 151_936])
def test_filters_that_reach_beyond_the_largest_scores_are_those_of_all_scores(shape: str, vocab: int, seed: int) -> None:
    """Each row follows the definition, alone and beside other rows."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    count = 12
    settings = [
        Sampling(
            temperature=rng.choice([1e-3, 0.1, 0.7, 1.0, 2.0, 100.0, 1e6]),
            top_k=rng.choice([0, 0, 0, 2, 100, 127, 128, 129, 3000, 40_000]),
            top_p=rng.choice([0.05, 0.5, 0.8, 0.95, 0.999, 0.999_999, 1.0]),
            min_p=rng.choice([0.0, 0.0, 0.0, 1e-5, 0.3]),
        )
        for _ in range(count)
    ]
    noise, chance = torch.randn(count, vocab, generator=generator), torch.rand(count, vocab, generator=generator)
    logits = torch.stack([SHAPES[shape](*row) for row in zip(noise, chance, strict=True)])
    rows = [draws(setting, rng.getrandbits(64)) for setting in settings]
    for index, drawn in enumerate(sample(logits, rows, [()] * count)):
        assert drawn == sample(logits[index : index + 1], [rows[index]], [()])[0], settings[index]
        expected = plain_choices(logits[index].double().numpy(), settings[index], (), (), (), rows[index].seed)
        assert drawn is not None and drawn.token_id in expected, settings[index]


def test_equal_scores_stand_or_fall_together_behind_any_rank() -> None:
    """1,000 scores are 1, and 40,000 are 0: a rank or a share that ends within one of the two groups keeps all of that group."""
    ones = torch.arange(0, 40_000, 40)
    logits = torch.zeros(40_000).index_fill_(0, ones, 1.0).expand(100, -1)
    share = 1000 * math.e / (1000 * math.e + 39_000)

    def draw_ids(**filters: float) -> set[int]:
        rows = [draws(Sampling(1.0, **filters), seed) for seed in range(100)]  # type: ignore[arg-type]
        return {drawn.token_id for drawn in sample(logits, rows, [()] * 100) if drawn}

    within = ({"top_k": 1}, {"top_k": 1000}, {"top_p": share * 0.01}, {"top_p": share * 0.999}, {"top_k": 1001, "top_p": share * 0.999})
    for filters in within:
        ids = draw_ids(**filters)
        assert len(ids) > 80 and ids <= set(ones.tolist()), filters
    for filters in ({"top_k": 1001}, {"top_p": share * 1.001}):
        assert len(draw_ids(**filters) - set(ones.tolist())) > 50, filters


def test_top_p_takes_shares_of_what_top_k_left() -> None:
    """80 scores are nearly equal, the others have a fifth of their weight together: half of what top-k left is 40 tokens, not 48."""
    logits = torch.full((1, 60_000), 1.0 - math.log(60_000 / 16))
    logits[0, :80] = torch.arange(80, 0, -1) * 1e-3 + 1.0
    found = {sample(logits, [draws(Sampling(1.0, top_k=80, top_p=0.5), seed)], [()])[0] for seed in range(400)}
    assert {drawn.token_id for drawn in found if drawn} <= set(range(40))
    assert len(found) > 35


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-38, 1e-45, 1e-300, 5e-324])
@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 70, "top_p": 0.5, "min_p": 0.5}])
def test_next_to_no_temperature_draws_the_largest(temperature: float, filters: dict[str, float], seed: int) -> None:
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(seed))
    logits[:, 777] = 9.0
    rows = [draws(Sampling(temperature=temperature, **filters), seed + index) for index in range(3)]  # type: ignore[arg-type]
    assert sample(logits, rows, [()] * 3) == [DrawnToken(777, None)] * 3


def test_equal_logits_pass_a_filter_together_and_greedy_takes_the_lowest_id() -> None:
    logits = torch.zeros(1, 3000)
    assert sample(logits, [draws(Sampling())], [()]) == [DrawnToken(0, None)]
    found = {sample(logits, [draws(Sampling(temperature=1.0, top_k=1), seed)], [()])[0] for seed in range(200)}
    assert len(found) > 150
    logits[0, [70, 2000]] = 5.0
    assert sample(logits, [draws(Sampling())], [()]) == [DrawnToken(70, None)]
    found = {sample(logits, [draws(Sampling(temperature=1.0, top_k=1), seed)], [()])[0] for seed in range(50)}
    assert found == {DrawnToken(70, None), DrawnToken(2000, None)}


def test_a_banned_token_is_never_drawn_and_a_row_that_is_not_finite_gives_none() -> None:
    logits = torch.zeros(5, 100)
    logits[:, 7] = 50.0
    logits[1, 3] = float("nan")
    logits[2, 3] = float("inf")
    logits[3, :] = float("-inf")
    logits[4, 7] = float("nan")
    drawn = sample(logits, [draws(Sampling()) for _ in range(5)], [(7,), (), (), (), (7,)])
    assert drawn == [DrawnToken(0, None), None, None, None, None]
    for sampling in (Sampling(1.0), Sampling(1.0, top_p=0.9), Sampling(1.0, top_k=30), Sampling(1.0, top_k=30, top_p=0.9)):
        first, *others = sample(logits, [draws(sampling) for _ in range(5)], [(7,), (), (), (), (7,)])
        assert first is not None and first.token_id != 7 and others == [None] * 4


def uniform(seed: int, step: int, count: int) -> torch.Tensor:
    """The noise of the first `count` tokens as numbers that should be uniform between 0 and 1."""
    blocks = torch.arange(-(-count // BLOCK))[None]
    arrivals = times(keys(torch.tensor([seed_bits(seed)]), torch.tensor([step])), blocks, torch.arange(BLOCK))
    return -torch.expm1(-arrivals.flatten()[:count])


def test_a_constraint_hides_no_number_that_is_none_and_leaves_nothing_where_it_allows_nothing() -> None:
    logits = torch.zeros(5, 100)
    logits[0, 3] = float("nan")
    logits[1, 3] = float("inf")
    logits[4, 50] = 9.0
    for sampling in (Sampling(), Sampling(1.0), Sampling(1.0, top_k=30, top_p=0.9)):
        rows = [draws(sampling) for _ in range(5)]
        for row, allowed in zip(rows, ([1, 2], [1, 2], [], [31, 32, 99], None), strict=True):
            row.walk = None if allowed is None else AllowedTokens(allowed, 100)
        drawn = sample(logits, rows, [()] * 5)
        assert drawn[:3] == [None] * 3
        assert drawn[3] is not None and drawn[3].token_id in (31, 32, 99)
        assert drawn[4] == sample(logits[4:], [draws(sampling)], [()])[0]


@pytest.mark.parametrize("vocab", [7, 500, 49_152])
def test_logprobs_are_those_of_the_models_own_logits(vocab: int, seed: int) -> None:
    """The logprobs do not depend on penalties, filters and constraints, alone and beside rows with others or none. Ids that are no tokens
    count in the softmax and are never among the likeliest, however likely they are."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    logits = torch.randn(12, vocab, generator=generator) * 4
    rows = []
    for place in range(12):
        count = rng.choice([None, 0, 1, 5, 20])
        nothing = frozenset(np.argsort(-logits[place].numpy())[:: rng.choice([1, 2, 3])][: rng.choice([0, 3])].tolist())
        row = Draws(any_sampling(rng), rng.getrandbits(64), count is not None, {1, 2}, top_logprobs=count or 0, tokenless=nothing)
        row.note(3)
        row.walk = AllowedTokens(rng.sample(range(vocab), 2), vocab) if place % 3 == 0 else None
        row.bias_ids.remainder_(vocab)
        rows.append(row)
    for place, (row, drawn) in enumerate(zip(rows, sample(logits, rows, [()] * 12), strict=True)):
        assert drawn is not None and drawn == sample(logits[place : place + 1], [row], [()])[0]
        own = logits[place].double().numpy()
        expected = own - own.max() - math.log(np.exp(own - own.max()).sum())
        if not row.logprobs:
            assert (drawn.logprob, drawn.top) == (None, ())
            continue
        assert drawn.logprob == pytest.approx(expected[drawn.token_id], abs=1e-4)
        named = [token_id for token_id in np.argsort(-expected).tolist() if token_id not in row.tokenless]
        best = named[: row.top_logprobs]
        assert [token_id for token_id, _ in drawn.top] == best
        assert [value for _, value in drawn.top] == pytest.approx(expected[best].tolist(), abs=1e-4)


def test_noise_depends_on_seed_step_and_token_and_is_uniform() -> None:
    one = uniform(1, 0, 64_000)
    for seed, step in ((2, 0), (1, 1), (2**64 - 1, 0)):
        assert abs(torch.corrcoef(torch.stack((one, uniform(seed, step, 64_000))))[0, 1].item()) < 0.03
    assert abs(torch.corrcoef(torch.stack((one[:-1], one[1:])))[0, 1].item()) < 0.03
    assert 0 < one.min() < one.max() < 1
    counts = torch.histc(one, 100, 0, 1)
    assert ((counts - 640) ** 2 / 640).sum() < 200


def test_the_tokens_of_a_block_arrive_independently() -> None:
    """For any first time of a block, its least, its second and its largest time are those of 32 independent ones."""
    ordered = uniform(5, 0, BLOCK * 4000).view(-1, BLOCK).sort(-1).values
    # The k-th least of 32 uniform numbers has mean k / 33 and variance k (33 - k) / (33 ** 2 * 34).
    for rank in (1, 2, 16, 32):
        mean, deviation = rank / 33, math.sqrt(rank * (33 - rank) / 34) / 33
        assert abs(ordered[:, rank - 1].mean().item() - mean) < 6 * deviation / math.sqrt(4000)
    places = uniform(5, 0, BLOCK * 4000).view(-1, BLOCK).argmin(-1)
    counts = torch.bincount(places, minlength=BLOCK)
    assert ((counts - 125) ** 2 / 125).sum() < 90


def test_no_time_is_zero_or_infinite() -> None:
    """The bits that once gave a uniform number of exactly 1, and those at the other end."""
    extremes = torch.tensor([-1, 0, (1 << 63) - 1, -(1 << 63), -2048, 2047])
    found = _times(extremes)
    assert (found > 0).all() and torch.isfinite(found).all()
    first, place = first_times(keys(torch.arange(1000), torch.arange(1000)), torch.arange(1000)[None])
    assert (first > 0).all() and (first < 1.2).all() and place.unique().tolist() == list(range(BLOCK))


def mixed(x: int) -> int:
    """SplitMix64's finaliser on Python's own integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


def mixed_array(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The same on arrays."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@pytest.mark.parametrize(("seed", "step"), [(42, 7), (2**64 - 1, 3), (0, 0), (2**63, 8191)])
def test_noise_is_what_the_text_says(seed: int, step: int) -> None:
    assert mixed_array(np.array([seed], np.uint64))[0] == mixed(seed)
    expected = -np.expm1(-plain_times(seed, step, 20_000))
    np.testing.assert_allclose(uniform(seed, step, 20_000).numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("sampling", [Sampling(temperature=1.0, top_k=50), Sampling(temperature=1.0, top_p=0.9), Sampling(temperature=1.0)])
def test_a_row_of_a_small_vocabulary_that_cannot_be_drawn_from_fails_alone(sampling: Sampling) -> None:
    logits = torch.tensor([[float("-inf")] * 2, [0.0, 1.0]])
    none, drawn = sample(logits, [Draws(sampling, 0, True), Draws(Sampling(temperature=0.0), 0, True)], [(), ()])
    assert none is None and drawn is not None and drawn.token_id == 1


# Transformers ------------------------------------------------------------------------------------------------------------------------


VOCAB = 900
END = 5


@cache
def mixin() -> Any:
    """A model of Transformers, for the order of its processors."""
    logging.set_verbosity_error()
    config = LlamaConfig(vocab_size=VOCAB, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, eos_token_id=END)
    return LlamaForCausalLM(config)


def processed(
    logits: torch.Tensor, sampling: Sampling, prompt: list[int], answer: list[int], suppressed: list[int], least: int
) -> torch.Tensor:
    """Scores from which Transformers would draw, float64 [vocab]; -inf for tokens that it would not draw."""
    warm = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p or None}
    config = GenerationConfig(
        do_sample=sampling.temperature > 0,
        repetition_penalty=sampling.repetition_penalty,
        suppress_tokens=suppressed or None,
        min_new_tokens=least,
        eos_token_id=END,
        **(warm if sampling.temperature > 0 else {}),
    )
    model = mixin()
    model._prepare_special_tokens(config, device=torch.device("cpu"))
    processors = model._get_logits_processor(config, input_ids_seq_length=len(prompt), device="cpu")
    return cast(torch.Tensor, processors(torch.tensor([prompt + answer]), logits[None].clone()))[0].double()


def test_draws_are_those_of_transformers(seed: int) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    ends = 0
    for _ in range(60):
        sampling = Sampling(
            temperature=rng.choice([0.0, 0.5, 1.0, 1.7]),
            top_k=rng.choice([0, 1, 7, 60]),
            top_p=rng.choice([1.0, 0.6, 0.95]),
            min_p=rng.choice([0.0, 0.0, 0.05]),
            repetition_penalty=rng.choice([1.0, 1.2, 3.0]),
        )
        prompt, answer = rng.choices(range(60), k=20), rng.choices(range(60), k=rng.randrange(15))
        suppressed, least = rng.sample(range(60), rng.choice([0, 4])), rng.choice([0, 0, 10])
        logits = torch.randn(VOCAB, generator=generator) * 2
        logits[rng.sample(range(60), 12)] += 6  # Tokens that were seen, tokens that are suppressed, and the end are among the likeliest.
        logits[END] += rng.choice([0, 9])
        noise_seed = rng.getrandbits(64)
        never = suppressed if len(answer) >= least else [*suppressed, END]
        (drawn,) = sample(logits[None], [draws(sampling, noise_seed, tuple(prompt), tuple(answer))], [never])
        scores = processed(logits, sampling, prompt, answer, suppressed, least).numpy()
        if sampling.temperature > 0:
            scores = scores - np.log(plain_times(noise_seed, len(answer), VOCAB))
        assert drawn is not None and drawn.token_id == int(np.argmax(scores)), f"{sampling}, {suppressed}, {least}"
        ends += drawn.token_id == END
    assert ends, "no end was ever drawn, so nothing was seen of one that is not allowed"


def test_a_penalty_in_another_order_would_be_seen(seed: int) -> None:
    """Filters before the penalty, or a penalty that forgets the prompt, change the draw: so the test above can fail."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    sampling = Sampling(temperature=1.0, top_k=7, repetition_penalty=3.0)
    late = forgetful = 0
    for _ in range(60):
        prompt = rng.choices(range(60), k=20)
        logits = torch.randn(VOCAB, generator=generator) * 2
        logits[rng.sample(range(60), 12)] += 6
        kept = processed(logits, sampling, prompt, [], [], 0).isfinite()
        late += not torch.equal(kept, processed(logits, Sampling(temperature=1.0, top_k=7), prompt, [], [], 0).isfinite())
        forgetful += not torch.equal(kept, processed(logits, sampling, [100], [], [], 0).isfinite())
    assert late > 30 and forgetful > 30
