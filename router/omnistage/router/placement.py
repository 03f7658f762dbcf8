"""The choice of a replica of each stage for a session: the router watches every replica, and the least loaded one is best. The replicas
also decide the router's capacity, which is the number of answers that they can take at once."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence

import grpc
import grpc.aio
import structlog

from omnistage.connector import shm
from omnistage.host.addresses import Name, Resolver, SystemResolver, name_of
from omnistage.host.background import SHORTAGES
from omnistage.link.liveness import Channels
from omnistage.link.search import Outlook
from omnistage.router.replica import DRAINING, LOST, SERVING, PlacedReplica
from omnistage.router.settings import LONE_PATIENCE_S
from omnistage.v1 import omni_pb2, stage_pb2, stage_pb2_grpc
from omnistage.wire.channel import ConnectionWatch
from omnistage.wire.errors import StageError
from omnistage.wire.limits import MAX_ADDRESSES
from omnistage.wire.token import VARIABLE

log = structlog.get_logger(__name__)

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 1.0
DESCRIBE_TIMEOUT_S = 2.0
SILENCE_S = 2.5
"""A replica sends a report every second. A replica without a report for this long, and for SECOND_LOOK_S more, counts as lost until its
next report."""
SECOND_LOOK_S = 0.5
"""Additional seconds in which the router reads reports that wait already, because the router itself may have been late."""
RESTS_AFTER_S = 10.0
"""After so many seconds without a session the router stops listening to reports, because each report wakes every thread of gRPC in both
processes repeatedly for a second."""
REST_S = 60.0
"""Time between two looks at a replica that rests. The router sees the end of its process at once, by the connection."""
WAKING_S = 0.5
"""Time from the first session to the first look: by then the report counts the session."""
LOOKUP_PERIOD_S = 1.0
MAX_WATCHED = 256
"""Largest number of addresses of one name that the router watches."""

Watch = grpc.aio.UnaryStreamCall[stage_pb2.WatchRequest, stage_pb2.WatchResponse]


class Placement:
    """The replicas of one pipeline. `watch()` runs for ever and keeps their state; `place()` orders them for a session."""

    def __init__(
        self,
        channels: Channels,
        replicas: Mapping[str, Sequence[str]],
        *,
        resolve: Resolver | None = None,
        boot_id: str = "",
        lookup_period_s: float = LOOKUP_PERIOD_S,
        lone_patience_s: float = LONE_PATIENCE_S,
    ) -> None:
        """replicas: addresses by kind of stage, HOST:PORT or dns:///NAME:PORT. resolve: finds the addresses of a name; None: the system's
        resolver. boot_id: of the host on which the first stage should be; empty: this host. lookup_period_s: seconds between two
        lookups. lone_patience_s: see RouterSettings."""
        self._channels = channels
        self._resolve = resolve or SystemResolver()
        self._boot_id = boot_id or shm.boot_id()
        self._lookup_period_s = lookup_period_s
        self._lone_patience_s = lone_patience_s
        # Each address with the name that it stands for; a plain HOST:PORT stands for no name.
        by_kind = {kind: [(address, name_of(address)) for address in dict.fromkeys(addresses)] for kind, addresses in replicas.items()}
        self._names = [(kind, name) for kind, pairs in by_kind.items() for _, name in pairs if name]
        self._replicas = {kind: [PlacedReplica(kind, address) for address, name in pairs if not name] for kind, pairs in by_kind.items()}
        self._pinned: Mapping[str, stage_pb2.DescribeResponse] = {}
        self._changed = asyncio.Event()
        self._used = asyncio.Event()
        self._used_at = 0.0

    async def watch(self) -> None:
        """Watch all replicas and look up all names, for ever."""
        self.use()
        async with asyncio.TaskGroup() as group:
            for replica in self.all():
                group.create_task(self._watch(replica))
            for kind, name in self._names:
                group.create_task(self._follow(kind, name, group))

    @property
    def changed(self) -> asyncio.Event:
        """An event that is set at the next change of a replica's state. Get the event first, then look at the replicas, then wait for the
        event: so no change is missed."""
        return self._changed

    async def descriptions(self) -> dict[str, stage_pb2.DescribeResponse]:
        """The descriptions of the stages, by kind, each from the first replica that takes sessions. Waits until every kind has one."""
        while True:
            changed = self.changed
            by_kind = {
                kind: next((replica.description for replica in replicas if replica.state == SERVING), None)
                for kind, replicas in self._replicas.items()
            }
            described = {kind: description for kind, description in by_kind.items() if description is not None}
            if len(described) == len(by_kind):
                return described
            await changed.wait()

    def missing(self) -> list[str]:
        """Why `descriptions` still waits: a sentence for each kind without a replica that takes sessions."""
        reasons = []
        for kind, replicas in self._replicas.items():
            if any(replica.state == SERVING for replica in replicas):
                continue
            is_known = any(replica.description is not None for replica in replicas)
            reason = _refusal(replicas) or ("takes no sessions now" if is_known else "has not answered yet")
            reasons.append(f"its {kind} {reason}")
        return reasons

    @property
    def is_complete(self) -> bool:
        """Whether every kind has a replica that takes sessions, or one that may only be too busy to report."""
        return all(any(replica.state == SERVING or replica.silent for replica in replicas) for replicas in self._replicas.values())

    # Placing -------------------------------------------------------------------------------------------------------------------------

    def place(self, kind: str, *, boot_id: str = "", revision: str = "") -> list[str]:
        """Addresses of replicas for a session, best first; the session counts for the first address. Raises STAGE_LOST if no replica takes
        sessions now.

        boot_id: boot id of the host of the stage before; empty: the host where the first stage should be. A replica on that host comes
        first while it has at most n + n / 4 + 1 sessions, where n is the fewest of any replica: a copy between hosts costs about as much,
        and a larger preference would let machines idle. revision: required revision, for a session that goes on; empty: any. Suspect
        replicas come last."""
        serving = self._serving(kind, revision)
        host = boot_id or self._boot_id
        min_sessions = min((replica.busy for replica in serving if not replica.suspect), default=0)
        max_neighbour_sessions = min_sessions + 1 + min_sessions // 4

        def rank(replica: PlacedReplica) -> tuple[bool, bool, int]:
            is_neighbour = replica.boot_id == host and replica.busy <= max_neighbour_sessions
            return replica.suspect, not is_neighbour, replica.busy

        serving.sort(key=rank)
        serving[0].placed += 1
        self.use()
        return [replica.address for replica in serving[:MAX_ADDRESSES]]

    def others(self, kind: str, address: str, *, revision: str = "") -> list[str]:
        """Addresses of a kind, other than `address`, that take sessions and are not suspect. revision: as in `place`."""
        replicas = [replica for replica in self._replicas[kind] if self._fits(replica) and revision in ("", replica.revision)]
        return [replica.address for replica in replicas if replica.state == SERVING and not replica.suspect and replica.address != address]

    def suspect(self, addresses: Collection[str]) -> None:
        """Place sessions at these replicas only if no others take them, until their next reports: a link lost them, or heard no sign of
        life from them."""
        for replica in self.all():
            if replica.address in addresses:
                if not replica.suspect and (process_fields := replica.process.describe()):
                    log.warning("replica.suspect", stage=replica.kind, address=replica.address, **process_fields)
                replica.suspect = True
                self.use()

    def describe_process(self, kind: str, address: str) -> dict[str, object]:
        """The state of a replica's process, as fields for a line of the log; empty if this machine cannot see the process."""
        replicas = (replica for replica in self._replicas[kind] if replica.address == address)
        return next((replica.process.describe() for replica in replicas), {})

    def use(self) -> None:
        """Call it when the state of the replicas is needed: from now on they report every second, until RESTS_AFTER_S have passed without a
        session or such a call."""
        self._used_at = asyncio.get_running_loop().time()
        used, self._used = self._used, asyncio.Event()
        used.set()

    def boot_id(self, kind: str, address: str) -> str:
        """The host of a replica, for `near`; empty if it is not known."""
        return next((replica.boot_id for replica in self._replicas[kind] if replica.address == address), "")

    def pin(self, descriptions: Mapping[str, stage_pb2.DescribeResponse]) -> None:
        """From now on give sessions only to replicas that run the model of these descriptions, by kind, and have their ports. A replica may
        have more output ports: it may be of the next version already."""
        self._pinned = descriptions

    def all(self) -> list[PlacedReplica]:
        return [replica for replicas in self._replicas.values() for replica in replicas]

    def count(self, kind: str, state: omni_pb2.ReplicaState) -> int:
        """The number of replicas of a kind in a state, by their last reports. Any thread may call this."""
        return sum(replica.state_for_people == state for replica in list(self._replicas[kind]))

    # Waiting for lost stages ---------------------------------------------------------------------------------------------------------

    def keep(self, addresses: Collection[str]) -> None:
        """Note which servers the launcher starts again whenever they end: those at these addresses, and no others."""
        for replica in self.all():
            replica.is_kept = replica.address in addresses
        self._notify()

    @property
    def is_unloaded(self) -> bool:
        return any(replica.is_unloaded for replica in self.all())

    def unload(self) -> None:
        """Note that the launcher ends the servers, and starts them again when the pipeline is loaded."""
        for replica in self.all():
            replica.is_unloaded, replica.is_kept = True, False
        self._notify()

    def load(self) -> None:
        """Note that the launcher starts the servers again."""
        for replica in self.all():
            replica.is_unloaded, replica.is_kept = False, True
        self._notify()

    @property
    def patience_s(self) -> float:
        """Seconds to go on looking for a lost stage. The launcher may notice a loss a moment after this router."""
        is_kept = any(replica.is_kept for replica in self.all())
        return max(self._lone_patience_s, LONE_PATIENCE_S) if is_kept else self._lone_patience_s

    def outlook(self, revisions: Mapping[str, str]) -> Outlook:
        """The hope that a session may have. revisions: by kind of its stages, as in `place`."""
        candidates = [self._candidates(kind, revision) for kind, revision in revisions.items()]
        absent = [replicas for replicas in candidates if not _available(replicas)]
        if not absent:
            return Outlook.COMPLETE
        is_awaited = all(any(replica.is_kept for replica in replicas) for replicas in absent)
        return Outlook.AWAITED if is_awaited else Outlook.GONE

    def _serving(self, kind: str, revision: str) -> list[PlacedReplica]:
        """The replicas that take sessions now, or, if none does, those that are silent: a silent replica may only be busy, and the link
        that waits for it finds out. Raises STAGE_LOST if there are none."""
        serving = _available(self._candidates(kind, revision))
        if not serving:
            refusal = _refusal(self._replicas[kind])
            reason = f": the one {refusal}" if refusal else ""
            raise StageError("STAGE_LOST", f"no {kind} is reachable now{reason}", metadata={"stage": kind})
        return serving

    def _candidates(self, kind: str, revision: str) -> list[PlacedReplica]:
        """The replicas that may have the session, if they take sessions.

        If any replica has the revision, only replicas of that revision count, even while they are out of reach: they may be back at once.
        If none has it, all count, and the stage says why it refuses."""
        replicas = [replica for replica in self._replicas[kind] if self._fits(replica)]
        if revision and any(replica.revision == revision for replica in self._replicas[kind]):
            replicas = [replica for replica in replicas if replica.revision == revision]
        return replicas

    def _fits(self, replica: PlacedReplica) -> bool:
        """Whether a replica has described itself, and has the model and the ports that `pin` demands."""
        pinned, description = self._pinned.get(replica.kind), replica.description
        if description is None or pinned is None:
            return description is not None
        return (description.model, description.accepts) == (pinned.model, pinned.accepts) and all(
            port in description.produces for port in pinned.produces
        )

    # Watching ------------------------------------------------------------------------------------------------------------------------

    async def _watch(self, replica: PlacedReplica) -> None:
        """Keep the state of a replica up to date until the replica is lost and its name no longer lists it.

        With wait_for_ready gRPC connects anew by itself, at most about a second after a replica has come back, so a replica that is away
        needs no pause here. The pauses are for a server that answers, but not as a stage does.
        """
        backoff_s = FIRST_BACKOFF_S
        channel = self._channels.get(replica.address)
        stub = stage_pb2_grpc.StageServiceStub(channel)
        with ConnectionWatch(channel) as connection:
            while True:
                needs_pause = False
                try:
                    await self._describe(replica, stub)
                    if not await self._listen(replica, stub):
                        needs_pause, reason = True, "it ended its reports"
                    elif await self._rest(replica, connection):
                        reason = "its connection was lost"
                    else:  # It has rested long enough, or its state is needed.
                        continue
                except TimeoutError:
                    replica.silent, reason = True, f"no report within {SILENCE_S + SECOND_LOOK_S:g} s"
                except grpc.aio.AioRpcError as error:
                    needs_pause, reason = self._note_failure(replica, error), error.details() or ""
                if not replica.is_away:
                    backoff_s = FIRST_BACKOFF_S
                self._lose(replica, reason)
                if not replica.listed:
                    self._forget(replica)
                    return
                await asyncio.sleep(backoff_s if needs_pause else 0.0)
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S) if needs_pause else backoff_s

    async def _listen(self, replica: PlacedReplica, stub: stage_pb2_grpc.StageServiceAsyncStub) -> bool:
        """Receive the reports of a replica until it may rest; then return True. Returns False if it ended the reports, or sent something
        else. Raises TimeoutError and AioRpcError."""
        watch = stub.Watch(stage_pb2.WatchRequest(), metadata=self._channels.metadata)
        try:
            while (report := await _report(watch)) is not grpc.aio.EOF:
                if not isinstance(report, stage_pb2.WatchResponse):  # grpc.aio returns another object for bytes that it cannot decode.
                    log.warning("replica.not_understood", stage=replica.kind, address=replica.address)
                    return False
                if replica.load.draining and not report.draining:
                    await self._describe(replica, stub)  # The stage is warm now, so its description has what it measured.
                self._take(replica, report)
                if self._may_rest(replica):
                    return True
            return False
        finally:
            watch.cancel()

    def _may_rest(self, replica: PlacedReplica) -> bool:
        """Whether the replica is well and nobody needs the state of any replica."""
        if replica.state != SERVING or any(other.busy or other.load.queued for other in self.all()):
            return False
        return asyncio.get_running_loop().time() - self._used_at >= RESTS_AFTER_S

    async def _rest(self, replica: PlacedReplica, connection: ConnectionWatch) -> bool:
        """Wait until `use` is called or REST_S have passed. Returns True if the connection was lost meanwhile, which ends the wait at
        once."""
        using = asyncio.create_task(self._used.wait())
        replica.rests = True
        try:
            done, _ = await asyncio.wait({using, connection.loss}, timeout=REST_S, return_when=asyncio.FIRST_COMPLETED)
            if done == {using}:
                await asyncio.sleep(WAKING_S)
            return connection.is_lost
        finally:
            replica.rests = False
            using.cancel()

    async def _describe(self, replica: PlacedReplica, stub: stage_pb2_grpc.StageServiceAsyncStub) -> None:
        """Ask a replica for its description. Raises AioRpcError."""
        replica.description = await stub.Describe(
            stage_pb2.DescribeRequest(), timeout=DESCRIBE_TIMEOUT_S, wait_for_ready=True, metadata=self._channels.metadata
        )
        replica.process.is_at(replica.description.pid, replica.boot_id)

    def _note_failure(self, replica: PlacedReplica, error: grpc.aio.AioRpcError) -> bool:
        """Note that a call to a replica failed. Returns True if the next try should wait for a pause."""
        self._note_refusal(replica, error)
        if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:  # No answer to Describe: a replica that served may only be busy.
            replica.silent = replica.silent or not replica.is_away
            return False
        replica.silent = False
        return True

    def _note_refusal(self, replica: PlacedReplica, error: grpc.aio.AioRpcError) -> None:
        """Log once that a replica refuses this router's token, which an operator must mend. The watch goes on: the stage may be started
        again with another token."""
        refused = error.code() == grpc.StatusCode.UNAUTHENTICATED
        if refused and not replica.refused:
            log.error("replica.refuses_our_token", stage=replica.kind, address=replica.address, why=error.details())
            replica.refused = True
            self._notify()
        replica.refused = refused

    def _take(self, replica: PlacedReplica, report: stage_pb2.WatchResponse) -> None:
        """Set a replica's load and state by its report."""
        replica.load = report
        replica.placed = 0
        state = DRAINING if report.draining or not replica.listed else SERVING
        if state != replica.state:
            process_fields = replica.process.describe() if replica.silent else {}
            log.info(
                "replica.state", stage=replica.kind, address=replica.address, state=omni_pb2.ReplicaState.Name(state), **process_fields
            )
            self._set_state(replica, state)
        replica.suspect = replica.refused = replica.silent = False
        replica.process.note_sign_of_life()

    def _lose(self, replica: PlacedReplica, reason: str) -> None:
        """Count a replica as lost, if it has ever described itself. reason: for the log."""
        replica.load, replica.placed = stage_pb2.WatchResponse(), 0
        if replica.state != LOST and replica.description is not None:
            process_fields = replica.process.describe() if replica.silent else {}
            if replica.is_unloaded:
                log.info("replica.unloaded", stage=replica.kind, address=replica.address)
            else:
                log.warning("replica.lost", stage=replica.kind, address=replica.address, why=reason, **process_fields)
            self._set_state(replica, LOST)

    def _set_state(self, replica: PlacedReplica, state: omni_pb2.ReplicaState) -> None:
        replica.state = state
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # Names ---------------------------------------------------------------------------------------------------------------------------

    async def _follow(self, kind: str, name: Name, group: asyncio.TaskGroup) -> None:
        """Look a name up again and again, and watch each new address in a task of `group`. A lookup that fails or finds nothing changes
        nothing, because DNS is down more often than all replicas at once, and the watch notices lost replicas."""
        failing = False
        while True:
            addresses: Collection[str] = ()
            reason = "it has no address"
            try:
                addresses = await self._resolve(name)
            # DNS fails with an OSError; the other errors mean that no thread for the lookup could be started.
            except SHORTAGES as error:
                reason = str(error)
            if not addresses and not failing:
                log.warning("name.not_found", stage=kind, name=str(name), why=reason)
            failing = not addresses
            if addresses:
                for replica in self._list(kind, name, sorted(set(addresses))[:MAX_WATCHED]):
                    group.create_task(self._watch(replica))
            await asyncio.sleep(self._lookup_period_s)

    def _list(self, kind: str, name: Name, addresses: Sequence[str]) -> list[PlacedReplica]:
        """Note the addresses `addresses` for a name; returns the new replicas. A replica that the name no longer lists gets no new session,
        and is watched until it is lost."""
        replicas = self._replicas[kind]
        known_addresses = {replica.address for replica in replicas}
        for replica in replicas:
            if replica.name == name:
                replica.listed = replica.address in addresses
                if not replica.listed and replica.state == SERVING:
                    log.info("replica.unlisted", stage=kind, address=replica.address, name=str(name))
                    self._set_state(replica, DRAINING)
        new = [PlacedReplica(kind, address, name) for address in addresses if address not in known_addresses]
        replicas.extend(new)
        return new

    def _forget(self, replica: PlacedReplica) -> None:
        self._replicas[replica.kind].remove(replica)
        self._channels.forget(replica.address)


def _available(replicas: Collection[PlacedReplica]) -> list[PlacedReplica]:
    """Those of the replicas that take sessions; if none does, those that are silent."""
    return [replica for replica in replicas if replica.state == SERVING] or [replica for replica in replicas if replica.silent]


def _refusal(replicas: Collection[PlacedReplica]) -> str:
    """A phrase for an error, which names a replica that refuses this router's token; empty if none refuses it."""
    refusing = next((replica.address for replica in replicas if replica.refused), "")
    return f"at {refusing} refuses this router's token ({VARIABLE})" if refusing else ""


async def _report(watch: Watch) -> object:
    """The next report of a watch, or EOF at its end. Raises TimeoutError and AioRpcError."""
    reading = asyncio.ensure_future(watch.read())
    try:
        for wait_s in (SILENCE_S, SECOND_LOOK_S):
            await asyncio.wait({reading}, timeout=wait_s)
            if reading.done():
                return await reading
        raise TimeoutError
    finally:
        reading.cancel()


Sessions = dict[str, dict[str, int]]
"""Sessions that each replica takes, by kind, then by address."""


def capacity(placements: Collection[Placement]) -> int:
    """How many answers all pipelines together can take at once. A pipeline takes as many answers as all replicas of its scarcest stage
    together take sessions. Draining replicas do not count; lost replicas do, because they may be back at once. Replicas that several
    pipelines share count once: all pipelines with a stage of one kind together take no more than all replicas of that kind.

    At least 1: if no stage takes a session, the request must reach the stages, because their refusal says best why."""
    pipelines = [_sessions(placement) for placement in placements]
    all_replicas: Sessions = {}  # A shared replica is in it once.
    for pipeline in pipelines:
        for kind, replicas in pipeline.items():
            all_replicas.setdefault(kind, {}).update(replicas)
    total = sum(map(_scarcest, pipelines))
    for kind, replicas in all_replicas.items():
        others_total = sum(_scarcest(pipeline) for pipeline in pipelines if kind not in pipeline)
        total = min(total, sum(replicas.values()) + others_total)
    return max(1, total)


def _sessions(placement: Placement) -> Sessions:
    """The sessions that each known replica of a pipeline takes; replicas that drain are left out."""
    sessions: Sessions = {}
    for replica in placement.all():
        if replica.description is not None and replica.state != DRAINING:
            sessions.setdefault(replica.kind, {})[replica.address] = replica.description.max_sessions
    return sessions


def _scarcest(pipeline: Sessions) -> int:
    """The smallest number of sessions that all replicas of one kind take together; 0 without replicas."""
    return min((sum(replicas.values()) for replicas in pipeline.values()), default=0)
