"""The properties of calls by which the router tells clients apart."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import pytest
from grpc.aio import Metadata

from omnistage.host.places import Client
from omnistage.router.admission import Callers, client_text, name_of, request_of, scope_of
from omnistage.wire.token import GATEWAY_HOST, GATEWAY_KEY, Token


@dataclass(frozen=True)
class FactsOfCall:
    address: str
    key: str = ""
    proof: str | bytes = ""
    host: str | bytes = ""

    def peer(self) -> str:
        return self.address

    def invocation_metadata(self) -> Metadata:
        given = {"x-api-key": self.key, GATEWAY_KEY: self.proof, GATEWAY_HOST: self.host}
        return Metadata(("other", "x"), *((name, value) for name, value in given.items() if value))


ONE, SAME_HOST, OTHER_HOST = "ipv4:10.0.0.1:1000", "ipv4:10.0.0.1:1001", "ipv4:10.0.0.2:1000"
OF_STACK = Token("s" * 32)
PROOF = OF_STACK.for_gateway().secret
UUID = "322e3fe2cf6c4976a0f411505a32621c"


def client_of(call: FactsOfCall) -> Client:
    """As a router finds it that has a token."""
    return Callers(OF_STACK.for_gateway()).client_of(call)


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (FactsOfCall(ONE), FactsOfCall(SAME_HOST), True),
        (FactsOfCall(ONE), FactsOfCall(OTHER_HOST), False),
        (FactsOfCall("ipv6:%5B::1%5D:1"), FactsOfCall("ipv6:%5B::1%5D:2"), True),
        (FactsOfCall("ipv6:%5B2001:db8:1:2::1%5D:1"), FactsOfCall("ipv6:%5B2001:db8:1:2:ffff::9%5D:1"), True),
        (FactsOfCall("ipv6:[2001:db8:1:2::1]:1"), FactsOfCall("ipv6:%5B2001:db8:1:2::2%5D:1"), True),
        (FactsOfCall("ipv6:%5B2001:db8:1:2::1%5D:1"), FactsOfCall("ipv6:%5B2001:db8:1:3::1%5D:1"), False),
        (FactsOfCall("ipv6:%5Bfe80::1%25eth0%5D:1"), FactsOfCall("ipv6:%5Bfe80::2%25eth0%5D:1"), True),
        (FactsOfCall("ipv6:%5B::ffff:10.0.0.1%5D:1"), FactsOfCall(ONE), True),
        (FactsOfCall("ipv6:%5B::ffff:10.0.0.1%5D:1"), FactsOfCall("ipv6:%5B::ffff:10.0.0.2%5D:1"), False),
        (FactsOfCall("unix:"), FactsOfCall("unix:"), True),
        (FactsOfCall(ONE, "a"), FactsOfCall(SAME_HOST, "a"), True),
        (FactsOfCall(ONE, "a"), FactsOfCall(OTHER_HOST, "a"), False),
        (FactsOfCall(ONE, "a"), FactsOfCall(ONE, "b"), False),
        (FactsOfCall(ONE, "a"), FactsOfCall(ONE), False),
        (FactsOfCall(ONE, "a", PROOF, "one"), FactsOfCall(OTHER_HOST, "a", PROOF, "one"), True),
        (FactsOfCall(ONE, "a", PROOF, "one"), FactsOfCall(ONE, "a", PROOF, "other"), False),
        (FactsOfCall(ONE, "a", PROOF, "10.0.0.1"), FactsOfCall(ONE, "a"), False),
    ],
)
def test_places_are_counted_by_host_and_there_by_key(first: FactsOfCall, second: FactsOfCall, same: bool):
    assert (client_of(first) == client_of(second)) == same


@pytest.mark.parametrize("callers", [Callers(OF_STACK.for_gateway()), Callers()], ids=["with a token", "without"])
@pytest.mark.parametrize("host", ["elsewhere", "10.0.0.9", b"\xff", "gateway:one", "x" * 4000])
@pytest.mark.parametrize("proof", ["", "guessed" * 4, OF_STACK.secret, PROOF[:-1], PROOF.upper(), PROOF.encode() + b"\xff", "\u20ac" * 16])
def test_a_host_that_is_named_without_proof_counts_for_nothing(callers: Callers, host: str | bytes, proof: str | bytes) -> None:
    for key in ("", "a"):
        assert callers.client_of(FactsOfCall(ONE, key, proof, host)) == callers.client_of(FactsOfCall(ONE, key))


def test_a_router_without_a_token_believes_no_gateway() -> None:
    assert Callers().client_of(FactsOfCall(ONE, "a", PROOF, "one")) == Callers().client_of(FactsOfCall(ONE, "a"))


def test_the_key_itself_is_kept_nowhere():
    call = FactsOfCall(ONE, "secret")
    assert "secret" not in f"{client_of(call)} {request_of(call, UUID)}"


@pytest.mark.parametrize(
    ("first", "second", "request_id", "same"),
    [
        (FactsOfCall(ONE), FactsOfCall(ONE), "1", True),
        (FactsOfCall(ONE), FactsOfCall(SAME_HOST), "1", False),
        (FactsOfCall(ONE), FactsOfCall(OTHER_HOST), "1", False),
        (FactsOfCall(ONE), FactsOfCall(OTHER_HOST), UUID, True),
        (FactsOfCall(ONE, "a"), FactsOfCall(OTHER_HOST, "a"), "1", True),
        (FactsOfCall(ONE, "a"), FactsOfCall(ONE, "b"), "1", False),
        (FactsOfCall(ONE, "a"), FactsOfCall(ONE, "b"), UUID, False),
        (FactsOfCall(ONE, "a"), FactsOfCall(ONE), UUID, False),
    ],
)
def test_a_request_is_the_same_only_where_no_stranger_can_have_asked_it(
    first: FactsOfCall, second: FactsOfCall, request_id: str, same: bool
):
    assert (request_of(first, request_id) == request_of(second, request_id)) == same


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (FactsOfCall(ONE), "10.0.0.1"),
        (FactsOfCall("ipv6:%5B::ffff:10.0.0.1%5D:1"), "10.0.0.1"),
        (FactsOfCall("ipv6:%5B2001:db8:1:2:ffff::9%5D:1"), "2001:db8:1:2::/64"),
        (FactsOfCall("ipv6:%5B::1%5D:1"), "::/64"),
        (FactsOfCall("unix:"), "local"),
        (FactsOfCall(ONE, "secret"), "key:2bb80d537b1da3e3"),
    ],
)
def test_logs_show_a_host_a_network_or_the_beginning_of_a_digest(call: FactsOfCall, expected: str) -> None:
    assert client_text(client_of(call)) == expected


def test_a_name_is_the_same_for_a_client_and_for_nobody_else() -> None:
    one = name_of(client_of(FactsOfCall(ONE)))
    assert name_of(client_of(FactsOfCall(SAME_HOST))) == one
    assert (
        len(
            {
                one,
                name_of(client_of(FactsOfCall(OTHER_HOST))),
                name_of(client_of(FactsOfCall(ONE, "key"))),
                name_of(client_of(FactsOfCall(ONE, "other"))),
            }
        )
        == 4
    )
    assert len(one) == 33 and "10.0.0.1" not in one
    assert name_of(client_of(FactsOfCall(ONE, "key"))).partition("/")[0] == one.partition("/")[0], "the host is the same"


def test_a_scope_is_that_of_a_key_and_all_without_one_share_theirs() -> None:
    one, other = (scope_of(client_of(FactsOfCall(ONE, key))) for key in ("a", "b"))
    assert one == scope_of(client_of(FactsOfCall(OTHER_HOST, "a"))) != other
    assert one and other and one != "a"
    assert (
        scope_of(client_of(FactsOfCall(ONE)))
        == scope_of(client_of(FactsOfCall(OTHER_HOST)))
        == scope_of(client_of(FactsOfCall("unix:")))
        == ""
    )


def test_whoever_knows_an_address_does_not_know_its_name() -> None:
    """It is another one in another process."""
    program = "from omnistage.router.admission import Client, name_of; print(name_of(Client('10.0.0.1')))"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    assert len(other) == 33 and other != name_of(client_of(FactsOfCall(ONE)))
