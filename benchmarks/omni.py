"""Figures of Qwen2.5-Omni's Thinker on a checkpoint of size 100m with random weights, beside Transformers on the same files."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2_5OmniForConditionalGeneration

from benchmarks.figures import Figure, Report, median
from helpers import media_files
from helpers.sequences import read
from omnistage.engine.request import Prompt, SequenceRequest
from omnistage.models.conversation import Media, Part, Turn
from omnistage.models.devices import dtype_of
from omnistage.models.interface import TextPiece, TextRequest, no_inputs
from omnistage.models.options import LoadOptions
from omnistage.models.qwen2_5_omni.loading import load_thinker
from omnistage.models.qwen2_5_omni.thinker import QwenThinker
from omnistage.models.tiny.makers import Order, make_tiny

ROUNDS = 3
AT_ONCE, ITEMS = 8, 48
RAGGED, PADDED = 16, 8
SHARED = 1500
BEGIN, END = 10, 400
"""Ids of ordinary tokens."""


@contextmanager
def checkpoint() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        make_tiny("qwen2.5-omni", Path(folder) / "made", Order(size="100m"))
        yield Path(folder) / "made"


def prompts(source: random.Random, count: int) -> list[list[int]]:
    return [[source.randrange(BEGIN, END) for _ in range(source.randint(8, 128))] for _ in range(count)]


def request(prompt: Sequence[int], items: int) -> SequenceRequest:
    return SequenceRequest(Prompt.of_tokens(prompt), 0, items)


async def ours(model: QwenThinker, asked: Sequence[Sequence[int]], items: Sequence[int]) -> float:
    """Seconds for all, asked at once."""
    started = time.perf_counter()
    answers = await asyncio.gather(*(read(model.engine.submit(request(*one))) for one in zip(asked, items, strict=True)))
    assert [len(answer) for answer in answers] == list(items)
    return time.perf_counter() - started


def theirs(reference: Any, asked: Sequence[Sequence[int]], items: int) -> float:
    """Seconds of one batch, padded on the left."""
    longest = max(map(len, asked))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in asked])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in asked])
    started = time.perf_counter()
    with torch.inference_mode():
        made = reference.generate(input_ids=ids, attention_mask=mask, max_new_tokens=items, min_new_tokens=items, do_sample=False)
    assert made.shape[1] == longest + items
    return time.perf_counter() - started


async def throughput(model: QwenThinker, reference: Any, report: Report) -> None:
    ratios, source = [], random.Random(0)
    for _ in range(ROUNDS):
        asked = prompts(source, AT_ONCE)
        together_s = await ours(model, asked, [ITEMS] * AT_ONCE)
        ratios.append(sum(theirs(reference, [prompt], ITEMS) for prompt in asked) / together_s)
    note = (
        f"{AT_ONCE} at once over Transformers one by one, prompts of 8 to 128 tokens, {ITEMS} more each; {_how(model)}; median of {ROUNDS}"
    )
    report.add(Figure("x_one_by_one_8_bf16", median(ratios), "x", ">= 5.0", note))


async def ragged(model: QwenThinker, reference: Any, report: Report) -> None:
    ratios, source = [], random.Random(1)
    for _ in range(ROUNDS - 1):
        asked, items = prompts(source, RAGGED), [source.randint(4, 256) for _ in range(RAGGED)]
        together_s = await ours(model, asked, items)
        padded_s = sum(theirs(reference, asked[n : n + PADDED], max(items[n : n + PADDED])) for n in range(0, RAGGED, PADDED))
        ratios.append(padded_s / together_s)
    note = f"{RAGGED} requests of 4 to 256 tokens over Transformers in padded batches of {PADDED}; {_how(model)}; median of {len(ratios)}"
    report.add(Figure("x_padded_ragged_16", median(ratios), "x", ">= 2.0", note))


def _how(model: QwenThinker) -> str:
    return f"{model.info.settings['dtype']}, one thread"


async def first_s(model: QwenThinker, *parts: Part) -> float:
    """Seconds to the first text of an answer."""
    asked = TextRequest((Turn("user", parts),), seed=0, max_tokens=8, ignore_eos=True)
    started = time.perf_counter()
    async with aclosing(model.generate(await model.prepare(asked), no_inputs(), {"text": 0})) as pieces:
        async for piece in pieces:
            if isinstance(piece, TextPiece) and piece.token_ids:
                return time.perf_counter() - started
    raise RuntimeError("no text")


async def prefixes(model: QwenThinker, report: Report) -> None:
    ratios = []
    for n in range(ROUNDS):
        words = "".join(random.Random(n).choices("abcdefghij ", k=SHARED))
        count = len(model.tokenizer.encode(words))
        cold = await first_s(model, words + " one")
        ratios.append(cold / await first_s(model, words + " two"))
    note = f"to the first text, {count} tokens before the question known, over unknown; median of {ROUNDS}"
    report.add(Figure("x_prefix_ttft", median(ratios), "x", ">= 8", note))


async def pictures(model: QwenThinker, report: Report) -> None:
    ratios = []
    for n in range(ROUNDS):
        picture = Media("image/jpeg", media_files.picture(n, 480, 640, "JPEG"))
        cold = await first_s(model, picture, "What is this?")
        ratios.append(cold / await first_s(model, picture, "And what is left of it?"))
    note = f"to the first text of a second question about a picture of 640 x 480, over the first question; median of {ROUNDS}"
    report.add(Figure("x_image_repeat_ttft", median(ratios), "x", ">= 4", note))


async def overhead(model: QwenThinker, report: Report) -> None:
    """What is between the calls of the model, of the time of the steps."""
    source = random.Random(2)
    runner = model.engine._runner
    spent = {"calls": 0.0}

    def timed(call: Callable[..., object]) -> Callable[..., object]:
        def run(*given: Any) -> object:
            started = time.perf_counter()
            try:
                return call(*given)
            finally:
                spent["calls"] += time.perf_counter() - started

        return run

    decoder, head = runner._decoder, runner._head
    runner._decoder, runner._head = _Timed(decoder, "hidden", timed), _Timed(head, "draw", timed)
    shares = []
    for _ in range(ROUNDS):
        asked = prompts(source, AT_ONCE)
        spent["calls"] = 0.0
        whole_s = await ours(model, asked, [128] * AT_ONCE)
        shares.append(1 - spent["calls"] / whole_s)
    runner._decoder, runner._head = decoder, head
    note = f"time outside of decoder and head, of that of {AT_ONCE} requests of 128 tokens; {_how(model)}; median of {ROUNDS}"
    report.add(Figure("engine_overhead", median(shares), "", "<= 0.05", note))


class _Timed:
    """An object of which one method is timed."""

    def __init__(self, of: Any, name: str, timed: Callable[[Callable[..., object]], Callable[..., object]]) -> None:
        self._of = of
        setattr(self, name, timed(getattr(of, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)


async def _served(folder: Path, report: Report) -> None:
    dtype = dtype_of("cpu")
    model = load_thinker(folder, LoadOptions(path=folder, dtype=dtype))
    family: Any = Qwen2_5OmniForConditionalGeneration
    reference = family.from_pretrained(folder, dtype=getattr(torch, dtype)).thinker.eval()
    await model.warm_up()
    with report.part("omni: throughput"):
        await throughput(model, reference, report)
    with report.part("omni: ragged"):
        await ragged(model, reference, report)
    with report.part("omni: prefixes"):
        await prefixes(model, report)
    with report.part("omni: pictures"):
        await pictures(model, report)
    with report.part("omni: overhead"):
        await overhead(model, report)
    await model.close()


def measure(report: Report) -> None:
    torch.set_num_threads(1)
    with checkpoint() as folder:
        asyncio.run(_served(folder, report))
