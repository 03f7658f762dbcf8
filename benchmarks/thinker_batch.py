"""`python -m benchmarks.thinker_batch`: tokens per second of the default Thinker alone, at 1, 8 and 32 requests, on one thread."""

from __future__ import annotations

import asyncio
import resource
import sys
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

from benchmarks.figures import Figure, Report, median, run
from omnistage.engine.types import Sampling
from omnistage.models.conversation import Turn
from omnistage.models.interface import TextPiece, TextRequest, no_inputs
from omnistage.models.smol.store import model_directory
from omnistage.models.smol.thinker import SmolThinker, load_thinker

CONCURRENT = {1: 1.0, 8: 4.5, 32: 8.0}
"""Goals by number of concurrent requests: how many times the tokens per second of one request they should reach."""

ANSWER_TOKENS = 96
SUBJECTS = ("the sea", "rain", "a guitar", "bread", "the moon", "a good friend", "winter", "trains")
ROUNDS = 5


@dataclass(frozen=True, slots=True)
class AnswerTimes:
    """Seconds from the question to the first text and to the end, and the number of tokens."""

    first_s: float
    whole_s: float
    tokens: int


async def answer(model: SmolThinker, index: int) -> AnswerTimes:
    """Ask the question with this number and measure the answer."""
    question = f"Tell me fact number {index} about {SUBJECTS[index % len(SUBJECTS)]}."
    request = TextRequest(
        turns=(Turn("user", (question,)),), seed=index, sampling=Sampling(repetition_penalty=1.1), max_tokens=ANSWER_TOKENS, ignore_eos=True
    )
    started = time.perf_counter()
    first_s, tokens = 0.0, 0
    async with aclosing(model.generate(await model.prepare(request), no_inputs(), {"text": 0})) as pieces:
        async for piece in pieces:
            first_s = first_s or time.perf_counter() - started
            tokens += len(piece.token_ids) if isinstance(piece, TextPiece) else 0
    return AnswerTimes(first_s, time.perf_counter() - started, tokens)


async def rate(model: SmolThinker, concurrent: int, first: int) -> float:
    """Tokens per second of `concurrent` requests asked at once, prompts included."""
    started = time.perf_counter()
    answers = await asyncio.gather(*(answer(model, first + index) for index in range(concurrent)))
    return sum(one.tokens for one in answers) / (time.perf_counter() - started)


async def _speed(model: SmolThinker, report: Report) -> None:
    """Measure tokens per second of several requests, and the times of one alone."""
    await model.warm_up()
    rates: dict[int, list[float]] = {concurrent: [] for concurrent in CONCURRENT}
    # The rounds are interleaved, so that other load on the machine touches all of them alike.
    for turn in range(ROUNDS):
        for concurrent, measured in rates.items():
            measured.append(await rate(model, concurrent, 100 * turn))
    answers = [await answer(model, 1000 + index) for index in range(ROUNDS)]
    note = f"median of {ROUNDS}, {ANSWER_TOKENS} tokens each, prompts included, one thread"
    first = median([one.first_s for one in answers])
    report.add(Figure("thinker_ttft_alone", first, "s", "<= 0.12", "first token; the system prompt is kept from before"))
    report.add(Figure("thinker_token_alone", _token_ms(answers), "ms", "<= 25", "between tokens of one request"))
    single = median(rates[1])
    for concurrent, goal in CONCURRENT.items():
        speed = median(rates[concurrent])
        report.add(Figure(f"thinker_tokens_per_s_{concurrent}", speed, "tokens/s", "", note))
        if concurrent > 1:
            ratio = median([many_rate / one_rate for many_rate, one_rate in zip(rates[concurrent], rates[1], strict=True)])
            report.add(Figure(f"thinker_x_{concurrent}", ratio, "x", f">= {goal}", f"of {single:.1f} tokens/s for one request"))
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    report.add(Figure("thinker_peak_memory", peak_mib, "MiB", "", "resident, the whole process"))


def _token_ms(answers: Sequence[AnswerTimes]) -> float:
    return median([(one.whole_s - one.first_s) / (one.tokens - 1) * 1000 for one in answers])


async def measure(report: Report) -> None:
    """Measure all figures of the Thinker alone, in this process."""
    directory = model_directory() / "thinker"
    started = time.perf_counter()
    model = load_thinker(directory)
    report.add(Figure("thinker_load", time.perf_counter() - started, "s", "", "from the converted folder, imports not counted"))
    try:
        await _speed(model, report)
    finally:
        await model.close()


if __name__ == "__main__":
    sys.exit(run("thinker_batch", __doc__, {"thinker alone": measure}))
