"""The chains that tests of a router ask."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from helpers.ask import ask
from helpers.chain import RouterAndStages, addresses_of, good
from helpers.servers import all_free, local_chain, local_router, omni_stub


@pytest.fixture
async def stack(request: pytest.FixtureRequest) -> AsyncIterator[RouterAndStages]:
    """A toy chain; when the test ends, the next request must work and nothing may be left. A parameter: settings of the router."""
    settings = getattr(request, "param", {})
    async with (
        local_chain({"interval_s": 0.002}) as stages,
        local_router(addresses_of(stages), **settings) as router,
        omni_stub(router.address) as stub,
    ):
        yield (standing := RouterAndStages(stages, router, stub))
        (await ask(stub, good())).check_toy(5, "good")
        await all_free(standing.addresses)


@pytest.fixture
async def steady() -> AsyncIterator[RouterAndStages]:
    """A toy chain without pauses: for many short tests."""
    async with local_chain() as stages, local_router(addresses_of(stages)) as router, omni_stub(router.address) as stub:
        yield (standing := RouterAndStages(stages, router, stub))
        await all_free(standing.addresses)
