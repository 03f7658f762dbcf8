"""Every family passes one suite."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec

import pytest

from helpers.contract import CHECKS, Case, Check, Loaded
from helpers.families import CASES

SLOW = [pytest.mark.slow, pytest.mark.skipif(find_spec("torch") is None, reason="the models extra is not installed")]


@pytest.fixture(scope="module", params=[pytest.param(case, id=str(case), marks=SLOW if case.slow else ()) for case in CASES])
def loaded(request: pytest.FixtureRequest) -> Iterator[Loaded]:
    """Loaded once: its callers' event loops come and go, and it holds nothing between two checks."""
    case: Case = request.param
    if case.fixture:
        case = replace(case, checkpoint=request.getfixturevalue(case.fixture))
    logic = case.load()
    yield Loaded(case, logic, case.sample())
    asyncio.run(logic.close())


@pytest.mark.parametrize("check", [pytest.param(check, id=check.__name__.removeprefix("check_")) for check in CHECKS])
async def test_contract(loaded: Loaded, check: Check, seed: int) -> None:
    await check(loaded, random.Random(seed))
