"""The policy for places, without a clock, a loop or gRPC.

One client may hold most of the places, but not all: a client gets a place if it holds fewer than `share / (1 - share)` times the free
places (Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet switches", 1998). So the first client gets up to
`share` of the places, the next client up to `share` of the rest, and so on. A client that holds no place gets any free place.

If all places are taken, a client that holds less than an equal share may wait; a client that holds more is refused at once. A freed place
goes to the waiting client that holds the fewest places, and among equals to the client that has waited longest. So if n requests wait when
a client comes that holds no place, the client gets one of the next n + 1 freed places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass

MAX_WAITING = 64
"""Largest number of requests of all clients together that wait."""

MAX_WAITING_EACH = 4
"""Largest number of requests of one client that wait."""


@dataclass(slots=True, eq=False)
class Ticket:
    """One request for a place. given: the request holds a place; else it waits for one."""

    client: Hashable
    given: bool = False


class Refused(Exception):
    """There is no place for this client now, and it may not wait for one; the text says why."""


class Places:
    """Counts the places that each client holds. `limit` may change at any time; a smaller limit takes nobody's place away."""

    def __init__(self, limit: int, share: float) -> None:
        """share: greatest part of the places that one client may hold; 1: all places."""
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
        """Returns a ticket that holds a place or waits for one. Raises Refused."""
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
        """Returns a ticket that holds a place, even if others wait for one. Raises Refused."""
        free = self.limit - self.taken
        if free <= 0:
            raise Refused(f"all {self.limit} places are taken")
        if not self._may_take(client, free):
            raise Refused(f"this client holds {self._held[client]} of {self.limit} places; the rest is for others")
        ticket = Ticket(client)
        self._give(ticket)
        return ticket

    def leave(self, ticket: Ticket) -> list[Ticket]:
        """Give a place back, or stop waiting for one. Returns the tickets that got a place because of it."""
        if not ticket.given:
            self._waiting.remove(ticket)
            return self.fill()
        ticket.given = False
        self._held[ticket.client] -= 1
        if not self._held[ticket.client]:
            del self._held[ticket.client]
        return self.fill()

    def fill(self) -> list[Ticket]:
        """Give the free places to waiting tickets. Returns the tickets that got one. Call it also after `limit` grew."""
        given = []
        while self._waiting and self.taken < self.limit:
            # `min` takes the first of equals, which has waited longest.
            next_one = min(self._waiting, key=lambda ticket: self._held[ticket.client])
            self._waiting.remove(next_one)
            self._give(next_one)
            given.append(next_one)
        return given

    def _may_take(self, client: Hashable, free: int) -> bool:
        """Whether a client may have one of the `free` places, by the rule at the top of this file. The last free place goes only to a
        client that holds no place."""
        held = self._held[client]
        if held == 0 or self._share >= 1:
            return True
        return free > 1 and held * (1 - self._share) < free * self._share

    def _give(self, ticket: Ticket) -> None:
        ticket.given = True
        self._held[ticket.client] += 1
