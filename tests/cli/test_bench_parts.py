"""The parts of `omnistage bench`: its arithmetic by hand, its arrivals, its loads step by step, and what it asks."""

from __future__ import annotations

import asyncio
import math
import re
import statistics
from itertools import count, islice, pairwise
from pathlib import Path

import numpy as np
import pytest

from helpers import peer
from helpers.waiting import until
from omnistage.cli.bench import prompts as bench_prompts
from omnistage.cli.bench.level import Arrivals, Closed, Failure, Level, Measured, Open, measure_answer
from omnistage.cli.bench.prompts import QUESTIONS, NumberRange, Questions, read_prompts
from omnistage.cli.bench.results import FIGURES, TOTALS, Distribution, Summary, number, read_limits
from omnistage.client import AsyncOmni
from omnistage.client.errors import DeadlineError, OmniError, OverloadedError, RequestError
from omnistage.v1 import omni_pb2


def answer(**figures: float) -> Measured:
    """An answer without anything but what is given."""
    return Measured({**dict.fromkeys((*FIGURES, *TOTALS)), **figures}, (), "")


def turned_away(retry_s: float | None, message: str = "full") -> Failure:
    error = OverloadedError(message, reason="OVERLOADED")
    error.retry_delay_s = retry_s
    return Failure.of(error)


class GatedAnswers:
    """A router that answers as soon as `together` requests are open. most: the most that were."""

    def __init__(self, together: int) -> None:
        self.open = self.most = 0
        self.may_answer = asyncio.Event()
        self._together = together

    async def __call__(self, number: int) -> Measured:
        self.open += 1
        self.most = max(self.most, self.open)
        if self.open == self._together:
            self.may_answer.set()
        await self.may_answer.wait()
        await asyncio.sleep(0)
        self.open -= 1
        return answer()


# Statistics


@pytest.mark.parametrize("count", [2, 3, 10, 101, 1000])
def test_a_distribution_is_what_is_worked_out_by_hand(seed: int, count: int) -> None:
    values = [float(value) for value in np.random.default_rng(seed).lognormal(size=count)]
    hundredths = statistics.quantiles(values, n=100, method="inclusive")
    found = Distribution.of(values)
    assert (found.count, found.max) == (count, max(values)) and found.mean == pytest.approx(math.fsum(values) / count)
    assert [found.median, found.p90, found.p99] == [pytest.approx(hundredths[percent - 1]) for percent in (50, 90, 99)]
    assert Distribution.of(values[:1]) == Distribution(1, *values[:1] * 5)


async def test_what_came_in_one_message_came_at_one_time_and_is_no_gap() -> None:
    """Six pieces of two tokens each: in a message each, in two messages, and in one. Time per token leaves out the first message."""
    chunks = [event.chunk for event in peer.answer(omni_pb2.GenerateRequest()) if event.HasField("chunk")]
    halves = [omni_pb2.GenerateResponse() for _ in range(2)]
    for place, chunk in enumerate(chunks):
        halves[place * 2 // len(chunks)].chunks.chunks.append(chunk)
    whole = omni_pb2.GenerateResponse()
    whole.chunks.chunks.extend(chunks)
    plays = [[peer.event(peer.STARTED), *messages, peer.event(peer.USAGE)] for messages in (halves, [whole])]
    async with peer.listening(peer.PlayingPeer(None, *plays)) as wire, AsyncOmni(address=wire.address) as omni:
        found = [await measure_answer(omni, Questions("ask", {}), 0) for _ in range(3)]
    for outcome, messages in zip(found, (6, 2, 1), strict=True):
        assert isinstance(outcome, Measured) and outcome.figures["audio_s"] == len(peer.SAMPLES) / 24000
        assert (outcome.figures["tokens"], len(outcome.itl_s)) == (12, messages - 1)
        per_token_s = sum(outcome.itl_s) / (12 - 12 // messages) if messages > 1 else None
        assert outcome.figures["tpot_s"] == (per_token_s and pytest.approx(per_token_s))


def test_numbers_have_three_digits() -> None:
    values = [0, 0.01234, 0.9999, 1.234, 9.999, 12.34, 99.99, 123.4, 12345.6]
    assert [number(value) for value in values] == ["0", "0.012", "1.00", "1.23", "10.0", "12.3", "100", "123", "12346"]


# Arrivals


def test_poisson_arrivals_have_random_gaps_and_their_rate() -> None:
    load, number = Open(7.0, "poisson", 1), 4000
    times_s = list(islice(load.due_times_s(3), number))
    gaps_s = np.random.default_rng(3).exponential(1 / 7.0, number)
    assert times_s == pytest.approx(np.cumsum(gaps_s)), "the exponential distribution has no memory; the same seed gives the same times"
    assert times_s != list(islice(load.due_times_s(4), number))


@pytest.mark.parametrize(
    ("arrivals", "burst", "times_s"), [("constant", 1, [0.0, 0.25, 0.5, 0.75, 1.0]), ("burst", 3, [0.0, 0.0, 0.0, 0.75, 0.75, 0.75, 1.5])]
)
def test_other_arrivals_are_equally_far_apart_and_keep_to_the_rate(arrivals: Arrivals, burst: int, times_s: list[float]) -> None:
    assert list(islice(Open(4.0, arrivals, 1, burst).due_times_s(0), len(times_s))) == times_s


# Loads


async def test_a_closed_loop_keeps_as_many_open_as_it_says() -> None:
    answers = GatedAnswers(3)
    level = Level(Closed(3, requests=20), answers, count(100))
    await level.measure()
    assert answers.most == 3 and sorted(sample.number for sample in level.samples) == list(range(100, 120))
    assert (level.offered, level.not_started, level.running) == (20, 0, 0)


async def test_an_open_loop_starts_what_has_room_and_counts_the_rest() -> None:
    answers = GatedAnswers(0)
    level = Level(Open(1000.0, "constant", 3, requests=20), answers, count())
    measuring = asyncio.create_task(level.measure())
    await until(lambda: level.offered == 20)
    answers.may_answer.set()
    await measuring
    assert sorted(sample.due_s for sample in level.samples) == [0.0, 0.001, 0.002]
    summary = Summary(level, None)
    assert (summary.completed, summary.failed, summary.interrupted, summary.not_started) == (3, 0, 0, 17)


async def test_an_open_loop_waits_for_no_answer() -> None:
    """All of them are open before the first is answered."""
    load = Open(1000.0, "poisson", 64, requests=12)
    level = Level(load, GatedAnswers(12), count(), 5)
    await level.measure()
    assert sorted(sample.due_s for sample in level.samples) == list(islice(load.due_times_s(5), 12))


@pytest.mark.parametrize(("load", "most"), [(Closed(2, seconds=0.05), 10**6), (Open(1000.0, "constant", 8, seconds=0.05), 50)])
async def test_a_level_of_so_many_seconds_ends(load: Closed | Open, most: int) -> None:
    level = Level(load, GatedAnswers(1), count())
    await level.measure()
    assert 0 < level.offered <= most and all(sample.due_s < 0.05 for sample in level.samples)
    assert len(level.samples) + level.not_started == level.offered


@pytest.mark.parametrize(("retry_s", "waits_s"), [(0.25, 0.25), (100.0, 5.0), (None, 0.5), (0.0, 0.0)])
def test_who_is_turned_away_waits_as_long_as_was_said_but_never_for_minutes(retry_s: float | None, waits_s: float) -> None:
    assert turned_away(retry_s).pause_s == waits_s and Failure.of(OmniError("wrong")).pause_s == 0.0


async def test_a_closed_loop_waits_before_it_asks_again() -> None:
    async def refuse(number: int) -> Failure:
        return turned_away(0.05)

    level = Level(Closed(1, requests=3), refuse, count())
    await level.measure()
    begun_s = [sample.begun_s for sample in level.samples]
    assert len(begun_s) == 3 and all(later - earlier >= 0.049 for earlier, later in pairwise(begun_s))


async def test_a_level_that_is_cut_short_keeps_what_it_has() -> None:
    async def answer_four(number: int) -> Measured:
        if number >= 4:
            await asyncio.Event().wait()
        return answer(tokens=2)

    level = Level(Closed(3, requests=100), answer_four, count())
    measuring = asyncio.create_task(level.measure())
    await until(lambda: level.running == 3 and len(level.samples) == 4)
    measuring.cancel()
    await asyncio.wait({measuring})
    summary = Summary(level, None)
    assert (summary.offered, summary.completed, summary.interrupted, summary.totals["tokens"]) == (7, 4, 3, 8)
    assert summary.wall_s > 0


async def test_failures_are_counted_by_kind_and_goodput_by_all_limits() -> None:
    outcomes: list[Measured | Failure] = [
        *(answer(ttft_s=0.1, rtf=0.3), answer(ttft_s=0.5, rtf=0.5), answer(ttft_s=0.6, rtf=0.1), answer(ttft_s=0.1)),
        *(turned_away(1.0, "first"), Failure.of(DeadlineError("too late")), turned_away(1.0, "second")),
    ]

    async def ask(number: int) -> Measured | Failure:
        return outcomes[number]

    level = Level(Open(1000.0, "burst", 64, 7, requests=7), ask, count())
    await level.measure()
    level.wall_s = 4.0
    summary = Summary(level, read_limits("ttft=0.5, rtf=0.5"))
    errors = [(error["error"], error["count"], error["message"]) for error in summary.errors]
    assert errors == [("OverloadedError", 2, "first"), ("DeadlineError", 1, "too late")]
    assert (summary.completed, summary.failed, summary.figures["rtf"].count) == (4, 3, 3)
    assert summary.rates["request_goodput"] == 2 / 4.0, "one was too slow, and one without sound has no rtf"
    assert summary.rates["request_throughput"] == 4 / 4.0


# Prompts


def test_words_and_lengths_are_the_same_for_the_same_seed_and_number() -> None:
    def texts(seed: int) -> list[str]:
        questions = Questions("ask", {"max_tokens": 3}, seed, words=NumberRange(5, 9), tokens=NumberRange(10, 12))
        asked = [questions.at(number) for number in range(200)]
        lengths = {(options["max_tokens"], options["min_tokens"], options["ignore_eos"]) for _, options in asked}
        assert lengths == {(n, n, True) for n in (10, 11, 12)}
        return [text for text, _ in asked]

    assert texts(3) == texts(3) != texts(4)
    assert {len(text.split()) for text in texts(3)} == {5, 6, 7, 8, 9}
    assert len(set(texts(3))) == 200 and {word for text in texts(3) for word in text.split()} <= set(bench_prompts.WORDS)


def test_prompts_of_a_file_are_its_lines(tmp_path: Path) -> None:
    lines = tmp_path / "lines.txt"
    lines.write_text('One?\n\n  \n{"prompt": "no object here"}\n')
    questions = Questions("ask", {"max_tokens": 10}, seed=2**64 - 1, prompts=read_prompts(lines))
    assert [questions.at(number) for number in range(3)] == [
        ("One?", {"max_tokens": 10, "seed": 2**64 - 1}),
        ('{"prompt": "no object here"}', {"max_tokens": 10, "seed": 0}),
        ("One?", {"max_tokens": 10, "seed": 1}),
    ]
    assert len(set(QUESTIONS)) == len(QUESTIONS) >= 30


@pytest.mark.parametrize(("name", "told"), [("p.txt", "there is no prompt in it"), ("p.jsonl", "prompts are lines of plain text, no JSON")])
def test_a_file_without_prompts_says_why(tmp_path: Path, name: str, told: str) -> None:
    (tmp_path / name).write_text("\n \n")
    with pytest.raises(RequestError, match=re.escape(told)):
        read_prompts(tmp_path / name)
