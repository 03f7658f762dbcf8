"""Every family passes one suite."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec

import pytest

from helpers import lengths
from helpers.contract import CHECKS, Case, Loaded
from helpers.families import CASES

SLOW = [pytest.mark.skipif(find_spec("torch") is None, reason="the models extra is not installed")]
DRAWN, DRAWN_MODELS = 1, 6
"""Checks of a model whose weights have to be read, and such models, which are drawn anew in each run; the long form makes all of them."""
CHECK_OF = {check.__name__.removeprefix("check_"): check for check in CHECKS}


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
