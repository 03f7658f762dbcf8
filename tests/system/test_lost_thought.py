"""A Thinker that is killed while it thinks: thought and answer go on, and what is heard is the answer alone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from helpers.ask import request
from helpers.disturbed import SLOW, ask_through, disturbed, kill_when, text_chunks
from helpers.fleet import Fleet, fleet
from omnistage.models.toy import formulas

TOKENS, THINKS = 90, 60


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two of each kind, so that one is left."""
    with fleet(tmp_path_factory.mktemp("logs"), replicas=2, options=SLOW, options_of={"thinker": {"thinks": THINKS}}) as running:
        yield running


async def test_a_thinker_is_killed_while_it_thinks(toys: Fleet, seed: int) -> None:
    lost = list[str]()

    async with disturbed(toys, alike=False) as stub:
        asked = request("hello", seed, thinker={"max_tokens": TOKENS, "ignore_eos": True})
        answer = await ask_through(stub, asked, kill_when(text_chunks(5), toys, "thinker", lost))
    answer.check_whole()
    assert [failover.lost for failover in answer.failovers] == lost
    said = [chunk for chunk in answer.of("text") if not chunk.text.HasField("thought")]
    thought = [chunk for chunk in answer.of("text") if chunk.text.HasField("thought")]
    whole = formulas.text(seed, "hello", TOKENS)
    assert sum(chunk.count for chunk in thought) == THINKS
    assert "".join(chunk.text.thought for chunk in thought) + answer.text() == whole
    assert answer.text() == "".join(chunk.text.text for chunk in said) == whole.removeprefix(formulas.text(seed, "hello", THINKS))
    first = THINKS * formulas.FRAMES_PER_ROW * formulas.SAMPLES_PER_FRAME
    np.testing.assert_array_equal(answer.samples(), formulas.audio(seed, "hello", TOKENS)[first:, 0] * 32768)
