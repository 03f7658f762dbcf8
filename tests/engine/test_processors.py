"""Draws are those of Transformers' own processors, in its order, with that of `engine.race` as the source of random numbers."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from engine.test_sampler import plain_times

from omnistage.engine.sampler import Draws, sample
from omnistage.engine.types import Sampling

VOCAB = 900
END = 5


@cache
def mixin() -> Any:
    """A model of Transformers, for the order of its processors."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=VOCAB, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, eos_token_id=END)
    return LlamaForCausalLM(config)


def processed(
    logits: torch.Tensor, sampling: Sampling, prompt: list[int], answer: list[int], suppressed: list[int], least: int
) -> torch.Tensor:
    """Scores from which Transformers would draw, float64 [vocab]; -inf for tokens that it would not draw."""
    from transformers import GenerationConfig

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
    scores: torch.Tensor = processors(torch.tensor([prompt + answer]), logits[None].clone())
    return scores[0].double()


def any_case(rng: random.Random) -> tuple[Sampling, list[int], list[int], list[int], int]:
    sampling = Sampling(
        temperature=rng.choice([0.0, 0.5, 1.0, 1.7]),
        top_k=rng.choice([0, 1, 7, 60]),
        top_p=rng.choice([1.0, 0.6, 0.95]),
        min_p=rng.choice([0.0, 0.0, 0.05]),
        repetition_penalty=rng.choice([1.0, 1.2, 3.0]),
    )
    prompt, answer = rng.choices(range(60), k=20), rng.choices(range(60), k=rng.randrange(15))
    return sampling, prompt, answer, rng.sample(range(60), rng.choice([0, 4])), rng.choice([0, 0, 10])


def test_draws_are_those_of_transformers(seed: int) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    ends = 0
    for _ in range(60):
        sampling, prompt, answer, suppressed, least = any_case(rng)
        logits = torch.randn(VOCAB, generator=generator) * 2
        logits[rng.sample(range(60), 12)] += 6  # Tokens that were seen, tokens that are suppressed, and the end are among the likeliest.
        logits[END] += rng.choice([0, 9])
        noise_seed = rng.getrandbits(64)
        row = Draws(sampling, noise_seed, ids=set(prompt))
        for token_id in answer:
            row.note(token_id)
        may_end = len(answer) >= least
        (drawn,) = sample(logits[None], [row], [suppressed if may_end else [*suppressed, END]])
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


@pytest.fixture(autouse=True)
def _quiet() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
