"""Where a link may go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from omnistage.v1 import stage_pb2

PATIENCE_S = 0.25
"""Of a link with fixed addresses, for a replica that comes back at once. The router, which knows of others, waits longer."""


class Route(Protocol):
    """Where a link may go."""

    @property
    def kind(self) -> stage_pb2.StageKind: ...

    @property
    def places_anew(self) -> bool:
        """Whether `place` can find other replicas for the hops behind too, so that the loss of one of those is worth another try here."""

    @property
    def patience_s(self) -> float:
        """How long to go on asking for a replica when none takes the session."""

    def place(self, revisions: Sequence[str]) -> tuple[Sequence[str], Sequence[stage_pb2.Hop]]:
        """Addresses for the next attempt, best first, and the hops behind. revisions: that the session is bound to, of this stage and those
        behind it; empty: any will do. Raises STAGE_LOST when there is no address."""

    def others(self, address: str, revisions: Sequence[str]) -> Sequence[str]:
        """Addresses beside this one that may take the session now, as far as is known; nobody is placed there. revisions: as in `place`."""

    def lost(self, address: str) -> None:
        """A replica was lost."""

    def known(self, address: str) -> Mapping[str, object]:
        """What the log is to say of a replica that gives no sign of life; empty where nothing is known."""


@dataclass(frozen=True, slots=True)
class FixedRoute:
    """The replicas that Open named, and nowhere else. kind, addresses: of the next hop. behind: the hops after it."""

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
        """The link itself asks a lost address last; nobody else is told here."""

    def known(self, address: str) -> Mapping[str, object]:
        return {}
