"""From rows to drawn tokens on a device that is not the processor: no tensor is left behind there, and no step waits by mistake. The fixed
sequence from which a revision is made passes through every weight and every form of attention.

If there is a GPU, it is the device, and its waits are not counted."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import pytest
import torch

from helpers import lengths
from helpers.elsewhere import GPU, Device, on_the_device
from helpers.engines import TAPPED, TINY, tiny_decoder, tiny_weights
from omnistage.engine import results as engine_results
from omnistage.engine.adapter import TokenHead
from omnistage.engine.attention import PagedAttention, RowAttention, SdpaAttention, TritonAttention, choose_backend
from omnistage.engine.decoder import PackedDecoder
from omnistage.engine.engine import Runner
from omnistage.engine.memory import PAGE_ROWS, KVCache, PagePool, PrefixCache
from omnistage.engine.request import Given, Prompt, SequenceRequest, Taps
from omnistage.engine.results import FIXED_ROWS, fixed_results
from omnistage.engine.scheduler import Scheduler, SchedulerLimits
from omnistage.engine.sequence import Sequence
from omnistage.engine.types import Item, Sampling

SAMPLINGS = (
    Sampling(),
    Sampling(temperature=1),
    Sampling(temperature=0.7, min_p=0.05),
    Sampling(temperature=1, top_k=20),
    Sampling(temperature=0.8, top_p=0.9, presence_penalty=0.5),
    Sampling(temperature=1.2, top_k=50, top_p=0.8, repetition_penalty=1.3, frequency_penalty=0.2, logit_bias={3: 2.0, 4: -50.0}),
)
STEP_FETCHES = 4
"""Most fetches of numbers in a step: the choices, the choices of some rows from all of their scores, logprobs, and taps."""


def entered(device: Device) -> AbstractContextManager[object]:
    return nullcontext() if torch.cuda.is_available() else device.there()


def asked() -> list[SequenceRequest]:
    """Prompts of several pages with given vectors, drawn in every way, some with taps."""
    requests = []
    for number, sampling in enumerate(SAMPLINGS):
        prompt = Prompt.of_tokens(range(number, number + 30 + 9 * number))
        given = torch.randn(5, TINY.hidden_size, generator=torch.Generator().manual_seed(number))
        requests.append(
            SequenceRequest(
                replace(prompt, given=(Given(7, given),)) if number % 2 else prompt,
                seed=number,
                max_items=8,
                sampling=sampling,
                banned=frozenset({1, 2}),
                logprobs=number % 3 == 0,
                taps_from=None if number < 3 else 2,
            )
        )
    return requests


def answers(decoder: PackedDecoder, device: Device) -> tuple[list[list[Item]], list[list[Taps]], list[float]]:
    """Items and taps of all requests, and the logprobs, as the engine makes them."""
    pool = PagePool(40)
    scheduler, cache = Scheduler(pool, PrefixCache(pool, 0), SchedulerLimits()), KVCache(decoder.spec, 40)
    runner = Runner(decoder, TokenHead(decoder.logits), cache, choose_backend(decoder.spec).backend)
    sequences = [Sequence(request) for request in asked()]
    taps: dict[Sequence, list[Taps]] = {sequence: [] for sequence in sequences}
    logprobs: list[float] = []
    waits = Counter[str]()
    for sequence in sequences:
        scheduler.add(sequence)
    while scheduler.waiting or scheduler.running:
        device.waits.clear()
        scheduler.admit()
        step = scheduler.plan(2 * PAGE_ROWS)
        cache.follow(*pool.changes())
        for done in runner.run(step.runs):
            sequence = done.run.sequence
            sequence.computed = done.run.start + done.run.count
            taps[sequence] += [] if done.taps is None else [done.taps]
            if done.drawn_item is not None:
                sequence.items.append(done.drawn_item.item)
                sequence.draws.note(done.drawn_item.item[0])
                logprobs += [] if done.drawn_item.logprob is None else [done.drawn_item.logprob]
            if len(sequence.items) == sequence.request.max_items:
                scheduler.remove(sequence)
        assert device.waits.keys() <= {"fetched", "nonzero", "_local_scalar_dense"}, "something is sent and waited for"
        assert device.waits["fetched"] + device.waits["_local_scalar_dense"] <= STEP_FETCHES
        waits += device.waits
    assert bool(waits) == (decoder.spec.device.type != "cpu" and not torch.cuda.is_available())
    return [sequence.items for sequence in sequences], list(taps.values()), logprobs


def test_an_answer_of_a_device_is_that_of_the_processor_and_no_step_waits_for_what_it_sends() -> None:
    weights = tiny_weights(torch.float32)
    with torch.inference_mode():
        items, taps, logprobs = answers(PackedDecoder(TINY, weights, TAPPED), Device())
    device = Device()
    with torch.inference_mode(), entered(device):
        decoder = PackedDecoder(TINY, on_the_device(weights), TAPPED)
        assert decoder.products == "blocks of 64 rows" and decoder.spec.device == GPU
        assert isinstance(choose_backend(decoder.spec).backend, TritonAttention if torch.cuda.is_available() else SdpaAttention)
        there, taps_there, logprobs_there = answers(decoder, device)
    assert there == items
    torch.testing.assert_close(logprobs_there, logprobs, atol=1e-4, rtol=1e-4)
    for mine, theirs in zip(taps_there, taps, strict=True):
        assert [(part.first, len(part.rows)) for part in mine] == [(part.first, len(part.rows)) for part in theirs]
        for part, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(part.rows, other.rows, atol=1e-4, rtol=1e-4)


def test_the_fixed_results_of_a_device_can_be_told_apart() -> None:
    """The revision reads the results and tells devices apart."""
    with torch.inference_mode():
        here = PackedDecoder(TINY, tiny_weights(torch.float32), TAPPED)
        expected = fixed_results(here, here.logits, choose_backend(here.spec).backend)
    with entered(Device()):
        decoder = PackedDecoder(TINY, on_the_device(tiny_weights(torch.float32)), TAPPED)
        results = [result.cpu() for result in fixed_results(decoder, decoder.logits, choose_backend(decoder.spec).backend)]
    for result, other in zip(results, expected, strict=True):
        torch.testing.assert_close(result, other, atol=1e-3, rtol=1e-3)


# The fixed sequence -----------------------------------------------------------------------------------------------------------------


LAYER = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
WEIGHTS = ("embed_tokens.weight", "lm_head.weight", *(f"layers.{layer}.{name}.weight" for layer in (0, 1) for name in LAYER))


def results(decoder: PackedDecoder) -> list[torch.Tensor]:
    """The results that were computed."""
    return fixed_results(decoder, decoder.logits, RowAttention())[1:]


def test_another_revision_of_the_engine_gives_other_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """So every model on another engine has another revision."""
    decoder = tiny_decoder()
    before = fixed_results(decoder, decoder.logits, RowAttention())
    monkeypatch.setattr(engine_results, "REVISION", engine_results.REVISION + 1)
    after = fixed_results(decoder, decoder.logits, RowAttention())
    assert not torch.equal(before[0], after[0]) and all(map(torch.equal, before[1:], after[1:]))


def test_it_is_read_as_a_prompt_is_and_its_last_row_alone() -> None:
    decoder = tiny_decoder()
    rows = [len(result) for result in results(decoder)]
    assert rows == [count for count in (PAGE_ROWS, PAGE_ROWS, FIXED_ROWS % PAGE_ROWS, 1) for _ in ("hidden", "logits")]
    assert all(bool(torch.isfinite(result).all()) for result in results(decoder))
    assert all(map(torch.equal, results(decoder), results(tiny_decoder())))


@lengths.drawn_cells(6, "name", WEIGHTS)
def test_every_weight_shows_in_it(name: str) -> None:
    original = tiny_weights(torch.float32)

    def changed(asked: str) -> torch.Tensor | None:
        weight = original(asked)
        return weight * 1.001 if weight is not None and asked == name else weight

    assert not all(map(torch.equal, results(PackedDecoder(TINY, changed)), results(tiny_decoder())))


def test_attention_shows_in_every_run() -> None:
    class Shifted(PagedAttention):
        """The same without the last page that a row sees."""

        def bind(self, cache, spec, plan):
            attend = super().bind(cache, spec, plan)
            return lambda *args: attend(*args) * (1.0 if plan.runs[0].start else 1.001)

    decoder = tiny_decoder()
    plain, shifted = (fixed_results(decoder, decoder.logits, backend)[1:] for backend in (PagedAttention(), Shifted()))
    assert not any(map(torch.equal, plain, shifted)), "what the first page became is seen by all that follow"
