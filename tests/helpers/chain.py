"""A router and its stages in this process, and the request with which a test ends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from helpers.ask import request
from helpers.servers import CHAIN, Local, all_free, is_busy, local_router, local_stage, omni_stub, toy_logic
from omnistage.router.pipeline import PipelineFile
from omnistage.stage.logic import StageLogic
from omnistage.v1 import omni_pb2, omni_pb2_grpc
from omnistage.wire.proto_values import kind_name


@dataclass
class LocalReplica:
    """A stage and what ends it."""

    local: Local
    exits: AsyncExitStack
    has_ended: bool = False

    async def end(self) -> None:
        self.has_ended = True
        await self.exits.aclose()


@dataclass
class RouterAndStages:
    """A router and the stages behind it, by kind. replicas: all of a kind, where `stages` has the first."""

    stages: Mapping[str, Local]
    router: Local
    stub: omni_pb2_grpc.OmniServiceAsyncStub
    replicas: Mapping[str, list[LocalReplica]] = field(default_factory=dict)

    @property
    def addresses(self) -> list[str]:
        return list(addresses_of(self.stages).values())

    async def end_busy(self, kind: str) -> None:
        """End the one replica of a kind that has a session."""
        (busy,) = [replica for replica in self.replicas[kind] if is_busy(replica.local)]
        await busy.end()


def addresses_of(stages: Mapping[str, Local]) -> dict[str, str]:
    return {kind: stage.address for kind, stage in stages.items()}


def toy_chain(options: Mapping[str, object] | None = None, *others: StageLogic) -> list[StageLogic]:
    """The toys of a chain; others: in place of those of their kinds."""
    logics = {kind: toy_logic(kind, options) for kind in CHAIN} | {kind_name(logic.description.kind): logic for logic in others}
    return list(logics.values())


@asynccontextmanager
async def router_and_stages(
    logics: Iterable[StageLogic], pipeline: PipelineFile | None = None, *, stage: Mapping[str, Any] | None = None, **settings: Any
) -> AsyncIterator[RouterAndStages]:
    """A router in front of stages of these models, several of a kind if it comes again; when the block ends well nothing may be held.
    stage: settings of every stage. settings: of the router."""
    async with AsyncExitStack() as exits:
        replicas: dict[str, list[LocalReplica]] = {}
        for logic in logics:
            own = await exits.enter_async_context(AsyncExitStack())
            local = await own.enter_async_context(local_stage(logic, **(stage or {})))
            replicas.setdefault(kind_name(logic.description.kind), []).append(LocalReplica(local, own))
        addresses = [(kind, replica.local.address) for kind, each in replicas.items() for replica in each]
        router = await exits.enter_async_context(local_router(addresses, pipeline, **settings))
        stub = await exits.enter_async_context(omni_stub(router.address))
        yield RouterAndStages({kind: each[0].local for kind, each in replicas.items()}, router, stub, replicas)
        await all_free([replica.local.address for each in replicas.values() for replica in each if not replica.has_ended])


def good() -> omni_pb2.GenerateRequest:
    """Its answer is `check_toy(5, "good")`."""
    return request("good", 5)
