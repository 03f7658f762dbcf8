"""`python -m benchmarks.default`: all figures of the default model, as benchmarks/out/default.json and as a table."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

from benchmarks import asr, relay
from benchmarks.figures import QUESTION, QUESTIONS, SIX_SECONDS_TOKENS, Figure, Report, median, peak_bytes, run
from omnistage.cli.stack.pipelines import Choice, layout_of
from omnistage.cli.stack.stack import Stack
from omnistage.client import AsyncOmni
from omnistage.engine.types import Sampling
from omnistage.models.conversation import Turn
from omnistage.models.interface import TextPiece, TextRequest, inputs_of
from omnistage.models.smol.store import model_directory
from omnistage.models.smol.thinker import SmolThinker, load_thinker

WARM_UPS = 5
ROUNDS = 20
CONCURRENT = 8
CONCURRENT_ROUNDS = 5
GOALS = {"ttft": 0.12, "ttfa": 0.30, "rtf": 0.20}
ONE_PROCESS_RATIO = 1.6


async def measure_servers(report: Report) -> None:
    """Measure the default model: the start of its stack, answers alone and at once, and memory."""
    layout = layout_of(Choice(["smol"]))
    begin_s = time.perf_counter()
    stack = Stack(layout)
    await stack.start()
    started = time.perf_counter() - begin_s
    try:
        async with AsyncOmni(address=stack.address, max_retries=0) as omni:
            report.add(Figure("stack_warm_start", started, "s", "<= 10", "model in the cache, stages in parallel"))
            with report.part("one answer at a time"):
                report.add(*await _measure_alone(omni))
            with report.part(f"{CONCURRENT} answers at once"):
                report.add(await _concurrent(omni))
        report.add(*(Figure(f"peak_memory_{child.name}", peak_bytes(child.pid) / 2**20, "MiB") for child in stack.children))
    finally:
        await stack.stop()


async def _measure_alone(omni: AsyncOmni) -> list[Figure]:
    """Ask the servers and the models in one process in turn, and make figures of the medians."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.one_process", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("no pipes to the one process")
    await process.stdout.readline()
    sdk: list[dict[str, float]] = []
    one: list[dict[str, float]] = []
    for number in range(WARM_UPS + ROUNDS):
        answer = await omni.generate(QUESTION, seed=number, max_tokens=SIX_SECONDS_TOKENS, ignore_eos=True)
        timing = answer.timing
        process.stdin.write(json.dumps({"question": QUESTION, "seed": number, "max_tokens": SIX_SECONDS_TOKENS}).encode() + b"\n")
        times = json.loads(await process.stdout.readline())
        if number >= WARM_UPS:
            sdk.append({"ttft": timing.ttft_s or 0, "ttfa": timing.ttfa_s or 0, "rtf": timing.rtf or 0, "audio": timing.audio_s})
            one.append({"ttft": times["ttft_s"], "ttfa": times["ttfa_s"], "rtf": times["rtf"], "audio": times["audio_s"]})
    process.stdin.close()
    await process.wait()
    return _figures(sdk, one)


def _figures(sdk: Sequence[dict[str, float]], one: Sequence[dict[str, float]]) -> list[Figure]:
    """The figures of the times of answers by the servers and in one process."""
    note = f"median of {len(sdk)} answers of {median([run['audio'] for run in sdk]):.1f} s"
    figures = []
    for name, goal in GOALS.items():
        unit = "" if name == "rtf" else "s"
        served = median([run[name] for run in sdk])
        baseline = median([run[name] for run in one])
        figures += [
            Figure(name, served, unit, f"<= {goal:g}", note),
            Figure(
                f"{name}_one_process", baseline, unit, "", f"the same models without servers, {median([run['audio'] for run in one]):.1f} s"
            ),
            Figure(f"{name}_over_one_process", served / baseline, "x", f"<= {ONE_PROCESS_RATIO:g}", "medians of the same run"),
        ]
    return figures


async def _concurrent(omni: AsyncOmni) -> Figure:
    """The speed of answers at once, in seconds of sound per second, divided by the speed of the same answers one by one."""
    ratios = []
    for number in range(CONCURRENT_ROUNDS):
        questions = [(QUESTIONS[i], number * CONCURRENT + i) for i in range(CONCURRENT)]
        begin_s = time.perf_counter()
        one_by_one = [
            (await omni.generate(question, seed=seed, max_tokens=SIX_SECONDS_TOKENS, ignore_eos=True)).timing.audio_s
            for question, seed in questions
        ]
        together_begin_s = time.perf_counter()
        answers = await asyncio.gather(
            *(omni.generate(question, seed=seed, max_tokens=SIX_SECONDS_TOKENS, ignore_eos=True) for question, seed in questions)
        )
        together = [answer.timing.audio_s for answer in answers]
        together_rate = sum(together) / (time.perf_counter() - together_begin_s)
        ratios.append(together_rate / (sum(one_by_one) / (together_begin_s - begin_s)))
    return Figure(f"x_concurrent_{CONCURRENT}", median(ratios), "x", ">= 2.5", f"median of {CONCURRENT_ROUNDS} rounds")


THINKER_GOALS = {1: 1.0, 8: 4.5, 32: 8.0}
"""Goals by number of concurrent requests: how many times the tokens per second of one request they should reach."""

ANSWER_TOKENS = 96
SUBJECTS = ("the sea", "rain", "a guitar", "bread", "the moon", "a good friend", "winter", "trains")
THINKER_ROUNDS = 5


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
    async with aclosing(model.generate(await model.prepare(request), inputs_of(), {"text": 0})) as pieces:
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
    rates: dict[int, list[float]] = {concurrent: [] for concurrent in THINKER_GOALS}
    # The rounds are interleaved, so that other load on the machine touches all of them alike.
    for turn in range(THINKER_ROUNDS):
        for concurrent, measured in rates.items():
            measured.append(await rate(model, concurrent, 100 * turn))
    answers = [await answer(model, 1000 + index) for index in range(THINKER_ROUNDS)]
    note = f"median of {THINKER_ROUNDS}, {ANSWER_TOKENS} tokens each, prompts included, one thread"
    first = median([one.first_s for one in answers])
    report.add(Figure("thinker_ttft_alone", first, "s", "<= 0.12", "first token; the system prompt is kept from before"))
    report.add(
        Figure(
            "thinker_token_alone",
            median([(one.whole_s - one.first_s) / (one.tokens - 1) * 1000 for one in answers]),
            "ms",
            "<= 25",
            "between tokens of one request",
        )
    )
    single = median(rates[1])
    for concurrent, goal in THINKER_GOALS.items():
        speed = median(rates[concurrent])
        report.add(Figure(f"thinker_tokens_per_s_{concurrent}", speed, "tokens/s", "", note))
        if concurrent > 1:
            ratio = median([many_rate / one_rate for many_rate, one_rate in zip(rates[concurrent], rates[1], strict=True)])
            report.add(Figure(f"thinker_x_{concurrent}", ratio, "x", f">= {goal}", f"of {single:.1f} tokens/s for one request"))


async def measure_thinker(report: Report) -> None:
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
    sys.exit(
        run(
            "default",
            __doc__,
            {
                "latency": measure_servers,
                "thinker alone": measure_thinker,
                "chain of toys": relay.measure,
                "relays": relay.relaying,
                "spoken words": asr.measure,
            },
        )
    )
