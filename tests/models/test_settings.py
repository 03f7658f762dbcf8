"""A setting changes what it names: seen from outside of the default Thinker, in its load and in the steps of its thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
import torch

from helpers import lengths
from helpers.models import said, text_pieces
from omnistage.engine.adapter import Attention, Hidden, StepRows
from omnistage.engine.decoder import PackedDecoder
from omnistage.models.conversation import Turn
from omnistage.models.interface import TextRequest, ThinkerModel
from omnistage.models.options import LoadOptions
from omnistage.models.registry import load
from omnistage.models.reports import LoadError
from omnistage.models.smol import thinker as smol

LONG = "Tell me about the sea and the ships that sail on it. " * 30
"""Some 400 tokens: a dozen pieces of a prompt."""

BLOCK = 32
"""Rows of the smallest step."""

SHORT_CACHE = 384 << 20
"""A little more than a whole context takes in float32."""


@asynccontextmanager
async def loaded(folder: Path, **settings: Any) -> AsyncIterator[ThinkerModel[Any]]:
    model = cast(ThinkerModel[Any], load("smol", "thinker", LoadOptions(folder, **settings)))
    try:
        yield model
    finally:
        await model.close()


def ask(text: str, max_tokens: int) -> TextRequest:
    return TextRequest((Turn("user", (text,)),), seed=1, max_tokens=max_tokens, ignore_eos=True)


def steps(model: ThinkerModel[Any]) -> int:
    """The steps of the engine's thread; now and then one in which nothing was to do is among them."""
    (engine,) = [thread for thread in model.threads if thread.name == "omnistage-engine"]
    return engine.steps


async def steps_of(model: ThinkerModel[Any], *asked: tuple[str, int]) -> int:
    before = steps(model)
    await asyncio.gather(*(text_pieces(model, ask(text, tokens)) for text, tokens in asked))
    return steps(model) - before


async def begun_before_one_ends(model: ThinkerModel[Any], asked: int, max_tokens: int) -> int:
    """How many of the answers have begun with the last piece of the first that ends. The answers that have not ended then are cancelled."""
    begun: set[int] = set()

    async def write(number: int) -> int:
        last = 0
        async with aclosing(said(model, ask(f"Say {number}.", max_tokens))) as pieces:
            async for _ in pieces:
                begun.add(number)
                last = len(begun)
                if last == asked:
                    break
        return last

    writing = [asyncio.create_task(write(number)) for number in range(asked)]
    ended, others = await asyncio.wait(writing, return_when=asyncio.FIRST_COMPLETED)
    for task in others:
        task.cancel()
    left = await asyncio.gather(*others, return_exceptions=True)
    assert all(isinstance(end, int | asyncio.CancelledError) for end in left), left
    return min(task.result() for task in ended)


@lengths.long_form(
    "engine/test_engine.py::test_the_queue_is_bounded",
    "models/test_settings.py::test_what_cannot_be_is_refused_with_its_name",
    unkept="the settings of batch and cache reach the engine of the default Thinker",
)
async def test_a_batch_of_one_writes_one_answer_at_a_time_and_a_cache_has_the_memory_that_was_said(default_model: Path) -> None:
    async with loaded(default_model, max_batch_size=1, kv_cache_bytes=SHORT_CACHE) as one:
        assert (one.info.settings["max_batch_size"], one.info.settings["kv_cache_bytes"]) == ("1", str(SHORT_CACHE))
        assert await begun_before_one_ends(one, asked=4, max_tokens=12) == 1
        pages = one.load().kv_pages_total
    async with loaded(default_model, kv_cache_bytes=2 * SHORT_CACHE) as many:
        assert (many.info.settings["max_batch_size"], many.info.settings["kv_cache_bytes"]) == ("64 (default)", str(2 * SHORT_CACHE))
        # So long that on a busy machine, too, all have come before one could end: they are cancelled as soon as all have begun.
        assert await begun_before_one_ends(many, asked=4, max_tokens=1000) == 4
        assert 0 < 2 * pages == many.load().kv_pages_total


class SizedDecoder(PackedDecoder):
    """Writes down how many rows each step has. Computes nothing, so time bounds no step."""

    sizes: ClassVar[list[int]] = []

    def hidden(self, rows: StepRows, attention: Attention) -> Hidden:
        self.sizes.append(len(rows.items))
        return Hidden(torch.zeros(len(rows.items), self.spec.given_width))


async def test_a_step_has_no_more_rows_than_was_said(default_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rows cost next to nothing, a prompt is read by many at a time, but for the setting."""
    monkeypatch.setattr(smol, "PackedDecoder", SizedDecoder)
    asked = [(LONG, 4), *((f"Say {number}.", 4) for number in range(3))]
    most = {}
    for rows in (BLOCK, 0):
        async with loaded(default_model, max_batch_tokens=rows) as model:
            assert model.info.settings["max_batch_tokens"] == (str(rows) if rows else "512 (default)")
            await model.warm_up()
            SizedDecoder.sizes.clear()
            await steps_of(model, *asked)
            most[rows] = max(SizedDecoder.sizes)
    assert most[BLOCK] == BLOCK < most[0]


async def test_without_the_cache_every_prompt_is_read_whole(default_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smol, "PackedDecoder", SizedDecoder)
    saved = []
    for enable_cache in (True, False):
        async with loaded(default_model, enable_cache=enable_cache, max_batch_tokens=BLOCK) as model:
            assert model.info.settings["enable_cache"] == str(enable_cache).lower()
            first = await steps_of(model, (LONG, 1))
            saved.append(first - await steps_of(model, (LONG, 1)))
    assert saved[0] > 6 > saved[1]


@lengths.drawn_cells(
    1,
    ("settings", "told"),
    [
        ({"kv_cache_bytes": 1 << 20}, "kv_cache_bytes 1048576: one whole context takes "),
        ({"kv_cache_bytes": 1 << 56}, "does not fit into the memory that is free"),
        ({"max_batch_tokens": 3}, "max_batch_tokens 3: a piece of a prompt alone has "),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size 2: the thinker of smol computes on one device"),
    ],
)
def test_what_cannot_be_is_refused_with_its_name(default_model: Path, settings: dict[str, int], told: str) -> None:
    with pytest.raises(LoadError) as raised:
        load("smol", "thinker", LoadOptions(default_model, **settings))  # type: ignore[arg-type]
    assert told in str(raised.value)
