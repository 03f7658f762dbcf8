"""Who gets a place: the policy, without a clock, a loop or gRPC.

One client may hold most of the places, but not all of them: a place is given to a client that holds fewer than `share / (1 - share)` times
the places that are free (Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet switches", 1998). Alone a client so
gets to `share` of the places, the next one to `share` of the rest, and so on. A client that holds nothing gets any free place.

Where all places are taken, a client that holds less than an equal share may wait; one that holds more is told at once. A place that becomes
free goes to who holds the fewest, among equals to who has waited longest. So a client that holds nothing and waits gets a place at the
latest when as many places have become free as others waited before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass

MAX_WAITING = 64
"""Of all clients together."""

MAX_WAITING_EACH = 4
"""Of one client."""


@dataclass(slots=True, eq=False)
class Ticket:
    """One ask. given: it holds a place; else it waits for one."""

    client: Hashable
    given: bool = False


class Refused(Exception):
    """There is no place for this client now, and it may not wait for one; the text says why."""


class Places:
    """Counts who holds what. `limit` may change at any time; fewer places take nobody's away."""

    def __init__(self, limit: int, share: float) -> None:
        """share: greatest part of the places that one client may hold; 1: all of it."""
        self._share = share
        self._held: Counter[Hashable] = Counter()
        self._waiting: list[Ticket] = []
        self.limit = limit

    @property
    def taken(self) -> int:
        return self._held.total()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def ask(self, client: Hashable) -> Ticket:
        """A ticket, with a place or one that waits. Raises Refused."""
        if self.taken < self.limit and not self._waiting:
            return self.take(client)
        ticket = Ticket(client)
        clients = self._held.keys() | {waiting.client for waiting in self._waiting} | {client}
        if self._held[client] * len(clients) >= self.limit:
            raise Refused(f"all {self.limit} places are taken")
        if self.waiting >= MAX_WAITING or sum(waiting.client == client for waiting in self._waiting) >= MAX_WAITING_EACH:
            raise Refused(f"all {self.limit} places are taken, and enough are waiting for one")
        self._waiting.append(ticket)
        return ticket

    def take(self, client: Hashable) -> Ticket:
        """A ticket with a place, whoever waits for one. Raises Refused."""
        free = self.limit - self.taken
        if free <= 0:
            raise Refused(f"all {self.limit} places are taken")
        if not self._may_take(client, free):
            raise Refused(f"this client holds {self._held[client]} of {self.limit} places; the rest is for others")
        ticket = Ticket(client)
        self._give(ticket)
        return ticket

    def leave(self, ticket: Ticket) -> list[Ticket]:
        """Give a place back, or stop waiting for one. The tickets that have a place now because of it."""
        if not ticket.given:
            self._waiting.remove(ticket)
            return self.fill()
        ticket.given = False
        self._held[ticket.client] -= 1
        if not self._held[ticket.client]:
            del self._held[ticket.client]
        return self.fill()

    def fill(self) -> list[Ticket]:
        """Give free places to those that wait; also after `limit` grew. The tickets that have a place now."""
        given = []
        while self._waiting and self.taken < self.limit:
            next_one = min(self._waiting, key=lambda ticket: self._held[ticket.client])  # The first of equals: who has waited longest.
            self._waiting.remove(next_one)
            self._give(next_one)
            given.append(next_one)
        return given

    def _may_take(self, client: Hashable, free: int) -> bool:
        held = self._held[client]
        if held == 0 or self._share >= 1:
            return True
        return free > 1 and held * (1 - self._share) < free * self._share

    def _give(self, ticket: Ticket) -> None:
        ticket.given = True
        self._held[ticket.client] += 1
