"""The Talkers of Qwen2.5-Omni and Qwen3-Omni, on rows of any numbers: they say the same after any cut and as soon as they can, read no row
twice, and tell what they refuse."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import lengths
from helpers.models import RowInputs
from helpers.waiting import until
from omnistage.models.interface import BadRequest, Sampling, SpeechRequest, TensorRows
from omnistage.models.options import LoadOptions
from omnistage.models.registry import load
from omnistage.models.speech.talker import RowTalker

QWEN2_5, QWEN3 = "qwen2_5_omni", "qwen3_omni"
FRAMES = 60


@dataclass
class TalkerMaker:
    """A Talker. block: frames that are put out together, behind the first one. between: number of rows that it adds to a conversation."""

    family: str
    folder: Path
    talker: RowTalker
    block: int
    between: int

    def loaded(self, **options: Any) -> RowTalker:
        model = load(self.family, "talker", LoadOptions(path=self.folder, dtype="float32", **options))
        assert isinstance(model, RowTalker)
        return model

    def rows(self, seed: int, tokens: int = 20, words: int = 60) -> list[TensorRows]:
        """Places and rows of a conversation, and rows of an answer. With more words it begins with the same rows."""
        at, width = np.arange(words), self.talker.info.accepts[0].width
        kinds = [at // 10 % 2] if self.family == QWEN3 else []
        prompt, hidden = (
            np.random.default_rng([seed, of]).standard_normal((count, width), np.float32) for of, count in enumerate((words, tokens))
        )
        places = np.stack([at, at, at, *kinds], 1).astype(np.int32)
        ports = (("places", places), ("prompt", prompt), ("hidden", hidden))
        return [TensorRows(port, rows, last=True) for port, rows in ports]

    def speech(self, seed: int, frames: int = FRAMES) -> SpeechRequest:
        """One that does not end by itself."""
        bias = dict.fromkeys(self.talker._manner.ends, -100.0)
        drawn = Sampling(temperature=0.9, top_k=40, top_p=0.8, repetition_penalty=1.05, logit_bias=bias)
        return SpeechRequest(seed, sampling=drawn, max_frames=frames)

    async def spoken(self, rows: Sequence[TensorRows], request: SpeechRequest, talker: RowTalker | None = None) -> list[list[int]]:
        line, model = RowInputs(), talker or self.talker
        for piece in rows:
            line.put(piece)
        async with aclosing(model.speak(await model.prepare(request), line.inputs(), {"codes": 0})) as frames:
            return [frame async for made in frames for frame in made.rows.tolist()]


@pytest.fixture(scope="module", params=[QWEN2_5, QWEN3])
def maker(request: pytest.FixtureRequest) -> Iterator[TalkerMaker]:
    folder = request.getfixturevalue("omni_checkpoint" if request.param == QWEN2_5 else "qwen3_checkpoint")
    talker: Any = load(request.param, "talker", LoadOptions(path=folder, dtype="float32", max_sessions=16))
    (between, *_) = talker._added.between.values()
    yield TalkerMaker(request.param, folder, talker, talker._manner.block, len(between))
    asyncio.run(talker.close())


@lengths.rounds(6, 50)
async def test_it_goes_on_after_any_frame(maker: TalkerMaker, rounds: int, seed: int) -> None:
    source, rows = random.Random(seed), maker.rows(seed)
    whole = await maker.spoken(rows, maker.speech(seed))
    for _ in range(rounds):
        cut = source.randrange(1, len(whole))
        assert await maker.spoken(rows, replace(maker.speech(seed), history=np.array(whole[:cut], np.uint32))) == whole[cut:], cut


async def test_a_frame_comes_with_its_row_and_the_next_one_is_waited_for(maker: TalkerMaker, seed: int) -> None:
    """A waiting speech has its pages and no place in a step; the row wakes it. After the first frame, frames come by the block. Behind the
    last row it goes on by itself."""
    rows, talker, line, heard = maker.rows(seed, tokens=3 * maker.block + 4), maker.talker, RowInputs(), list[list[int]]()
    *conversation, hidden = rows
    whole = await maker.spoken(rows, maker.speech(seed))
    for piece in conversation:
        line.put(piece)
    fed = max(2 * maker.block, 6)
    async with aclosing(talker.speak(await talker.prepare(maker.speech(seed)), line.inputs(), {"codes": 0})) as frames:
        waiting = asyncio.ensure_future(anext(frames))
        for count in range(fed):
            if count % 5 == 1:
                await until(lambda: talker.engine.stats().starved == 1)
                stats = talker.engine.stats()
                assert stats.running == 0 and stats.pages_used > 0
                await maker.spoken(rows, maker.speech(seed + 1, frames=3))
                assert not waiting.done() and talker.engine.stats().starved == 1
            made = talker.engine.stats().items
            line.put(TensorRows("hidden", hidden.rows[count : count + 1]))
            await until(lambda made=made: talker.engine.stats().items == made + 1)  # type: ignore[misc]
            if count == 0 or (count + 1) % maker.block == 0:
                heard += (await waiting).rows.tolist()
                assert len(heard) == count + 1
                waiting = asyncio.ensure_future(anext(frames))
        line.put(TensorRows("hidden", hidden.rows[fed:], last=True))
        heard += (await waiting).rows.tolist()
        heard += [frame async for each in frames for frame in each.rows.tolist()]
    assert heard == whole and len(whole) == FRAMES


async def test_a_conversation_that_goes_on_is_not_read_again(maker: TalkerMaker, seed: int) -> None:
    """The rows that it begins with have the same bits and places, and are known by them; not to another scope."""
    first, longer = (maker.rows(seed, 5, words) for words in (200, 300))
    elsewhere = np.array(longer[0].rows)
    elsewhere[40, -1] = 1 - elsewhere[40, -1] % 2  # For Qwen3-Omni the row is of another kind, and so has another projection.

    async def computed(rows: Sequence[TensorRows], scope: str) -> int:
        before = maker.talker.engine.stats().rows
        await maker.spoken(rows, replace(maker.speech(seed, frames=1), scope=scope))
        return maker.talker.engine.stats().rows - before

    await computed(first, "one")
    assert await computed(longer, "one") < 150 < 300 <= await computed(longer, "other")
    assert await computed([replace(longer[0], rows=elsewhere), *longer[1:]], "one") > 250


async def test_an_answer_without_a_word_has_no_speech(maker: TalkerMaker, seed: int) -> None:
    nothing = maker.rows(seed, tokens=0)
    assert await maker.spoken(nothing, maker.speech(seed)) == [] and maker.talker.engine.stats().pages_used == 0
    history = np.full((1, maker.talker._manner.codes.width), 7, np.uint32)
    with pytest.raises(BadRequest, match="nothing to speak") as refused:
        await maker.spoken(nothing, replace(maker.speech(seed), history=history))
    assert refused.value.field == "resume.history"


async def test_a_conversation_beyond_its_context_is_refused(maker: TalkerMaker, seed: int) -> None:
    """The rows that are added to it and the first frame count as well."""
    small, most = maker.loaded(family={"context": 64}), 64 - maker.between - 1
    for words in (most + 1, 200):
        longer = maker.rows(seed, words=words)
        for order in (longer, longer[::-1]):
            with pytest.raises(BadRequest, match=f"the Talker takes {most} rows") as refused:
                await maker.spoken(order, maker.speech(seed), small)
            assert refused.value.field == "thinker.messages"
    assert len(await maker.spoken(maker.rows(seed, words=most), maker.speech(seed, frames=0), small)) == 1
    assert 0 < len(await maker.spoken(maker.rows(seed, words=9), maker.speech(seed, frames=0), small)) < 64
    assert small.engine.stats().pages_used == 0
    await small.close()


def frames(*codes: int, groups: int = 16) -> np.ndarray[Any, Any]:
    """A frame for each first code; the other codes are 0."""
    return np.array([[code, *[0] * (groups - 1)] for code in codes], np.uint32)


HISTORY, BIAS = "resume.history", "talker.sampling.logit_bias"
BAD: Sequence[tuple[str, dict[str, Any], str, str]] = [
    (QWEN2_5, {"voice": "Nobody"}, "talker.voice", "the voices are Chelsie and Ethan"),
    (QWEN2_5, {"speed": 1.2}, "talker.speed", "its own pace"),
    (QWEN2_5, {"history": frames(5, 8294, groups=1)}, HISTORY, "8294 is part of no answer"),
    (QWEN2_5, {"history": frames(5, 8292, 6, groups=1)}, HISTORY, "8292 is part of no answer"),
    (QWEN2_5, {"history": frames(8293, 5, groups=1)}, HISTORY, "8293 is part of no answer"),
    (QWEN2_5, {"history": frames(8448, groups=1)}, HISTORY, "below 8448"),
    (QWEN2_5, {"history": frames(*[0] * FRAMES, groups=1)}, HISTORY, f"it has {FRAMES} at most"),
    (QWEN2_5, {"sampling": Sampling(logit_bias={8448: 1.0})}, BIAS, "below 8448"),
    (QWEN3, {"voice": "nobody"}, "talker.voice", "the voices are ethan, (chelsie and aiden|aiden and chelsie)"),
    (QWEN3, {"speed": 1.2}, "talker.speed", "its own pace"),
    (QWEN3, {"history": frames(0, groups=15)}, HISTORY, "has 16 ids"),
    (QWEN3, {"history": frames(262)}, HISTORY, "262 is part of no answer"),
    (QWEN3, {"history": np.full((1, 16), 160, np.uint32)}, HISTORY, "must be below|is part of no answer"),
    (QWEN3, {"history": np.array([[0, 160, *[0] * 14]], np.uint32)}, HISTORY, "must be below 160"),
    (QWEN3, {"history": frames(*[0] * FRAMES)}, HISTORY, f"it has {FRAMES} at most"),
    (QWEN3, {"sampling": Sampling(logit_bias={160 + 1024: 1.0})}, BIAS, "below 1184"),
]


async def test_what_it_cannot_do_is_told_before_anything_is_read(maker: TalkerMaker) -> None:
    for family, change, field, told in BAD:
        if family == maker.family:
            with pytest.raises(BadRequest, match=told) as refused:
                await maker.talker.prepare(replace(maker.speech(1), **change))
            assert refused.value.field == field
