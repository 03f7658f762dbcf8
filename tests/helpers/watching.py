"""A placement that watches real stages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from helpers.run import RunStream, open_of
from helpers.servers import ServerProcess, stage_flags
from omnistage.host.addresses import Resolver
from omnistage.link.liveness import Channels
from omnistage.router.placement import Placement
from omnistage.v1 import omni_pb2, stage_pb2, stage_pb2_grpc
from omnistage.wire.channel import Credentials

SETTLE_S = 30.0


@asynccontextmanager
async def watched(replicas: Mapping[str, Sequence[str]], resolve: Resolver | None = None) -> AsyncIterator[Placement]:
    async with Channels(Credentials()) as channels:
        placement = Placement(channels, replicas, resolve=resolve, boot_id="here", lookup_period_s=0.1)
        watching = asyncio.create_task(placement.watch())
        try:
            yield placement
        finally:
            watching.cancel()
            await asyncio.wait({watching})


async def until(placement: Placement, states: Mapping[str, omni_pb2.ReplicaState]) -> None:
    """Return when the replicas, by address, are in these states and no others are known."""
    async with asyncio.timeout(SETTLE_S):
        while True:
            changed = placement.changed
            if {replica.address: replica.state for replica in placement.all()} == states:
                return
            await changed.wait()


def thinker(log_folder: Path, address: str = "127.0.0.1:0") -> ServerProcess:
    return ServerProcess("omnistage.thinker", *stage_flags(), "--address", address, log_folder=log_folder)


async def waiting_session(stub: stage_pb2_grpc.StageServiceAsyncStub) -> RunStream:
    """A session that is open and gets no credit, so that it lasts until it is left."""
    caller = RunStream(stub)
    await caller.send(open=open_of(await stub.Describe(stage_pb2.DescribeRequest(), timeout=SETTLE_S), credits={}))
    await caller.opened()
    return caller
