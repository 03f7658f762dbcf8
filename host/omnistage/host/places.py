"""The policy for places, without a clock, a loop or gRPC.

Places are shared among hosts, and the places of a host among its clients: nobody checks keys, so a host can have as many clients as it
invents keys. At both levels one may hold most of the places, but not all: a client gets a place if it, and its host, hold fewer than
`share / (1 - share)` times the free places (Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet switches",
1998). So the first host gets up to `share` of the places, the next one up to `share` of the rest, and so on. A client of a host that holds
no place gets any free place.

If all places are taken, or the host has its share, a client may wait that holds less than an equal share of its host's equal share; a
client that holds more is refused at once. A freed place goes to the waiting client whose host holds the fewest places, among these to the
client that holds the fewest, and among equals to the client that has waited longest. So if n requests wait when a client comes whose host
holds no place, that host gets one of the next n + 1 freed places.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

HOST_SHARE = 0.75
"""The largest part of what all clients share (places, connections, memory, jobs) for one host, or one IPv6 network. Keys do not count,
because any text is a key."""

MAX_WAITING = 64
"""Largest number of requests of all clients together that wait."""

MAX_WAITING_OF_HOST = int(HOST_SHARE * MAX_WAITING)
"""Largest number of requests of one host that wait."""

MAX_WAITING_EACH = 4
"""Largest number of requests of one client that wait."""


class Client(NamedTuple):
    """The holder of places. host: where it comes from. name: its name there; one host can have many."""

    host: str
    name: str = ""


@dataclass(slots=True, eq=False)
class Ticket:
    """One request for a place. has_place: the request holds a place; else it waits for one."""

    client: Client
    has_place: bool = False


class Refused(Exception):
    """There is no place for this client now, and it may not wait for one; the text says why."""


class Places:
    """Counts the places that each client holds. `limit` may change at any time; a smaller limit takes nobody's place away."""

    def __init__(self, limit: int, share: float = HOST_SHARE) -> None:
        """share: greatest part of the places that one host, and one client, may hold; 1: all places."""
        self._share = share
        self._held_by_client: Counter[Client] = Counter()
        self._held_by_host: Counter[str] = Counter()
        self._waiting: list[Ticket] = []
        self.limit = limit

    @property
    def taken_places(self) -> int:
        return self._held_by_client.total()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def ask(self, client: Client) -> Ticket:
        """Returns a ticket that holds a place or waits for one. Raises Refused."""
        if self.taken_places < self.limit:
            self._check_share("client", self._held_by_client[client])
            if self._is_within_share(self._held_by_host[client.host]):
                return self.take(client)
        clients = self._held_by_client.keys() | {ticket.client for ticket in self._waiting} | {client}
        hosts = [each.host for each in clients]  # each as often as it has clients
        equal_share = self.limit / len(set(hosts)) / hosts.count(client.host)
        if self._held_by_client[client] >= equal_share:
            raise Refused(self._state)
        of_host = [ticket.client for ticket in self._waiting if ticket.client.host == client.host]
        if self.waiting >= MAX_WAITING or len(of_host) >= MAX_WAITING_OF_HOST or of_host.count(client) >= MAX_WAITING_EACH:
            raise Refused(f"{self._state}, and enough are waiting for one")
        ticket = Ticket(client)
        self._waiting.append(ticket)
        return ticket

    def take(self, client: Client) -> Ticket:
        """Returns a ticket that holds a place, even if others wait for one. Raises Refused."""
        if self.taken_places >= self.limit:
            raise Refused(self._state)
        self._check_share("client", self._held_by_client[client])
        self._check_share("host", self._held_by_host[client.host])
        return self.hold(client)

    def hold(self, client: Client) -> Ticket:
        """Returns a ticket that holds a place, even if there is none, or the client has its share."""
        ticket = Ticket(client)
        self._give(ticket)
        return ticket

    def leave(self, ticket: Ticket) -> list[Ticket]:
        """Give a place back, or stop waiting for one. Returns the tickets that got a place because of it."""
        if not ticket.has_place:
            self._waiting.remove(ticket)
            return self.fill()
        ticket.has_place = False
        self._count(ticket.client, -1)
        return self.fill()

    def fill(self) -> list[Ticket]:
        """Give the free places to waiting tickets. Returns the tickets that got one. Call it also after `limit` grew."""
        filled = list[Ticket]()
        while self.taken_places < self.limit:
            waiting = [ticket for ticket in self._waiting if self._is_within_share(self._held_by_host[ticket.client.host])]
            if not waiting:
                break
            # `min` takes the first of equals, which has waited longest.
            ticket = min(waiting, key=self._rank)
            self._waiting.remove(ticket)
            self._give(ticket)
            filled.append(ticket)
        return filled

    @property
    def _state(self) -> str:
        """The reason of a refusal. If there are free places, the host of the refused client has its share of them."""
        if self.taken_places >= self.limit:
            return f"all {self.limit} places are taken"
        return f"{self.taken_places} of {self.limit} places are taken; the rest is for other hosts"

    def _rank(self, ticket: Ticket) -> tuple[int, int]:
        """The places that the host and the client of a ticket hold."""
        return self._held_by_host[ticket.client.host], self._held_by_client[ticket.client]

    def _check_share(self, holder: str, places: int) -> None:
        """holder: "client" or "host", which holds so many places. Raises Refused if it may not have one more."""
        if not self._is_within_share(places):
            raise Refused(f"this {holder} holds {places} of {self.limit} places; the rest is for others")

    def _is_within_share(self, places: int) -> bool:
        """Whether a host or a client that holds so many places may have one more, by the rule at the top of this file. The last free place
        goes only to one that holds no place."""
        if places == 0 or self._share >= 1:
            return True
        free = self.limit - self.taken_places
        return free > 1 and places * (1 - self._share) < free * self._share

    def _give(self, ticket: Ticket) -> None:
        ticket.has_place = True
        self._count(ticket.client, 1)

    def _count(self, client: Client, places: int) -> None:
        """Count places that a client has got or given back; a client without one leaves nothing behind."""
        self._held_by_client[client] += places
        self._held_by_host[client.host] += places
        if not self._held_by_client[client]:
            del self._held_by_client[client]
        if not self._held_by_host[client.host]:
            del self._held_by_host[client.host]
