"""The policy of places: none is lost, nobody has all of them, and nobody who waits is passed by for ever."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from omnistage.host.places import MAX_WAITING, MAX_WAITING_EACH, MAX_WAITING_OF_HOST, Client, Places, Refused, Ticket

SHARE = 0.75


def take_all(places: Places, host: str, name: str = "") -> list[Ticket]:
    """Ask until there is no place at once."""
    tickets: list[Ticket] = []
    while True:
        try:
            ticket = places.ask(Client(host, name))
        except Refused:
            return tickets
        if not ticket.has_place:
            assert places.leave(ticket) == []
            return tickets
        tickets.append(ticket)


@pytest.mark.parametrize("limit", [2, 3, 4, 5, 16, 64, 1000])
def test_one_client_leaves_room_and_the_next_ones_find_it(limit: int):
    places = Places(limit, SHARE)
    first = take_all(places, "first")
    assert limit / 2 <= len(first) < limit and len(first) <= math.ceil(SHARE * limit)
    second = places.ask(Client("second"))
    assert second.has_place


def test_a_client_alone_may_have_all_places_where_that_is_said():
    places = Places(8, 1)
    assert len(take_all(places, "only")) == 8 and Places(1, SHARE).ask(Client("only")).has_place


def test_who_comes_when_all_places_are_taken_waits_and_who_has_most_of_them_does_not():
    places = Places(8, SHARE)
    rich = take_all(places, "rich")
    others = [places.ask(Client(f"other {n}")) for n in range(8 - len(rich))]
    assert places.taken_places == 8 and all(ticket.has_place for ticket in others)
    with pytest.raises(Refused):
        places.ask(Client("rich"))
    late = places.ask(Client("late"))
    assert not late.has_place and places.leave(rich.pop()) == [late] and late.has_place


def test_places_go_to_who_holds_the_fewest_and_then_to_who_waited_longest():
    places = Places(4, 1)
    held = [places.ask(Client("rich")) for _ in range(4)]
    waiting = [places.ask(Client(client)) for client in ("a", "a", "b", "c")]
    order = [ticket for _ in range(4) for ticket in places.leave(held.pop())]
    assert order == [waiting[0], waiting[2], waiting[3], waiting[1]]


def test_the_queue_is_bounded_for_each_client_and_for_all():
    places = Places(4, 1)
    for _ in range(4):
        places.ask(Client("rich"))
    for _ in range(MAX_WAITING_EACH):
        places.ask(Client("a"))
    with pytest.raises(Refused):
        places.ask(Client("a"))
    for n in range(MAX_WAITING - MAX_WAITING_EACH):
        places.ask(Client(f"b {n}"))
    with pytest.raises(Refused):
        places.ask(Client("c"))


def test_more_places_are_given_to_who_waits():
    places = Places(1, SHARE)
    places.ask(Client("a"))
    waiting = places.ask(Client("b"))
    places.limit = 2
    assert places.fill() == [waiting]


@pytest.mark.parametrize("keys", [2, 5, 80])
@pytest.mark.parametrize("limit", [4, 8, 64])
def test_a_host_gets_no_more_by_inventing_keys(limit: int, keys: int):
    places = Places(limit, SHARE)
    held = [ticket for number in range(keys) for ticket in take_all(places, "rich", f"key:{number}")]
    assert limit / 2 <= len(held) <= math.ceil(SHARE * limit) and places.ask(Client("honest")).has_place


def test_who_shares_a_host_with_a_greedy_client_waits_and_is_next():
    places = Places(8, SHARE)
    greedy = take_all(places, "office", "key:greedy")
    late = places.ask(Client("office", "key:late"))
    with pytest.raises(Refused):
        places.ask(Client("office", "key:greedy"))
    assert not late.has_place and places.ask(Client("elsewhere")).has_place and places.leave(greedy.pop()) == [late]


def test_the_keys_of_one_host_do_not_lower_the_share_of_another():
    places = Places(8, 1)
    for client in [Client("alone")] * 3 + [Client("crowd", f"key:{number}") for number in range(5)]:
        assert places.ask(client).has_place
    assert not places.ask(Client("alone")).has_place, "it holds less than half, so it may wait"
    with pytest.raises(Refused):
        places.ask(Client("crowd", "key:0"))


def test_whose_host_holds_little_is_served_before_the_invented_keys_of_another():
    places = Places(4, 1)
    held = [places.ask(Client("rich", f"key:{number}")) for number in range(4)]
    refused, late = 0, []
    for number in range(4, 200):
        try:
            late.append(places.ask(Client("rich", f"key:{number}")))
        except Refused:
            refused += 1
    honest = places.ask(Client("honest", "key:mine"))
    assert refused and len(late) <= MAX_WAITING_OF_HOST and places.leave(held.pop()) == [honest]


class PlacesHouse(RuleBasedStateMachine):
    """Callers that come, wait, are served and leave in any order, at a router whose places change."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Ticket] = []
        self.waiting: dict[Ticket, int] = {}
        """How many may still be served before it; only for who holds nothing."""

    @initialize(limit=st.integers(1, 12), share=st.sampled_from([0.5, 0.75, 1.0]))
    def open(self, limit: int, share: float) -> None:
        self.places, self.share = Places(limit, share), share

    @rule(host=st.sampled_from("abcd"), name=st.sampled_from(["", "x", "y", "z"]))
    def ask(self, host: str, name: str) -> None:
        client, before = Client(host, name), self.places.taken_places
        poor = not any(ticket.client.host == host for ticket in [*self.held, *self.waiting])
        try:
            ticket = self.places.ask(client)
        except Refused:
            assert not poor or before >= self.places.limit, "who holds nothing gets any free place"
            assert not poor or len(self.waiting) >= MAX_WAITING or self.places.limit < 1
            return
        if ticket.has_place:
            assert before < self.places.limit
            self.held.append(ticket)
        else:
            assert before >= self.places.limit or not poor
            self.waiting[ticket] = len(self.waiting) if poor else -1

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        tickets = [*self.held, *self.waiting]
        if not tickets:
            return
        ticket = data.draw(st.sampled_from(tickets))
        if ticket in self.waiting:
            del self.waiting[ticket]
        else:
            self.held.remove(ticket)
        self.served(self.places.leave(ticket))

    @rule(limit=st.integers(1, 12))
    def resize(self, limit: int) -> None:
        self.places.limit = limit
        self.served(self.places.fill())

    def served(self, given: list[Ticket]) -> None:
        for ticket in given:
            assert ticket.has_place
            del self.waiting[ticket]
            self.held.append(ticket)
            for other, left in self.waiting.items():
                if left >= 0:
                    assert left > 0, "somebody who holds nothing was passed by more often than others waited before"
                    self.waiting[other] = left - 1

    @invariant()
    def no_place_is_lost(self) -> None:
        if hasattr(self, "places"):
            assert (self.places.taken_places, self.places.waiting) == (len(self.held), len(self.waiting))
            free = self.places.limit - self.places.taken_places
            for ticket in self.waiting if free > 0 else ():
                of_host = sum(held.client.host == ticket.client.host for held in self.held)
                has_share = free == 1 or of_host * (1 - self.share) >= free * self.share
                assert of_host and self.share < 1 and has_share, "a place is free, and somebody waits whose host has less than its share"


TestHouse = PlacesHouse.TestCase
TestHouse.settings = settings(max_examples=200, stateful_step_count=60)
