"""First text, first sound and speed of the default model: through the servers, and by the same models in one process without a server."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence

from benchmarks.figures import QUESTION, SIX_SECONDS_TOKENS, SPOKEN, Figure, Report, median, peak_bytes
from omnistage.cli.stack.pipelines import Choice, layout_of
from omnistage.cli.stack.stack import Stack
from omnistage.client import AsyncOmni

WARM_UPS = 5
ROUNDS = 20
CONCURRENT = 8
CONCURRENT_ROUNDS = 5
GOALS = {"ttft": 0.12, "ttfa": 0.30, "rtf": 0.20}
ONE_PROCESS_RATIO = 1.6


async def measure(report: Report) -> None:
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
                report.add(*await _alone(omni))
            with report.part(f"{CONCURRENT} answers at once"):
                report.add(await _concurrent(omni))
        report.add(*(Figure(f"peak_memory_{child.name}", peak_bytes(child.pid) / 2**20, "MiB") for child in stack.children))
    finally:
        await stack.stop()


async def _alone(omni: AsyncOmni) -> list[Figure]:
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
        questions = [(SPOKEN[i], number * CONCURRENT + i) for i in range(CONCURRENT)]
        begin_s = time.perf_counter()
        one_by_one = [
            (await omni.generate(question, seed=seed, max_tokens=SIX_SECONDS_TOKENS, ignore_eos=True)).timing.audio_s
            for question, seed in questions
        ]
        between = time.perf_counter()
        answers = await asyncio.gather(
            *(omni.generate(question, seed=seed, max_tokens=SIX_SECONDS_TOKENS, ignore_eos=True) for question, seed in questions)
        )
        together = [answer.timing.audio_s for answer in answers]
        ratios.append((sum(together) / (time.perf_counter() - between)) / (sum(one_by_one) / (between - begin_s)))
    return Figure(f"x_concurrent_{CONCURRENT}", median(ratios), "x", ">= 2.5", f"median of {CONCURRENT_ROUNDS} rounds")
