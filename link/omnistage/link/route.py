"""The addresses to which a link may go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from omnistage.v1 import stage_pb2

PATIENCE_S = 0.25
"""Seconds that a link with fixed addresses waits for a replica that comes back at once. The router, which can place anew, waits longer."""


class Route(Protocol):
    """The addresses to which a link may go."""

    @property
    def kind(self) -> stage_pb2.StageKind: ...

    @property
    def places_anew(self) -> bool:
        """Whether `place` can choose other replicas for the later stages too: then trying again helps after the loss of one of them."""

    @property
    def patience_s(self) -> float:
        """How long to go on asking for a replica while none takes the session."""

    def place(self, revisions: Sequence[str]) -> tuple[Sequence[str], Sequence[stage_pb2.Hop]]:
        """Addresses for the next attempt, best first, and the hops after this stage. revisions: which this stage and each stage after it
        must have; empty: any will do. Raises STAGE_LOST if there is no address."""

    def others(self, address: str, revisions: Sequence[str]) -> Sequence[str]:
        """Addresses, apart from this one, that may take the session now; this counts no session for them. revisions: as in `place`."""

    def lost(self, address: str) -> None:
        """Note that the replica at this address was lost."""

    def known(self, address: str) -> Mapping[str, object]:
        """The state of the process of a replica that gives no sign of life, as fields for a log line; empty if nothing is known."""


@dataclass(frozen=True, slots=True)
class FixedRoute:
    """A route to the replicas that Open names, and to no others. kind, addresses: of the next hop. behind: the hops after that hop."""

    kind: stage_pb2.StageKind
    addresses: Sequence[str]
    behind: Sequence[stage_pb2.Hop] = ()
    places_anew: bool = False
    patience_s: float = PATIENCE_S

    def place(self, revisions: Sequence[str]) -> tuple[Sequence[str], Sequence[stage_pb2.Hop]]:
        return self.addresses, self.behind

    def others(self, address: str, revisions: Sequence[str]) -> Sequence[str]:
        return [other for other in self.addresses if other != address]

    def lost(self, address: str) -> None:
        """The link itself asks a lost address last; nobody else needs to know."""

    def known(self, address: str) -> Mapping[str, object]:
        return {}
