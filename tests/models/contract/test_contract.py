"""Every family passes one suite; and what only toys can show of sessions that go on elsewhere."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from helpers import lengths
from helpers.contract import CHECKS, Case, Loaded, check_it_goes_on_wherever_it_was_lost
from helpers.families import CASES
from helpers.logic import content, history_of_text, pieces_of, run_logic, start_at
from helpers.run import params
from helpers.servers import toy_logic
from omnistage.models.toy import formulas
from omnistage.models.toy.stages import DIFFERENCE
from omnistage.stage.logic import Start
from omnistage.v1 import chunk_pb2, stage_pb2
from omnistage.wire.errors import StageError

SLOW = [pytest.mark.skipif(find_spec("torch") is None, reason="the models extra is not installed")]
DRAWN, DRAWN_MODELS = 1, 6
"""Checks of a model whose weights have to be read, and such models, which are drawn anew in each run; the long form makes all of them."""
CHECK_OF = {check.__name__.removeprefix("check_"): check for check in CHECKS}
STOP = chunk_pb2.FINISH_REASON_STOP


def asked(slow: bool) -> pytest.MarkDecorator:
    """Gives a test the models that are slow, of which the short form draws some, or those that are not."""
    cases = [pytest.param(case, id=str(case), marks=SLOW if slow else ()) for case in CASES if case.slow == slow]
    if slow:
        return lengths.drawn_cells(DRAWN_MODELS, "loaded", cases, indirect=True, scope="module")
    return pytest.mark.parametrize("loaded", cases, indirect=True, scope="module")


@pytest.fixture(scope="module")
def loaded(request: pytest.FixtureRequest) -> Iterator[Loaded]:
    """Loaded once: its callers' event loops come and go, and it holds nothing between two checks."""
    case: Case = request.param
    if case.fixture:
        case = replace(case, checkpoint=request.getfixturevalue(case.fixture))
    logic = case.load()
    yield Loaded(case, logic, case.sample())
    asyncio.run(logic.close())


@asked(slow=False)
@pytest.mark.parametrize("check", CHECK_OF)
async def test_contract(loaded: Loaded, check: str, seed: int) -> None:
    await CHECK_OF[check](loaded, random.Random(seed))


@asked(slow=True)
@lengths.some_or_all("check", CHECK_OF, DRAWN)
async def test_contract_of_a_slow_model(loaded: Loaded, check: str, seed: int) -> None:
    check = lengths.draw_of(check, CHECK_OF, DRAWN, str(loaded.case))
    await CHECK_OF[check](loaded, random.Random(seed))


DEFAULT = [pytest.param(case, id=str(case), marks=SLOW) for case in CASES if case.family == "smol" and not case.name]


@pytest.mark.parametrize("loaded", DEFAULT, indirect=True, scope="module")
async def test_the_default_model_goes_on_wherever_it_was_lost(loaded: Loaded, seed: int) -> None:
    """In each run, at every place."""
    await check_it_goes_on_wherever_it_was_lost(replace(loaded, case=replace(loaded.case, slow=False)), random.Random(seed))


def codes_up_to_now(codes: np.ndarray) -> chunk_pb2.Chunk:
    """A port of codes [frames, codebooks]."""
    chunk = chunk_pb2.CodeChunk(codes=codes.ravel().tolist(), codebook_count=codes.shape[1])
    return chunk_pb2.Chunk(port="codes", count=len(codes), codes=chunk)


async def test_a_talker_that_differs_leaves_one_splice(seed: int) -> None:
    """It has the same revision, so nothing can refuse it; what was heard before stays, and the rest is its own."""
    rows = np.stack([formulas.row(formulas.token(seed, "How far is it?", n)) for n in range(formulas.NATURAL_LENGTH)])
    usual, other, codes = toy_logic("talker"), toy_logic("talker", {"differs": True}), formulas.frames(rows)
    assert usual.description.revision == other.description.revision
    pieces = pieces_of("hidden", rows, random.Random(seed))
    made = await run_logic(other, params("talker"), pieces, start_at({}, codes_up_to_now(codes[:17])))
    assert content(made.outputs, "codes") == ((codes[17:] + DIFFERENCE) % 1024).astype(np.uint32).tobytes()


async def test_a_code2wav_asks_for_its_left_context() -> None:
    for sample, frame in [(0, 0), (179, 0), (240, 1), (599, 6), (600, 7), (6000, 97)]:
        work = await toy_logic("code2wav", {"context": 3}).prepare(stage_pb2.Open(), start_at({"audio": sample}))
        assert work.needs == {"codes": frame}


CODES = np.zeros((6, formulas.CODEBOOKS), np.uint32)
NARROW, WITHOUT = codes_up_to_now(CODES), codes_up_to_now(CODES)
NARROW.codes.codebook_count, WITHOUT.codes.codebook_count = 2, 0


@pytest.mark.parametrize(
    ("kind", "start", "fields", "text"),
    [
        pytest.param("thinker", start_at({}, history_of_text([1, 2, 3]), ended=["text"]), {}, ".", id="ended without a reason"),
        pytest.param("thinker", start_at({}, history_of_text([1, 2, 3], STOP)), {}, ".", id="a reason without an end"),
        pytest.param("thinker", start_at({}, history_of_text(range(24))), {}, ".", id="nothing left to say"),
        pytest.param("thinker", start_at({}, history_of_text(range(4000))), {}, ".", id="more than can be said"),
        pytest.param(
            *("thinker", start_at({}, history_of_text([1, 2, 3], STOP), ended=["text"]), {"verbatim": "a b"}, "has 2 words"),
            id="more than the text to be spoken has",
        ),
        pytest.param("talker", start_at({}, codes_up_to_now(CODES[:, :3])), {}, ".", id="too few codebooks"),
        pytest.param("talker", start_at({}, NARROW), {}, ".", id="another number of codebooks"),
        pytest.param("talker", start_at({}, WITHOUT), {}, ".", id="no codebooks"),
        pytest.param("talker", start_at({}, codes_up_to_now(CODES)), {"max_frames": 6}, "max_frames", id="all frames that are asked for"),
    ],
)
async def test_a_history_that_does_not_fit_is_refused_before_anything_is_computed(
    kind: str, start: Start, fields: dict[str, Any], text: str
) -> None:
    with pytest.raises(StageError, match=text) as refused:
        await toy_logic(kind).prepare(stage_pb2.Open(params=params(kind, **fields)), start)
    assert (refused.value.reason, refused.value.metadata["field"]) == ("BAD_REQUEST", "resume.history")


@pytest.mark.parametrize(
    ("kind", "start"),
    [
        pytest.param("diffusion", start_at({"image": 2}), id="more pictures than asked for"),
        pytest.param("thinker", start_at({"hidden": 4}, history_of_text([1, 2, 3])), id="rows beyond the text"),
        pytest.param("talker", start_at({}, codes_up_to_now(np.zeros((21, formulas.CODEBOOKS), np.uint32))), id="frames beyond the speech"),
    ],
)
async def test_a_place_that_the_answer_does_not_have_is_refused(kind: str, start: Start, seed: int) -> None:
    rows = np.stack([formulas.row(formulas.token(seed, "hello", n)) for n in range(10)])
    inputs = pieces_of("hidden", rows, random.Random(seed)) if kind == "talker" else ()
    with pytest.raises(StageError) as refused:
        await run_logic(toy_logic(kind), params(kind), inputs, start)
    assert (refused.value.reason, refused.value.metadata["field"]) == ("BAD_REQUEST", "resume.positions")
