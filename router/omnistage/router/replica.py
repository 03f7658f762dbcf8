"""A stage server, as the router sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

from omnistage.host.addresses import Name
from omnistage.router.process import ReplicaProcess
from omnistage.v1 import omni_pb2, stage_pb2

LOST, SERVING, DRAINING = omni_pb2.REPLICA_STATE_LOST, omni_pb2.REPLICA_STATE_SERVING, omni_pb2.REPLICA_STATE_DRAINING
STARTING, UNLOADED = omni_pb2.REPLICA_STATE_STARTING, omni_pb2.REPLICA_STATE_UNLOADED
STATES = {SERVING: "serving", DRAINING: "draining", LOST: "lost", STARTING: "starting", UNLOADED: "unloaded"}
"""The states in words."""


@dataclass(slots=True, eq=False)
class PlacedReplica:
    """One stage server.

    name: the DNS name in which the address was found; None: the configuration has the address. listed: the name still has the address.
    placed: sessions that this router placed at the server since its last report, which may not count them yet. suspect: since the last
    report a link lost the server, or heard no sign of life from it. refused: the server does not accept this router's token. silent: the
    server counts as lost only because no report comes. rests: the router does not listen to the server now, and `load` is as old as the
    last report. is_kept: the launcher of this router starts the server again whenever it ends. is_unloaded: its pipeline is unloaded, so
    the server ends, unless another pipeline uses it. process: the state of the server's process, for the log. description: None: not
    described yet.
    """

    kind: str
    address: str
    name: Name | None = None
    listed: bool = True
    state: omni_pb2.ReplicaState = STARTING
    description: stage_pb2.DescribeResponse | None = None
    load: stage_pb2.WatchResponse = field(default_factory=stage_pb2.WatchResponse)
    placed: int = 0
    suspect: bool = False
    refused: bool = False
    silent: bool = False
    rests: bool = False
    is_kept: bool = False
    is_unloaded: bool = False
    process: ReplicaProcess = field(init=False)

    def __post_init__(self) -> None:
        self.process = ReplicaProcess(self.address)

    @property
    def is_away(self) -> bool:
        """Whether the server has not answered yet, or does not answer any more."""
        return self.state in (STARTING, LOST)

    @property
    def state_for_people(self) -> omni_pb2.ReplicaState:
        """The state as operators see it, who know why a server is away."""
        if not self.is_away or self.silent:
            return self.state
        return UNLOADED if self.is_unloaded else STARTING if self.is_kept else self.state

    @property
    def busy(self) -> int:
        """Sessions that the server has: the number in its last report, and the sessions placed there since."""
        return self.load.sessions + self.placed

    @property
    def boot_id(self) -> str:
        return self.description.boot_id if self.description else ""

    @property
    def revision(self) -> str:
        return self.description.revision if self.description else ""
