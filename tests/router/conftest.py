"""The chains that tests of a router ask."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from helpers.ask import ask
from helpers.chain import RouterAndStages, good, router_and_stages, toy_chain


@pytest.fixture
async def stack(request: pytest.FixtureRequest) -> AsyncIterator[RouterAndStages]:
    """A toy chain; when the test ends, the next request must work and nothing may be left. A parameter: settings of the router."""
    async with router_and_stages(toy_chain({"interval_s": 0.002}), **getattr(request, "param", {})) as stack:
        yield stack
        (await ask(stack.stub, good())).check_toy(5, "good")


@pytest.fixture
async def steady() -> AsyncIterator[RouterAndStages]:
    """A toy chain without pauses: for many short tests."""
    async with router_and_stages(toy_chain()) as stack:
        yield stack
