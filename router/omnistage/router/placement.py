"""Which replica of each stage takes a session: every replica is watched, the least loaded one is best."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import grpc.aio
import structlog

from omnistage.link.channel import Channels
from omnistage.link.errors import StageError
from omnistage.v1 import omni_pb2, stage_pb2, stage_pb2_grpc

log = structlog.get_logger(__name__)

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 1.0
DESCRIBE_TIMEOUT_S = 2.0
MAX_CANDIDATES = 8


@dataclass(slots=True)
class Replica:
    """One stage server. placed: sessions that this router gave it and that are not in its last report yet."""

    kind: str
    address: str
    state: omni_pb2.ReplicaState = omni_pb2.REPLICA_STATE_LOST
    description: stage_pb2.DescribeResponse | None = None
    load: stage_pb2.WatchResponse = field(default_factory=stage_pb2.WatchResponse)
    placed: int = 0

    @property
    def busy(self) -> int:
        return self.load.sessions + self.placed


class Placement:
    """The replicas of one pipeline. `watch()` runs for ever and keeps their state; `place()` orders them for a new session."""

    def __init__(self, channels: Channels, replicas: Mapping[str, Sequence[str]]) -> None:
        self._channels = channels
        self._replicas = {kind: [Replica(kind, address) for address in addresses] for kind, addresses in replicas.items()}
        self._pinned: Mapping[str, stage_pb2.DescribeResponse] = {}
        self._changed = asyncio.Event()

    async def watch(self) -> None:
        async with asyncio.TaskGroup() as group:
            for replica in self.all():
                group.create_task(self._watch(replica))

    async def descriptions(self) -> dict[str, stage_pb2.DescribeResponse]:
        """What the first replica of every kind that takes sessions says of itself; waits for the slowest kind."""
        while True:
            changed = self._changed
            found = {
                kind: next((replica.description for replica in replicas if replica.state == omni_pb2.REPLICA_STATE_SERVING), None)
                for kind, replicas in self._replicas.items()
            }
            described = {kind: description for kind, description in found.items() if description is not None}
            if len(described) == len(found):
                return described
            await changed.wait()

    def place(self, kind: str) -> list[str]:
        """Addresses for a new session, best first. Raises STAGE_LOST if no replica takes sessions now."""
        serving = [replica for replica in self._replicas[kind] if self._fits(replica)]
        if not serving:
            raise StageError("STAGE_LOST", f"no {kind} is reachable now", metadata={"stage": kind}, retry_delay_s=1.0)
        serving.sort(key=lambda replica: replica.busy)
        serving[0].placed += 1
        return [replica.address for replica in serving[:MAX_CANDIDATES]]

    def pin(self, descriptions: Mapping[str, stage_pb2.DescribeResponse]) -> None:
        """From now on only replicas that run the model and have the ports that the pipeline was checked with get sessions."""
        self._pinned = descriptions

    def _fits(self, replica: Replica) -> bool:
        pinned, own = self._pinned.get(replica.kind), replica.description
        if replica.state != omni_pb2.REPLICA_STATE_SERVING or own is None:
            return False
        return pinned is None or (own.model, own.accepts, own.produces) == (pinned.model, pinned.accepts, pinned.produces)

    def all(self) -> Iterable[Replica]:
        return [replica for replicas in self._replicas.values() for replica in replicas]

    async def _watch(self, replica: Replica) -> None:
        backoff = FIRST_BACKOFF_S
        stub = stage_pb2_grpc.StageServiceStub(self._channels.get(replica.address))
        while True:
            try:
                replica.description = await stub.Describe(stage_pb2.DescribeRequest(), timeout=DESCRIBE_TIMEOUT_S)
                async for report in stub.Watch(stage_pb2.WatchRequest()):
                    if report is None:  # What grpc.aio gives for bytes that it cannot decode.
                        log.warning("replica.not_understood", stage=replica.kind, address=replica.address)
                        break
                    self._take(replica, report)
                    backoff = FIRST_BACKOFF_S
            except grpc.aio.AioRpcError as error:
                if replica.state != omni_pb2.REPLICA_STATE_LOST:
                    log.warning("replica.lost", stage=replica.kind, address=replica.address, why=error.details())
            replica.state = omni_pb2.REPLICA_STATE_LOST
            self._notify()
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, MAX_BACKOFF_S)

    def _take(self, replica: Replica, report: stage_pb2.WatchResponse) -> None:
        replica.load = report
        replica.placed = 0
        state = omni_pb2.REPLICA_STATE_DRAINING if report.draining else omni_pb2.REPLICA_STATE_SERVING
        if state != replica.state:
            replica.state = state
            log.info("replica.state", stage=replica.kind, address=replica.address, state=omni_pb2.ReplicaState.Name(state))
            self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
