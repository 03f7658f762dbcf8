"""A Thinker that sees and a Talker that starves, both on the real engine, as real processes: text and speech are the closed formula,
whoever is lost on the way."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from helpers import lengths
from helpers.ask import WholeAnswer, ask
from helpers.disturbed import ask_through, audio_chunks, begun, disturbed, kill_when, text_chunks
from helpers.engine_family import Reply, speech
from helpers.families import PICTURE, looked_only
from helpers.fleet import Fleet, fleet
from helpers.hanging import ENVIRONMENT
from helpers.servers import all_free, omni_stub
from omnistage.client import AsyncOmni
from omnistage.models.toy import formulas
from omnistage.v1 import omni_pb2

pytestmark = lengths.long_form(
    "models/test_arithmetic_models.py::test_text_prompt_rows_and_reply_rows_are_those_of_the_engine",
    "models/test_arithmetic_models.py::test_speech_starves_until_its_next_row_comes",
    "router/test_chain.py::test_a_stage_that_is_lost_in_mid_speech_leaves_no_gap",
    "engine/test_engine.py::test_prompts_that_begin_alike_share_pages",
    "router/test_sharing.py::test_two_keys_share_no_prompts_that_were_computed_and_no_key_is_told",
)

TOKENS = 150
MOMENTS = {"as it begins": begun, "in speech": audio_chunks(2), "late": text_chunks(60)}

SEEN = ("What is ", PICTURE, " and ")

PIPELINE = """
name: test-engine
description: Arithmetic on the real engine.
inputs: [text, image]
outputs: [text, audio]
stages:
  - kind: thinker
    family: test-engine
  - kind: talker
    family: test-engine
    takes: [prompt, hidden]
  - kind: code2wav
    family: test-engine
    takes: [codes]
defaults:
  thinker: {max_tokens: 40}
"""


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two of each kind. Text comes slower than speech, so that the Talker starves after every row; tensors go by shared memory."""
    folder = tmp_path_factory.mktemp("house")
    (folder / "engine.yaml").write_text(PIPELINE)
    options = {"thinker": {"interval_s": 0.02}}
    with fleet(
        folder,
        pipeline=str(folder / "engine.yaml"),
        family="test-engine",
        options_of=options,
        stage_args=["--inline-limit", "0"],
        environment=ENVIRONMENT,
    ) as running:
        yield running


def question(seed: int, tokens: int = TOKENS) -> omni_pb2.GenerateRequest:
    asked = omni_pb2.GenerateRequest(seed=seed, thinker=looked_only().params.thinker)
    asked.thinker.max_tokens = tokens
    return asked


def check(answer: WholeAnswer, seed: int, tokens: int = TOKENS) -> Reply:
    answer.check_whole()
    reply = Reply.to(SEEN, seed, tokens)
    assert answer.text() == reply.text
    frames = speech(reply.prompt, reply.hidden)
    np.testing.assert_array_equal(answer.samples(), formulas.samples(frames)[:, 0] * 32768)
    return reply


async def test_it_speaks_the_formula_and_a_prompt_that_is_known_is_not_read_again(house: Fleet, seed: int) -> None:
    async with omni_stub(house.address("router")) as stub:
        answers = [await ask(stub, question(seed + n, 40)) for n in range(3)]
        for n, answer in enumerate(answers):
            reply = check(answer, seed + n, 40)
            assert answer.usage is not None
            assert answer.usage.stages[0].prompt_tokens == len(reply.prompt)
            assert dict(answer.usage.stages[1].input_items) == {"prompt": len(reply.prompt), "hidden": 40}
        known = [answer.usage.stages[0].cached_tokens for answer in answers if answer.usage is not None]
        assert known[0] == 0
        assert max(known) == len(reply.prompt) // 32 * 32, "of three equal questions, two go to the same of two replicas"
    await all_free([house.address(name) for name in house.stages])


@pytest.mark.parametrize("kind", ["thinker", "talker"])
@lengths.one_or_all("moment", MOMENTS)
async def test_one_on_the_engine_is_killed(house: Fleet, kind: str, moment: str, seed: int) -> None:
    strikes = MOMENTS[lengths.draw(moment, MOMENTS, seed)]

    async with disturbed(house, alike=False) as stub:
        answer = await ask_through(stub, question(seed), kill_when(strikes, house, kind))
        check(answer, seed)
        assert len(answer.failovers) == 1


async def test_nobody_finds_what_another_key_has_asked(house: Fleet):
    """Equal prompts: only those of one key, or of nobody's, are found computed; a replica that has not seen one has nothing to find."""

    async def found(client: AsyncOmni, asks: int) -> list[int]:
        prompt = "Say it again, and again, and once more: what is a kite?"
        answers = [await client.generate(prompt, seed=9, max_tokens=2, outputs=["text"]) for _ in range(asks)]
        assert len({answer.text for answer in answers}) == 1
        return [answer.usage.stages[0].cached_tokens or 0 for answer in answers]

    async with AsyncOmni(address=house.address("router")) as omni:
        for key in ("one", "other", "third"):
            first, *later = await found(omni.as_client(key), 3)
            assert first == 0 and max(later) >= 32, key
        first, *later = await found(omni, 3)
        assert max(later) >= 32
        assert (await found(omni.as_client("fourth"), 1))[0] == 0
