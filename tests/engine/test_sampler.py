"""Draws follow the filtered distribution, penalties are those of an independent reference, and no row knows its neighbours."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
import torch

from omnistage.engine.noise import gumbel, seed_bits, uniform
from omnistage.engine.sampler import Drawn, Draws, sample
from omnistage.engine.types import Sampling


def draws(sampling: Sampling, seed: int = 0, prompt: tuple[int, ...] = (), answer: tuple[int, ...] = ()) -> Draws:
    result = Draws(sampling, seed, seen=set(prompt))
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


@pytest.mark.parametrize("sampling", SETTINGS)
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


def test_greedy_choices_follow_the_reference_penalties(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        penalties = Sampling(
            repetition_penalty=rng.choice([1.0, 1.1, 2.0]), presence_penalty=rng.uniform(-2, 2), frequency_penalty=rng.uniform(-2, 2)
        )
        prompt, answer = tuple(rng.choices(range(40), k=10)), tuple(rng.choices(range(40), k=rng.randrange(20)))
        logits = torch.randn(40, generator=torch.Generator().manual_seed(rng.getrandbits(32))) * 2
        warm = Sampling(1.0, 0, 1.0, 0.0, penalties.repetition_penalty, penalties.presence_penalty, penalties.frequency_penalty)
        expected = reference_probabilities(logits.double().tolist(), warm, prompt, answer)
        (drawn,) = sample(logits[None], [draws(penalties, 0, prompt, answer)], [()])
        assert drawn is not None
        assert expected[drawn.token_id] == pytest.approx(max(expected.values()), rel=1e-4)


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
        together = sample(logits[company], [rows[index] for index in company], [()] * len(company))
        for index, drawn in zip(company, together, strict=True):
            assert drawn == alone[index]


@pytest.mark.parametrize(
    "sampling",
    [Sampling(temperature=1.0, top_p=0.999), Sampling(temperature=1.0, min_p=1e-6), Sampling(temperature=3.0, top_k=2000)],
)
def test_a_filter_that_passes_more_than_a_window_is_exact(sampling: Sampling, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(4000, generator=generator).bfloat16().float()
    expected = reference_probabilities(logits.double().tolist(), sampling, (), ())
    scores = {token: math.log(share) for token, share in expected.items()}
    assert len(scores) > 1024
    for index in range(40):
        row = draws(sampling, seed + index)
        (drawn,) = sample(logits[None], [row], [()])
        noise = gumbel(torch.tensor([seed_bits(row.seed)]), torch.tensor([0]), torch.tensor([list(scores)]))[0].tolist()
        best = max(zip(scores.values(), noise, scores, strict=True), key=lambda entry: entry[0] + entry[1])
        assert drawn == Drawn(best[2], None)


def test_equal_logits_pass_a_filter_together_and_greedy_takes_the_lowest_id() -> None:
    logits = torch.zeros(1, 3000)
    assert sample(logits, [draws(Sampling())], [()]) == [Drawn(0, None)]
    found = {sample(logits, [draws(Sampling(temperature=1.0, top_k=1), seed)], [()])[0] for seed in range(200)}
    assert len(found) > 150
    logits[0, [70, 2000]] = 5.0
    assert sample(logits, [draws(Sampling())], [()]) == [Drawn(70, None)]
    found = {sample(logits, [draws(Sampling(temperature=1.0, top_k=1), seed)], [()])[0] for seed in range(50)}
    assert found == {Drawn(70, None), Drawn(2000, None)}


def test_a_banned_token_is_never_drawn_and_a_row_that_is_not_finite_gives_none() -> None:
    logits = torch.zeros(5, 100)
    logits[:, 7] = 50.0
    logits[1, 3] = float("nan")
    logits[2, 3] = float("inf")
    logits[3, :] = float("-inf")
    logits[4, 7] = float("nan")
    drawn = sample(logits, [draws(Sampling()) for _ in range(5)], [(7,), (), (), (), (7,)])
    assert drawn == [Drawn(0, None), None, None, None, None]


def test_noise_depends_on_seed_step_and_token_and_is_uniform() -> None:
    ids = torch.arange(50_000)[None]
    one = uniform(torch.tensor([1]), torch.tensor([0]), ids)
    for seed, step in ((2, 0), (1, 1), (seed_bits(2**64 - 1), 0)):
        other = uniform(torch.tensor([seed]), torch.tensor([step]), ids)
        assert abs(torch.corrcoef(torch.cat((one, other)))[0, 1].item()) < 0.03
    neighbours = torch.stack((one[0, :-1], one[0, 1:]))
    assert abs(torch.corrcoef(neighbours)[0, 1].item()) < 0.03
    assert 0 < one.min() < one.max() < 1
    counts = torch.histc(one, 100, 0, 1)
    assert ((counts - 500) ** 2 / 500).sum() < 200


def mixed(x: int) -> int:
    """SplitMix64's finaliser on Python's own integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


@pytest.mark.parametrize(("seed", "step", "token_id"), [(42, 7, 0), (42, 7, 49151), (2**64 - 1, 3, 17), (0, 0, 0), (2**63, 8191, 1)])
def test_noise_is_the_hash_that_the_text_says(seed: int, step: int, token_id: int) -> None:
    key = mixed((mixed((seed + 0x9E3779B97F4A7C15) % 2**64) + step * 0x9E3779B97F4A7C15) % 2**64)
    expected = ((mixed((key + token_id * 0xD1B54A32D192ED03) % 2**64) >> 11) + 0.5) * 2.0**-53
    found = uniform(torch.tensor([seed_bits(seed)]), torch.tensor([step]), torch.tensor([[token_id]]))
    assert found.item() == expected
