"""The Thinkers over several processes say what they say in one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers import lengths, media_files
from helpers.checkpoints import VARIANTS, made
from helpers.models import said
from omnistage.models.conversation import Media, Part, TextConstraint, Turn
from omnistage.models.encoders.thinker import MediaThinker
from omnistage.models.interface import Sampling, TextPiece, TextRequest
from omnistage.models.options import LoadOptions
from omnistage.models.qwen2_5_omni.thinker import load_thinker
from omnistage.models.registry import load
from omnistage.models.reports import LoadError

PORTS = ("text", "prompt", "places", "hidden")
ALMOST = 1.5
"""The allowed difference of log-probabilities; other tokens at such a place have some 5 less."""


@dataclass(frozen=True, slots=True)
class RankCase:
    """variant: of `checkpoints.VARIANTS`, where it is not the checkpoint that is there for all tests."""

    family: str
    ranks: int = 2
    dtype: str = "float32"
    variant: str = ""


QWEN3 = "qwen3_omni"
FOUR_HEADS = next(name for name, (size, _) in VARIANTS.items() if size.get("text", {}).get("num_key_value_heads") == 4)
FIXTURES = {"qwen2_5_omni": "omni_checkpoint", QWEN3: "qwen3_checkpoint"}
CASES = {
    "Qwen2.5-Omni": RankCase("qwen2_5_omni"),
    "Qwen3-Omni": RankCase(QWEN3),
    "Qwen3-Omni, bfloat16": RankCase(QWEN3, dtype="bfloat16"),
    # Five experts: two of one rank, and one of each of the others.
    "Qwen3-Omni, four": RankCase(QWEN3, 4, variant=FOUR_HEADS),
    "Qwen3-Omni, four, bfloat16": RankCase(QWEN3, 4, "bfloat16", FOUR_HEADS),
}


@asynccontextmanager
async def loaded(folder: Path, case: RankCase, ranks: int) -> AsyncIterator[MediaThinker]:
    options = LoadOptions(path=folder, dtype=case.dtype, tensor_parallel_size=ranks, kv_cache_bytes=64 << 20)
    model = load(case.family, "thinker", options)
    assert isinstance(model, MediaThinker)
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
    asked = [
        TextRequest((Turn("user", (*parts, "What is this?")),), seed=seed, max_tokens=24, ignore_eos=True, logprobs=True, top_logprobs=20)
        for parts in kinds
    ]
    formed = TextConstraint("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}')
    return [*asked, TextRequest((), seed, verbatim="All that was said."), replace(asked[0], constraint=formed, ignore_eos=False)]


@dataclass(frozen=True, slots=True)
class RankAnswer:
    """likely: the likeliest tokens in the place of each."""

    ids: list[int]
    likely: list[dict[int, float]]
    rows: dict[str, np.ndarray]


async def answer(model: MediaThinker, request: TextRequest) -> RankAnswer:
    ids, likely, rows = list[int](), list[dict[int, float]](), dict[str, list[np.ndarray]]()
    async with aclosing(said(model, request, dict.fromkeys(PORTS, 0))) as pieces:
        async for piece in pieces:
            if isinstance(piece, TextPiece):
                ids += piece.token_ids
                likely += [{one.token_id: one.logprob for one in ones} for ones in piece.top_logprobs]
            elif len(piece.rows):
                rows.setdefault(piece.port, []).append(piece.rows.copy())
    return RankAnswer(ids, likely, {port: np.concatenate(parts) for port, parts in rows.items()})


def check_near(found: RankAnswer, expected: RankAnswer, dtype: str) -> None:
    """In float32 the same tokens, and rows as near as it has them. In bfloat16 each rank rounds its part of a sum: where two tokens are
    almost equally good, the other one may be drawn, and nothing can be said of what follows."""
    if dtype == "float32":
        assert found.ids == expected.ids
        assert found.rows.keys() == expected.rows.keys()
        for port, rows in found.rows.items():
            np.testing.assert_allclose(rows, expected.rows[port], rtol=1e-3, atol=1e-3)
        return
    for mine, other, likely in zip(found.ids, expected.ids, expected.likely, strict=False):
        if mine != other:
            assert likely[other] - likely[mine] < ALMOST
            return
    assert len(found.ids) == len(expected.ids)


@lengths.long_form(
    "models/test_team.py::test_several_ranks_say_what_one_says",
    "models/qwen2_5_omni/test_ranks.py::test_the_plan_is_that_of_transformers",
    unkept="each Thinker of several ranks says what one rank says, and goes on with an answer",
)
@lengths.one_or_all("name", CASES)
async def test_several_ranks_say_what_one_says(name: str, request: pytest.FixtureRequest, tmp_path: Path, seed: int) -> None:
    """They say it at once and when an answer goes on. A drawn token does not depend on the requests beside it. It does not depend on
    another model either; a process that has one of several ranks refuses that model."""
    case = CASES[name or lengths.draw(name, [each for each in CASES if CASES[each].ranks == 2], seed)]
    folder = made(tmp_path, case.variant, 0) if case.variant else request.getfixturevalue(FIXTURES[case.family])
    # A row that is almost between two experts would go to the other one now and then.
    asked = questions(seed if case.family != QWEN3 else 5)
    async with loaded(folder, case, 1) as one:
        expected = [await answer(one, each) for each in asked]
        alone = one.info
    async with loaded(folder, case, case.ranks) as several:
        found = await asyncio.gather(*(answer(several, each) for each in asked))
        again = await asyncio.gather(*(answer(several, each) for each in asked))
        rest = await answer(several, replace(asked[4], history=tuple(found[4].ids[:9])))
        info = several.info
        with pytest.raises(LoadError, match=r"^tensor_parallel_size 2: this process has a model of several ranks already"):
            load(case.family, "thinker", LoadOptions(path=folder, tensor_parallel_size=2))
        sampling = Sampling(temperature=1, top_p=0.95, repetition_penalty=1.05)
        drawn = [replace(each, seed=seed + n, sampling=sampling) for n, each in enumerate(asked[:5])]
        beside = await asyncio.gather(*(answer(several, each) for each in drawn))
        assert [each.ids for each in beside] == [(await answer(several, each)).ids for each in drawn]
        assert several.load().kv_pages_total == one.load().kv_pages_total, "a part of the heads in each, and as many rows"
    assert [each.ids for each in found] == [each.ids for each in again]
    assert rest.ids == found[4].ids[9:]
    for mine, repeated, other in zip(found, again, expected, strict=True):
        assert mine.rows.keys() == repeated.rows.keys()
        for port, rows in mine.rows.items():
            np.testing.assert_array_equal(rows, repeated.rows[port])
        check_near(mine, other, case.dtype)
    assert info.settings["tensor_parallel_size"] == str(case.ranks) and "tensor_parallel_size" not in alone.settings
    assert info.revision != alone.revision and info.produces == alone.produces


@pytest.mark.parametrize(("family", "heads"), [("qwen2_5_omni", "2 heads of keys and values, 320 FFN columns"), (QWEN3, "2 heads of keys")])
def test_a_size_that_does_not_divide_is_refused(family: str, heads: str, request: pytest.FixtureRequest) -> None:
    """More ranks than heads of keys, too. Experts need not divide."""
    folder = request.getfixturevalue(FIXTURES[family])
    with pytest.raises(
        LoadError, match=rf"^tensor_parallel_size 4: does not divide 6 query heads, {heads}[^;]* tokens.*; it can be 1 or 2$"
    ):
        load(family, "thinker", LoadOptions(path=folder, tensor_parallel_size=4))


@lengths.long_form("models/test_team.py::test_ranks_of_gpus_have_one_each", unkept="a rank that is left alone while it loads says nothing")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, where more than this can be seen")
def test_ranks_take_the_first_gpus(omni_checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As far as can be seen without one: nothing is wrong but that."""
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA"):
        load_thinker(omni_checkpoint, LoadOptions(path=omni_checkpoint, device="cuda", dtype="float32", tensor_parallel_size=2))
    assert "Traceback" not in capfd.readouterr().err, "who is left alone while it loads says nothing"


def test_the_plan_is_that_of_transformers() -> None:
    from transformers import Qwen2_5OmniThinkerForConditionalGeneration
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeThinkerForConditionalGeneration

    from omnistage.models.checkpoint.decoder import HEAD_PLAN

    assert Qwen2_5OmniThinkerForConditionalGeneration._tp_plan == HEAD_PLAN
    assert Qwen3OmniMoeThinkerForConditionalGeneration._tp_plan == HEAD_PLAN
