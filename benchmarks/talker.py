"""`python -m benchmarks.talker`: speech while text is being written, by Qwen2.5-Omni with random weights. Thinker and Talker as processes
on a checkpoint of size small, and the Talker alone on one of size 100m."""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from benchmarks import by_hand
from benchmarks.figures import Figure, Report, arguments, median
from helpers.fleet import Fleet, fleet
from helpers.models import ROW_PORTS, RowInputs
from helpers.run import RunStream, messages, open_of, run_once
from helpers.servers import omni_stub, stage_stub
from helpers.waiting import until
from omnistage.engine.engine import Engine
from omnistage.engine.memory import PAGE_ROWS
from omnistage.engine.request import Given, Prompt, SequenceRequest
from omnistage.engine.scheduler import Run
from omnistage.models.conversation import Turn
from omnistage.models.interface import Sampling, SpeechRequest, TensorRows, TextRequest
from omnistage.models.options import LoadOptions
from omnistage.models.qwen2_5_omni.config import TalkerConfig
from omnistage.models.qwen2_5_omni.talker import Qwen2_5Talker, load_talker
from omnistage.models.qwen2_5_omni.thinker import load_thinker
from omnistage.models.text.engine_model import array_of
from omnistage.models.tiny.makers import CheckpointOrder, make_tiny
from omnistage.v1 import chunk_pb2, omni_pb2, stage_pb2

ROUNDS = 5
TOKENS = 200
PROMPT_CHARACTERS = 1200
FRAMES = 64
SPEAKERS = 8
ALIKE = (0.8, 1.25)
"""Bounds of the time of the Talker alone divided by the time of the Thinker alone."""

NEVER_ENDS = {8294: -100.0}
SAMPLING = Sampling(temperature=0.9, top_k=40, top_p=0.8, repetition_penalty=1.05, logit_bias=NEVER_ENDS)


def words(seed: int, characters: int) -> str:
    return "".join(random.Random(seed).choices("abcdefgh ", k=characters))


def thinker_params(seed: int, characters: int = 80) -> stage_pb2.ThinkerParams:
    sampling = stage_pb2.Sampling(temperature=1)
    return stage_pb2.ThinkerParams(messages=messages(words(seed, characters)), sampling=sampling, max_tokens=TOKENS, ignore_eos=True)


def talker_params(frames: int) -> stage_pb2.TalkerParams:
    sampling = stage_pb2.Sampling(temperature=0.9, top_k=40, top_p=0.8, repetition_penalty=1.05, logit_bias=NEVER_ENDS)
    return stage_pb2.TalkerParams(sampling=sampling, max_frames=frames)


def question(seed: int, frames: int, characters: int = 80) -> omni_pb2.GenerateRequest:
    return omni_pb2.GenerateRequest(seed=seed, thinker=thinker_params(seed, characters), talker=talker_params(frames))


async def time_call(call: Callable[[], Awaitable[object]]) -> float:
    started = time.perf_counter()
    await call()
    return time.perf_counter() - started


# Processes -----------------------------------------------------------------------------------------------------------------------------


class StageAlone:
    """Runs the Thinker or the Talker of a fleet by itself: this class acts as the stages before and after it."""

    def __init__(self, running: Fleet) -> None:
        self._addresses = {kind: running.address(f"{kind}-0") for kind in ("thinker", "talker")}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> StageAlone:
        self._stubs = {kind: await self._stack.enter_async_context(stage_stub(address)) for kind, address in self._addresses.items()}
        self._descriptions = {kind: await stub.Describe(stage_pb2.DescribeRequest(), timeout=10) for kind, stub in self._stubs.items()}
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def think(self, seed: int) -> list[chunk_pb2.Chunk]:
        """Ask the Thinker for TOKENS tokens; returns their rows, as chunks for a Talker."""
        opening = open_of(self._descriptions["thinker"], seed=seed, params=stage_pb2.StageParams(thinker=thinker_params(seed)))
        answer = await run_once(self._stubs["thinker"], opening)
        return [chunk for port in ROW_PORTS for chunk in answer.of(port)]

    async def speak(self, rows: Sequence[chunk_pb2.Chunk], seed: int, frames: int) -> None:
        """Let the Talker speak `frames` frames of these rows, and check their number."""
        caller = RunStream(self._stubs["talker"])
        await caller.send(open=open_of(self._descriptions["talker"], seed=seed, params=stage_pb2.StageParams(talker=talker_params(frames))))
        await caller.opened()
        for chunk in rows:
            await caller.until(lambda answer, chunk=chunk: answer.credits[chunk.port] > chunk.seq)  # type: ignore[misc]
            await caller.send(chunk=chunk)
        answer = await caller.finish()
        assert len(answer.codes()) == frames


async def overlap(running: Fleet, report: Report) -> None:
    """Compare the chain with its two stages one after the other, with so many frames that speech takes about as long as the text."""
    async with StageAlone(running) as stages, omni_stub(running.address("router")) as stub:
        rows = await stages.think(0)
        await stages.speak(rows, 0, TOKENS)
        text_s, speech_s = await time_call(lambda: stages.think(1)), await time_call(lambda: stages.speak(rows, 1, TOKENS))
        frames = round(TOKENS * text_s / speech_s)
        ratios, texts, speeches, slowdowns = [], [], [], []
        for n in range(2, 2 + ROUNDS):
            text_s = await time_call(lambda n=n: stages.think(n))  # type: ignore[misc]
            speech_s = await time_call(lambda n=n: stages.speak(rows, n, frames))  # type: ignore[misc]
            chain_s = await time_call(lambda n=n: read_whole(stub.Generate(question(n, frames), timeout=600), frames))  # type: ignore[misc]
            both_s = await time_call(lambda n=n: asyncio.gather(stages.think(n + 100), stages.speak(rows, n, frames)))  # type: ignore[misc]
            ratios.append(chain_s / (text_s + speech_s))
            slowdowns.append(both_s / max(text_s, speech_s))
            texts.append(text_s)
            speeches.append(speech_s)
    share = median(speeches) / median(texts)
    if not ALIKE[0] <= share <= ALIKE[1]:
        raise RuntimeError(f"speech alone takes {share:.2f} of the time of text alone: the figure would say nothing")
    note = f"{TOKENS} tokens and {frames} frames through the router, over both stages one after the other; small; median of {ROUNDS}"
    report.add(
        Figure("thinker_alone", median(texts), "s", "", f"{TOKENS} tokens with their rows, by gRPC"),
        Figure("talker_alone", median(speeches), "s", "", f"{frames} frames of rows that are there, by gRPC; {share:.2f} of the Thinker"),
        Figure("slowdown_of_two", median(slowdowns), "x", "", "both at once, independent of each other, over the slower one alone"),
        Figure("x_overlap", median(ratios), "x", "<= 0.7", note),
    )


async def read_whole(call: object, frames: int) -> None:
    """Read an answer to its end and check that it has `frames` codes."""
    codes = 0
    async for message in call:  # type: ignore[attr-defined]
        codes += sum(chunk.count for chunk in _chunks(message) if chunk.port == "codes")
    assert codes == frames


def _chunks(message: omni_pb2.GenerateResponse) -> Sequence[chunk_pb2.Chunk]:
    return [message.chunk] if message.HasField("chunk") else message.chunks.chunks


async def first_code_s(running: Fleet, seed: int) -> float:
    """Seconds to the first code of an answer through the router; the prompt is in no cache."""
    async with omni_stub(running.address("router")) as stub:
        started = time.perf_counter()
        call = stub.Generate(question(seed, FRAMES, PROMPT_CHARACTERS), timeout=60)
        async for message in call:
            if any(chunk.port == "codes" and chunk.count for chunk in _chunks(message)):
                taken_s = time.perf_counter() - started
                call.cancel()
                return taken_s
    raise RuntimeError("no code came")


async def first_code(running: Fleet, folder: Path, report: Report) -> None:
    """Compare the time to the first code with the model calls that it needs: the prompt and two steps of the Thinker, and one of the
    Talker."""
    options = LoadOptions(path=folder)
    thinker, talker = load_thinker(folder, options), load_talker(folder, options)
    await first_code_s(running, 99)
    ratios, paths = [], []
    for n in range(100, 100 + 2 * ROUNDS):
        request = TextRequest((Turn("user", (words(n, PROMPT_CHARACTERS),)),), seed=n, max_tokens=TOKENS, ignore_eos=True)
        text = SequenceRequest(Prompt.of_tokens((await thinker.prepare(request)).prompt_ids), n, TOKENS, taps_from=0)
        rows = torch.randn(len(text.prompt) + 2, talker.config.row_size).to(talker.engine.spec.dtype)
        with torch.inference_mode():
            path_s = computed_s(thinker.engine, text, steps=2)
            path_s += computed_s(talker.engine, speech_of(talker.config, len(rows), n), steps=1, vectors=rows)
        ratios.append(await first_code_s(running, n) / path_s)
        paths.append(path_s)
    await asyncio.gather(thinker.close(), talker.close())
    calls = f"{median(paths) * 1000:.0f} ms of calls"
    note = f"prompts of {len(text.prompt)} tokens, through the router; over {calls}; small; median of {len(ratios)}"
    report.add(Figure("first_code_over_critical_path", median(ratios), "x", "<= 1.25", note))


def speech_of(config: TalkerConfig, rows: int, seed: int) -> SequenceRequest:
    """The request of a speech, as the Talker makes it. rows: number of rows of the prompt; their vectors come later."""
    codec = config.codec
    items = np.full((rows, 1), config.blank_item, np.int64)
    items[-2:, 0] = codec.pad, codec.bos
    banned, seen_ids = frozenset({codec.bos}), frozenset({codec.mask, codec.pad, codec.bos})
    return SequenceRequest(Prompt(items, given_later=True), seed, FRAMES, SAMPLING, banned=banned, seen_ids=seen_ids, appended=True)


def computed_s(engine: Engine, request: SequenceRequest, steps: int, vectors: torch.Tensor | None = None) -> float:
    """Seconds to read a prompt and to make `steps` steps after it, in all. vectors: as in `steps_s`."""
    return sum(steps_s(engine, request, steps, vectors))


def steps_s(engine: Engine, request: SequenceRequest, steps: int, vectors: torch.Tensor | None = None) -> list[float]:
    """Seconds to read a prompt, then the seconds of each of `steps` steps after it. vectors: of the prompt's rows, [rows, width]; the last
    vector serves for the row of each step too."""
    sequence = by_hand.begin(engine, request, len(request.prompt) + steps)
    if vectors is not None:
        sequence.give(Given(0, vectors))
        sequence.append(vectors[-1:], end=True)
    clock = [time.perf_counter()]
    for first in range(0, len(request.prompt), 512):
        end = min(first + 512, len(request.prompt))
        by_hand.run(engine, [Run(sequence, at, min(PAGE_ROWS, end - at)) for at in range(first, end, PAGE_ROWS)])
    clock.append(time.perf_counter())
    for step in range(steps):
        sequence.items.append((7,) * engine.spec.codebooks)
        by_hand.run(engine, [Run(sequence, len(request.prompt) + step, 1)])
        clock.append(time.perf_counter())
    by_hand.end(engine, sequence)
    return [after - before for before, after in pairwise(clock)]


# The Talker alone ----------------------------------------------------------------------------------------------------------------------


class MeasuredSpeech:
    """A speech by the Talker alone. rows: how many rows of the answer it gets; with only one it starves."""

    def __init__(self, talker: Qwen2_5Talker, seed: int, rows: int) -> None:
        source = np.random.default_rng(seed)
        self._talker, self._request, self._line = talker, SpeechRequest(seed, sampling=SAMPLING, max_frames=FRAMES), RowInputs()
        values = torch.from_numpy(source.standard_normal((40 + rows, talker.config.row_size), np.float32)).to(talker.engine.spec.dtype)
        self._line.put(TensorRows("prompt", array_of(values[:40]), last=True))
        self._line.put(TensorRows("places", np.repeat(np.arange(40, dtype=np.int32)[:, None], 3, 1), last=True))
        self._line.put(TensorRows("hidden", array_of(values[40:]), last=rows > 1))

    async def speak(self) -> int:
        """Speak; returns the number of codes."""
        codes = 0
        async with aclosing(self._talker.speak(await self._talker.prepare(self._request), self._line.inputs(), {"codes": 0})) as frames:
            async for piece in frames:
                codes += len(piece.rows)
        return codes


async def rate(talker: Qwen2_5Talker, seeds: Sequence[int]) -> float:
    """Codes per second of speeches that begin at the same time, one for each seed."""
    started = time.perf_counter()
    codes = await asyncio.gather(*(MeasuredSpeech(talker, seed, FRAMES).speak() for seed in seeds))
    assert codes == [FRAMES] * len(seeds)
    return sum(codes) / (time.perf_counter() - started)


async def speakers(talker: Qwen2_5Talker, report: Report) -> None:
    """Compare the rate of SPEAKERS speeches at once with one by one, and with the rate while others starve."""
    together, starved = [], []
    await rate(talker, [0])
    for n in range(ROUNDS):
        seeds = range(100 * n + 1, 100 * n + 1 + SPEAKERS)
        alone_rates = [await rate(talker, [seed]) for seed in seeds]
        ready = await rate(talker, seeds)
        together.append(ready / median(alone_rates))
        waiting = [asyncio.ensure_future(MeasuredSpeech(talker, seed + 50, 1).speak()) for seed in seeds]
        await until(lambda: talker.engine.stats().starved == SPEAKERS)
        starved.append(await rate(talker, seeds) / ready)
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
    setup = f"{talker.info.settings['dtype']}, one thread, 100m; median of {ROUNDS}"
    report.add(
        Figure("x_talkers_8", median(together), "x", ">= 4", f"codes a second of {SPEAKERS} at once over one by one; {setup}"),
        Figure("x_starved_50", median(starved), "", ">= 0.95", f"the same beside {SPEAKERS} that starve, over without them; {setup}"),
    )


async def _measure(report: Report, folder: Path) -> None:
    for size in ("small", "100m"):
        make_tiny("qwen2.5-omni", folder / size, CheckpointOrder(size=size))
    (folder / "logs").mkdir()
    with (
        report.part("processes"),
        fleet(
            folder / "logs",
            replicas=1,
            kinds=("thinker", "talker"),
            pipeline="qwen2_5_omni-codes",
            family="qwen2_5_omni",
            stage_args=["--checkpoint", str(folder / "small")],
        ) as running,
    ):
        await overlap(running, report)
        await first_code(running, folder / "small", report)
    with report.part("speakers"):
        talker = load_talker(folder / "100m", LoadOptions(path=folder / "100m"))
        await speakers(talker, report)
        await talker.close()


def main() -> int:
    options = arguments(__doc__).parse_args()
    report = Report("talker")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_measure(report, Path(folder)))
    return report.finish(judge=not options.report)


if __name__ == "__main__":
    sys.exit(main())
