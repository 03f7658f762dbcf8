"""`python -m benchmarks.engine`: the engine with the Thinkers of the Omni families, on checkpoints with random weights, compared with
Transformers on the same files; one thread."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2_5OmniForConditionalGeneration
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeForConditionalGeneration

from benchmarks.figures import Benchmark, Figure, arguments, median, ratio, run, time_call
from helpers import media_files
from helpers.engines import items as items_of
from helpers.engines import read
from omnistage.engine.request import Prompt, SequenceRequest
from omnistage.models.conversation import Media, Part, Turn
from omnistage.models.devices import dtype_of
from omnistage.models.encoders.thinker import MediaThinker
from omnistage.models.interface import TextPiece, TextRequest, inputs_of
from omnistage.models.options import LoadOptions
from omnistage.models.qwen2_5_omni import thinker as qwen2_5_omni
from omnistage.models.qwen3_omni import thinker as qwen3_omni
from omnistage.models.tiny.makers import CheckpointOrder, make_tiny

ROUNDS = 3
AT_ONCE, ITEMS = 8, 48
RAGGED, PADDED = 16, 8
SHARED = 1500
"""Characters of the prompt before the question."""
BEGIN, END = 10, 400
"""Ids of ordinary tokens."""


@dataclass(frozen=True, slots=True)
class MeasuredFamily:
    """A family to measure. maker, size: maker and size of its checkpoint. load: loads our Thinker. model_class: of Transformers. figure,
    goal: name and goal of the figure of `throughput`. load_arguments: for the class of Transformers."""

    maker: str
    size: str
    load: Callable[[Path, LoadOptions], MediaThinker]
    model_class: Any
    figure: str
    goal: str
    load_arguments: Mapping[str, Any] = field(default_factory=dict)


QWEN2_5 = MeasuredFamily(
    "qwen2.5-omni", "100m", qwen2_5_omni.load_thinker, Qwen2_5OmniForConditionalGeneration, "x_one_by_one_8_bf16", ">= 5.0"
)
QWEN3 = MeasuredFamily(
    "qwen3-omni",
    "small",
    qwen3_omni.load_thinker,
    Qwen3OmniMoeForConditionalGeneration,
    "x_qwen3_one_by_one_8",
    ">= 4.0",
    {"enable_audio_output": False},
)

Prompts = Sequence[Sequence[int]]
Answers = list[list[int]]


class Rivals:
    """A checkpoint, loaded twice: as our Thinker, and as the model of Transformers."""

    def __init__(self, benchmark: Benchmark, family: MeasuredFamily, dtype: str) -> None:
        folder, size = benchmark.folder / family.maker, benchmark.size(family.size, "tiny")
        make_tiny(family.maker, folder, CheckpointOrder(size=size))
        self.model = family.load(folder, LoadOptions(path=folder, dtype=dtype))
        reference = family.model_class.from_pretrained(folder, dtype=getattr(torch, dtype), **family.load_arguments)
        self._reference: Any = reference.thinker.eval()
        self.note = f"{size}, {self.model.info.settings['dtype']}, one thread"

    async def ours(self, prompts: Prompts, items: Sequence[int]) -> Answers:
        """The tokens of our engine's answers to all prompts at once. items: how many tokens each answer has."""
        requests = [SequenceRequest(Prompt.of_tokens(prompt), 0, count) for prompt, count in zip(prompts, items, strict=True)]
        answers = await asyncio.gather(*(read(self.model.engine.submit(request)) for request in requests))
        tokens = [[item[0] for item in items_of(answer)] for answer in answers]
        assert [len(answer) for answer in tokens] == list(items)
        return tokens

    async def theirs(self, prompts: Prompts, items: int) -> Answers:
        """The tokens of Transformers' answers to all prompts as one batch, padded on the left. items: how many tokens each answer has."""
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            output_ids = self._reference.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=items, min_new_tokens=items, do_sample=False
            )
        assert output_ids.shape[1] == longest + items
        answers: Answers = output_ids[:, longest:].tolist()
        return answers

    async def batches(self, prompts: Prompts, items: Sequence[int], size: int) -> Answers:
        """As `theirs`, in batches of `size`, each with as many tokens as the longest of its answers has."""
        starts = range(0, len(prompts), size)
        return [answer for n in starts for answer in await self.theirs(prompts[n : n + size], max(items[n : n + size]))]


def draw_prompts(source: random.Random, count: int) -> Prompts:
    return [[source.randrange(BEGIN, END) for _ in range(source.randint(8, 128))] for _ in range(count)]


@asynccontextmanager
async def rivals_of(benchmark: Benchmark, family: MeasuredFamily, dtype: str) -> AsyncIterator[Rivals]:
    """Make the checkpoint of a family and load it; our Thinker is closed in the end."""
    torch.set_num_threads(1)
    rivals = Rivals(benchmark, family, dtype)
    try:
        await rivals.model.warm_up()
        yield rivals
    finally:
        await rivals.model.close()


async def throughput(benchmark: Benchmark, family: MeasuredFamily, rivals: Rivals) -> None:
    """Measure how many times as fast our Thinker is with requests at once as Transformers one by one."""
    items = [benchmark.size(ITEMS, 2)] * AT_ONCE
    ours, theirs = await benchmark.by_turns(
        ROUNDS,
        lambda n: time_call(rivals.ours(draw_prompts(random.Random(n), AT_ONCE), items)),
        lambda n: time_call(rivals.batches(draw_prompts(random.Random(n), AT_ONCE), items, 1)),
    )
    pairs = [pair for (_, mine), (_, others) in zip(ours, theirs, strict=True) for pair in zip(mine, others, strict=True)]
    note = (
        f"{AT_ONCE} at once over Transformers one by one, prompts of 8 to 128 tokens, {items[0]} more each; {rivals.note}; "
        f"median of {len(ours)}; the same tokens in {sum(mine == other for mine, other in pairs)} of {len(pairs)} answers"
    )
    speed = ratio([seconds for seconds, _ in theirs], [seconds for seconds, _ in ours])
    benchmark.add(Figure(family.figure, speed, "x", family.goal, note))


async def ragged(benchmark: Benchmark, rivals: Rivals) -> None:
    """Measure how many times as fast our Thinker is with unequal requests at once as Transformers in padded batches."""
    longest = benchmark.size(256, 4)

    def order(number: int) -> tuple[Prompts, list[int]]:
        """The prompts of a round, and the lengths of their answers."""
        source = random.Random(100 + number)
        return draw_prompts(source, RAGGED), [source.randint(4, longest) for _ in range(RAGGED)]

    ours, theirs = await benchmark.by_turns(
        ROUNDS, lambda n: time_call(rivals.ours(*order(n))), lambda n: time_call(rivals.batches(*order(n), PADDED)), warm_ups=0
    )
    note = (
        f"{RAGGED} requests of 4 to {longest} tokens over Transformers in padded batches of {PADDED}; {rivals.note}; median of {len(ours)}"
    )
    speed = ratio([seconds for seconds, _ in theirs], [seconds for seconds, _ in ours])
    benchmark.add(Figure("x_padded_ragged_16", speed, "x", ">= 2.0", note))


async def first_s(model: MediaThinker, *parts: Part) -> float:
    """Seconds to the first text of an answer. parts: the question."""
    request = TextRequest((Turn("user", parts),), seed=0, max_tokens=8, ignore_eos=True)

    async def read_first() -> None:
        async with aclosing(model.generate(await model.prepare(request), inputs_of(), {"text": 0})) as pieces:
            async for piece in pieces:
                if isinstance(piece, TextPiece) and piece.token_ids:
                    return
        raise RuntimeError("no text")

    return (await time_call(read_first()))[0]


async def kept_rows(benchmark: Benchmark, rivals: Rivals) -> None:
    """Measure how many times as fast the first text comes if the beginning of the prompt was read before: words, or a picture."""
    model, words, pictures = rivals.model, list[float](), list[float]()
    for number in range(benchmark.size(ROUNDS, 1)):
        prefix = "".join(random.Random(number).choices("abcdefghij ", k=SHARED))
        picture = Media("image/jpeg", media_files.picture(number, 480, 640, "JPEG"))
        words.append(await first_s(model, prefix + " one") / await first_s(model, prefix + " two"))
        pictures.append(await first_s(model, picture, "What is this?") / await first_s(model, picture, "And what is left of it?"))
    count, rounds = len(model.tokenizer.encode(prefix)), f"median of {len(words)}"
    picture_note = f"to the first text of a second question about a picture of 640 x 480, over the first question; {rounds}"
    benchmark.add(
        Figure("x_prefix_ttft", median(words), "x", ">= 8", f"to the first text, {count} tokens before the question known; {rounds}"),
        Figure("x_image_repeat_ttft", median(pictures), "x", ">= 4", picture_note),
    )


async def qwen2_5(benchmark: Benchmark) -> None:
    async with rivals_of(benchmark, QWEN2_5, dtype_of("cpu")) as rivals:
        with benchmark.part("throughput"):
            await throughput(benchmark, QWEN2_5, rivals)
        with benchmark.part("ragged"):
            await ragged(benchmark, rivals)
        with benchmark.part("kept rows"):
            await kept_rows(benchmark, rivals)


async def qwen3(benchmark: Benchmark) -> None:
    """Compare the Thinker of Qwen3-Omni with Transformers; in float32, because only then both give the same tokens."""
    async with rivals_of(benchmark, QWEN3, "float32") as rivals:
        await throughput(benchmark, QWEN3, rivals)


if __name__ == "__main__":
    sys.exit(run("engine", arguments(__doc__).parse_args(), {"Qwen2.5-Omni": qwen2_5, "Qwen3-Omni": qwen3}))
