"""Prompts whose vectors come later: they are read as they come, with the same result in any order. Every answer is checked by hand."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from helpers.arithmetic import AXES, GIVEN, IDS, answer, engine, prompt_items
from helpers.engines import items, read
from helpers.waiting import until
from omnistage.engine.engine import Engine
from omnistage.engine.memory import PAGE_ROWS
from omnistage.engine.request import Given, Prompt, SequenceEvent, SequenceRequest
from omnistage.engine.sequence import Sequence, SequenceStream


def whole(rng: random.Random, rows: int, first: int = 0) -> Prompt:
    """A prompt with a vector for each row from `first` on, and positions of its own."""
    positions = np.array([[rng.randrange(500) for _ in range(rows)] for _ in range(AXES)], np.int64)
    vectors = torch.tensor([[rng.randrange(20) for _ in range(GIVEN)] for _ in range(first, rows)], dtype=torch.float32)
    return Prompt(prompt_items([rng.randrange(IDS) for _ in range(rows)]), (Given(first, vectors),), positions)


def later(prompt: Prompt, given: int = 0) -> Prompt:
    """The same with the vectors of the first `given` rows that have one."""
    (vectors,) = prompt.given
    return replace(prompt, given=(Given(vectors.first, vectors.rows[:given], b"given"),) if given else (), given_later=True)


def digest_of(prompt: Prompt, first: int, last: int) -> bytes:
    return prompt.given[0].rows[first:last].numpy().tobytes()


def give(stream: SequenceStream, prompt: Prompt, first: int, last: int) -> None:
    stream.give(prompt.given[0].rows[first:last], digest_of(prompt, first, last))


async def give_pages(stream: SequenceStream, prompt: Prompt, first: int, last: int) -> None:
    for row in range(first, last, PAGE_ROWS):
        give(stream, prompt, row, min(row + PAGE_ROWS, last))


async def give_in_parts(stream: SequenceStream, prompt: Prompt, first: int, rng: random.Random) -> None:
    while first < len(prompt):
        last = min(first + rng.choice([1, PAGE_ROWS, rng.randrange(1, 80)]), len(prompt))
        give(stream, prompt, first, last)
        first = last
        await asyncio.sleep(rng.random() * 0.01)


def taps_of(events: list[SequenceEvent]) -> list[tuple[int, int]]:
    return [(int(total), int(value)) for event in events if event.taps is not None for total, value in event.taps.rows.tolist()]


async def read_rows(one: Engine, before: int, count: int) -> None:
    """Wait until so many more rows were computed, and the sequence waits for the next ones."""
    await until(lambda: one.stats().starved == 1 and one.stats().running == 0 and one.stats().rows == before + count)


@pytest.mark.parametrize("pages", [200, 20])
async def test_whatever_comes_when_the_answer_is_the_same(pages: int, seed: int) -> None:
    """The sequence runs in company, others take its pages, it resumes from any frame, with taps and with rows of the answer.

    Three sequences that wait for their last vectors hold 18 of 20 pages, so that the others must take them."""
    running = engine(pages, max_sequences=12)
    rng = random.Random(seed)
    holders = [whole(rng, 200) for _ in range(3 if pages == 20 else 0)]
    holding = [running.submit(SequenceRequest(later(prompt), number, 9)) for number, prompt in enumerate(holders)]
    for prompt, stream in zip(holders, holding, strict=True):
        await give_pages(stream, prompt, 0, 192)
        await until(lambda stream=stream: stream.sequence.computed == 192)  # type: ignore[misc]

    async def ask(number: int) -> None:
        rng = random.Random(seed + number)
        prompt, count = whole(rng, rng.randrange(1, 300)), rng.randrange(1, 60)
        appended = rng.choice([None, [[rng.randrange(20) for _ in range(GIVEN)] for _ in range(count)]])
        frames, rows = answer(prompt, number, count, appended)
        cut, taps_from = rng.choice([0, rng.randrange(count)]), rng.choice([None, rng.randrange(len(prompt))])
        at = rng.choice([0, rng.randrange(len(prompt))])
        asked = SequenceRequest(later(prompt, at), number, count, history=tuple(frames[:cut]), appended=bool(appended), taps_from=taps_from)
        stream = running.submit(asked)
        if appended:
            stream.append(torch.tensor(appended, dtype=torch.float32), end=True)
        giving = asyncio.create_task(give_in_parts(stream, prompt, at, rng))
        events = await read(stream)
        assert items(events) == frames[cut:]
        assert taps_of(events) == ([] if taps_from is None else rows[taps_from:])
        await giving

    await asyncio.gather(*(ask(number) for number in range(24)))
    for number, (prompt, stream) in enumerate(zip(holders, holding, strict=True)):
        await give_pages(stream, prompt, 192, 200)
        assert items(await read(stream)) == answer(prompt, number, 9)[0]
    assert running.stats().pages_used == running.stats().waiting == 0
    assert (running.stats().preemptions > 0) is (pages == 20)


async def test_rows_are_computed_as_their_vectors_come_and_hold_no_one_up(seed: int) -> None:
    rng = random.Random(seed)
    running, prompt, other = engine(), whole(rng, 150), whole(rng, 40)
    stream = running.submit(SequenceRequest(later(prompt), 1, 9))
    assert items(await read(running.submit(SequenceRequest(other, 2, 20)))) == answer(other, 2, 20)[0]
    assert running.stats().waiting == 1  # The sequence has no row yet, so it takes no place.
    before = running.stats().rows
    for first, last in ((0, 64), (64, 65), (65, 104)):
        give(stream, prompt, first, last)
        await read_rows(running, before, last)
    give(stream, prompt, 104, 150)
    assert items(await read(stream)) == answer(prompt, 1, 9)[0]
    assert running.stats().rows == before + 150 + 8


@pytest.mark.parametrize("taps_from", [None, 40])
async def test_pages_that_are_there_already_are_found_as_the_vectors_come(taps_from: int | None, seed: int) -> None:
    """Pages are found by the digests of the vectors, not with other positions or another scope, and with the wanted taps."""
    rng = random.Random(seed)
    running, prompt = engine(), whole(rng, 200)
    frames, rows = answer(prompt, 1, 5)

    async def computed(asked: Prompt, *firsts: int) -> int:
        """Number of rows computed, if the vectors up to each of these rows came together."""
        before = running.stats().rows
        stream = running.submit(SequenceRequest(later(asked), 1, 5, taps_from=taps_from))
        for first, last in zip((0, *firsts), (*firsts, 200), strict=True):
            await give_pages(stream, prompt, first, last)
            if last < 200:
                await until(lambda last=last: stream.sequence.computed == last)  # type: ignore[misc]
        events = await read(stream)
        if asked is prompt:
            assert items(events) == frames
            assert taps_of(events) == ([] if taps_from is None else rows[taps_from:])
        return running.stats().rows - before

    assert await computed(prompt, 64) == 200 + 4
    assert await computed(prompt) == await computed(prompt, 32, 128) == await computed(prompt, 160) == 8 + 4
    assert await computed(replace(prompt, scope=b"other"), 64) == 200 + 4
    assert await computed(replace(prompt, positions=None), 64) == 200 + 4


async def test_pages_behind_vectors_without_a_digest_are_found_by_nobody(seed: int) -> None:
    rng = random.Random(seed)
    running, prompt, other = engine(), whole(rng, 200), whole(rng, 200)
    named, mixed = prompt.given[0].rows[:72], torch.cat([prompt.given[0].rows[:72], other.given[0].rows[72:]])
    for vectors, count in ((prompt.given[0].rows, 200), (mixed, 200 - 64)):
        before, asked = running.stats().rows, replace(prompt, given=(Given(0, vectors),))
        stream = running.submit(SequenceRequest(later(asked), 1, 5))
        stream.give(named, digest_of(asked, 0, 72))
        stream.give(vectors[72:150])
        stream.give(vectors[150:], digest_of(asked, 150, 200))
        assert items(await read(stream)) == answer(asked, 1, 5)[0]
        assert running.stats().rows - before == count + 4 and running.stats().pages_kept == 2


def test_a_run_has_the_vectors_that_were_given_for_its_rows(seed: int) -> None:
    """However few vectors there are, and with any gap between them."""
    rng = random.Random(seed)
    places = sorted(rng.sample(range(300), 40))
    parts = [Given(first, torch.full((rng.randint(1, end - first), GIVEN), first)) for first, end in pairwise([*places, 300])]
    kept = tuple(part for part in parts if rng.random() < 0.7)
    sequence = Sequence(SequenceRequest(Prompt(prompt_items([1] * 300), kept), 1, 9, history=((1, 2),) * 8))
    expected = {given.first + at: given.first for given in kept for at in range(len(given.rows))}
    for start in range(305):
        for count in (1, 2, PAGE_ROWS):
            found = {start + at + n: int(row[0]) for at, rows in sequence.given_of(start, count) for n, row in enumerate(rows)}
            assert found == {slot: expected[slot] for slot in range(start, start + count) if slot in expected}
            assert all(len(rows) for _, rows in sequence.given_of(start, count))


@pytest.mark.parametrize("count", [0, 20, 32, 110])
async def test_one_that_is_given_up_leaves_nothing_but_pages_for_the_next_one(count: int, seed: int) -> None:
    running, prompt = engine(), whole(random.Random(seed), 120)
    stream = running.submit(SequenceRequest(later(prompt), 1, 9))
    await give_pages(stream, prompt, 0, count)
    await until(lambda: stream.sequence.computed == count)
    await stream.aclose()
    stats = running.stats()
    assert (stats.pages_used, stats.waiting, stats.running, stats.starved) == (0, 0, 0, 0)
    assert stats.pages_kept == count // PAGE_ROWS
    again = running.submit(SequenceRequest(later(prompt), 1, 9))
    await give_pages(again, prompt, 0, 120)
    assert items(await read(again)) == answer(prompt, 1, 9)[0]
    assert running.stats().rows == count % PAGE_ROWS + 120 + 8


async def test_one_whose_vectors_do_not_come_leaves_its_pages_to_others(seed: int) -> None:
    """The sequence has pages again, kept ones or computed ones, when all of its vectors are there."""
    rng = random.Random(seed)
    running, prompt, other = engine(10, kept_pages=0), whole(rng, 200), whole(rng, 160)
    stream = running.submit(SequenceRequest(later(prompt), 1, 9))
    await give_pages(stream, prompt, 0, 192)
    await read_rows(running, 0, 192)
    assert items(await read(running.submit(SequenceRequest(other, 2, 9)))) == answer(other, 2, 9)[0]
    assert running.stats().preempted == 1 and running.stats().pages_used == 0
    await give_pages(stream, prompt, 192, 199)
    assert items(await read(running.submit(SequenceRequest(other, 2, 9)))) == answer(other, 2, 9)[0]
    assert running.stats().preempted == 1
    await give_pages(stream, prompt, 199, 200)
    assert items(await read(stream)) == answer(prompt, 1, 9)[0]
    assert running.stats().preemptions == 1


async def test_vectors_that_cannot_be_taken_are_refused(seed: int) -> None:
    running, prompt = engine(), whole(random.Random(seed), 40, first=8)
    stream = running.submit(SequenceRequest(later(prompt, 30), 1, 9))
    with pytest.raises(ValueError, match="width 2"):
        stream.give(torch.zeros(1, GIVEN + 1))
    for count in (0, 3):
        with pytest.raises(ValueError, match="2 rows of the prompt are without"):
            stream.give(torch.zeros(count, GIVEN))
    give(stream, prompt, 30, 32)
    with pytest.raises(ValueError, match="0 rows of the prompt are without"):
        stream.give(torch.zeros(1, GIVEN))
    assert items(await read(stream)) == answer(prompt, 1, 9)[0]
    with pytest.raises(ValueError, match="0 rows"):
        running.submit(SequenceRequest(prompt, 1, 9)).give(torch.zeros(1, GIVEN))


def test_a_row_whose_vector_comes_later_is_no_text() -> None:
    prompt = Prompt(prompt_items([1, 2, 3]), (Given(1, torch.zeros(1, GIVEN)),))
    assert prompt.text_ids == {1, 3} and replace(prompt, given_later=True).text_ids == {1}
