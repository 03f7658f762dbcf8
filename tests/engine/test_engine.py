"""The engine as its callers see it: streams, bounds, cancels, failures, stops."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest
import torch

from helpers import lengths
from helpers.tiny import NAN_TOKEN, TINY, tiny_decoder, tiny_weights
from omnistage.engine.adapter import Attention, DecoderSpec
from omnistage.engine.decoder import PackedDecoder
from omnistage.engine.engine import Engine, TokenStream
from omnistage.engine.kv import pages_for
from omnistage.engine.request import EngineClosed, EngineFull, SequenceFailed, TokenEvent, TokenRequest
from omnistage.engine.scheduler import MAX_UNREAD, Limits
from omnistage.engine.types import FinishReason, Sampling


def engine(pages: int = 200, dtype: torch.dtype = torch.float32, **limits: int) -> Engine:
    return Engine(tiny_decoder(dtype), pages=pages, limits=Limits(**limits), poison=True)


def ask(prompt: tuple[int, ...] = (1, 2, 3), **changes: object) -> TokenRequest:
    settings: dict[str, object] = {"seed": 7, "max_tokens": 20, **changes}
    return TokenRequest(prompt, **settings)  # type: ignore[arg-type]


async def read(stream: TokenStream) -> list[TokenEvent]:
    events: list[TokenEvent] = []
    while not events or events[-1].finish_reason is None:
        events += await stream.take()
    await stream.aclose()
    return events


def ids(events: list[TokenEvent]) -> list[int]:
    return [event.token_id for event in events if event.token_id is not None]


def assert_empty(running: Engine) -> None:
    stats = running.stats()
    assert (stats.waiting, stats.running, stats.parked, stats.pages_used) == (0, 0, 0, 0)


async def test_answers_do_not_depend_on_company_order_or_a_break(seed: int) -> None:
    rng = random.Random(seed)
    requests = []
    for _ in range(24):
        prompt = tuple(rng.randrange(TINY.vocab_size) for _ in range(rng.randrange(1, 120)))
        sampling = Sampling(temperature=rng.choice([0.0, 0.8]), top_k=rng.choice([0, 20]), top_p=0.9, repetition_penalty=1.1)
        requests.append(ask(prompt, seed=rng.getrandbits(64), max_tokens=rng.randrange(2, 60), sampling=sampling, logprobs=True))
    single = engine(max_sequences=1)
    expected = [await read(single.submit(request)) for request in requests]
    await single.close()
    together = engine(max_sequences=8)
    streams = {index: together.submit(requests[index]) for index in rng.sample(range(24), 24)}
    for index, events in zip(streams, await asyncio.gather(*map(read, streams.values())), strict=True):
        assert [(event.token_id, event.logprob) for event in events] == [(event.token_id, event.logprob) for event in expected[index]]
    for request, events in zip(requests, expected, strict=True):
        cut = rng.randrange(1, request.max_tokens)
        rest = TokenRequest(
            request.prompt, request.seed, request.max_tokens, request.sampling, logprobs=True, history=tuple(ids(events)[:cut])
        )
        again = await read(together.submit(rest))
        assert [(event.token_id, event.logprob) for event in again] == [(event.token_id, event.logprob) for event in events[cut:]]
    assert_empty(together)
    await together.close()


async def test_a_history_costs_a_prefill_and_not_a_repetition(dtype: torch.dtype) -> None:
    running = engine(dtype=dtype)
    events = await read(running.submit(ask(max_tokens=201)))
    before = running.stats()
    rest = await read(running.submit(ask(max_tokens=201, history=tuple(ids(events)[:200]))))
    after = running.stats()
    assert ids(rest) == ids(events)[200:]
    chunks = 1 + -(-200 // Limits().chunk_tokens)  # of the prompt, and of the history
    assert after.steps - before.steps <= chunks
    assert after.tokens - before.tokens == 1
    assert_empty(running)
    await running.close()


@lengths.rounds(1000, 10_000)
async def test_thousands_of_cancels_free_every_page_and_none_reads_a_freed_one(seed: int, rounds: int) -> None:
    rng = random.Random(seed)
    running = engine(pages=60, dtype=torch.bfloat16, max_sequences=8, max_waiting=32)
    cancelled = finished = 0
    beginning = tuple(rng.randrange(100) for _ in range(40))

    async def one() -> None:
        nonlocal cancelled, finished
        prompt = beginning[: rng.choice([0, 40])] + tuple(rng.randrange(100) for _ in range(rng.randrange(1, 40)))
        stream = running.submit(ask(prompt, max_tokens=rng.randrange(1, 40), sampling=Sampling(temperature=rng.choice([0.0, 1.0]))))
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
    assert cancelled >= rounds
    assert finished > 0
    assert_empty(running)
    await running.close()


async def test_a_reader_that_stops_is_parked_at_the_bound_and_others_go_on() -> None:
    running = engine()
    idle = running.submit(ask(max_tokens=200))
    events = await read(running.submit(ask((9, 8), max_tokens=300)))
    assert len(events) == 300
    await read(running.submit(ask((4,), max_tokens=MAX_UNREAD + 1)))
    assert running.stats().parked == 1
    held = await idle.take()
    assert len(held) == MAX_UNREAD
    rest = [*held, *await read(idle)]
    assert rest[-1].finish_reason is FinishReason.LENGTH
    alone = engine()
    assert ids(rest) == ids(await read(alone.submit(ask(max_tokens=200))))
    assert_empty(running)
    await running.close()
    await alone.close()


async def test_a_parked_answer_can_be_cancelled() -> None:
    running = engine()
    idle = running.submit(ask(max_tokens=200))
    await read(running.submit(ask((9, 8), max_tokens=100)))
    await idle.aclose()
    assert_empty(running)
    await running.close()


async def test_the_queue_is_bounded() -> None:
    running = engine(pages=10, max_sequences=1, max_waiting=2)
    first = running.submit(ask(max_tokens=300))
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
    await running.close()


async def test_a_request_that_can_never_run_is_refused() -> None:
    running = engine(pages=4)
    for request in (ask(max_tokens=1100), ask(max_tokens=200), ask((TINY.vocab_size,)), ask(sampling=Sampling(logit_bias={-1: 1.0}))):
        with pytest.raises(ValueError, match=r"tokens|vocabulary"):
            running.submit(request)
    with pytest.raises(ValueError, match="prompt"):
        ask(())
    with pytest.raises(ValueError, match="history"):
        ask(max_tokens=2, history=(1, 2))
    await running.close()


async def test_logits_that_are_not_finite_fail_their_sequence_only() -> None:
    running = Engine(tiny_decoder(nan=True), pages=200, poison=True)
    good, bad = running.submit(ask(max_tokens=100)), running.submit(ask((1, NAN_TOKEN)))
    with pytest.raises(SequenceFailed, match="finite"):
        await bad.take()
    await bad.aclose()
    assert len(await read(good)) == 100
    # In the middle of an answer, in a batch with others.
    good = running.submit(ask(max_tokens=100))
    bad = running.submit(ask((5,), max_tokens=50, sampling=Sampling(logit_bias={NAN_TOKEN: 1e6})))
    assert ids(await bad.take())[:1] == [NAN_TOKEN]
    with pytest.raises(SequenceFailed, match="finite"):
        while True:
            await bad.take()
    await bad.aclose()
    assert len(await read(good)) == 100
    assert_empty(running)
    await running.close()


class Brittle(PackedDecoder):
    """Raises when it meets token 13."""

    def hidden(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        if bool((token_ids == 13).any()):
            raise RuntimeError("token 13")
        return super().hidden(token_ids, positions, attention)


async def test_a_step_that_raises_fails_only_the_sequence_that_caused_it() -> None:
    running = Engine(Brittle(TINY, tiny_weights(torch.float32)), pages=100, poison=True)
    steady = [running.submit(ask((index,), max_tokens=60, sampling=Sampling(logit_bias={13: -1e6}))) for index in range(3)]
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
        lonely = await read(expected.submit(ask((index,), max_tokens=60, sampling=Sampling(logit_bias={13: -1e6}))))
        rest = await read(stream)
        assert ids(lonely)[-len(rest) :] == ids(rest)
    assert_empty(running)
    await running.close()
    await expected.close()


class Broken(PackedDecoder):
    """Ends the engine's thread: what it raises is no error of a step."""

    def hidden(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        raise SystemExit("gone")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_nobody_waits_for_ever_if_the_thread_ends() -> None:
    running = Engine(Broken(TINY, tiny_weights(torch.float32)), pages=100)
    streams = [running.submit(ask()) for _ in range(3)]
    for stream in streams:
        with pytest.raises(EngineClosed, match="gone"):
            await stream.take()
        await stream.aclose()
    with pytest.raises(EngineClosed):
        running.submit(ask())
    await running.close()


async def test_close_ends_what_runs_and_what_waits() -> None:
    running = engine(max_sequences=1)
    streams = [running.submit(ask(max_tokens=300)) for _ in range(3)]
    await streams[0].take()
    await running.close()
    for stream in streams:
        with pytest.raises(EngineClosed):
            while True:
                await stream.take()
        await stream.aclose()
    assert_empty(running)


async def test_end_tokens_min_tokens_and_ignore_end() -> None:
    running = engine()
    free = ids(await read(running.submit(ask(max_tokens=40))))
    end = frozenset({free[10]})
    first = free.index(free[10])
    stopped = await read(running.submit(ask(max_tokens=40, end_ids=end)))
    assert ids(stopped) == free[:first]
    assert stopped[-1] == TokenEvent(None, None, FinishReason.STOP, stopped[-1].queued_s)
    longer = await read(running.submit(ask(max_tokens=40, end_ids=end, min_tokens=15)))
    assert len(ids(longer)) >= 15
    assert not end & set(ids(longer)[:15])
    endless = await read(running.submit(ask(max_tokens=40, end_ids=end, ignore_end=True)))
    assert len(ids(endless)) == 40
    assert not end & set(ids(endless))
    assert endless[-1].finish_reason is FinishReason.LENGTH
    await running.close()


async def test_the_log_probability_is_that_of_the_models_own_logits() -> None:
    running = engine()
    request = ask(sampling=Sampling(temperature=0.7, top_k=5, repetition_penalty=1.3), logprobs=True)
    events = await read(running.submit(request))
    decoder = tiny_decoder()
    tokens = [*request.prompt, *ids(events)]
    attend = Textbook(decoder.spec)
    logits = decoder.logits(decoder.hidden(torch.tensor(tokens), torch.arange(len(tokens)), attend)).log_softmax(-1)
    for index, event in enumerate(events):
        expected = logits[len(request.prompt) + index - 1, event.token_id].item()
        assert event.logprob == pytest.approx(expected, abs=1e-3)
    await running.close()


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

    def elsewhere() -> None:
        async def leave_early() -> None:
            await running.submit(ask(max_tokens=900)).take()

        asyncio.run(leave_early())

    thread = threading.Thread(target=elsewhere)
    thread.start()
    await asyncio.to_thread(thread.join)
    assert len(await read(running.submit(ask(max_tokens=60)))) == 60
    assert running.stats().pages_used == 0
    await running.close()


async def test_the_first_event_says_how_long_the_request_waited() -> None:
    running = engine(max_sequences=1)
    first, second = running.submit(ask(max_tokens=60)), running.submit(ask())
    events = await read(first)
    later = await read(second)
    assert 0 < events[0].queued_s < later[0].queued_s
    assert all(event.queued_s == 0 for event in (*events[1:], *later[1:]))
    await running.close()


async def test_prompts_that_begin_alike_share_pages() -> None:
    running = engine()
    beginning = tuple(range(64))
    await read(running.submit(ask((*beginning, 70))))
    kept = running.stats().pages_kept
    assert kept == pages_for(64)
    stream = running.submit(ask((*beginning, 80, 81), max_tokens=20))
    await stream.take()
    assert running.stats().pages_kept == 0
    shared = ids(await read(stream))
    fresh = engine()
    alone = ids(await read(fresh.submit(ask((*beginning, 80, 81), max_tokens=20))))
    assert alone[-len(shared) :] == shared
    await running.close()
    await fresh.close()
