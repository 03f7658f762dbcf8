"""`python -m benchmarks.default`: all figures of the default model, as benchmarks/out/default.json and as a table."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Awaitable
from contextlib import aclosing
from functools import partial

from benchmarks import asr, one_process, relay
from benchmarks.figures import (
    ANSWER_TOKENS,
    QUESTION,
    QUESTIONS,
    SIX_SECONDS_TOKENS,
    Benchmark,
    Figure,
    arguments,
    median,
    ratio,
    run,
    serving,
    time_call,
)
from benchmarks.one_process import AnswerTimes
from omnistage.cli.stack.pipelines import Choice, layout_of
from omnistage.client import AsyncOmni
from omnistage.engine.types import Sampling
from omnistage.models.conversation import Turn
from omnistage.models.interface import TextPiece, TextRequest, inputs_of
from omnistage.models.smol.store import model_directory
from omnistage.models.smol.thinker import load_thinker

WARM_UPS = 5
ROUNDS = 20
CONCURRENT = 8
CONCURRENT_ROUNDS = 5
GOALS = {"ttft": 0.12, "ttfa": 0.30, "rtf": 0.20}
ONE_PROCESS_RATIO = 1.6


async def speak(omni: AsyncOmni, question: str, seed: int) -> AnswerTimes:
    """Ask for six seconds of sound and measure the answer."""
    timing = (await omni.generate(question, seed=seed, max_tokens=SIX_SECONDS_TOKENS, ignore_eos=True)).timing
    return AnswerTimes(timing.ttft_s or math.nan, timing.ttfa_s or math.nan, timing.rtf or math.nan, timing.audio_s)


async def servers(benchmark: Benchmark) -> None:
    """Measure the default model: the start of its stack, and answers alone and at once."""
    begin_s = time.perf_counter()
    async with serving(layout_of(Choice(["smol"]))) as stack, AsyncOmni(address=stack.address, max_retries=0) as omni:
        start_s = time.perf_counter() - begin_s
        benchmark.add(Figure("stack_warm_start", start_s, "s", "<= 10", "model in the cache, stages in parallel"))
        with benchmark.part("one answer at a time"):
            await latency(benchmark, omni)
        with benchmark.part(f"{CONCURRENT} answers at once"):
            await at_once(benchmark, omni)


async def latency(benchmark: Benchmark, omni: AsyncOmni) -> None:
    """Compare the servers with the models in one process."""
    async with one_process.started() as ask:
        served, bare = await benchmark.by_turns(
            ROUNDS, partial(speak, omni, QUESTION), lambda number: ask(QUESTION, number, SIX_SECONDS_TOKENS), warm_ups=WARM_UPS
        )
    note = f"median of {len(served)} answers of {median([times.audio for times in served]):.1f} s"
    bare_note = f"the same models without servers, {median([times.audio for times in bare]):.1f} s"
    for name, goal in GOALS.items():
        unit, ours, theirs = "" if name == "rtf" else "s", *([getattr(times, name) for times in each] for each in (served, bare))
        over = median(ours) / median(theirs)
        benchmark.add(
            Figure(name, median(ours), unit, f"<= {goal:g}", note),
            Figure(f"{name}_one_process", median(theirs), unit, "", bare_note),
            Figure(f"{name}_over_one_process", over, "x", f"<= {ONE_PROCESS_RATIO:g}", "medians of the same run"),
        )


async def at_once(benchmark: Benchmark, omni: AsyncOmni) -> None:
    """Compare answers at once with the same answers one by one, in seconds of sound a second."""
    questions = QUESTIONS[: benchmark.size(CONCURRENT, 2)]

    async def one_by_one(number: int) -> list[AnswerTimes]:
        return [await speak(omni, question, 100 * number + n) for n, question in enumerate(questions)]

    async def together(number: int) -> list[AnswerTimes]:
        return await asyncio.gather(*(speak(omni, question, 100 * number + n) for n, question in enumerate(questions)))

    async def rate(call: Awaitable[list[AnswerTimes]]) -> float:
        elapsed_s, answers = await time_call(call)
        return sum(times.audio for times in answers) / elapsed_s

    rates = await benchmark.by_turns(CONCURRENT_ROUNDS, lambda n: rate(together(n)), lambda n: rate(one_by_one(n)))
    benchmark.add(Figure(f"x_concurrent_{CONCURRENT}", ratio(*rates), "x", ">= 2.5", f"median of {len(rates[0])} rounds"))


THINKER_GOALS = {8: 4.5, 32: 8.0}
"""Goals by number of concurrent requests: how many times the tokens per second of one request they should reach."""

SUBJECTS = ("the sea", "rain", "a guitar", "bread", "the moon", "a good friend", "winter", "trains")
THINKER_ROUNDS = 5


async def thinker(benchmark: Benchmark) -> None:
    """Compare the tokens per second of several requests to the Thinker, in this process, with those of one."""
    model, tokens = load_thinker(model_directory() / "thinker"), benchmark.size(ANSWER_TOKENS, 4)
    await model.warm_up()

    async def answer(index: int) -> int:
        """Ask the question with this number; returns the number of tokens."""
        question = f"Tell me fact number {index} about {SUBJECTS[index % len(SUBJECTS)]}."
        turns, sampling = (Turn("user", (question,)),), Sampling(repetition_penalty=1.1)
        prepared = await model.prepare(TextRequest(turns, seed=index, sampling=sampling, max_tokens=tokens, ignore_eos=True))
        async with aclosing(model.generate(prepared, inputs_of(), {"text": 0})) as pieces:
            return sum([len(piece.token_ids) async for piece in pieces if isinstance(piece, TextPiece)])

    async def rate(concurrent: int, number: int) -> float:
        elapsed_s, counts = await time_call(asyncio.gather(*(answer(100 * number + index) for index in range(concurrent))))
        return sum(counts) / elapsed_s

    single, *rates = await benchmark.by_turns(THINKER_ROUNDS, *(partial(rate, concurrent) for concurrent in (1, *THINKER_GOALS)))
    await model.close()
    note = f"of {median(single):.1f} tokens/s for one request; median of {len(single)}, {tokens} tokens each, prompts included, one thread"
    for (concurrent, goal), rates_at_once in zip(THINKER_GOALS.items(), rates, strict=True):
        benchmark.add(Figure(f"thinker_x_{concurrent}", ratio(rates_at_once, single), "x", f">= {goal}", note))


PARTS = {"latency": servers, "thinker alone": thinker, "chain of toys": relay.latency, "relays": relay.relays, "spoken words": asr.measure}

if __name__ == "__main__":
    sys.exit(run("default", arguments(__doc__).parse_args(), PARTS))
