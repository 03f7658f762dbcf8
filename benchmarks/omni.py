"""Figures of the Thinkers of the Omni families on checkpoints with random weights, compared with Transformers on the same files."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2_5OmniForConditionalGeneration
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeForConditionalGeneration

from benchmarks.figures import Figure, Report, median
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
BEGIN, END = 10, 400
"""Ids of ordinary tokens."""


@dataclass(frozen=True, slots=True)
class MeasuredFamily:
    """A family to measure. maker, size: maker and size of its checkpoint. load: loads our Thinker. model_class: of Transformers.
    load_arguments: load it. figure, goal: name and goal of the figure of `throughput`."""

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


@contextmanager
def running(family: MeasuredFamily, dtype: str) -> Iterator[tuple[MediaThinker, Any]]:
    """Make a checkpoint and load it twice; yields our Thinker and the model of Transformers."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "made"
        make_tiny(family.maker, checkpoint, CheckpointOrder(size=family.size))
        model = family.load(checkpoint, LoadOptions(path=checkpoint, dtype=dtype))
        yield model, family.model_class.from_pretrained(checkpoint, dtype=getattr(torch, dtype), **family.load_arguments).thinker.eval()


def prompts(source: random.Random, count: int) -> list[list[int]]:
    return [[source.randrange(BEGIN, END) for _ in range(source.randint(8, 128))] for _ in range(count)]


def request(prompt: Sequence[int], items: int) -> SequenceRequest:
    return SequenceRequest(Prompt.of_tokens(prompt), 0, items)


Answers = list[list[int]]


async def ours(model: MediaThinker, prompt_ids: Sequence[Sequence[int]], items: Sequence[int]) -> tuple[float, Answers]:
    """Ask our engine all prompts at once; returns the seconds for all of them, and their tokens. items: tokens of each answer."""
    started = time.perf_counter()
    answers = await asyncio.gather(*(read(model.engine.submit(request(*one))) for one in zip(prompt_ids, items, strict=True)))
    taken_s = time.perf_counter() - started
    tokens = [[item[0] for item in items_of(answer)] for answer in answers]
    assert [len(answer) for answer in tokens] == list(items)
    return taken_s, tokens


def theirs(reference: Any, prompt_ids: Sequence[Sequence[int]], items: int) -> tuple[float, Answers]:
    """Ask Transformers all prompts as one batch, padded on the left; returns seconds and tokens. items: tokens of each answer."""
    longest = max(map(len, prompt_ids))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompt_ids])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompt_ids])
    started = time.perf_counter()
    with torch.inference_mode():
        output_ids = reference.generate(input_ids=ids, attention_mask=mask, max_new_tokens=items, min_new_tokens=items, do_sample=False)
    assert output_ids.shape[1] == longest + items
    return time.perf_counter() - started, output_ids[:, longest:].tolist()


async def throughput(family: MeasuredFamily, model: MediaThinker, reference: Any, report: Report) -> None:
    """Measure how many times as fast our Thinker is with requests at once as Transformers one by one."""
    ratios, source, matches = [], random.Random(0), list[bool]()
    theirs(reference, prompts(source, 1), ITEMS)
    for _ in range(ROUNDS):
        prompt_ids = prompts(source, AT_ONCE)
        together_s, tokens = await ours(model, prompt_ids, [ITEMS] * AT_ONCE)
        one_by_one = [theirs(reference, [prompt], ITEMS) for prompt in prompt_ids]
        ratios.append(sum(taken_s for taken_s, _ in one_by_one) / together_s)
        # Each of their answers is a batch of one.
        matches += [our_tokens == their_tokens for our_tokens, (_, (their_tokens,)) in zip(tokens, one_by_one, strict=True)]
    note = (
        f"{AT_ONCE} at once over Transformers one by one, prompts of 8 to 128 tokens, {ITEMS} more each; {family.size}, "
        f"{_setup(model)}; median of {ROUNDS}; the same tokens in {sum(matches)} of {len(matches)} answers"
    )
    report.add(Figure(family.figure, median(ratios), "x", family.goal, note))


async def measure_ragged(model: MediaThinker, reference: Any, report: Report) -> None:
    """Measure how many times as fast our Thinker is with unequal requests at once as Transformers in padded batches."""
    ratios, source = [], random.Random(1)
    for _ in range(ROUNDS - 1):
        prompt_ids, items = prompts(source, RAGGED), [source.randint(4, 256) for _ in range(RAGGED)]
        together_s, _ = await ours(model, prompt_ids, items)
        padded_s = sum(theirs(reference, prompt_ids[n : n + PADDED], max(items[n : n + PADDED]))[0] for n in range(0, RAGGED, PADDED))
        ratios.append(padded_s / together_s)
    note = f"{RAGGED} requests of 4 to 256 tokens over Transformers in padded batches of {PADDED}; {_setup(model)}; median of {len(ratios)}"
    report.add(Figure("x_padded_ragged_16", median(ratios), "x", ">= 2.0", note))


def _setup(model: MediaThinker) -> str:
    return f"{model.info.settings['dtype']}, one thread"


async def first_s(model: MediaThinker, *parts: Part) -> float:
    """Seconds to the first text of an answer. parts: the question."""
    text_request = TextRequest((Turn("user", parts),), seed=0, max_tokens=8, ignore_eos=True)
    started = time.perf_counter()
    async with aclosing(model.generate(await model.prepare(text_request), inputs_of(), {"text": 0})) as pieces:
        async for piece in pieces:
            if isinstance(piece, TextPiece) and piece.token_ids:
                return time.perf_counter() - started
    raise RuntimeError("no text")


async def prefixes(model: MediaThinker, report: Report) -> None:
    """Measure how many times as fast the first text comes if the engine has read the beginning of the prompt before."""
    ratios = []
    for n in range(ROUNDS):
        words = "".join(random.Random(n).choices("abcdefghij ", k=SHARED))
        count = len(model.tokenizer.encode(words))
        cold = await first_s(model, words + " one")
        ratios.append(cold / await first_s(model, words + " two"))
    note = f"to the first text, {count} tokens before the question known, over unknown; median of {ROUNDS}"
    report.add(Figure("x_prefix_ttft", median(ratios), "x", ">= 8", note))


async def pictures(model: MediaThinker, report: Report) -> None:
    """Measure how many times as fast the first text comes for a second question about a picture as for the first."""
    ratios = []
    for n in range(ROUNDS):
        picture = Media("image/jpeg", media_files.picture(n, 480, 640, "JPEG"))
        cold = await first_s(model, picture, "What is this?")
        ratios.append(cold / await first_s(model, picture, "And what is left of it?"))
    note = f"to the first text of a second question about a picture of 640 x 480, over the first question; median of {ROUNDS}"
    report.add(Figure("x_image_repeat_ttft", median(ratios), "x", ">= 4", note))


async def overhead(model: MediaThinker, report: Report) -> None:
    """Measure the share of the steps' time that the engine needs between the calls of the model."""
    source = random.Random(2)
    runner = model.engine._runner
    seconds = {"calls": 0.0}

    def timed(call: Callable[..., object]) -> Callable[..., object]:
        def run(*arguments: Any) -> object:
            started = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                seconds["calls"] += time.perf_counter() - started

        return run

    decoder, head = runner._decoder, runner._head
    runner._decoder, runner._head = _Timed(decoder, "hidden", timed), _Timed(head, "draw", timed)
    shares = []
    for _ in range(ROUNDS):
        prompt_ids = prompts(source, AT_ONCE)
        seconds["calls"] = 0.0
        whole_s, _ = await ours(model, prompt_ids, [128] * AT_ONCE)
        shares.append(1 - seconds["calls"] / whole_s)
    runner._decoder, runner._head = decoder, head
    note = f"time outside of decoder and head, of that of {AT_ONCE} requests of 128 tokens; {_setup(model)}; median of {ROUNDS}"
    report.add(Figure("engine_overhead", median(shares), "", "<= 0.05", note))


class _Timed:
    """Stands for the object `of`; calls of its method `name` go through `timed`."""

    def __init__(self, of: Any, name: str, timed: Callable[[Callable[..., object]], Callable[..., object]]) -> None:
        self._of = of
        setattr(self, name, timed(getattr(of, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)


async def _qwen2_5(report: Report) -> None:
    with running(QWEN2_5, dtype_of("cpu")) as (model, reference):
        await model.warm_up()
        with report.part("omni: throughput"):
            await throughput(QWEN2_5, model, reference, report)
        with report.part("omni: ragged"):
            await measure_ragged(model, reference, report)
        with report.part("omni: prefixes"):
            await prefixes(model, report)
        with report.part("omni: pictures"):
            await pictures(model, report)
        with report.part("omni: overhead"):
            await overhead(model, report)
        await model.close()


async def qwen3(report: Report) -> None:
    """Compare the Thinker of Qwen3-Omni with Transformers; in float32, because only then both give the same tokens."""
    torch.set_num_threads(1)
    with running(QWEN3, "float32") as (model, reference):
        await model.warm_up()
        await throughput(QWEN3, model, reference, report)
        await model.close()


def measure(report: Report) -> None:
    torch.set_num_threads(1)
    asyncio.run(_qwen2_5(report))
