"""The Thinker over two processes says what it says in one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers import media_files
from helpers.models import said
from omnistage.models.conversation import Constraint, Media, Part, Turn
from omnistage.models.errors import LoadError
from omnistage.models.interface import Sampling, TextPiece, TextRequest
from omnistage.models.options import LoadOptions
from omnistage.models.qwen2_5_omni.loading import load_thinker
from omnistage.models.qwen2_5_omni.thinker import QwenThinker

PORTS = ("text", "prompt", "places", "hidden")


@asynccontextmanager
async def loaded(folder: Path, ranks: int) -> AsyncIterator[QwenThinker]:
    model = load_thinker(folder, LoadOptions(path=folder, dtype="float32", tensor_parallel_size=ranks, kv_cache_bytes=64 << 20))
    try:
        await model.warm_up()
        yield model
    finally:
        await model.close()


def questions(seed: int) -> list[TextRequest]:
    """Greedy ones: text, a picture, a sound, a film, all of them, text that is given, and JSON."""
    picture = Media("image/png", media_files.picture(seed))
    sound = Media("audio/flac", media_files.sound(seed, form="FLAC"))
    film = Media("video/mp4", media_files.film(seed, sound_s=1), use_audio=True)
    kinds: list[tuple[Part, ...]] = [(), (picture,), (sound,), (film,), (picture, sound, film)]
    asked = [TextRequest((Turn("user", (*parts, "What is this?")),), seed=seed, max_tokens=24, ignore_eos=True) for parts in kinds]
    formed = Constraint("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}')
    return [*asked, TextRequest((), seed, verbatim="All that was said."), replace(asked[0], constraint=formed, ignore_eos=False)]


async def answer(model: QwenThinker, request: TextRequest) -> tuple[list[int], dict[str, np.ndarray]]:
    ids, rows = list[int](), dict[str, list[np.ndarray]]()
    async with aclosing(said(model, request, dict.fromkeys(PORTS, 0))) as pieces:
        async for piece in pieces:
            if isinstance(piece, TextPiece):
                ids += piece.token_ids
            elif len(piece.rows):
                rows.setdefault(piece.port, []).append(piece.rows.copy())
    return ids, {port: np.concatenate(parts) for port, parts in rows.items()}


async def test_two_ranks_say_what_one_says(omni_checkpoint: Path, seed: int) -> None:
    """The same tokens, at once and going on; and rows as near as float32 has them. What is drawn does not depend on what is beside, nor on
    another model, which a process that has one of several ranks refuses."""
    asked = questions(seed)
    async with loaded(omni_checkpoint, 1) as one:
        expected = [await answer(one, request) for request in asked]
        alone = one.info
    async with loaded(omni_checkpoint, 2) as two:
        found = await asyncio.gather(*(answer(two, request) for request in asked))
        again = await asyncio.gather(*(answer(two, request) for request in asked))
        cut = replace(asked[4], history=tuple(expected[4][0][:9]))
        rest, _ = await answer(two, cut)
        info = two.info
        with pytest.raises(LoadError, match=r"^tensor_parallel_size 2: this process has a model of several ranks already"):
            load_thinker(omni_checkpoint, LoadOptions(path=omni_checkpoint, tensor_parallel_size=2))
        sampling = Sampling(temperature=1, top_p=0.95, repetition_penalty=1.05)
        drawn = [replace(request, seed=seed + n, sampling=sampling) for n, request in enumerate(asked[:5])]
        beside = await asyncio.gather(*(answer(two, request) for request in drawn))
        assert [ids for ids, _ in beside] == [(await answer(two, request))[0] for request in drawn]
        assert two.load().kv_pages_total == one.load().kv_pages_total, "half of the heads in each, and as many rows"
    assert [ids for ids, _ in found] == [ids for ids, _ in again] == [ids for ids, _ in expected]
    assert rest == expected[4][0][9:]
    for (_, mine), (_, repeated), (_, other) in zip(found, again, expected, strict=True):
        assert mine.keys() == other.keys() == repeated.keys()
        for port, rows in mine.items():
            np.testing.assert_array_equal(rows, repeated[port])
            np.testing.assert_allclose(rows, other[port], rtol=1e-3, atol=1e-3)
    assert info.settings["tensor_parallel_size"] == "2" and "tensor_parallel_size" not in alone.settings
    assert info.revision != alone.revision and info.produces == alone.produces


def test_a_size_that_does_not_divide_is_refused(omni_checkpoint: Path) -> None:
    with pytest.raises(LoadError, match=r"^tensor_parallel_size 4: does not divide 6 query heads, 2 heads of keys.*; it can be 1 or 2$"):
        load_thinker(omni_checkpoint, LoadOptions(path=omni_checkpoint, tensor_parallel_size=4))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, where more than this can be seen")
def test_ranks_take_the_first_gpus(omni_checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As far as can be seen without one: nothing is wrong but that."""
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA"):
        load_thinker(omni_checkpoint, LoadOptions(path=omni_checkpoint, device="cuda", dtype="float32", tensor_parallel_size=2))
    assert "Traceback" not in capfd.readouterr().err, "who is left alone while it loads says nothing"


def test_the_plan_is_that_of_transformers() -> None:
    from transformers import Qwen2_5OmniThinkerForConditionalGeneration

    from omnistage.models.qwen2_5_omni.loading import HEAD_PLAN

    assert Qwen2_5OmniThinkerForConditionalGeneration._tp_plan == HEAD_PLAN
