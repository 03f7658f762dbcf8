"""Qwen3-Omni as real processes: text, codes and sound of Transformers for questions of all kinds, and one talk over HTTP."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers import lengths
from helpers.omni_answers import CASES, Qwen3Answers
from helpers.omni_family import FAMILIES
from helpers.servers import Stack, omni_stub, stack

pytestmark = pytest.mark.slow

FAMILY = FAMILIES["qwen3_omni"]
FRAMES = {True: 12, False: 30}
"""In the short form, and in the long one."""


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory, qwen3_checkpoint: Path) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("chain")
    args = ["--checkpoint", str(qwen3_checkpoint), "--dtype", "float32"]
    with stack(folder, pipeline=FAMILY.pipeline(folder), family=FAMILY.name, stage_args=args) as running:
        yield running


@pytest.fixture(scope="module")
def answers(qwen3_checkpoint: Path) -> Qwen3Answers:
    return Qwen3Answers(qwen3_checkpoint)


@lengths.some_or_all("case", CASES, 2)
async def test_text_codes_and_sound_are_those_of_transformers(chain: Stack, answers: Qwen3Answers, case: str, seed: int) -> None:
    frames = FRAMES[case.startswith(lengths.DRAWN)]
    expected = await answers.expected(lengths.draw_of(case, CASES, 2, "qwen3 chain"), frames, random.Random(seed))
    async with omni_stub(chain.address) as stub:
        await expected.check(stub, FAMILY)
