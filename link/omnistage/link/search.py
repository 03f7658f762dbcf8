"""Finds a replica that takes a session: decides in which order the replicas of a route are asked, how long each has to answer, and when to
give up. A route has the addresses to which a link may go."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Protocol

import structlog

from omnistage.link.liveness import Channels, Deadline, StreamLost
from omnistage.link.replay import ReplayExpired
from omnistage.link.stream import Stream
from omnistage.v1 import stage_pb2
from omnistage.wire.errors import StageError
from omnistage.wire.proto_values import kind_name

log = structlog.get_logger(__name__)

PATIENCE_S = 0.25
"""Seconds that a link with fixed addresses waits for a replica that comes back at once. The router, which can place anew, waits longer."""


class Outlook(Enum):
    """The hope that a link may have of its route: all stages have a replica; one has none, and it is being started again; one is gone."""

    COMPLETE = "complete"
    AWAITED = "awaited"
    GONE = "gone"


class Route(Protocol):
    """The addresses to which a link may go."""

    @property
    def kind(self) -> stage_pb2.StageKind: ...

    @property
    def places_anew(self) -> bool:
        """Whether `place` can choose other replicas for the later stages too: then trying again helps after the loss of one of them."""

    @property
    def patience_s(self) -> float:
        """How long to go on asking for a replica while none takes the session, from the loss on, or from the moment at which a stage that
        was awaited is there again."""

    def outlook(self, revisions: Sequence[str]) -> Outlook:
        """The hope that a further attempt may have. revisions: as in `place`."""

    def place(self, revisions: Sequence[str]) -> tuple[Sequence[str], Sequence[stage_pb2.Hop]]:
        """Addresses for the next attempt, best first, and the hops after this stage. revisions: which this stage and each stage after it
        must have; empty: any will do. Raises STAGE_LOST if there is no address."""

    def others(self, address: str, revisions: Sequence[str]) -> Sequence[str]:
        """Addresses, apart from this one, that may take the session now; this counts no session for them. revisions: as in `place`."""

    def note_loss(self, address: str) -> None:
        """Note that the replica at this address was lost."""

    def describe_process(self, address: str) -> Mapping[str, object]:
        """The state of the process of a replica that gives no sign of life, as fields for a log line; empty if nothing is known."""


@dataclass(frozen=True, slots=True)
class FixedRoute:
    """A route to the replicas that Open names, and to no others. kind, addresses: of the next hop. later_hops: the hops after that hop."""

    kind: stage_pb2.StageKind
    addresses: Sequence[str]
    later_hops: Sequence[stage_pb2.Hop] = ()
    places_anew: bool = False
    patience_s: float = PATIENCE_S

    def outlook(self, revisions: Sequence[str]) -> Outlook:
        return Outlook.COMPLETE

    def place(self, revisions: Sequence[str]) -> tuple[Sequence[str], Sequence[stage_pb2.Hop]]:
        return self.addresses, self.later_hops

    def others(self, address: str, revisions: Sequence[str]) -> Sequence[str]:
        return [other for other in self.addresses if other != address]

    def note_loss(self, address: str) -> None:
        """The link itself asks a lost address last; nobody else needs to know."""

    def describe_process(self, address: str) -> Mapping[str, object]:
        return {}


SEARCH_S = 4.0
"""Seconds, in addition to the patience of the route, for asking replicas that do not answer one after the other. For a replica that gives
signs of life the search waits longer."""

FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 0.2
"""Longest pause between two rounds through the replicas, in seconds."""


class _AwaitedStage:
    """The wait of one search for a stage that is being started again, in the log; a context manager."""

    def __init__(self) -> None:
        self._since: float | None = None  # None: no stage is awaited
        self._stage = ""

    def note(self, error: StageError, deadline: Deadline) -> None:
        """Note that the stage that this error names is awaited. Raises DEADLINE if the time of the request is nearly over."""
        if self._since is None:
            self._since, self._stage = time.monotonic(), error.metadata.get("stage", "")
            log.warning("link.waits", stage=self._stage, why=f"it is being started again: {error.message}")
        if deadline.is_near:
            message = f"the {self._stage} was being started again until the time of the request was over"
            raise StageError("DEADLINE", message, metadata={"stage": self._stage}) from None

    def __enter__(self) -> _AwaitedStage:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._since is not None:
            waited_s = round(time.monotonic() - self._since, 3)
            log.warning("link.waited", stage=self._stage, answers=kind is None, waited_s=waited_s)


Ask = Callable[[str, Sequence[stage_pb2.Hop], Callable[[], bool]], Awaitable[Stream]]
"""Opens a stream to a replica. It gets the address, the hops after it, and a function that returns whether to withdraw the Open if the
replica does not answer at once."""


class Search:
    """Finds replicas for one link: the first one, and another one after every loss. silent: addresses of replicas that gave no sign of life
    when they were asked, for this stage or a later one."""

    def __init__(self, channels: Channels, route: Route, deadline: Deadline) -> None:
        self._channels = channels
        self._route = route
        self._deadline = deadline
        self._stage = kind_name(route.kind)
        self._lost_at: dict[str, float] = {}  # time of the last loss by address, in time.monotonic() seconds
        self._named_addresses: set[str] = set()  # addresses that the route has named so far
        self.silent: set[str] = set()

    async def find(self, revisions: Sequence[str], ask: Ask) -> Stream:
        """Ask the replicas, in rounds, until one takes the session. revisions: as in Route.place. Raises the error of the last replica if
        no further round can help, or the time for them is over; DEADLINE if a stage is still being started again at the end of the time."""
        begin_s = patient_since_s = time.monotonic()
        pause = FIRST_PAUSE_S
        self._named_addresses = set(self._route.others("", revisions))
        with _AwaitedStage() as awaited:
            while True:
                try:
                    return await self._round(revisions, ask, patient_since_s + self._route.patience_s + SEARCH_S)
                except StageError as error:
                    if not error.meaning.passes or not self.can_mend(error):
                        raise
                    match self._route.outlook(revisions):
                        case Outlook.AWAITED:
                            awaited.note(error, self._deadline)
                            patient_since_s = time.monotonic()
                        case Outlook.GONE:
                            patient_since_s = begin_s
                    # A replica that was named since the last round is asked even if the time is over.
                    remaining_s = min(patient_since_s + self._route.patience_s - time.monotonic(), self._deadline.remaining_s)
                    if pause > remaining_s and not self._is_another(revisions):
                        raise
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)

    def can_mend(self, error: StageError) -> bool:
        """Whether another replica of this stage can help after an error. If a later stage was lost, it helps only on a route that can
        choose other replicas for the later stages."""
        return not error.meaning.is_about_later_stage or self._route.places_anew

    def is_alone(self, address: str, revisions: Sequence[str]) -> bool:
        """Whether all other replicas, if any, give no sign of life either. revisions: as in Route.place."""
        return all(self._channels.pulses.is_quiet(other) for other in self._route.others(address, revisions))

    def _is_another(self, revisions: Sequence[str]) -> bool:
        """Whether a new replica was found since the last call, for example during a long wait for the only replica. Each counts once."""
        addresses_before, self._named_addresses = self._named_addresses, self._named_addresses.union(self._route.others("", revisions))
        return addresses_before != self._named_addresses

    def lose(self, address: str) -> None:
        """Note that the replica at this address cannot be reached, is silent, or is lost."""
        self._lost_at[address] = time.monotonic()
        self._route.note_loss(address)
        if self._channels.pulses.is_quiet(address):
            self.silent.add(address)

    async def _round(self, revisions: Sequence[str], ask: Ask, until: float) -> Stream:
        """Ask each replica of the route once; after `until`, in time.monotonic() seconds, ask only the first one. Raises the error of the
        last replica, or at once an error that no other replica would change."""
        addresses, hops = self._route.place(revisions)
        errors = [StageError("STAGE_LOST", f"no replica of {self._stage} is known", metadata={"stage": self._stage})]
        self._named_addresses.update(addresses)
        remaining = sorted(addresses, key=self._order)
        # The first replica is asked at any time.
        while remaining and (len(remaining) == len(addresses) or time.monotonic() < until):
            address = remaining.pop(0)
            self._channels.hedges.count_open()
            try:
                return await ask(address, hops, lambda: self._may_hedge(remaining))
            except ReplayExpired:
                raise
            except StageError as error:
                if not error.meaning.another_replica:
                    raise
                if isinstance(error, StreamLost):
                    self.lose(address)
                log.warning("link.open_failed", stage=self._stage, address=address, reason=error.reason, message=error.message)
                errors = [self._as_lost(address, error) if error.reason == "UNAUTHENTICATED" else error]
        raise errors.pop()  # If this frame kept the error, the error would keep the frame and with it the request.

    def _order(self, address: str) -> tuple[bool, float]:
        """The key that sorts the replicas. First come replicas that this link never lost, then replicas that it lost, the latest loss last.
        Quiet replicas come after all others."""
        return self._channels.pulses.is_quiet(address), self._lost_at.get(address, 0.0)

    def _may_hedge(self, others: Sequence[str]) -> bool:
        """Whether to withdraw an Open that its replica does not answer at once, to send it to another one. True if one of `others` is not
        quiet, and the budget of second Opens has room; this uses up one of them."""
        return any(not self._channels.pulses.is_quiet(address) for address in others) and self._channels.hedges.take()

    def _as_lost(self, address: str, error: StageError) -> StageError:
        """The error for the callers of this process if a replica refuses this process's token: STAGE_LOST, because their own credentials
        are right."""
        message = f"{self._stage} at {address} refuses its caller: {error.message}"
        return StageError("STAGE_LOST", message, metadata={"stage": self._stage})
