"""The engine as its callers see it: streams, bounds, cancels, failures, stops."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from helpers import lengths
from helpers.engines import NAN_TOKEN, TINY, ask, close_later, drawn, items, make_engine, read, tiny_decoder, tiny_weights
from omnistage.engine.adapter import Attention, DecoderSpec, Hidden, StepRows, TokenHead
from omnistage.engine.decoder import EMBEDDING, PackedDecoder
from omnistage.engine.engine import Engine
from omnistage.engine.memory import pages_for
from omnistage.engine.request import EngineClosed, EngineFull, Given, Prompt, SequenceEvent, SequenceFailed, SequenceRequest
from omnistage.engine.scheduler import SchedulerLimits
from omnistage.engine.sequence import MAX_UNREAD
from omnistage.engine.types import FinishReason, Sampling, Unfit

BUDGETS = ("1", "41", "512")


def engine(pages: int = 200, dtype: torch.dtype = torch.float32, *, kept_pages: int | None = None, **limits: int) -> Engine:
    return make_engine(tiny_decoder(dtype), pages, kept_pages=kept_pages, **limits)


def ids(events: list[SequenceEvent]) -> list[int]:
    return [item[0] for item in items(events)]


def assert_empty(running: Engine) -> None:
    stats = running.stats()
    assert (stats.waiting, stats.running, stats.parked, stats.starved, stats.pages_used) == (0, 0, 0, 0, 0)


def random_requests(rng: random.Random, count: int, prompt: int = 120, answer: int = 60) -> list[SequenceRequest]:
    def any_request() -> SequenceRequest:
        sampling = Sampling(temperature=rng.choice([0.0, 0.8]), top_k=rng.choice([0, 20]), top_p=0.9, repetition_penalty=1.1)
        ids = tuple(rng.randrange(TINY.vocab_size) for _ in range(rng.randrange(1, prompt)))
        length, client = rng.randrange(2, answer), rng.choice(["", "a", "b"])
        return ask(ids, seed=rng.getrandbits(64), max_items=length, sampling=sampling, logprobs=True, client=client)

    return [any_request() for _ in range(count)]


async def alone(requests: list[SequenceRequest], dtype: torch.dtype = torch.float32) -> list[list[SequenceEvent]]:
    """The answer to each request by an engine that runs one request at a time and keeps nothing."""
    single = engine(dtype=dtype, kept_pages=0, max_sequences=1)
    return [await read(single.submit(request)) for request in requests]


@lengths.rounds(5, 24)
async def test_answers_do_not_depend_on_company_order_or_a_break(dtype: torch.dtype, seed: int, rounds: int) -> None:
    rng = random.Random(seed)
    requests = random_requests(rng, rounds)
    expected = await alone(requests, dtype)
    together = engine(dtype=dtype, max_sequences=8)
    streams = {index: together.submit(requests[index]) for index in rng.sample(range(rounds), rounds)}
    for index, events in zip(streams, await asyncio.gather(*map(read, streams.values())), strict=True):
        assert drawn(events) == drawn(expected[index])
    for request, events in zip(requests, expected, strict=True):
        cut = rng.randrange(1, request.max_items)
        again = await read(together.submit(replace(request, history=tuple(items(events)[:cut]))))
        assert drawn(again) == drawn(events)[cut:]
    assert_empty(together)


@lengths.one_or_all("budget", BUDGETS)
async def test_the_budget_of_a_step_changes_no_bit(budget: str, dtype: torch.dtype, seed: int) -> None:
    max_rows = int(lengths.draw(budget, BUDGETS, seed))
    requests = random_requests(random.Random(seed), 7, prompt=300, answer=12)
    expected = await alone(requests, dtype)
    decoder = tiny_decoder(dtype)
    limits = SchedulerLimits(max_rows=max_rows)
    running = close_later(Engine(decoder, TokenHead(decoder.logits), pages=200, limits=limits, step_s=None, poison=True))
    answers = await asyncio.gather(*(read(running.submit(request)) for request in requests))
    assert list(map(drawn, answers)) == list(map(drawn, expected))


async def test_a_history_costs_a_prefill_and_not_a_repetition(dtype: torch.dtype) -> None:
    running = engine(dtype=dtype, kept_pages=0)
    events = await read(running.submit(ask(max_items=201)))
    before = running.stats()
    rest = await read(running.submit(ask(max_items=201, history=tuple(items(events)[:200]))))
    after = running.stats()
    assert ids(rest) == ids(events)[200:]
    assert after.rows - before.rows == 203
    assert after.steps - before.steps == after.stepped - before.stepped <= pages_for(203)
    assert after.items - before.items == 1
    assert_empty(running)


@lengths.rounds(300, 10_000)
async def test_thousands_of_cancels_free_every_page_and_none_reads_a_freed_one(seed: int, rounds: int) -> None:
    rng = random.Random(seed)
    running = engine(pages=60, dtype=torch.bfloat16, max_sequences=8, max_waiting=32)
    cancelled = finished = 0
    beginning = tuple(rng.randrange(100) for _ in range(40))

    async def one() -> None:
        nonlocal cancelled, finished
        prompt = beginning[: rng.choice([0, 40])] + tuple(rng.randrange(100) for _ in range(rng.randrange(1, 40)))
        stream = running.submit(ask(prompt, max_items=rng.randrange(1, 40), sampling=Sampling(temperature=rng.choice([0.0, 1.0]))))
        for _ in range(rng.randrange(0, 4)):
            # A NaN read from a freed page would end the stream with SequenceFailed.
            if (events := await stream.take()) and events[-1].finish_reason is not None:
                finished += 1
                break
        else:
            cancelled += 1
        await stream.aclose()

    async def worker() -> None:
        while cancelled < rounds:
            await one()

    await asyncio.gather(*(worker() for _ in range(24)))
    assert cancelled >= rounds and finished > 0
    assert_empty(running)


async def test_a_reader_that_stops_is_parked_at_the_bound_and_others_go_on() -> None:
    running = engine()
    idle = running.submit(ask(max_items=200))
    assert len(await read(running.submit(ask((9, 8), max_items=300)))) == 300
    await read(running.submit(ask((4,), max_items=MAX_UNREAD + 1)))
    assert running.stats().parked == 1
    held = await idle.take()
    assert len(held) == MAX_UNREAD
    rest = [*held, *await read(idle)]
    assert rest[-1].finish_reason is FinishReason.LENGTH
    assert ids(rest) == ids(await read(engine().submit(ask(max_items=200))))
    assert_empty(running)


async def test_a_parked_answer_can_be_cancelled() -> None:
    running = engine()
    idle = running.submit(ask(max_items=200))
    await read(running.submit(ask((9, 8), max_items=100)))
    await idle.aclose()
    assert_empty(running)


async def test_the_queue_is_bounded() -> None:
    running = engine(pages=10, max_sequences=1, max_waiting=2)
    first = running.submit(ask(max_items=300))
    await first.take()
    waiting = [running.submit(ask()), running.submit(ask())]
    with pytest.raises(EngineFull):
        running.submit(ask())
    await waiting.pop().aclose()
    waiting.append(running.submit(ask()))
    await first.aclose()
    for stream in waiting:
        assert len(await read(stream)) == 20
    assert_empty(running)


async def test_a_request_that_can_never_run_is_refused() -> None:
    """The error names the field at fault, if a caller can set that field."""
    running = engine(pages=4)
    for request, field in (
        (ask(max_items=1100), "max_items"),
        (ask(max_items=200), "max_items"),
        (ask((1,) * 1100), "prompt"),
        (ask(history=((TINY.vocab_size,),)), "history"),
        (ask(sampling=Sampling(logit_bias={-1: 1.0})), "sampling.logit_bias"),
        (ask(sampling=Sampling(logit_bias={TINY.vocab_size: 1.0})), "sampling.logit_bias"),
    ):
        with pytest.raises(Unfit, match=r"rows|vocabulary") as unfit:
            running.submit(request)
        assert unfit.value.field == field
    for field, never in (("end_ids", 4), ("banned", 5)):
        with pytest.raises(Unfit, match=f"history: {never} is part of no answer"):
            running.submit(replace(ask(history=((3,), (4,), (5,))), **{field: frozenset({never})}))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="vocabulary"):
        running.submit(ask((TINY.vocab_size,)))
    with pytest.raises(ValueError, match="prompt"):
        ask(())
    with pytest.raises(Unfit, match="history: the answer ended before or with these 2 items"):
        ask(max_items=2, history=((1,), (2,)))


async def test_an_item_without_logits_is_for_rows_that_are_not_drawn() -> None:
    """Such an item stands in a row that has none; its id is behind those of the vocabulary."""
    weight, nothing = tiny_weights(torch.float32), TINY.vocab_size

    def longer(name: str) -> torch.Tensor | None:
        found = weight(name)
        return torch.cat((found, torch.zeros(1, TINY.hidden_size))) if name == EMBEDDING and found is not None else found

    running = make_engine(PackedDecoder(replace(TINY, vocab_size=nothing + 1), longer))
    penalised = Sampling(repetition_penalty=1.5, logit_bias={nothing - 1: 1.0})
    for request, field in (
        (ask(history=((nothing,),)), "history"),
        (ask(sampling=Sampling(logit_bias={nothing: 1.0})), "sampling.logit_bias"),
    ):
        with pytest.raises(Unfit, match=f"below {nothing}") as unfit:
            running.submit(request)
        assert unfit.value.field == field
    for field in ("end_ids", "banned", "seen_ids"):
        with pytest.raises(ValueError, match="never drawn"):
            running.submit(replace(ask(), **{field: frozenset({1, nothing})}))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="never drawn"):
        running.submit(ask((1, nothing), sampling=penalised))
    known = (Given(1, torch.ones(1, TINY.hidden_size)),)
    given = replace(ask(sampling=penalised), prompt=Prompt(np.array([[1], [nothing]]), known))
    for request in (ask((1, nothing), seen_ids=frozenset({nothing - 1}), sampling=penalised), given):
        assert len(await read(running.submit(request))) == 20


async def test_logits_that_are_not_finite_fail_their_sequence_only() -> None:
    running = make_engine(tiny_decoder(nan=True))
    good, bad = running.submit(ask(max_items=100)), running.submit(ask((1, NAN_TOKEN)))
    with pytest.raises(SequenceFailed, match="finite"):
        await bad.take()
    await bad.aclose()
    assert len(await read(good)) == 100
    # This happens in the middle of an answer, in a batch with others.
    good = running.submit(ask(max_items=100))
    bad = running.submit(ask((5,), max_items=50, sampling=Sampling(logit_bias={NAN_TOKEN: 1e6})))
    assert ids(await bad.take())[:1] == [NAN_TOKEN]
    with pytest.raises(SequenceFailed, match="finite"):
        while True:
            await bad.take()
    await bad.aclose()
    assert len(await read(good)) == 100
    assert_empty(running)


class Brittle(PackedDecoder):
    """Raises an error when it meets token 13."""

    def hidden(self, rows: StepRows, attention: Attention) -> Hidden:
        if bool((rows.items == 13).any()):
            raise RuntimeError("token 13")
        return super().hidden(rows, attention)


async def test_a_step_that_raises_fails_only_the_sequence_that_caused_it() -> None:
    running = make_engine(Brittle(TINY, tiny_weights(torch.float32)), 100)
    steady = [running.submit(ask((index,), max_items=60, sampling=Sampling(logit_bias={13: -1e6}))) for index in range(3)]
    for stream in steady:
        await stream.take()
    at_prefill = running.submit(ask((1, 13)))
    at_decode = running.submit(ask((2,), sampling=Sampling(logit_bias={13: 1e6})))
    with pytest.raises(SequenceFailed, match="token 13"):
        await at_prefill.take()
    assert ids(await at_decode.take())[:1] == [13]
    with pytest.raises(SequenceFailed, match="token 13") as failure:
        await at_decode.take()
    assert isinstance(failure.value.__cause__, RuntimeError)
    for stream in (at_prefill, at_decode):
        await stream.aclose()
    expected = engine()
    for index, stream in enumerate(steady):
        lonely = await read(expected.submit(ask((index,), max_items=60, sampling=Sampling(logit_bias={13: -1e6}))))
        rest = await read(stream)
        assert ids(lonely)[-len(rest) :] == ids(rest)
    assert_empty(running)


class BrokenDecoder(PackedDecoder):
    """Ends the engine's thread once every request was made: its error is not that of a step."""

    everyone_asked = threading.Event()

    def hidden(self, rows: StepRows, attention: Attention) -> Hidden:
        assert self.everyone_asked.wait(60)
        raise SystemExit("gone")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_nobody_waits_for_ever_if_the_thread_ends() -> None:
    running = make_engine(BrokenDecoder(TINY, tiny_weights(torch.float32)), 100)
    streams = [running.submit(ask()) for _ in range(3)]
    BrokenDecoder.everyone_asked.set()
    for stream in streams:
        with pytest.raises(EngineClosed, match="gone"):
            await stream.take()
        await stream.aclose()
    with pytest.raises(EngineClosed):
        running.submit(ask())


@lengths.long_form(unkept="An interpreter that ends in the middle of a step ends with its own status and does not crash.")
@lengths.rounds(1, 3)
def test_the_interpreter_may_end_while_answers_are_computed(rounds: int) -> None:
    """The interpreter ends in the middle of a step, with all engines, streams and loops as they are."""
    script = """
import asyncio, os, sys
from helpers.engines import tiny_decoder
from omnistage.engine.engine import Engine
from omnistage.engine.adapter import TokenHead
from omnistage.engine.request import Prompt, SequenceRequest
async def main(end):
    decoder = tiny_decoder()
    running = Engine(decoder, TokenHead(decoder.logits), pages=60)
    streams = [running.submit(SequenceRequest(Prompt.of_tokens(range(1, 100 + n)), n, 700)) for n in range(8)]
    for stream in streams[:4]:
        await stream.take()
    match end:
        case "return":
            return running
        case "raise":
            raise KeyError("no key")
        case "exit":
            sys.exit(3)
for end in sys.argv[1:]:  # What takes long is to import torch: all interpreters share it, and end each for itself.
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    else:
        kept = asyncio.run(main(end))
        break
"""
    codes = {"return": 0, "raise": 1, "exit": 3}
    ends = [end for end in codes for _ in range(rounds)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", script, *ends], capture_output=True, text=True, timeout=100, env=environment)
    assert (ended.returncode, ended.stdout.split()) == (0, [str(codes[end]) for end in ends]), ended.stderr
    assert "terminate" not in ended.stderr


async def test_close_ends_what_runs_and_what_waits() -> None:
    running = engine(max_sequences=1)
    streams = [running.submit(ask(max_items=300)) for _ in range(3)]
    await streams[0].take()
    await running.close()
    for stream in streams:
        with pytest.raises(EngineClosed):
            while True:
                await stream.take()
        await stream.aclose()
    assert_empty(running)


async def test_end_tokens_min_items_and_ignore_end() -> None:
    running = engine()
    free = ids(await read(running.submit(ask(max_items=40))))
    end = frozenset({free[10]})
    first = free.index(free[10])
    stopped = await read(running.submit(ask(max_items=40, end_ids=end)))
    assert ids(stopped) == free[:first]
    assert (stopped[-1].item, stopped[-1].logprob, stopped[-1].finish_reason) == (None, None, FinishReason.STOP)
    longer = await read(running.submit(ask(max_items=40, end_ids=end, min_items=15)))
    assert len(ids(longer)) >= 15 and not end & set(ids(longer)[:15])
    endless = await read(running.submit(ask(max_items=40, end_ids=end, ignore_end=True)))
    assert len(ids(endless)) == 40 and not end & set(ids(endless))
    assert endless[-1].finish_reason is FinishReason.LENGTH


async def test_the_log_probability_is_that_of_the_models_own_logits() -> None:
    running = engine()
    events = await read(running.submit(ask(sampling=Sampling(temperature=0.7, top_k=5, repetition_penalty=1.3), logprobs=True)))
    decoder = tiny_decoder()
    tokens = [1, 2, 3, *ids(events)]
    rows = StepRows(torch.tensor(tokens)[:, None], torch.arange(len(tokens))[None])
    logits = decoder.logits(decoder.hidden(rows, Textbook(decoder.spec)).last).log_softmax(-1)
    expected = [logits[2 + index, ids([event])[0]].item() for index, event in enumerate(events)]
    assert [event.logprob for event in events] == pytest.approx(expected, abs=1e-3)


class Textbook:
    """Causal attention of one sequence, without a cache."""

    def __init__(self, spec: DecoderSpec) -> None:
        self._heads = spec.kv_heads

    def __call__(self, layer: int, queries: torch.Tensor, keys_values: torch.Tensor) -> torch.Tensor:
        rows = queries.shape[0]
        keys, values = keys_values[:, : self._heads], keys_values[:, self._heads :]
        grouped = queries.view(rows, self._heads, -1, queries.shape[-1])
        scores = torch.einsum("qhgd,khd->hgqk", grouped, keys)
        hidden = torch.ones(rows, rows, dtype=torch.bool).triu(1)
        return torch.einsum("hgqk,khd->qhgd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values).reshape(rows, -1)


async def test_an_event_loop_that_is_gone_frees_its_sequences() -> None:
    running = engine()

    async def leave_early() -> None:
        await running.submit(ask(max_items=900)).take()

    await asyncio.to_thread(asyncio.run, leave_early())
    assert len(await read(running.submit(ask(max_items=60)))) == 60
    assert running.stats().pages_used == 0


async def test_the_first_event_says_how_long_the_request_waited() -> None:
    running = engine(max_sequences=1)
    first, second = running.submit(ask(max_items=60)), running.submit(ask())
    events, later = await read(first), await read(second)
    assert 0 < events[0].queued_s < later[0].queued_s
    assert all(event.queued_s == 0 for event in (*events[1:], *later[1:]))


async def test_prompts_that_begin_alike_share_pages() -> None:
    running = engine()
    beginning = tuple(range(64))
    await read(running.submit(ask((*beginning, 70))))
    assert running.stats().pages_kept == pages_for(64)
    stream = running.submit(ask((*beginning, 80, 81), max_items=20))
    await stream.take()
    assert running.stats().pages_kept == 0
    shared = ids(await read(stream))
    assert ids(await read(engine().submit(ask((*beginning, 80, 81), max_items=20))))[-len(shared) :] == shared
