"""A sequence's logits are the same bits alone, among others, cut anywhere, with a shared prefix, and taken up again from its history."""

from __future__ import annotations

import random

import pytest
import torch

from helpers.tiny import TINY, tiny_decoder
from omnistage.engine.adapter import DecoderSpec
from omnistage.engine.attention import BatchedDecodeAttention, Row, SingleDecodeAttention, batches_are_exact
from omnistage.engine.kv import PAGE_TOKENS, KVCache, PagePool, pages_for
from omnistage.engine.linear import MAX_ROWS, MIN_ROWS, Linear, in_blocks, rows_are_independent
from omnistage.engine.request import TokenRequest
from omnistage.engine.runner import Runner
from omnistage.engine.scheduler import Chunk, Sequence


class Bench:
    """Sequences run by hand on one runner, in any order and any company."""

    def __init__(self, dtype: torch.dtype, pages: int = 400) -> None:
        decoder = tiny_decoder(dtype)
        self.pool = PagePool(pages)
        self.cache = KVCache(decoder.spec, pages, poison=True)
        self.runner = Runner(decoder, self.cache)

    def sequence(self, prompt: list[int], answer: int, history: list[int] | None = None) -> Sequence:
        sequence = Sequence(TokenRequest(tuple(prompt), 0, answer, history=tuple(history or ())))
        sequence.pages = self.pool.take(pages_for(sequence.request.tokens))
        self.cache.clear(sequence.pages)
        return sequence

    def prefill(self, sequence: Sequence, chunk_tokens: int) -> torch.Tensor:
        """Run prompt and history in chunks; returns the logits [vocab] of the last row."""
        while True:
            prompt = len(sequence.request.prompt)
            end = prompt if sequence.computed < prompt else sequence.known
            chunk = Chunk(sequence, sequence.computed, min(chunk_tokens, end - sequence.computed))
            logits = self.runner.chunk(chunk)
            sequence.computed += chunk.count
            if logits is not None:
                return logits[0]

    def decode(self, sequences: list[Sequence]) -> torch.Tensor:
        return self.runner.decode(sequences)

    def leave(self, sequence: Sequence) -> None:
        self.cache.retire(self.pool.give_back(sequence.pages))


def alone(dtype: torch.dtype, prompt: list[int], answer: list[int]) -> list[torch.Tensor]:
    """Logits of each step of a sequence that is by itself and takes `answer`."""
    bench = Bench(dtype)
    sequence = bench.sequence(prompt, len(answer) + 1)
    logits = [bench.prefill(sequence, 64)]
    for token_id in answer:
        sequence.tokens.append(token_id)
        logits.append(bench.decode([sequence])[0])
    return logits


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(TINY.vocab_size) for _ in range(count)]


def test_logits_are_equal_alone_and_in_a_ragged_batch_that_others_join_and_leave(dtype: torch.dtype, seed: int) -> None:
    rng = random.Random(seed)
    plans = [(tokens(rng, rng.randrange(1, 200)), tokens(rng, rng.randrange(8, 80))) for _ in range(16)]
    expected = [alone(dtype, prompt, answer) for prompt, answer in plans]
    bench = Bench(dtype)
    waiting, running = list(range(len(plans))), dict[int, Sequence]()
    compared = 0
    while waiting or running:
        while waiting and len(running) < 8 and (not running or rng.random() < 0.5):
            index = waiting.pop()
            running[index] = bench.sequence(plans[index][0], len(plans[index][1]) + 1)
            assert torch.equal(bench.prefill(running[index], rng.choice([32, 64, 128])), expected[index][0])
        company = rng.sample(sorted(running), rng.randrange(1, len(running) + 1))
        for index in company:
            running[index].tokens.append(plans[index][1][len(running[index].tokens)])
        logits = bench.decode([running[index] for index in company])
        for row, index in enumerate(company):
            step = len(running[index].tokens)
            assert torch.equal(logits[row], expected[index][step]), f"sequence {index}, step {step}, batch of {len(company)}"
            compared += 1
            if step == len(plans[index][1]):
                bench.leave(running.pop(index))
    assert compared == sum(len(answer) for _, answer in plans)
    assert bench.pool.used == 0


def test_a_history_computed_again_gives_the_bits_of_the_undisturbed_run(dtype: torch.dtype, seed: int) -> None:
    rng = random.Random(seed)
    prompt, answer = tokens(rng, rng.randrange(1, 150)), tokens(rng, 90)
    expected = alone(dtype, prompt, answer)
    for cut in (1, 2, 3, *rng.sample(range(4, 90), 6)):
        bench = Bench(dtype)
        other = bench.sequence(tokens(rng, 70), 64)
        bench.prefill(other, 64)
        sequence = bench.sequence(prompt, len(answer) + 1, history=answer[:cut])
        assert torch.equal(bench.prefill(sequence, rng.choice([32, 64])), expected[cut]), f"cut after {cut}"
        for step in range(cut, len(answer)):
            sequence.tokens.append(answer[step])
            other.tokens.append(rng.randrange(100))
            company = [sequence, other] if len(other.tokens) < 64 else [sequence]
            assert torch.equal(bench.decode(company)[0], expected[step + 1]), f"cut after {cut}, step {step + 1}"


def test_a_shared_prefix_gives_the_same_bits(dtype: torch.dtype, seed: int) -> None:
    rng = random.Random(seed)
    beginning, end = tokens(rng, 2 * PAGE_TOKENS), tokens(rng, 41)
    bench = Bench(dtype)
    first = bench.sequence(beginning + tokens(rng, 5), 4)
    bench.prefill(first, 64)
    second = bench.sequence(beginning + end, 4)
    second.pages[:2] = first.pages[:2]
    second.computed = 2 * PAGE_TOKENS
    assert torch.equal(bench.prefill(second, 64), alone(dtype, beginning + end, [])[0])


@pytest.mark.parametrize("shape", [(960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576)])
def test_rows_of_a_product_do_not_depend_on_the_batch(dtype: torch.dtype, shape: tuple[int, int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    linear = Linear(torch.randn(*shape, generator=generator).mul_(0.05).to(dtype))
    x = torch.randn(128, shape[1], generator=generator).to(dtype)
    whole = linear(x)
    for rows in (*range(MIN_ROWS, MAX_ROWS + 4), 48, 63, 64, 65, 100):
        assert torch.equal(linear(x[-rows:].contiguous()), whole[-rows:]), f"the last {rows} rows"
        assert torch.equal(linear(x[:rows].contiguous()), whole[:rows]), f"the first {rows} rows"


@pytest.mark.parametrize("shape", [(960, 576), (576, 576), (576, 1536)])
def test_the_library_keeps_its_promise_for_any_weight(dtype: torch.dtype, shape: tuple[int, int], seed: int) -> None:
    """What batching stands on: a block of 32 rows costs hardly more than one of 4, which the fallback would run instead."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(20):
        linear = Linear(torch.randn(*shape, generator=generator).to(dtype))
        assert rows_are_independent(linear._product, shape[1], dtype)


@pytest.mark.parametrize("block", [MIN_ROWS, 8, MAX_ROWS])
def test_products_in_blocks_are_those_rows_and_never_run_too_few_or_too_many(dtype: torch.dtype, block: int) -> None:
    weight = torch.randn(24, 40, generator=torch.Generator().manual_seed(1)).to(dtype)
    ran = []

    def product(part: torch.Tensor) -> torch.Tensor:
        ran.append(part.shape[0])
        return part @ weight.T

    for rows in range(MIN_ROWS, 3 * MAX_ROWS):
        x = torch.randn(rows, 40, generator=torch.Generator().manual_seed(rows)).to(dtype)
        torch.testing.assert_close(in_blocks(product, x, block), x @ weight.T)
    assert min(ran) >= MIN_ROWS and max(ran) <= block


def test_a_product_whose_rows_depend_on_their_number_is_found_out(dtype: torch.dtype) -> None:
    assert not rows_are_independent(lambda x: x * len(x), 16, dtype)


def test_a_row_attends_alike_in_any_company_and_place(seed: int) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    spec = tiny_decoder(torch.bfloat16).spec
    assert batches_are_exact(spec)
    cache = KVCache(spec, 400)
    cache.layer(0).copy_(torch.randn(cache.layer(0).shape, generator=generator))
    for _ in range(1500):
        free = rng.sample(range(400), 400)
        positions = [rng.choice([rng.randrange(300), rng.randrange(30, 120)]) for _ in range(rng.randrange(1, 12))]
        rows = [Row(position, [free.pop() for _ in range(pages_for(position + 1))]) for position in positions]
        queries = torch.randn(len(rows), spec.query_heads, spec.head_size, generator=generator).bfloat16()
        stored = torch.randn(len(rows), 2 * spec.kv_heads, spec.head_size, generator=generator).bfloat16()
        together = BatchedDecodeAttention(cache, spec, rows)(0, queries, stored)
        one = rng.randrange(len(rows))
        alone = BatchedDecodeAttention(cache, spec, rows[one : one + 1])(0, queries[one : one + 1], stored[one : one + 1])
        assert torch.equal(alone[0], together[one]), f"row {one} of {positions}"


def test_a_model_whose_products_are_too_small_runs_row_by_row() -> None:
    assert not batches_are_exact(DecoderSpec(2, 4, 2, 16, 500, 1024, torch.bfloat16))


def _most_rounding(query: torch.Tensor, keys: torch.Tensor, dtype: torch.dtype) -> float:
    """Most relative error of one head's weighted sum of absolute values, when scores, weights and the result are rounded to `dtype`.

    query: float64 [head_size]; keys: float64 [length, head_size]. Sums are kept in float32. Scores wrong by at most d change every weight
    by a factor within exp(+-2 d) (Higham, Accuracy and Stability of Numerical Algorithms, chapter 3, for the rounding of sums).
    """
    unit, unit_of_sums = torch.finfo(dtype).eps / 2, torch.finfo(torch.float32).eps / 2
    of_scores = unit * (keys @ query).abs().max() + unit_of_sums * len(query) * (keys.abs() @ query.abs()).max()
    return float(torch.expm1(2 * of_scores + 2 * unit + 2 * unit_of_sums * len(keys)))


def test_both_forms_of_decode_attention_agree_with_the_textbook(dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    spec = tiny_decoder(dtype).spec
    positions = [0, 31, 32, 77, 100]
    pool = PagePool(40)
    rows = [Row(position, pool.take(pages_for(position + 1))) for position in positions]
    cache = KVCache(spec, 40)
    cache.layer(1).copy_(torch.randn(cache.layer(1).shape, generator=generator))
    queries = torch.randn(8, spec.query_heads, spec.head_size, generator=generator).to(dtype)
    stored = torch.randn(8, 2 * spec.kv_heads, spec.head_size, generator=generator).to(dtype)
    for form in (BatchedDecodeAttention, SingleDecodeAttention):
        result = form(cache, spec, rows)(1, queries, stored)
        for index, row in enumerate(rows):
            held = cache.layer(1)[row.pages].transpose(1, 2).flatten(0, 1)[: row.position + 1].double()
            for head in range(spec.query_heads):
                group = head // (spec.query_heads // spec.kv_heads)
                query, keys, values = queries[index, head].double(), held[:, group], held[:, spec.kv_heads + group]
                weights = torch.softmax(keys @ query, 0)
                got = result[index].view(spec.query_heads, -1)[head].double()
                allowed = _most_rounding(query, keys, dtype) * (weights @ values.abs())
                assert ((got - weights @ values).abs() <= allowed).all()
            assert torch.equal(held[-1], stored[index].double())
