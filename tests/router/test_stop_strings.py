"""Text that a stop string cuts off is not spoken either."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.ask import ask, request
from helpers.chain import RouterAndStages
from omnistage.models.toy import formulas
from omnistage.v1 import chunk_pb2

PROMPT = "And then?"


@pytest.mark.parametrize("said", [1, 2, 11, 23])
async def test_sound_ends_with_the_text_that_a_stop_string_ended(stack: RouterAndStages, seed: int, said: int):
    words = [formulas.word(formulas.token(seed, PROMPT, n)) for n in range(formulas.NATURAL_LENGTH)]
    answer = await ask(stack.stub, request(PROMPT, seed, thinker={"stop": [words[said], "never said"]}))
    answer.check_whole()
    assert answer.text() == "".join(words[:said])
    assert answer.usage is not None and answer.usage.finish_reason == chunk_pb2.FINISH_REASON_STOP
    np.testing.assert_array_equal(answer.samples(), formulas.audio(seed, PROMPT, said)[:, 0] * 32768)


async def test_text_that_might_have_been_a_stop_string_is_spoken_when_it_is_none(stack: RouterAndStages, seed: int):
    words = "".join(formulas.word(formulas.token(seed, PROMPT, n)) for n in range(formulas.NATURAL_LENGTH))
    answer = await ask(stack.stub, request(PROMPT, seed, thinker={"stop": [words[-9:] + "x", words[3:30] + "x"]}))
    answer.check_toy(seed, PROMPT)
