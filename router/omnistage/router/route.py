"""The route of an answer: replicas that the placement finds anew for every attempt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from omnistage.router.placement import Placement
from omnistage.v1 import stage_pb2
from omnistage.wire.kinds import KINDS

PATIENCE_S = 5.0
"""Seconds to wait for a replica that comes back. A small model is served again in less time, and the answer goes on. A large model takes
longer, so the client gets the error that the stage is lost, with the delay until it may ask again."""


@dataclass(frozen=True, slots=True)
class Hop:
    """A stage after the first one, without its replicas. takes: ports of the stage before it that go into it. checkpoints: its compact
    ports. unwanted: its ports that nobody needs."""

    kind: str
    model: str
    params: stage_pb2.StageParams
    takes: Sequence[str]
    checkpoints: Sequence[str]
    unwanted: Sequence[str]


@dataclass(frozen=True, slots=True)
class PlacedRoute:
    """The Route (link.route) of a link to the first stage, whose replicas the placement chooses. first: kind of the first stage. behind:
    the stages after the first."""

    placement: Placement
    first: str
    behind: Sequence[Hop]
    places_anew: bool = True
    patience_s: float = PATIENCE_S

    @property
    def kind(self) -> stage_pb2.StageKind:
        return KINDS[self.first]

    def place(self, revisions: Sequence[str]) -> tuple[Sequence[str], Sequence[stage_pb2.Hop]]:
        """Addresses of the first stage, and the hops after it, each placed near the best replica of the stage before. revisions: as in
        Route."""
        revision = dict(enumerate(revisions))
        addresses = self.placement.place(self.first, revision=revision.get(0, ""))
        before = (self.first, addresses[0])
        hops = []
        for number, hop in enumerate(self.behind, start=1):
            best_first = self.placement.place(hop.kind, boot_id=self.placement.boot_id(*before), revision=revision.get(number, ""))
            before = (hop.kind, best_first[0])
            hops.append(
                stage_pb2.Hop(
                    kind=KINDS[hop.kind],
                    model=hop.model,
                    addresses=best_first,
                    params=hop.params,
                    takes=hop.takes,
                    checkpoints=hop.checkpoints,
                    unwanted=hop.unwanted,
                )
            )
        return addresses, hops

    def others(self, address: str, revisions: Sequence[str]) -> Sequence[str]:
        return self.placement.others(self.first, address, revision=next(iter(revisions), ""))

    def lost(self, address: str) -> None:
        self.placement.suspect([address])

    def known(self, address: str) -> Mapping[str, object]:
        return self.placement.known(self.first, address)
