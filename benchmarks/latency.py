"""First text, first sound and speed of the default model: by two clients through the servers, and by the same models in one process without
a server. The second client is independent of the SDK: it records when messages arrive on a synchronous channel."""

from __future__ import annotations

import asyncio
import json
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc

from benchmarks.figures import QUESTION, SIX_SECONDS_TOKENS, SPOKEN, Figure, Report, median, peak_bytes
from omnistage.cli.stack.pipelines import Choice, layout_of
from omnistage.cli.stack.stack import Stack
from omnistage.client import AsyncOmni
from omnistage.v1 import omni_pb2, omni_pb2_grpc, stage_pb2

THRESHOLD = 32768 * 10 ** (-40 / 20)


@dataclass
class EventArrivals:
    """The events of one answer, each with the seconds from the call to its arrival. ttft, ttfa: times to first text and sound."""

    events: list[tuple[float, omni_pb2.GenerateResponse]] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(event.chunk.text.text for _, event in self.events if event.HasField("chunk"))

    @property
    def ttft_s(self) -> float:
        return next(at for at, event in self.events if event.HasField("chunk") and event.chunk.text.text)

    @property
    def ttfa_s(self) -> float:
        """Seconds to the chunk with the first 16-bit sample above -40 dBFS. Raises LookupError for a silent answer."""
        for at, event in self.events:
            data = event.chunk.audio.data if event.HasField("chunk") else b""
            if any(abs(sample) > THRESHOLD for (sample,) in struct.iter_unpack("<h", data)):
                return at
        raise LookupError("the answer is silent")

    @property
    def audio_s(self) -> float:
        sound = [event.chunk for _, event in self.events if event.HasField("chunk") and event.chunk.HasField("audio")]
        return sum(len(chunk.audio.data) / 2 / chunk.audio.channel_count / chunk.audio.sample_rate_hz for chunk in sound)

    @property
    def rtf(self) -> float:
        last = max(at for at, event in self.events if event.HasField("chunk") and event.chunk.audio.data)
        return last / self.audio_s


class RawClient:
    """A client of the router at `address`, with one synchronous channel and no option set."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)
        grpc.channel_ready_future(self._channel).result(timeout=10)
        self._stub = omni_pb2_grpc.OmniServiceStub(self._channel)

    def ask(self, question: str, *, seed: int, max_tokens: int) -> EventArrivals:
        message = stage_pb2.Message(role="user", parts=[stage_pb2.Part(text=question)])
        thinker = stage_pb2.ThinkerParams(messages=[message], max_tokens=max_tokens, ignore_eos=True)
        request = omni_pb2.GenerateRequest(seed=seed, thinker=thinker)
        arrivals = EventArrivals()
        begin_s = time.perf_counter()
        for event in self._stub.Generate(request, timeout=60):
            arrivals.events.append((time.perf_counter() - begin_s, event))
        return arrivals

    def close(self) -> None:
        self._channel.close()


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
                report.add(*await _alone(omni, stack.address))
            with report.part(f"{CONCURRENT} answers at once"):
                report.add(await _concurrent(omni))
        report.add(*(Figure(f"peak_memory_{child.name}", peak_bytes(child.pid) / 2**20, "MiB") for child in stack.children))
    finally:
        await stack.stop()


async def _alone(omni: AsyncOmni, address: str) -> list[Figure]:
    """Ask the SDK, the raw client and the models in one process in turn, and make figures of the medians."""
    raw = RawClient(address)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.one_process", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("no pipes to the one process")
    await process.stdout.readline()
    sdk: list[dict[str, float]] = []
    second: list[dict[str, float]] = []
    one: list[dict[str, float]] = []
    for number in range(WARM_UPS + ROUNDS):
        answer = await omni.generate(QUESTION, seed=number, max_tokens=SIX_SECONDS_TOKENS, ignore_eos=True)
        timing = answer.timing
        arrivals = await asyncio.to_thread(raw.ask, QUESTION, seed=number, max_tokens=SIX_SECONDS_TOKENS)
        if arrivals.text != answer.text:
            raise RuntimeError("two clients with one seed got two answers")
        process.stdin.write(json.dumps({"question": QUESTION, "seed": number, "max_tokens": SIX_SECONDS_TOKENS}).encode() + b"\n")
        times = json.loads(await process.stdout.readline())
        if number >= WARM_UPS:
            sdk.append({"ttft": timing.ttft_s or 0, "ttfa": timing.ttfa_s or 0, "rtf": timing.rtf or 0, "audio": timing.audio_s})
            second.append({"ttft": arrivals.ttft_s, "ttfa": arrivals.ttfa_s, "rtf": arrivals.rtf})
            one.append({"ttft": times["ttft_s"], "ttfa": times["ttfa_s"], "rtf": times["rtf"], "audio": times["audio_s"]})
    process.stdin.close()
    await process.wait()
    raw.close()
    return _figures(sdk, second, one)


def _figures(sdk: Sequence[dict[str, float]], second: Sequence[dict[str, float]], one: Sequence[dict[str, float]]) -> list[Figure]:
    """The figures of the times of answers by the SDK, by the raw client and in one process."""
    note = f"median of {len(sdk)} answers of {median([run['audio'] for run in sdk]):.1f} s"
    figures = []
    for name, goal in GOALS.items():
        unit = "" if name == "rtf" else "s"
        served = median([run[name] for run in sdk])
        baseline = median([run[name] for run in one])
        figures += [
            Figure(name, served, unit, f"<= {goal:g}", note),
            Figure(
                f"{name}_second_client", median([run[name] for run in second]), unit, f"<= {goal:g}", "raw arrivals, synchronous client"
            ),
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
