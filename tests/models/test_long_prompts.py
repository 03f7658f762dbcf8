"""Prompts that are too long, and such as are just not: none of them holds up anybody else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from helpers import lengths
from helpers.link import opening
from helpers.run import RunStream, params
from helpers.servers import all_free, local_stage, stage_stub
from helpers.waiting import turning
from omnistage.models.conversation import Turn
from omnistage.models.interface import BadRequest, TextRequest
from omnistage.models.smol.thinker import SmolThinker, load_thinker
from omnistage.thinker.stage import ThinkerStage

EMOJI = "\U0001f600"


@pytest.fixture
async def thinker(default_model: Path) -> AsyncIterator[SmolThinker]:
    model = load_thinker(default_model / "thinker")
    yield model
    await model.close()


def asked(text: str) -> TextRequest:
    return TextRequest((Turn("user", (text,)),), seed=1, max_tokens=4)


@lengths.long_form(
    "models/test_long_prompts.py::test_a_huge_prompt_is_refused_and_the_short_ones_beside_it_go_on",
    "models/test_smol_thinker.py::test_what_it_cannot_do_is_refused_by_field",
)
async def test_a_text_that_can_never_fit_is_refused_by_its_characters(thinker: SmolThinker) -> None:
    for request in (asked(EMOJI * 1_000_000), TextRequest((), seed=1, verbatim=EMOJI * 1_000_000)):
        with pytest.raises(BadRequest, match="1000000 characters"):
            await thinker.prepare(request)
    with pytest.raises(BadRequest, match=r"has \d+ tokens"):
        await thinker.prepare(asked(EMOJI * 60_000))


@lengths.long_form("models/test_prepared_thinker.py::test_a_tokenizer_that_hangs_is_seen_by_whoever_watches_the_threads")
async def test_others_run_while_a_prompt_becomes_tokens(thinker: SmolThinker) -> None:
    request = asked("word " * 7000)
    async with turning() as turns:
        prepared = await thinker.prepare(request)
        assert turns() > 2
    assert prepared.prompt_ids == thinker.prompt(request.turns)


async def test_a_huge_prompt_is_refused_and_the_short_ones_beside_it_go_on(thinker: SmolThinker) -> None:
    async with local_stage(ThinkerStage(thinker)) as stage, stage_stub(stage.address) as stub:
        callers = []
        for number, text in enumerate(["Hello!", EMOJI * 1_000_000, "Hi!"]):
            caller = RunStream(stub)
            given = params("thinker", text, max_tokens=3, ignore_eos=True)
            await caller.send(open=opening("thinker", {"text": 64}, session_id=f"s{number}", model=thinker.info.name, params=given))
            callers.append(caller)
        ends = [await caller.finish() for caller in callers]
        assert [heard.ended is not None and heard.ended.reason for heard in ends] == ["", "BAD_REQUEST", ""]
        (refused,) = [heard.ended for heard in ends if heard.ended is not None and heard.ended.reason]
        assert refused.metadata["field"] == "thinker.messages"
        assert "characters" in refused.message
        await all_free([stage.address])
