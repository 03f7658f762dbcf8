"""The parts of `omnistage bench`: its arithmetic by hand, its arrivals, its loads step by step, and what it asks."""

from __future__ import annotations

import asyncio
import math
import re
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import peer
from helpers.waiting import until
from omnistage.cli.bench import level as levels
from omnistage.cli.bench import prompts as bench_prompts
from omnistage.cli.bench.level import Closed, Extent, Failure, Level, Measured, Open, Sample, TokenArrival, due_times_s, pause_s
from omnistage.cli.bench.prompts import BenchPrompt, NumberRange, Questions, RandomWords, built_in_prompts, of_file
from omnistage.cli.bench.results import number
from omnistage.cli.bench.summary import Distribution, Objectives, Summary
from omnistage.client import AsyncOmni
from omnistage.client.errors import RequestError
from omnistage.v1 import omni_pb2


def answer(**given: Any) -> Measured:
    """An answer without anything but what is given."""
    none: dict[str, Any] = {"ttft_s": None, "tpot_s": None, "audio_ttfp_s": None, "ttfa_s": None, "rtf": None, "rtf_generation": None}
    none |= {"underrun_s": None, "starved_s": None, "tokens": 0, "itl_s": (), "e2e_s": 0.0, "audio_s": 0.0, "queued_s": 0.0, "steps": 0}
    return Measured(**{**none, "pictures": 0, "failovers": 0, "finish_reason": "", **given})


def percentile(values: list[float], percent: float) -> float:
    """By hand: the value at a place between the first and the last, and between two neighbours in proportion."""
    ordered = sorted(values)
    place = percent / 100 * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


# Statistics


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101, 1000])
def test_a_distribution_is_what_is_worked_out_by_hand(seed: int, count: int) -> None:
    values = [float(value) for value in np.random.default_rng(seed).lognormal(size=count)]
    found = Distribution.of(values)
    assert found is not None and Distribution.of([]) is None
    assert found.count == count and found.mean == pytest.approx(math.fsum(values) / count)
    assert found.max == max(values)
    assert [found.median, found.p90, found.p99] == [pytest.approx(percentile(values, percent)) for percent in (50, 90, 99)]


def test_time_per_token_leaves_out_the_first_message() -> None:
    pieces = [TokenArrival(1.0, 3), TokenArrival(1.5, 1), TokenArrival(2.2, 4)]
    assert levels.per_token_s(pieces) == pytest.approx((2.2 - 1.0) / 5) and levels.per_token_s(pieces[:1]) is None
    assert levels.per_token_s([]) is None


async def test_what_came_in_one_message_came_at_one_time() -> None:
    """Six pieces of two tokens each: in a message each, and in two messages."""
    chunks = [event.chunk for event in peer.answer(omni_pb2.GenerateRequest()) if event.HasField("chunk")]
    batches = [omni_pb2.GenerateResponse() for _ in range(2)]
    for place, chunk in enumerate(chunks):
        batches[place * 2 // len(chunks)].chunks.chunks.append(chunk)
    question = Questions("ask", built_in_prompts(to_draw=False), {}).at(0)
    router = peer.PlayingPeer(None, [peer.event(peer.STARTED), *batches, peer.event(peer.USAGE)])
    async with peer.listening(router) as wire, AsyncOmni(address=wire.address) as omni:
        one_by_one, together = [(await levels.take(omni, question, 0.0, 0.0)).outcome for _ in range(2)]
    assert isinstance(one_by_one, Measured) and isinstance(together, Measured)
    assert (one_by_one.tokens, len(one_by_one.itl_s)) == (12, 5)
    assert (together.tokens, len(together.itl_s)) == (12, 1)
    assert together.tpot_s == pytest.approx(together.itl_s[0] / 6)
    assert one_by_one.audio_s == together.audio_s == len(peer.SAMPLES) / 24000


def test_numbers_have_three_digits() -> None:
    values = [0, 0.01234, 0.9999, 1.234, 9.999, 12.34, 99.99, 123.4, 12345.6]
    assert [number(value) for value in values] == ["0", "0.012", "1.00", "1.23", "10.0", "12.3", "100", "123", "12346"]


# Arrivals


@pytest.mark.parametrize("chosen", range(5))
def test_poisson_arrivals_have_their_rate_and_no_memory(chosen: int) -> None:
    """Bounds of five standard deviations, for seeds that are always the same."""
    rate, count = 7.0, 4000
    times_s = list(islice(due_times_s("poisson", rate, chosen), count))
    gaps_s = np.diff([0.0, *times_s])
    assert np.all(gaps_s > 0)
    unit = gaps_s * rate
    assert abs(unit.mean() - 1) < 5 / math.sqrt(count)
    assert abs(unit.var() - 1) < 5 * math.sqrt(8 / count), "of the exponential distribution mean and deviation are alike"
    assert abs((unit > 1).mean() - math.exp(-1)) < 5 * math.sqrt(math.exp(-1) * (1 - math.exp(-1)) / count)
    for lag in (1, 2, 10):
        assert abs(np.corrcoef(unit[:-lag], unit[lag:])[0, 1]) < 5 / math.sqrt(count), "a gap says nothing of the next ones"
    assert times_s == list(islice(due_times_s("poisson", rate, chosen), count)), "the same seed, the same times"
    assert times_s != list(islice(due_times_s("poisson", rate, chosen + 100), count))


def test_constant_arrivals_are_equally_far_apart() -> None:
    assert list(islice(due_times_s("constant", 4.0), 5)) == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_bursts_come_together_and_at_the_rate() -> None:
    assert list(islice(due_times_s("burst", 4.0, burst=3), 7)) == [0.0, 0.0, 0.0, 0.75, 0.75, 0.75, 1.5]


# Loads


def sample_of(number: int, outcome: Measured | Failure, due_s: float = 0.0) -> Sample:
    return Sample(number, number, due_s, due_s, due_s, outcome)


async def test_a_closed_loop_keeps_as_many_open_as_it_says() -> None:
    seen, all_run = list[int](), asyncio.Event()

    async def take(number: int, due_s: float, t0: float) -> Sample:
        if level.running == 3:
            all_run.set()
        await all_run.wait()
        seen.append(level.running)
        await asyncio.sleep(0)
        return sample_of(number, answer())

    level = Level(Closed(3), Extent(20, None), take, 100, 0)
    await level.measure()
    assert max(seen) == 3
    assert sorted(sample.number for sample in level.samples) == list(range(100, 120))
    assert (level.offered, level.started, level.not_started, level.running) == (20, 20, 0, 0)


async def test_an_open_loop_starts_what_has_room_and_counts_the_rest() -> None:
    may_end = asyncio.Event()

    async def take(number: int, due_s: float, t0: float) -> Sample:
        await may_end.wait()
        return sample_of(number, answer(), due_s)

    level = Level(Open(1000.0, "constant", 3), Extent(20, None), take, 0, 0)
    measuring = asyncio.create_task(level.measure())
    await until(lambda: level.offered == 20)
    may_end.set()
    await measuring
    assert sorted(sample.due_s for sample in level.samples) == [0.0, 0.001, 0.002]
    assert (level.offered, level.started, level.not_started) == (20, 3, 17)
    summary = Summary.of(level, None)
    assert (summary.completed, summary.failed, summary.interrupted, summary.not_started) == (3, 0, 0, 17)


async def test_an_open_loop_waits_for_no_answer() -> None:
    """All of them are open before the first is answered."""
    all_run = asyncio.Event()

    async def take(number: int, due_s: float, t0: float) -> Sample:
        if level.running == 12:
            all_run.set()
        await all_run.wait()
        return sample_of(number, answer(), due_s)

    level = Level(Open(1000.0, "poisson", 64), Extent(12, None), take, 0, 5)
    await level.measure()
    assert sorted(sample.due_s for sample in level.samples) == list(islice(due_times_s("poisson", 1000.0, 5), 12))


@pytest.mark.parametrize(("load", "most"), [(Closed(2), 10**6), (Open(1000.0, "constant", 8), 50)])
async def test_a_level_of_so_many_seconds_ends(load: Closed | Open, most: int) -> None:
    async def take(number: int, due_s: float, t0: float) -> Sample:
        await asyncio.sleep(0.001)
        return sample_of(number, answer(), due_s)

    level = Level(load, Extent(None, 0.05), take, 0, 0)
    await level.measure()
    assert 0 < level.offered <= most and all(sample.due_s < 0.05 for sample in level.samples)
    assert len(level.samples) == level.started


@pytest.mark.parametrize(("retry_s", "waits_s"), [(0.25, 0.25), (100.0, 5.0), (None, 0.0), (0.0, 0.0)])
def test_who_is_turned_away_waits_as_long_as_was_said_but_never_for_minutes(retry_s: float | None, waits_s: float) -> None:
    assert pause_s(turned_away(retry_s)) == waits_s and pause_s(answer()) == 0.0


async def test_a_closed_loop_waits_before_it_asks_again() -> None:
    at_s: list[float] = []

    async def take(number: int, due_s: float, t0: float) -> Sample:
        at_s.append(asyncio.get_running_loop().time())
        return sample_of(number, turned_away(0.05))

    await Level(Closed(1), Extent(3, None), take, 0, 0).measure()
    assert len(at_s) == 3 and all(later - earlier >= 0.049 for earlier, later in pairwise(at_s))


def turned_away(retry_s: float | None) -> Failure:
    return Failure("OverloadedError", "OVERLOADED", "full", "", retry_s, is_refusal=False)


async def test_a_level_that_is_cut_short_keeps_what_it_has() -> None:
    async def take(number: int, due_s: float, t0: float) -> Sample:
        if number >= 4:
            await asyncio.Event().wait()
        return sample_of(number, answer(tokens=2))

    level = Level(Closed(3), Extent(100, None), take, 0, 0)
    measuring = asyncio.create_task(level.measure())
    await until(lambda: level.running == 3 and len(level.samples) == 4)
    measuring.cancel()
    await asyncio.wait({measuring})
    summary = Summary.of(level, None)
    assert (summary.offered, summary.completed, summary.interrupted, summary.tokens) == (7, 4, 3, 8)
    assert summary.wall_s > 0


async def test_failures_are_counted_by_kind_and_goodput_by_all_limits() -> None:
    first, second = (Failure("OverloadedError", "OVERLOADED", message, "wait", 1.0, is_refusal=False) for message in ("first", "second"))
    outcomes: list[Measured | Failure] = [
        *(answer(ttft_s=0.1, rtf=0.3), answer(ttft_s=0.5, rtf=0.5), answer(ttft_s=0.6, rtf=0.1), answer(ttft_s=0.1)),
        *(first, Failure("DeadlineError", "DEADLINE", "too late", "", None, is_refusal=False), second),
    ]

    async def take(number: int, due_s: float, t0: float) -> Sample:
        return sample_of(number, outcomes[number])

    level = Level(Open(1000.0, "burst", 64, 7), Extent(7, None), take, 0, 0)
    await level.measure()
    level.wall_s = 4.0
    summary = Summary.of(level, Objectives.parse("ttft=0.5, rtf=0.5"))
    errors = [(error.error, error.count, error.message) for error in summary.errors]
    assert errors == [("OverloadedError", 2, "first"), ("DeadlineError", 1, "too late")]
    assert (summary.completed, summary.failed) == (4, 3)
    assert summary.request_goodput == 2 / 4.0, "one was too slow, and one without sound has no rtf"
    assert summary.request_throughput == 4 / 4.0 and summary.figures["rtf"].count == 3


# The prompts -


def test_words_are_the_same_for_the_same_seed_and_number() -> None:
    prompts = RandomWords(NumberRange(5, 9), 3)
    texts = [prompts.at(number).text for number in range(200)]
    assert texts == [RandomWords(NumberRange(5, 9), 3).at(number).text for number in range(200)]
    assert {len(text.split()) for text in texts} == {5, 6, 7, 8, 9}
    assert len(set(texts)) == 200 and {word for text in texts for word in text.split()} <= set(bench_prompts.WORDS)
    assert texts != [RandomWords(NumberRange(5, 9), 4).at(number).text for number in range(200)]


def test_built_in_prompts_differ() -> None:
    assert len(set(bench_prompts.QUESTIONS)) == len(bench_prompts.QUESTIONS) >= 30
    assert {built_in_prompts(to_draw=True).at(number).text for number in range(100)}.isdisjoint(bench_prompts.QUESTIONS)


def test_prompts_of_a_file(tmp_path: Path) -> None:
    lines, objects = tmp_path / "lines.txt", tmp_path / "objects.jsonl"
    lines.write_text('One?\n\n  \n{"prompt": "no object here"}\n')
    objects.write_text('{"prompt": "Long?", "max_tokens": 64}\n{"prompt": "Short?", "id": 7}\n')
    assert of_file(lines).prompts == [BenchPrompt("One?"), BenchPrompt('{"prompt": "no object here"}')]
    found = of_file(objects)
    assert [found.at(number) for number in range(3)] == [BenchPrompt("Long?", 64), BenchPrompt("Short?"), BenchPrompt("Long?", 64)]
    asked = Questions("ask", found, {"max_tokens": 10}, seed=bench_prompts.LAST_SEED - 1)
    first, second = ((question.text, question.options["max_tokens"], question.seed) for question in map(asked.at, (0, 1)))
    assert (first, second) == (("Long?", 64, bench_prompts.LAST_SEED - 1), ("Short?", 10, 0))
    assert "max_tokens" not in Questions("say", found, {}).at(0).options, "what is spoken has its length"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "there is no prompt in it"),
        ("{", "line 1: prompt: this is no JSON"),
        ('{"prompt": "a"}\n{"text": "b"}', "line 2: prompt: is to be a text that is not empty"),
        ('{"prompt": "a", "max_tokens": 0}', "line 1: max_tokens: is 0; give a number from 1 to 32768"),
        ("[]", "line 1: prompt: is to be a text"),
    ],
)
def test_a_file_without_prompts_says_where(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "p.jsonl").write_text(text)
    with pytest.raises(RequestError, match=re.escape(told)):
        of_file(tmp_path / "p.jsonl")


def test_each_answer_is_made_as_long_as_was_said() -> None:
    asked = Questions("ask", built_in_prompts(to_draw=False), {"max_tokens": 3}, tokens=NumberRange(10, 12))
    options = [asked.at(number).options for number in range(100)]
    assert {(one["max_tokens"], one["min_tokens"], one["ignore_eos"]) for one in options} == {(n, n, True) for n in (10, 11, 12)}
