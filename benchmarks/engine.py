"""`python -m benchmarks.engine`: the engine with the default Thinker and with Qwen2.5-Omni's: throughput, cost of a step, fairness."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import torch

from benchmarks import by_hand, omni
from benchmarks.figures import Figure, Report, median, run
from helpers.engines import read
from omnistage.engine.adapter import StepRows, TokenHead
from omnistage.engine.decoder import PackedDecoder
from omnistage.engine.engine import Engine
from omnistage.engine.memory import page_bytes
from omnistage.engine.request import Prompt, SequenceRequest
from omnistage.engine.sampler import Draws, sample
from omnistage.engine.scheduler import Run, SchedulerLimits
from omnistage.engine.sequence import SequenceStream
from omnistage.engine.types import Sampling
from omnistage.models.checkpoint.weights import Weights
from omnistage.models.devices import dtype_of
from omnistage.models.smol.store import model_directory
from omnistage.models.smol.thinker import read_decoder

ROUNDS = 5
PROMPT, ANSWER = 40, 128
LONG, SHORT = 1000, 20
BEHIND_S = 0.05
GIANTS, GIANT_ITEMS, SMALL = 3, 8000, 100
KV_BYTES = 512 << 20
VOCABULARY = 152_000
SAMPLING = Sampling(temperature=0.7, top_p=0.95, repetition_penalty=1.1)
THROUGHPUT = {"amx": {8: 7.0, 32: 18.0}, "other": {8: 5.5, 32: 10.0}}
"""Goals by kind of CPU and number of requests: how many times the tokens per second of one request they should reach."""
STEPS = {8: 1.35, 32: 1.7}
"""Goals for the time of a step divided by the time to read the weights once, by number of rows."""

IDS = range(1000, 40_000)
"""Ids of ordinary tokens."""

_ids = random.Random(0)


def isa() -> str:
    """The kind of this CPU: "amx" if it has products of bfloat16 matrices that this process may use, else "other"."""
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    return "amx" if "amx_bf16" in flags and "ONEDNN_MAX_CPU_ISA" not in os.environ else "other"


def prompt(rows: int, ids: range = IDS) -> Prompt:
    """A prompt whose beginning no other prompt has."""
    return Prompt.of_tokens(_ids.choice(ids) for _ in range(rows))


def request(rows: int, items: int, history: int = 0, ids: range = IDS) -> SequenceRequest:
    earlier = tuple((_ids.choice(ids),) for _ in range(history))
    return SequenceRequest(prompt(rows, ids), _ids.getrandbits(32), history + items, SAMPLING, history=earlier)


async def first_s(engine: Engine, sequence_request: SequenceRequest) -> float:
    """Seconds to the first item of an answer, which is cancelled then."""
    started = time.perf_counter()
    stream = engine.submit(sequence_request)
    while all(event.item is None for event in await stream.take()):
        pass
    taken_s = time.perf_counter() - started
    await stream.aclose()
    return taken_s


async def tokens_per_s(engine: Engine, concurrent: int) -> float:
    """Tokens per second of `concurrent` requests that are asked at once, prompts included."""
    started = time.perf_counter()
    answers = await asyncio.gather(*(read(engine.submit(request(PROMPT, ANSWER))) for _ in range(concurrent)))
    return sum(map(len, answers)) / (time.perf_counter() - started)


async def throughput(engine: Engine, report: Report) -> None:
    """Measure the tokens per second of one request and of several at once, and how many times as many the several have."""
    goals = THROUGHPUT[isa()]
    rates: dict[int, list[float]] = {1: [], **{concurrent: [] for concurrent in goals}}
    for _ in range(ROUNDS):  # The rounds are interleaved, so that other load on the machine touches all of them alike.
        for concurrent, measured in rates.items():
            measured.append(await tokens_per_s(engine, concurrent))
    note = f"median of {ROUNDS}; {PROMPT} + {ANSWER} tokens each, prompts included; {isa()}, {dtype_of('cpu')}"
    report.add(*(Figure(f"tokens_per_s_{concurrent}", median(measured), "tokens/s", "", note) for concurrent, measured in rates.items()))
    for concurrent, goal in goals.items():
        ratio = median([many_rate / single_rate for many_rate, single_rate in zip(rates[concurrent], rates[1], strict=True)])
        report.add(Figure(f"x_{concurrent}", ratio, "x", f">= {goal}", note))


def seconds(call: Callable[[], object], rounds: int = 9) -> float:
    """The median seconds of a call, after a first call that does not count."""
    call()
    durations = []
    for _ in range(rounds):
        started = time.perf_counter()
        call()
        durations.append(time.perf_counter() - started)
    return median(durations)


def running(engine: Engine, rows: int, ids: range = IDS) -> list[Run]:
    """The runs of one step of `rows` requests, each in the middle of its answer, with pages of its own."""
    runs = []
    for _ in range(rows):
        sequence_request = request(PROMPT, ANSWER, ANSWER // 2 - 1, ids)
        sequence = by_hand.begin(engine, sequence_request, PROMPT + len(sequence_request.history))
        sequence.computed = sequence.known_rows - 1
        runs.append(Run(sequence, sequence.computed, 1))
    return runs


def steps(decoder: PackedDecoder, weights: Sequence[torch.Tensor], report: Report) -> None:
    """Measure the time of a step of several rows, divided by the time to read all weights once."""
    engine = new_engine(decoder)
    with torch.inference_mode():
        floor_s = seconds(lambda: [weight.sum() for weight in weights])
        words_s = seconds(lambda: [weight.flatten().view(torch.float32).sum() for weight in weights])
        report.add(
            Figure("floor", floor_s * 1000, "ms", "", f"a plain sum over the weights, in {decoder.spec.dtype}; {isa()}"),
            Figure("floor_as_words", words_s * 1000, "ms", "", "the same bytes summed as float32: the memory alone"),
        )
        for rows in (1, *STEPS):
            runs = running(engine, rows)
            step_s = seconds(lambda runs=runs: by_hand.run(engine, runs))  # type: ignore[misc]
            note = f"{PROMPT} + {ANSWER // 2} rows each, draws included; over a plain sum over the weights"
            goal = f"<= {STEPS[rows]}" if rows in STEPS else ""
            report.add(Figure(f"step_over_floor_{rows}", step_s / floor_s, "x", goal, note))


def drawing(decoder: PackedDecoder, report: Report) -> None:
    """Divide the time to draw tokens of a large vocabulary by the time of a step's matrix products, default model, as many rows."""
    generator = torch.Generator().manual_seed(0)
    rows = StepRows(torch.zeros(32, 1, dtype=torch.int64), torch.zeros(1, 32, dtype=torch.int64))

    def skip_attention(layer: int, queries: torch.Tensor, keys_values: torch.Tensor) -> torch.Tensor:
        return queries.flatten(1)

    cases = {"": (4.0, Sampling(temperature=1.0)), "_flat_top_p": (0.1, Sampling(temperature=1.0, top_p=0.95))}
    with torch.inference_mode():
        products_s = seconds(lambda: decoder.logits(decoder.hidden(rows, skip_attention).last))
        for name, (spread, sampling) in cases.items():
            logits = torch.randn(32, VOCABULARY, generator=generator).mul_(spread).to(decoder.spec.dtype)
            draws = [Draws(sampling, seed, False) for seed in range(32)]
            sampled_s = seconds(lambda logits=logits, draws=draws: sample(logits, draws, [()] * 32))  # type: ignore[misc]
            note = (
                f"32 rows, temperature 1, top-p {sampling.top_p}, {VOCABULARY} logits of spread {spread:g}; over a step without attention"
            )
            report.add(Figure(f"sampling_share_152k{name}", sampled_s / products_s, "", "" if name else "<= 0.15", note))


async def bystander(engine: Engine, report: Report) -> None:
    """Measure how fast an answer goes on while a long prompt is read, as a share of its speed alone."""
    shares = []
    for _ in range(ROUNDS):
        stream = engine.submit(request(PROMPT, 4000))
        await stream.take()
        alone_rate = await rate_until(stream, asyncio.sleep(2.0))
        beside_rate = await rate_until(stream, first_s(engine, request(LONG, 4)))
        await stream.aclose()
        shares.append(beside_rate / alone_rate)
    note = f"tokens/s of an answer while a prompt of {LONG} tokens is read, over alone; median of {ROUNDS}"
    report.add(Figure("long_prompt_bystander", median(shares), "", ">= 0.5", note))


async def rate_until(stream: SequenceStream, until: Awaitable[object]) -> float:
    """Items per second that a stream gives until something else is done."""
    started, items = time.perf_counter(), 0
    task = asyncio.ensure_future(until)
    while not task.done():
        items += len(await stream.take())
    await task
    return items / (time.perf_counter() - started)


async def short_after_long(engine: Engine, report: Report) -> None:
    """Measure how many times as long the first token of a short prompt takes just after a long prompt as it takes alone."""
    ratios = []
    for _ in range(ROUNDS):
        alone_s = await first_s(engine, request(SHORT, 4))
        long = asyncio.create_task(first_s(engine, request(LONG, 4)))
        await asyncio.sleep(BEHIND_S)
        ratios.append(await first_s(engine, request(SHORT, 4)) / alone_s)
        await long
    note = f"first token of {SHORT} tokens, {BEHIND_S * 1000:.0f} ms behind a prompt of {LONG}, over alone; median of {ROUNDS}"
    report.add(Figure("short_behind_long", median(ratios), "x", "<= 3", note))


async def measure_resumed(engine: Engine, report: Report) -> None:
    """Measure how many times as long the first new token takes after a long history as it takes after a prompt of that length."""
    ratios = []
    for _ in range(ROUNDS):
        prefill = await first_s(engine, request(PROMPT + LONG, 4))
        ratios.append(await first_s(engine, request(PROMPT, 4, history=LONG)) / prefill)
    note = f"first new token with {LONG} tokens of history, over a prompt with as many more tokens; median of {ROUNDS}"
    report.add(Figure("resume_1000_over_prefill", median(ratios), "x", "<= 1.3", note))


async def beside_giants(engine: Engine, report: Report) -> None:
    """Measure how many times as long the first tokens of small requests take while giant ones run as in an empty engine."""
    ratios = []
    for _ in range(3):
        empty = await slowest_first(engine)
        giants = [engine.submit(request(PROMPT, GIANT_ITEMS)) for _ in range(GIANTS)]
        reading = [asyncio.create_task(read(giant)) for giant in giants]
        await asyncio.sleep(1.0)
        ratios.append(await slowest_first(engine) / empty)
        for task, giant in zip(reading, giants, strict=True):
            task.cancel()
            await giant.aclose()
    note = (
        f"first token of the slowest of {SMALL} small requests beside {GIANTS} of {GIANT_ITEMS} tokens, over an empty engine; median of 3"
    )
    report.add(Figure("small_beside_giants", median(ratios), "x", "<= 3", note))


async def slowest_first(engine: Engine) -> float:
    """Ask SMALL small requests at once and read their answers; returns the longest time to a first token, in seconds."""

    async def one() -> float:
        started = time.perf_counter()
        stream = engine.submit(request(SHORT, 8))
        await stream.take()
        taken_s = time.perf_counter() - started
        await read(stream)
        return taken_s

    return max(await asyncio.gather(*(one() for _ in range(SMALL))))


def new_engine(decoder: PackedDecoder) -> Engine:
    limits = SchedulerLimits(max_sequences=64, max_waiting=2 * SMALL)
    return Engine(decoder, TokenHead(decoder.logits), pages=KV_BYTES // page_bytes(decoder.spec), limits=limits, kept_pages=0)


async def measure_served(decoder: PackedDecoder, report: Report) -> None:
    """Measure the parts that need the engine's own thread."""
    engine = new_engine(decoder)
    await tokens_per_s(engine, 2)
    for name, part in {
        "throughput": throughput,
        "bystander": bystander,
        "behind a long prompt": short_after_long,
        "resume": measure_resumed,
        "beside giants": beside_giants,
    }.items():
        with report.part(name):
            await part(engine, report)
    await engine.close()


def measure(report: Report) -> None:
    torch.set_num_threads(1)
    directory = model_directory() / "thinker"
    decoder = read_decoder(directory, getattr(torch, dtype_of("cpu")))
    with Weights(directory) as stored:
        weights = [tensor for name in stored.names if (tensor := stored.read(name)) is not None]
    with report.part("steps"):
        steps(decoder, [weight.to(decoder.spec.dtype) for weight in weights if weight.numel() % 2 == 0], report)
    with report.part("sampling"):
        drawing(decoder, report)
    asyncio.run(measure_served(decoder, report))


if __name__ == "__main__":
    sys.exit(run("engine", __doc__, {"engine": measure, "omni": omni.measure}))
