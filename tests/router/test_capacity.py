"""How many places a router has: what its stages take together, however its pipelines share them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from helpers.servers import local_stage, toy_logic
from helpers.watching import until, watched
from omnistage.router.placement import SERVING, Placement, capacity

MOST = {"thinker": 7, "second thinker": 5, "talker": 2, "second talker": 3}

Pipelines = Sequence[Mapping[str, Sequence[str]]]


@asynccontextmanager
async def pipelines_of(pipelines: Pipelines) -> AsyncIterator[list[Placement]]:
    """A placement for each pipeline; its stages are names of MOST, by kind."""
    async with AsyncExitStack() as exits:
        addresses = {}
        for name, most in MOST.items():
            stage = await exits.enter_async_context(local_stage(toy_logic(name.rpartition(" ")[2]), max_sessions=most))
            addresses[name] = stage.address
        placements = []
        for pipeline in pipelines:
            replicas = {kind: [addresses[name] for name in names] for kind, names in pipeline.items()}
            placements.append(await exits.enter_async_context(watched(replicas)))
            await until(placements[-1], dict.fromkeys((address for found in replicas.values() for address in found), SERVING))
        yield placements


@pytest.mark.parametrize(
    ("pipelines", "places"),
    [
        pytest.param([{"thinker": ["thinker"], "talker": ["talker", "second talker"]}], 5, id="the scarcest stage"),
        pytest.param([{"thinker": ["thinker"], "talker": ["talker"]}] * 2, 2, id="two that are the same"),
        pytest.param([{"thinker": ["thinker"], "talker": ["talker"]}, {"thinker": ["thinker"]}], 7, id="the whole of a shared stage"),
        pytest.param(
            [{"thinker": ["thinker"], "talker": ["talker"]}, {"thinker": ["second thinker"], "talker": ["talker", "second talker"]}],
            5,
            id="one replica of two is shared",
        ),
        pytest.param(
            [{"thinker": ["thinker"], "talker": ["talker"]}, {"thinker": ["second thinker"], "talker": ["second talker"]}],
            5,
            id="nothing is shared",
        ),
        pytest.param([], 1, id="nothing at all"),
    ],
)
async def test_a_replica_counts_once_however_many_pipelines_have_it(pipelines: Pipelines, places: int):
    async with pipelines_of(pipelines) as placements:
        assert capacity(placements) == places
