"""The only process of a stage is killed in the middle of an answer: the answer goes on when `omnistage serve` has started it again, however
long its model takes to load."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from helpers import lengths
from helpers.lone_stage import slow_chain, struck_answer
from helpers.processes import ProcessFamily
from helpers.servers import CHAIN
from helpers.serving import serving, take_over
from helpers.toy_pipeline import toy_pipeline
from omnistage.client import Omni
from omnistage.client.errors import StageLostError
from omnistage.router.settings import LONE_PATIENCE_S

SHORT_S, LONG_S = LONE_PATIENCE_S + 1.0, 30.0
"""How long a model loads, in the short form and in the long form."""


@pytest.mark.parametrize("load_s", [SHORT_S, pytest.param(LONG_S, marks=lengths.LONG)])
@lengths.one_or_all("kind", CHAIN)
def test_an_answer_waits_for_a_stage_that_takes_long_to_load(
    kind: str, load_s: float, family: ProcessFamily, tmp_path: Path, seed: int
) -> None:
    kind = lengths.draw(kind, CHAIN, seed)
    with serving(family, slow_chain(tmp_path, load_s), "--no-http") as server, Omni(address=server.address()) as omni:
        answer = struck_answer(omni, kind, seed)
        assert server.report("restarted ").startswith(f"{kind} (pid ")
    assert answer.is_whole and len(answer.failovers) == 1


def test_an_answer_ends_when_its_stage_is_given_up(family: ProcessFamily, tmp_path: Path) -> None:
    with serving(family, toy_pipeline(tmp_path), "--no-http") as server, Omni(address=server.address(), max_retries=0) as omni:
        [thinker] = omni.replicas()
        with ExitStack() as exits:
            take_over(thinker, exits)
            with pytest.raises(StageLostError, match="no thinker is reachable now"):
                omni.generate("Hi")
        assert server.wait(30) == 1
