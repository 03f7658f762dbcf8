"""The only process of a stage is killed in the middle of an answer: the answer goes on when `omnistage serve` has started it again, however
long its model takes to load."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from helpers import lengths
from helpers.processes import ProcessFamily
from helpers.servers import CHAIN
from helpers.serving import serving, take_over
from helpers.toy_pipeline import toy_pipeline
from omnistage.client import AudioChunk, Failover, Omni, TextDelta
from omnistage.client.errors import StageLostError
from omnistage.models.toy import formulas
from omnistage.router.placement import LONE_PATIENCE_S

SHORT_S, LONG_S = LONE_PATIENCE_S + 1.0, 30.0
"""How long a model loads, in the short form and in the long form."""

TOKENS, SAMPLES_PER_FRAME = 100, 240


def answer_through_kill(omni: Omni, kind: str, seed: int) -> tuple[str, list[float], int]:
    """Text and sound of an answer, at whose first sound the process of a stage is killed, and the number of failovers."""
    pid = next(replica.pid for replica in omni.replicas() if replica.stage == kind)
    text, sound, failovers = "", list[float](), 0
    for event in omni.stream("A long story.", seed=seed):
        match event:
            case TextDelta():
                text += event.text
            case AudioChunk():
                if not sound:
                    os.kill(pid, signal.SIGKILL)
                sound.extend(event.samples)
            case Failover():
                failovers += 1
    return text, sound, failovers


@pytest.mark.parametrize("load_s", [SHORT_S, pytest.param(LONG_S, marks=lengths.LONG)])
@lengths.one_or_all("kind", CHAIN)
def test_an_answer_waits_for_a_stage_that_takes_long_to_load(
    kind: str, load_s: float, family: ProcessFamily, tmp_path: Path, seed: int
) -> None:
    kind = lengths.draw(kind, CHAIN, seed)
    pipeline = toy_pipeline(tmp_path, interval_s=0.02, length=TOKENS, samples_per_frame=SAMPLES_PER_FRAME, load_s=load_s)
    with serving(family, pipeline, "--no-http") as server, Omni(address=server.address()) as omni:
        text, sound, failovers = answer_through_kill(omni, kind, seed)
        assert server.report("restarted ").startswith(f"{kind} (pid ")
    assert text == formulas.text(seed, "A long story.", TOKENS) and failovers == 1
    np.testing.assert_allclose(sound, formulas.audio(seed, "A long story.", TOKENS, SAMPLES_PER_FRAME)[:, 0], atol=1e-4)


def test_an_answer_ends_when_its_stage_is_given_up(family: ProcessFamily, tmp_path: Path) -> None:
    pipeline = toy_pipeline(tmp_path, interval_s=0.02, length=TOKENS)
    with serving(family, pipeline, "--no-http") as server, Omni(address=server.address(), max_retries=0) as omni:
        [thinker] = omni.replicas()
        with ExitStack() as taken:
            take_over(thinker, taken)
            with pytest.raises(StageLostError, match="no thinker is reachable now"):
                omni.generate("Hi")
        assert server.wait(30) == 1
