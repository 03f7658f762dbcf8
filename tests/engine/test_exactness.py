"""The logits of a sequence have the same bits alone, among others, cut anywhere, with a shared prefix, and resumed from its history; rows
of a product have the same bits in any company."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as functional

from helpers import lengths
from helpers.engines import TINY, tiny_decoder, tiny_weights
from omnistage.engine import attention, linear
from omnistage.engine.adapter import Attention, DecoderSpec, StepRows
from omnistage.engine.attention import (
    AttentionBackend,
    PagedAttention,
    RowAttention,
    SdpaAttention,
    TritonAttention,
    attend,
    choose_backend,
    rows_are_independent,
)
from omnistage.engine.decoder import PackedDecoder
from omnistage.engine.engine import Runner
from omnistage.engine.linear import (
    Fixed,
    Linear,
    LinearProduct,
    Linears,
    Packed,
    RowsDiffer,
    in_blocks,
    multiplies_bfloat16,
    rows_that_differ,
    viable_products,
)
from omnistage.engine.memory import PAGE_ROWS, KVCache, PagePool, pages_for
from omnistage.engine.plan import PlannedRun, StepPlan
from omnistage.engine.request import Prompt, SequenceRequest
from omnistage.engine.sampler import Draws
from omnistage.engine.scheduler import Run
from omnistage.engine.sequence import Sequence


class LogitsHead:
    """A head that draws nothing and keeps the logits."""

    def __init__(self, decoder: PackedDecoder) -> None:
        self._decoder = decoder
        self.logits = torch.empty(0)

    def draw(self, hidden: torch.Tensor, draws: list[Draws], banned: list[frozenset[int]]) -> list[None]:
        self.logits = self._decoder.logits(hidden)[: len(draws)]
        return [None] * len(draws)


class Bench:
    """Sequences that a test runs by hand on one runner, in any order and in any company."""

    def __init__(self, dtype: torch.dtype, pages: int = 400) -> None:
        decoder = tiny_decoder(dtype)
        self.pool = PagePool(pages)
        self.cache = KVCache(decoder.spec, pages, poison=True)
        self.head = LogitsHead(decoder)
        self.runner = Runner(decoder, self.head, self.cache, choose_backend(decoder.spec).backend)  # type: ignore[arg-type]

    def sequence(self, prompt: list[int], answer: int, history: list[int] | None = None) -> Sequence:
        request = SequenceRequest(Prompt.of_tokens(prompt), 0, answer, history=tuple((token,) for token in history or ()))
        sequence = Sequence(request)
        sequence.pages = [self.pool.take() for _ in range(pages_for(request.rows + 1))]
        self.cache.follow(*self.pool.changes())
        return sequence

    def prefill(self, sequence: Sequence, pages: int) -> torch.Tensor:
        """Run all known rows, so many pages at a time. Returns the logits [vocab] of the last row."""
        while sequence.rows_left:
            self.run(self.next_runs(sequence, pages))
        return self.head.logits[-1]

    def next_runs(self, sequence: Sequence, pages: int) -> list[Run]:
        runs: list[Run] = []
        start = sequence.computed
        while start < sequence.known_rows and len(runs) < pages:
            runs.append(Run(sequence, start, min(sequence.known_rows - start, PAGE_ROWS - start % PAGE_ROWS)))
            start += runs[-1].count
        return runs

    def run(self, runs: list[Run]) -> torch.Tensor:
        """Returns the logits of the runs that draw."""
        self.runner.run(runs)
        for run in runs:
            run.sequence.computed = run.start + run.count
        return self.head.logits

    def decode(self, sequences: list[Sequence]) -> torch.Tensor:
        return self.run([run for sequence in sequences for run in self.next_runs(sequence, 1)])

    def leave(self, sequence: Sequence) -> None:
        self.pool.give_back(sequence.pages)
        self.cache.follow(*self.pool.changes())


def alone(dtype: torch.dtype, prompt: list[int], answer: list[int]) -> list[torch.Tensor]:
    """The logits of each step of a sequence that runs alone and takes `answer`."""
    bench = Bench(dtype)
    sequence = bench.sequence(prompt, len(answer) + 1)
    logits = [bench.prefill(sequence, 2)]
    for token_id in answer:
        sequence.items.append((token_id,))
        logits.append(bench.decode([sequence])[0])
    return logits


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(TINY.vocab_size) for _ in range(count)]


@lengths.rounds(6, 16)
def test_logits_are_equal_alone_and_in_a_ragged_batch_that_others_join_and_leave(dtype: torch.dtype, seed: int, rounds: int) -> None:
    rng = random.Random(seed)
    plans = [(tokens(rng, rng.randrange(1, 200)), tokens(rng, rng.randrange(8, 80))) for _ in range(rounds)]
    expected = [alone(dtype, prompt, answer) for prompt, answer in plans]
    bench = Bench(dtype)
    waiting, running = list(range(len(plans))), dict[int, Sequence]()
    compared = 0
    while waiting or running:
        while waiting and len(running) < 8 and (not running or rng.random() < 0.5):
            index = waiting.pop()
            running[index] = bench.sequence(plans[index][0], len(plans[index][1]) + 1)
            assert torch.equal(bench.prefill(running[index], rng.choice([1, 2, 4])), expected[index][0])
        company = rng.sample(sorted(running), rng.randrange(1, len(running) + 1))
        for index in company:
            running[index].items.append((plans[index][1][len(running[index].items)],))
        logits = bench.decode([running[index] for index in company])
        for row, index in enumerate(company):
            step = len(running[index].items)
            assert torch.equal(logits[row], expected[index][step]), f"sequence {index}, step {step}, batch of {len(company)}"
            compared += 1
            if step == len(plans[index][1]):
                bench.leave(running.pop(index))
    assert compared == sum(len(answer) for _, answer in plans)
    assert bench.pool.used == 0


def test_a_prompt_beside_decoding_rows_gives_the_bits_of_both_alone(dtype: torch.dtype, seed: int) -> None:
    rng = random.Random(seed)
    prompt, answer, long = tokens(rng, 50), tokens(rng, 30), tokens(rng, 333)
    expected, expected_long = alone(dtype, prompt, answer), alone(dtype, long, [])[0]
    bench = Bench(dtype)
    decoding, reading = bench.sequence(prompt, len(answer) + 1), bench.sequence(long, 2)
    bench.prefill(decoding, 1)
    for step, token_id in enumerate(answer):
        decoding.items.append((token_id,))
        blocks = bench.next_runs(reading, rng.randrange(0, 3))
        logits = bench.run([*bench.next_runs(decoding, 1), *blocks])
        assert torch.equal(logits[0], expected[step + 1]), f"step {step}"
        if any(run.draws for run in blocks):
            assert torch.equal(logits[1], expected_long)
    assert reading.rows_left == 0


@lengths.rounds(2, 6)
def test_a_history_computed_again_gives_the_bits_of_the_undisturbed_run(dtype: torch.dtype, seed: int, rounds: int) -> None:
    rng = random.Random(seed)
    prompt, answer = tokens(rng, rng.randrange(1, 150)), tokens(rng, 90)
    expected = alone(dtype, prompt, answer)
    for cut in (1, 2, 3, *rng.sample(range(4, 90), rounds)):
        bench = Bench(dtype)
        other = bench.sequence(tokens(rng, 70), 64)
        bench.prefill(other, 2)
        sequence = bench.sequence(prompt, len(answer) + 1, history=answer[:cut])
        assert torch.equal(bench.prefill(sequence, rng.choice([1, 2])), expected[cut]), f"cut after {cut}"
        for step in range(cut, len(answer)):
            sequence.items.append((answer[step],))
            other.items.append((rng.randrange(100),))
            company = [sequence, other] if len(other.items) < 64 else [sequence]
            assert torch.equal(bench.decode(company)[0], expected[step + 1]), f"cut after {cut}, step {step + 1}"


def test_a_shared_prefix_gives_the_same_bits(dtype: torch.dtype, seed: int) -> None:
    rng = random.Random(seed)
    beginning, end = tokens(rng, 2 * PAGE_ROWS), tokens(rng, 41)
    bench = Bench(dtype)
    first = bench.sequence(beginning + tokens(rng, 5), 4)
    bench.prefill(first, 2)
    second = bench.sequence(beginning + end, 4)
    second.pages[:2] = first.pages[:2]
    second.computed = 2 * PAGE_ROWS
    assert torch.equal(bench.prefill(second, 2), alone(dtype, beginning + end, [])[0])


def random_runs(rng: random.Random, count: int, pages: int) -> list[PlannedRun]:
    """Runs of any length at any place; no two share a page."""
    free, runs, first = rng.sample(range(pages), pages), list[PlannedRun](), 0
    for _ in range(count):
        start = rng.choice([rng.randrange(300), rng.randrange(30, 120)])
        rows = rng.choice([1, 1, rng.randrange(1, PAGE_ROWS - start % PAGE_ROWS + 1)])
        runs.append(PlannedRun(first, rows, start, tuple(free.pop() for _ in range(pages_for(start + rows)))))
        first += rows
    return runs


@lengths.drawn_cells(3, ("query_heads", "kv_heads", "head_size"), [(6, 2, 32), (9, 3, 64), (28, 4, 128), (12, 12, 64), (16, 2, 128)])
@lengths.rounds(8, 40)
def test_a_row_attends_alike_in_any_run_company_and_place(
    query_heads: int, kv_heads: int, head_size: int, dtype: torch.dtype, seed: int, rounds: int
) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    spec = DecoderSpec(1, query_heads, kv_heads, head_size, 500, 1024, dtype)
    backend = choose_backend(spec).backend
    assert isinstance(backend, PagedAttention)
    cache = KVCache(spec, 200)
    cache.layer(0).copy_(torch.randn(cache.layer(0).shape, generator=generator))
    for _ in range(rounds):
        runs = random_runs(rng, rng.randrange(1, 12), 200)
        rows = runs[-1].first + runs[-1].count
        queries = torch.randn(rows, query_heads, head_size, generator=generator).to(dtype)
        stored = torch.randn(rows, 2 * kv_heads, head_size, generator=generator).to(dtype)
        together = attend(backend, cache, spec, runs, queries, stored)
        one = rng.choice(runs)
        for row in range(one.count):
            at = one.first + row
            single = PlannedRun(0, 1, one.start + row, one.pages)
            alone = attend(backend, cache, spec, [single], queries[at : at + 1], stored[at : at + 1])
            assert torch.equal(alone[0], together[at]), f"row {row} of {one}"


def later_rows(plan: StepPlan, like: torch.Tensor) -> torch.Tensor:
    """1 for the first row of each run but the first."""
    ones = torch.zeros(len(like), 1, dtype=like.dtype)
    ones[[run.first for run in plan.runs[1:]]] = 1
    return ones


WRONG: dict[str, Callable[[StepPlan, torch.Tensor], torch.Tensor]] = {
    "the number of rows": lambda plan, result: result * (1 + len(result)),
    "whether there are 29 rows and many pages": lambda plan, result: (
        result * (2 if plan.count == 29 and len(plan.runs[0].pages) == 16 else 1)
    ),
    "whether its run is the first": lambda plan, result: result + later_rows(plan, result),
}
"""Backends, by what the result of a row depends on."""


class WrongBackend(PagedAttention):
    change = staticmethod(WRONG["whether its run is the first"])

    def bind(self, cache: KVCache, spec: DecoderSpec, plan: StepPlan) -> Attention:
        bound = super().bind(cache, spec, plan)
        return lambda *rows: self.change(plan, bound(*rows))


class Loose(WrongBackend):
    """It claims nothing."""

    name = "loose"
    is_exact = False


def test_every_backend_of_the_processor_keeps_its_claim(dtype: torch.dtype) -> None:
    spec = tiny_decoder(dtype).spec
    assert rows_are_independent(PagedAttention({}), spec)
    assert rows_are_independent(RowAttention(), spec)
    assert isinstance(choose_backend(spec).backend, PagedAttention)


@lengths.drawn_cells(2, "fault", WRONG)
def test_a_backend_that_breaks_its_claim_is_found_out_and_told(fault: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = tiny_decoder(dtype).spec
    monkeypatch.setattr(WrongBackend, "change", staticmethod(WRONG[fault]))
    assert not rows_are_independent(WrongBackend(), spec)
    monkeypatch.setattr(attention, "ATTENTION", (WrongBackend, RowAttention))
    choice = choose_backend(spec)
    assert isinstance(choice.backend, RowAttention) and "pages: a row depended on its neighbours at load;" in choice.reason
    monkeypatch.setattr(attention, "ATTENTION", (WrongBackend,))
    with pytest.raises(ValueError, match="no way to attend on cpu: not paged in sweeps of 12/32 pages"):
        choose_backend(spec)


def test_a_backend_that_claims_nothing_is_used_and_the_settings_say_so(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "ATTENTION", (Loose, RowAttention))
    choice = choose_backend(tiny_decoder(dtype).spec)
    assert isinstance(choice.backend, Loose) and choice.reason == "loose: a row that is computed again may differ in its last bits"


def test_heads_whose_products_are_too_small_run_row_by_row() -> None:
    assert isinstance(choose_backend(DecoderSpec(1, 4, 2, 16, 500, 1024, torch.bfloat16)).backend, RowAttention)


def test_an_accelerator_is_given_a_kernel_of_its_own_or_sdpa() -> None:
    spec = DecoderSpec(1, 9, 3, 64, 500, 1024, torch.bfloat16, device=torch.device("cuda"))
    names = [make().name for make in attention.ATTENTION if make().is_viable(spec)]
    # No kernel is compiled for a device that is not there.
    assert names == [*([TritonAttention.name] if torch.cuda.is_available() else []), SdpaAttention.name, RowAttention.name]


def _most_rounding(query: torch.Tensor, keys: torch.Tensor, dtype: torch.dtype) -> float:
    """Most relative error of one head's weighted sum of absolute values, when scores, weights and the result are rounded to `dtype`.

    query: float64 [head_size]; keys: float64 [length, head_size]. Sums are kept in float32. Scores wrong by at most d change every weight
    by a factor within exp(+-2 d) (Higham, Accuracy and Stability of Numerical Algorithms, chapter 3, for the rounding of sums).
    """
    unit, unit_of_sums = torch.finfo(dtype).eps / 2, torch.finfo(torch.float32).eps / 2
    of_scores = unit * (keys @ query).abs().max() + unit_of_sums * len(query) * (keys.abs() @ query.abs()).max()
    return float(torch.expm1(2 * of_scores + 2 * unit + 2 * unit_of_sums * len(keys)))


@pytest.mark.parametrize("backend", [PagedAttention(), SdpaAttention(), RowAttention()], ids=["paged", "sdpa", "row by row"])
def test_every_form_of_attention_agrees_with_the_textbook(backend: AttentionBackend, dtype: torch.dtype, seed: int) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    spec = tiny_decoder(dtype).spec
    runs = random_runs(rng, 8, 100)
    cache = KVCache(spec, 100)
    cache.layer(1).copy_(torch.randn(cache.layer(1).shape, generator=generator))
    rows = runs[-1].first + runs[-1].count
    queries = torch.randn(rows + 2, spec.query_heads, spec.head_size, generator=generator).to(dtype)
    stored = torch.randn(rows + 2, 2 * spec.kv_heads, spec.head_size, generator=generator).to(dtype)
    result = attend(backend, cache, spec, runs, queries, stored, layer=1)
    for run in runs:
        held = cache.layer(1)[list(run.pages)].transpose(1, 2).flatten(0, 1).double()
        for row in range(run.count):
            seen = held[: run.start + row + 1]
            for head in range(spec.query_heads):
                group = head // (spec.query_heads // spec.kv_heads)
                query, keys, values = queries[run.first + row, head].double(), seen[:, group], seen[:, spec.kv_heads + group]
                weights = torch.softmax(keys @ query, 0)
                got = result[run.first + row].view(spec.query_heads, -1)[head].double()
                allowed = _most_rounding(query, keys, dtype) * (weights @ values.abs())
                assert ((got - weights @ values).abs() <= allowed).all()
            assert torch.equal(seen[-1], stored[run.first + row].double())


# Memory ------------------------------------------------------------------------------------------------------------------------------


GROWTH = """
from pathlib import Path

import torch

from omnistage.engine.attention import PagedAttention, attend
from omnistage.engine.adapter import DecoderSpec
from omnistage.engine.memory import KVCache
from omnistage.engine.memory import PAGE_ROWS
from omnistage.engine.plan import PlannedRun

PAGES = 900
spec = DecoderSpec(1, 6, 2, 16, 500, PAGES * PAGE_ROWS, torch.bfloat16)
backend, cache = PagedAttention(), KVCache(spec, PAGES)
cache.layer(0).zero_()
queries = torch.zeros(PAGE_ROWS, 6, 16, dtype=torch.bfloat16)
stored = torch.zeros(PAGE_ROWS, 4, 16, dtype=torch.bfloat16)


def held() -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) >> 10


torch.set_num_threads(1)
with torch.inference_mode():
    before = held()
    for pages in range(1, PAGES + 1):
        attend(backend, cache, spec, [PlannedRun(0, PAGE_ROWS, (pages - 1) * PAGE_ROWS, tuple(range(pages)))], queries, stored)
    print(held() - before)
"""

MAX_GROWTH_MIB = 450
"""The kernels that are kept, the scores of 32 rows of the longest run, and what lies free between them. With a new piece of memory for each
product and all kernels kept it was 740 to 830, in a Thinker of three layers 1,700."""

TIMEOUT_S = 540.0
"""It computes for 100 s on a core of its own. The test has 600 s."""


@lengths.long_form(unkept="Attention over a long prompt leaves no more memory behind than the kernels that are kept.")
def test_a_prompt_of_900_pages_leaves_few_kernels_behind() -> None:
    done = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < MAX_GROWTH_MIB


# Products -------------------------------------------------------------------------------------------------------------------------------


CPU = torch.device("cpu")
FIXED = (Fixed("blocks of 64 rows", 64, 64, "cuda"), Fixed("row by row", 1, 1))
SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536)]


class Lying(Packed):
    """A backend whose result depends on the number of rows, from some number of rows on, if the weight is `wide`."""

    def run(self, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        product = super().run(x, packed, bias)
        return product * 1.5 if product.shape[1] == TINY.hidden_size and x.shape[1] == TINY.ffn_size and len(x) in (5, 21) else product


@lengths.drawn_cells(2, "shape", [*SHAPES, (49152, 576)])
def test_rows_of_a_product_do_not_depend_on_the_batch(dtype: torch.dtype, shape: tuple[int, int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(*shape, generator=generator).mul_(0.05).to(dtype)
    product = Linears(next(viable_products(dtype, CPU)))(weight)
    x = torch.randn(128, shape[1], generator=generator).to(dtype)
    whole = product(x)
    for rows in (*range(1, 36), 48, 63, 64, 65, 100):
        assert torch.equal(product(x[-rows:].contiguous()), whole[-rows:]), f"the last {rows} rows"
        assert torch.equal(product(x[:rows].contiguous()), whole[:rows]), f"the first {rows} rows"


@lengths.drawn_cells(3, "shape", SHAPES)
def test_the_library_keeps_its_promise_for_any_weight(dtype: torch.dtype, shape: tuple[int, int], seed: int) -> None:
    """Batching rests on this: a block of 32 rows costs hardly more than one of 4. The last backend would run its rows one by one."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(20):
        weight = torch.randn(*shape, generator=generator).to(dtype)
        assert not rows_that_differ(Linear(weight, None, Packed()).run, weight, Packed())


@pytest.mark.parametrize(
    "product", [Packed(), replace(Packed(), max_rows=8), *FIXED], ids=lambda product: f"{product.name} {product.max_rows}"
)
def test_any_number_of_rows_runs_in_blocks_that_the_backend_takes(dtype: torch.dtype, product: LinearProduct) -> None:
    generator = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(24, 40, generator=generator).to(dtype), torch.randn(24, generator=generator).to(dtype)
    made, ran = Linear(weight, bias, product), list[int]()

    def run(part: torch.Tensor) -> torch.Tensor:
        ran.append(part.shape[0])
        return made.run(part)

    for rows in range(1, 3 * product.max_rows + 2):
        x = torch.randn(rows, 40, generator=generator).to(dtype)
        torch.testing.assert_close(in_blocks(run, x, product), functional.linear(x, weight, bias))
    assert min(ran) == product.min_rows and max(ran) == product.max_rows


@pytest.mark.parametrize("product", FIXED, ids=lambda product: product.name)
def test_a_product_of_one_size_needs_no_claim_about_sizes(dtype: torch.dtype, product: LinearProduct, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(96, 80, generator=generator).to(dtype)
    made = Linear(weight, None, product)
    assert not rows_that_differ(made.run, weight, product)
    x = torch.randn(70, 80, generator=generator).to(dtype)
    assert all(torch.equal(made(x[index : index + 1]), made(x)[index : index + 1]) for index in range(70))


@pytest.mark.parametrize("lie", range(4, 32))
def test_a_product_whose_rows_depend_on_their_number_is_found_out(dtype: torch.dtype, lie: int) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        return x + (len(x) == lie)

    assert rows_that_differ(run, torch.zeros(1, 16, dtype=dtype), Packed()) == lie
    # Only the first weight of a shape is tried with all sizes; another one is tried with a few of them, so one of sixteen weights finds the
    # fault.
    found = [rows_that_differ(run, torch.zeros(1, 16, dtype=dtype), Packed(), range(4, 33)[first::16]) for first in range(16)]
    assert found.count(lie) == 1


def test_a_product_whose_rows_depend_on_their_place_is_found_out(dtype: torch.dtype) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        return x + torch.arange(len(x))[:, None]

    assert rows_that_differ(run, torch.zeros(1, 16, dtype=dtype), Packed()) == 4
    assert rows_that_differ(run, torch.zeros(1, 16, dtype=dtype), FIXED[0]) == 64


def test_a_broken_claim_moves_all_weights_to_the_next_backend_and_is_told(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    assert PackedDecoder(TINY, tiny_weights(dtype)).products.startswith("packed")
    monkeypatch.setattr(linear, "PRODUCTS", (Lying(), FIXED[1]))
    decoder = PackedDecoder(TINY, tiny_weights(dtype))
    assert decoder.products == f"row by row; packed: 5 rows times [{TINY.hidden_size}, {TINY.ffn_size}] are not those of 32 rows"
    monkeypatch.setattr(Lying, "run", None)  # A product that still used the old backend would fail.
    nothing = torch.zeros(1, 4, dtype=torch.int64)
    hidden = decoder.hidden(StepRows(nothing.T, nothing), lambda layer, queries, keys_values: queries.flatten(1))
    assert decoder.logits(hidden.last).shape == (4, TINY.vocab_size)


def test_the_last_backend_of_a_table_that_breaks_its_claim_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "PRODUCTS", (Lying(),))
    with pytest.raises(RowsDiffer, match="packed: 5 rows"):
        PackedDecoder(TINY, tiny_weights(torch.float32))


def test_every_device_has_a_backend_and_the_processor_has_the_packed_one(dtype: torch.dtype) -> None:
    def names(device: str) -> list[str]:
        return [product.name for product in viable_products(dtype, torch.device(device))]

    many = ["packed to 64 rows"] if dtype == torch.float32 or not multiplies_bfloat16() else []
    assert names("cpu") == [*many, "packed", "row by row"]
    assert names("cuda") == ["blocks of 64 rows", "row by row"]
    assert names("meta") == ["row by row"]
