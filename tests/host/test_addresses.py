"""Addresses as people type them, and ports that are taken."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator

import pytest
from pydantic import ValidationError

from omnistage.host.addresses import check_address, check_can_listen, check_replica_address, is_loopback
from omnistage.host.errors import StartError
from omnistage.host.settings import ServerSettings


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which this process listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        yield port


@pytest.mark.parametrize("address", ["127.0.0.1:50050", "0.0.0.0:0", "[::1]:65535", "localhost:1", "a-host.example_1:80"])
def test_host_and_port(address: str) -> None:
    assert check_address(address) == address
    assert check_replica_address(address) == address


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("50051", "has no host: give HOST:PORT such as 127.0.0.1:50051"),
        (":50051", "has no host: give HOST:PORT such as 127.0.0.1:50051"),
        ("localhost", "has no port: give HOST:PORT such as localhost:50050"),
        ("localhost:", "has no port: give HOST:PORT such as localhost:50050"),
        ("a..b:50050", "names no possible host: between its dots stand 1 to 63 characters"),
        (f"{'x' * 64}:1", "names no possible host"),
        ("http://127.0.0.1:50050", "is a URL: leave http:// out, give HOST:PORT such as 127.0.0.1:50050"),
        ("grpc://router", "is a URL: leave grpc:// out"),
        ("0.0.0.0:99999", "has no possible port: a port is 0 to 65535"),
        ("::1:50050", "an IPv6 address stands in brackets"),
        ("127.0.0.1:http", "is not HOST:PORT"),
        ("127.0.0.1:50050 ", "is not HOST:PORT"),
        ("127.0.0.1:\u0661\u0662", "is not HOST:PORT"),
        ("", "is not HOST:PORT"),
    ],
)
def test_what_is_wrong_with_an_address_is_told_in_words(address: str, told: str) -> None:
    for check in (check_address, check_replica_address):
        with pytest.raises(ValueError, match=r"HOST:PORT|a port is|brackets|characters") as raised:
            check(address)
        assert told in str(raised.value)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.255.0.53", True),
        ("localhost", True),
        ("0:0:0:0:0:0:0:1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("127.999.0.1", False),
    ],
)
def test_channelz_is_for_who_an_open_stage_is_for(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
    address = f"[{host}]:1" if ":" in host else f"{host}:1"
    if loopback:
        assert ServerSettings(channelz_address=address).channelz_address == address
    else:
        with pytest.raises(ValidationError, match="can be reached from other hosts"):
            ServerSettings(channelz_address=address)


def test_a_free_port_can_be_listened_on(free_port: int) -> None:
    for address in ("127.0.0.1:0", f"127.0.0.1:{free_port}", f"localhost:{free_port}", f"0.0.0.0:{free_port}"):
        check_can_listen(address, "--address")


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_who_is_in_the_way_is_told(taken: int, host: str) -> None:
    with pytest.raises(StartError) as raised:
        check_can_listen(f"{host}:{taken}", "--metrics-address")
    told = str(raised.value)
    assert told.startswith(f"cannot listen on {host}:{taken}: the port is taken by ")
    assert f"(pid {os.getpid()})" in told
    assert told.endswith("; choose another --metrics-address")


def test_a_port_whose_connections_have_just_ended_is_free() -> None:
    """The kernel keeps such connections for a minute. That must not keep a server from starting again."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            accepted, _ = server.accept()
            accepted.close()  # first, so that the side of the server is the one that waits
    check_can_listen(f"127.0.0.1:{port}", "--address")


def test_a_port_that_is_kept_can_be_listened_on_once() -> None:
    """With SO_REUSEPORT the system would let two servers of one user share the calls. A server on another address is not in the way."""
    with socket.socket() as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        keeper.bind(("127.0.0.1", 0))
        port: int = keeper.getsockname()[1]
        address = f"127.0.0.1:{port}"
        with socket.create_server(("127.0.0.2", port)):
            check_can_listen(address, "--address", is_reserved=True)
            with pytest.raises(StartError, match="the port is taken by "):
                check_can_listen(address, "--address")
        with socket.create_server(("127.0.0.1", port), reuse_port=True), pytest.raises(StartError, match=rf"\(pid {os.getpid()}\)"):
            check_can_listen(address, "--address", is_reserved=True)
        check_can_listen(address, "--address", is_reserved=True)


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("192.0.2.1:50050", "192.0.2.1 is not an address of this machine"),
        ("no-such-host.invalid:50050", "no host 'no-such-host.invalid' is known here"),
    ],
)
def test_a_host_that_is_not_here(address: str, told: str) -> None:
    with pytest.raises(StartError, match="choose another --address") as raised:
        check_can_listen(address, "--address")
    assert told in str(raised.value)


def test_the_module_is_named_where_python_runs_one() -> None:
    """pytest runs this test, started as a module or not; the process's own command line says which."""
    from omnistage.host.addresses import listener

    with socket.create_server(("127.0.0.1", 0)) as server:
        told = listener(server.getsockname()[1])
    assert told.endswith(f"(pid {os.getpid()})")
    assert ("python -m " in told) == ("-m" in sys.orig_argv)
