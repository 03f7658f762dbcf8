"""Given rows, rows that come one by one, rows with positions of their own; taps; frames. Every answer is checked by hand. On a device that
is not the processor no tensor is left behind there."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as functional

from helpers import lengths
from helpers.arithmetic import AXES, END, GIVEN, IDS, answer, engine, prompt_items
from helpers.elsewhere import GPU, Device, on_the_device
from helpers.engines import TAPPED, TINY, items, read, tiny_decoder, tiny_weights
from helpers.waiting import until
from omnistage.engine import results as engine_results
from omnistage.engine.adapter import StepRows, TokenHead
from omnistage.engine.attention import PagedAttention, RowAttention, SdpaAttention, TritonAttention, choose_backend
from omnistage.engine.decoder import PackedDecoder
from omnistage.engine.engine import Engine, Runner
from omnistage.engine.memory import PAGE_ROWS, KVCache, PagePool, PrefixCache
from omnistage.engine.request import Given, Prompt, SequenceEvent, SequenceRequest, Taps
from omnistage.engine.results import FIXED_ROWS, fixed_results
from omnistage.engine.scheduler import Scheduler, SchedulerLimits
from omnistage.engine.sequence import MAX_UNREAD, Mailbox, Sequence, SequenceStream
from omnistage.engine.types import FinishReason, Item, Sampling, Unfit


def random_rows(rng: random.Random, count: int) -> torch.Tensor:
    return torch.tensor([[rng.randrange(20) for _ in range(GIVEN)] for _ in range(count)], dtype=torch.float32)


def random_prompt(rng: random.Random, rows: int, *, media: bool = True) -> Prompt:
    """A prompt with two pictures, a position of its own for each axis, and a delta."""
    items = prompt_items([rng.randrange(IDS) for _ in range(rows)])
    if not media:
        return Prompt(items)
    cuts = sorted(rng.sample(range(rows + 1), 4)) if rows >= 4 else []
    places = zip(cuts[::2], cuts[1::2], strict=True)
    given = [Given(first, random_rows(rng, last - first), rng.randbytes(8)) for first, last in places]
    positions = np.array([[rng.randrange(500) for _ in range(rows)] for _ in range(AXES)], np.int64)
    return Prompt(items, tuple(given), positions, delta=rng.randrange(-min(len(items), 20), 20))


def taps(events: list[SequenceEvent], first: int) -> list[tuple[int, int]]:
    """All taps, which must come in order from slot `first` on."""
    rows: list[tuple[int, int]] = []
    for event in events:
        if event.taps is not None:
            assert event.taps.first == first + len(rows)
            rows += [(int(total), int(value)) for total, value in event.taps.rows.tolist()]
    return rows


async def rest(one: Engine, **stats: int) -> None:
    """Wait until the engine rests with these numbers."""
    await until(lambda: all(getattr(one.stats(), name) == value for name, value in stats.items()))


@pytest.mark.parametrize("pages", [200, 14])
async def test_given_rows_positions_and_taps_alone_in_company_and_preempted(pages: int, seed: int) -> None:
    rng = random.Random(seed)
    running = engine(pages, max_sequences=12)
    asked = []
    for index in range(30):
        prompt = random_prompt(rng, rng.randrange(1, 150), media=rng.random() < 0.8)
        count = rng.randrange(1, 90)
        taps_from = rng.choice([None, 0, len(prompt), rng.randrange(len(prompt))])
        asked.append(SequenceRequest(prompt, index, count, taps_from=taps_from))
    answers = await asyncio.gather(*(read(running.submit(request)) for request in asked))
    for request, events in zip(asked, answers, strict=True):
        frames, rows = answer(request.prompt, request.seed, request.max_items)
        assert items(events) == frames
        assert taps(events, request.taps_from or 0) == ([] if request.taps_from is None else rows[request.taps_from :])
    assert running.stats().pages_used == 0
    assert (running.stats().preemptions > 0) is (pages == 14)


async def test_an_answer_goes_on_from_any_frame_with_the_taps_that_are_still_wanted(seed: int) -> None:
    rng = random.Random(seed)
    running = engine()
    prompt = random_prompt(rng, 75)
    frames, rows = answer(prompt, 3, 60)
    for cut in (0, 1, 2, 21, 22, 53, 59):
        first = rng.randrange(len(prompt) + cut)
        request = SequenceRequest(prompt, 3, 60, history=tuple(frames[:cut]), taps_from=first)
        events = await read(running.submit(request))
        assert items(events) == frames[cut:]
        assert taps(events, first) == rows[first:]


async def test_a_sequence_starves_until_its_next_row_comes_and_holds_no_one_up(seed: int) -> None:
    """One that starves can be cancelled."""
    rng = random.Random(seed)
    running = engine()
    prompt, rows = random_prompt(rng, 40), random_rows(rng, 30)
    frames, _ = answer(prompt, 5, 50, rows.tolist())
    stream = running.submit(SequenceRequest(prompt, 5, 50, appended=True))
    made = await stream.take()
    assert items(made) == frames[:1]  # The first frame follows from the prompt alone.
    for index in range(29):
        await rest(running, starved=1, running=0)
        if index % 10 == 0:
            other = random_prompt(rng, 20)
            assert items(await read(running.submit(SequenceRequest(other, 1, 20)))) == answer(other, 1, 20)[0]
        stream.append(rows[index : index + 1])
        made += await stream.take()
        assert items(made) == frames[: index + 2]
    cancelled = running.submit(SequenceRequest(prompt, 5, 50, appended=True))
    await cancelled.take()
    await rest(running, starved=2)
    await cancelled.aclose()
    stream.append(rows[29:], end=True)
    made += await read(stream)
    assert items(made) == frames and running.stats().pages_used == 0


@pytest.mark.parametrize("pages", [200, 14])
async def test_many_starving_speakers_at_once_give_what_each_gives_alone(pages: int, seed: int) -> None:
    rng = random.Random(seed)
    running = engine(pages, max_sequences=16)

    async def speak(number: int) -> None:
        local = random.Random(seed + number)
        prompt, rows, count = random_prompt(local, local.randrange(1, 60)), random_rows(local, 40), local.randrange(1, 80)
        frames, _ = answer(prompt, number, count, rows.tolist())
        cut = local.choice([0, 0, local.randrange(count)])
        stream = running.submit(SequenceRequest(prompt, number, count, history=tuple(frames[:cut]), appended=True))

        async def feed() -> None:
            given = 0
            while given < len(rows):
                part = rows[given : given + local.randrange(1, 6)]
                given += len(part)
                stream.append(part, end=given == len(rows))
                await asyncio.sleep(local.random() * 0.01)

        feeding = asyncio.create_task(feed())
        assert items(await read(stream)) == frames[cut:]
        await feeding

    await asyncio.gather(*(speak(rng.randrange(10_000)) for _ in range(24)))
    assert running.stats().pages_used == 0


async def test_an_end_with_no_row_at_all_lets_the_answer_go_on_without_vectors() -> None:
    prompt = Prompt(prompt_items([1, 2, 3]))
    stream = engine().submit(SequenceRequest(prompt, 0, 10, appended=True))
    stream.append(torch.zeros(0, GIVEN), end=True)
    assert items(await read(stream)) == answer(prompt, 0, 10)[0]
    with pytest.raises(ValueError, match="last one was given"):
        stream.append(torch.zeros(1, GIVEN))


async def test_rows_that_cannot_be_needed_are_left_for_nobody(seed: int) -> None:
    """However many such rows come while the engine computes a step."""
    mailbox = Mailbox(1, lambda: None, lambda: None)
    request = SequenceRequest(Prompt.of_tokens([1]), seed, max_items=5, appended=True)
    stream = SequenceStream(Sequence(request), mailbox, GIVEN)
    for _ in range(100):
        stream.append(torch.zeros(2, GIVEN))
    stream.append(torch.zeros(2, GIVEN), end=True)
    assert [(len(rows), end) for _, rows, end in mailbox.collect(wait=False).appended] == [(2, False), (2, False), (1, False), (0, True)]


async def test_rows_that_cannot_be_needed_are_dropped_and_those_that_cannot_be_taken_refused(seed: int) -> None:
    running = engine()
    prompt, rows = Prompt(prompt_items([1])), random_rows(random.Random(seed), 9)
    stream = running.submit(SequenceRequest(prompt, 0, 5, appended=True))
    with pytest.raises(ValueError, match="width 2"):
        stream.append(torch.zeros(1, GIVEN + 1))
    stream.append(rows)
    assert items(await read(stream)) == answer(prompt, 0, 5, rows.tolist())[0]
    with pytest.raises(ValueError, match="takes none"):
        running.submit(SequenceRequest(prompt, 0, 5)).append(torch.zeros(1, GIVEN))


async def test_a_frame_that_begins_with_an_end_id_ends_an_answer_that_may_end(seed: int) -> None:
    rng = random.Random(seed)
    running = engine()
    while True:
        prompt = random_prompt(rng, 10, media=False)
        frames, _ = answer(prompt, 0, 200)
        first = next((index for index, (code, _) in enumerate(frames) if code == END), 0)
        if first > 1:
            break
    events = await read(running.submit(SequenceRequest(prompt, 0, 200, end_ids=frozenset({END}))))
    assert items(events) == frames[:first]
    assert events[-1].finish_reason is FinishReason.STOP
    later = await read(running.submit(SequenceRequest(prompt, 0, 200, end_ids=frozenset({END}), min_items=first + 1)))
    assert len(items(later)) > first


async def test_pages_are_shared_by_equal_media_only() -> None:
    """Two pictures of equal size have equal ids: the digest tells them apart, and so do positions and scope."""
    running, rng, ids = engine(), random.Random(1), prompt_items([3] * 80)
    pictures = [random_rows(rng, 40) for _ in range(2)]

    async def cached(prompt: Prompt) -> int:
        events = await read(running.submit(SequenceRequest(prompt, 0, 3)))
        assert items(events) == answer(prompt, 0, 3)[0]
        return events[0].cached_rows

    first = Prompt(ids, (Given(4, pictures[0], b"one"),), scope=b"a")
    assert [await cached(first), await cached(first)] == [0, 2 * PAGE_ROWS]
    assert await cached(replace(first, given=(Given(4, pictures[1], b"two"),))) == 0
    assert await cached(replace(first, scope=b"b")) == 0
    moved = replace(first, positions=np.tile(np.arange(100, 180), (AXES, 1)))
    assert [await cached(moved), await cached(moved)] == [0, 2 * PAGE_ROWS]
    # A row without a digest is in no key, and neither are the rows behind it.
    nameless = replace(first, given=(Given(40, pictures[0]),))
    assert [await cached(nameless), await cached(nameless)] == [0, PAGE_ROWS]
    # One page of the prompt lies before the picture of another one that begins alike.
    late = replace(first, given=(Given(36, pictures[1], b"two"),), scope=b"c")
    await cached(late)
    assert await cached(replace(late, given=(Given(36, pictures[0], b"one"),))) == PAGE_ROWS


async def test_an_answer_is_found_again_as_the_beginning_of_the_next_prompt() -> None:
    running = engine()
    prompt = Prompt(prompt_items([5] * 20))
    frames, _ = answer(prompt, 0, 100)
    await read(running.submit(SequenceRequest(prompt, 0, 100)))
    longer = Prompt(np.concatenate([prompt.items, np.array(frames, np.int64)]))
    events = await read(running.submit(SequenceRequest(longer, 9, 4)))
    assert events[0].cached_rows == 3 * PAGE_ROWS
    assert items(events) == answer(longer, 9, 4)[0]


async def test_taps_are_found_beside_kept_pages_and_computed_where_they_are_not(seed: int) -> None:
    rng = random.Random(seed)
    running = engine()
    prompt = random_prompt(rng, 100)
    frames, rows = answer(prompt, 0, 4)
    for taps_from, cached in ((None, 0), (40, PAGE_ROWS), (40, 3 * PAGE_ROWS), (None, 3 * PAGE_ROWS), (0, 0), (0, 3 * PAGE_ROWS)):
        events = await read(running.submit(SequenceRequest(prompt, 0, 4, taps_from=taps_from)))
        assert items(events) == frames
        assert taps(events, taps_from or 0) == ([] if taps_from is None else rows[taps_from:])
        assert events[0].cached_rows == cached, taps_from


async def test_a_reader_that_does_not_take_the_taps_of_a_long_prompt_parks_it() -> None:
    running = engine(max_rows=PAGE_ROWS)
    prompt = Prompt(prompt_items([2] * (PAGE_ROWS * (MAX_UNREAD + 8))))
    stream = running.submit(SequenceRequest(prompt, 0, 3, taps_from=0))
    await rest(running, parked=1)
    assert running.stats().rows == MAX_UNREAD * PAGE_ROWS
    events = await read(stream)
    frames, rows = answer(prompt, 0, 3)
    assert items(events) == frames
    assert taps(events, 0) == rows


async def test_taps_found_beside_more_pages_than_a_reader_may_leave_are_one_event() -> None:
    running = engine(200, kept_pages=100)
    pages = MAX_UNREAD + 8
    prompt = Prompt(prompt_items([2] * (PAGE_ROWS * pages)))
    await read(running.submit(SequenceRequest(prompt, 0, 3, taps_from=0)))
    stream = running.submit(SequenceRequest(prompt, 0, MAX_UNREAD + 3, taps_from=5))
    await rest(running, parked=1)
    assert stream.sequence.unread == MAX_UNREAD
    events = await read(stream)
    found = events[0].taps
    assert found is not None and (found.first, len(found.rows)) == (5, PAGE_ROWS * (pages - 1) - 5)
    frames, rows = answer(prompt, 0, MAX_UNREAD + 3)
    assert items(events) == frames and taps(events, 5) == rows[5:]


async def test_requests_that_do_not_fit_the_model_are_refused_in_words() -> None:
    running = engine()
    good = Prompt(prompt_items([1, 2, 3]))
    for wrong, words in (
        (SequenceRequest(Prompt.of_tokens([1]), 0, 3), "2 ids"),
        (SequenceRequest(good, 0, 3, history=((1,),)), "2 ids"),
        (SequenceRequest(replace(good, positions=np.zeros((1, 3), np.int64)), 0, 3), "3 axes"),
        (SequenceRequest(replace(good, given=(Given(0, torch.zeros(1, 5)),)), 0, 3), "width 2"),
        (SequenceRequest(good, 0, 3, banned=frozenset({IDS})), "not below"),
    ):
        with pytest.raises(ValueError, match=words):
            running.submit(wrong)
    with pytest.raises(ValueError, match="overlap"):
        Prompt(good.items, (Given(0, torch.zeros(2, GIVEN)), Given(1, torch.zeros(1, GIVEN))))
    with pytest.raises(ValueError, match="beyond"):
        Prompt(good.items, (Given(2, torch.zeros(2, GIVEN)),))
    with pytest.raises(ValueError, match="positions are"):
        Prompt(good.items, positions=np.zeros((3, 2), np.int64))


def test_a_tap_is_without_the_embedding_where_a_vector_was_given() -> None:
    """Qwen2.5-Omni's Talker takes the rows of pictures and sound so."""
    decoder = PackedDecoder(TINY, tiny_weights(torch.float32), TAPPED)
    items, given = torch.arange(4)[:, None], torch.zeros(4, TINY.hidden_size)
    has_given = torch.tensor([[False], [True], [True], [False]])
    given[1:3] = torch.randn(2, TINY.hidden_size)
    rows = StepRows(items, torch.arange(4)[None], given, has_given, taps=True)
    hidden = decoder.hidden(rows, lambda layer, queries, keys_values: queries.flatten(1))
    embedding = tiny_weights(torch.float32)("embed_tokens.weight")
    assert embedding is not None and hidden.taps is not None
    embedded = functional.embedding(items[:, 0], embedding)
    assert torch.equal(hidden.taps, hidden.last + embedded * ~has_given)


@pytest.mark.parametrize(
    ("positions", "delta"), [([[0, 1, 2000]] * 3, 0), ([[0, -1, 0]] * 3, 0), (None, -4), (None, 1990)], ids=["far", "below", "back", "on"]
)
async def test_positions_that_no_table_has_are_refused(positions: list[list[int]] | None, delta: int) -> None:
    prompt = Prompt(prompt_items([1, 2, 3]), positions=None if positions is None else np.array(positions), delta=delta)
    with pytest.raises(Unfit, match="positions"):
        engine().submit(SequenceRequest(prompt, 0, 9))


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
