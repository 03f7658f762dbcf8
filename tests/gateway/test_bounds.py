"""Requests that are too large, too slow or none: each gets an answer or loses its connection, and the next one is answered."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol

from helpers import servers
from helpers.gateway import gateway, local_gateway
from helpers.memory import peak_bytes
from helpers.raw_http import CHAT, QUESTION, answer, connected, head, heard, post
from omnistage.gateway.answering import as_event
from omnistage.gateway.port import READ_BYTES

MIB = 1 << 20
HOST = {"Host": "localhost"}
JSON = {**HOST, "Content-Type": "application/json"}
CHUNKED = head("POST", CHAT, {**JSON, "Transfer-Encoding": "chunked"})
DESCRIPTORS = 128


@pytest.fixture(scope="module")
def narrow(toy: servers.ServerProcesses, tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.ServerProcess]:
    """A gateway that takes bodies of 1 MiB."""
    with gateway(toy.address, tmp_path_factory.mktemp("narrow"), "--max-message-bytes", str(MIB)) as server:
        yield server


def is_answered(url: str, source: str = "127.0.0.1") -> bool:
    """Whether a good request is."""
    return answer(url, post(), source=source).status == 200


def asked(**fields: object) -> bytes:
    return json.dumps({**QUESTION, **fields}).encode()


def written(name: str, value: str) -> bytes:
    """The question with a field whose value is written so."""
    return json.dumps(QUESTION)[:-1].encode() + f', "{name}": {value}}}'.encode("utf-8", "surrogatepass")


BODIES = {
    "nothing": b"",
    "no object": b"[]",
    "a number": b"1",
    "half": b'{"model": "toy"',
    "UTF-16": asked().decode().encode("utf-16"),
    "two byte order marks": b"\xef\xbb\xbf" * 2 + asked(),
    "UTF-16 without a mark": asked().decode().encode("utf-16-be"),
    "UTF-32": asked().decode().encode("utf-32"),
    "no UTF-8": b'{"model": "\xff"}',
    "half a pair": written("stop", '"\\ud800"'),
    "half a pair as a name": written("\\ud800", "1"),
    "half a pair in the question": b'{"model": "toy", "messages": [{"role": "user", "content": "\\udfff"}]}',
    "half a pair, as it is": written("stop", '"\ud800"'),
    "NaN": written("temperature", "NaN"),
    "Infinity": written("temperature", "-Infinity"),
    "an infinite number": written("temperature", "1e999999"),
    "an infinite count": written("seed", "1e999999"),
    "100,000 digits": written("seed", "9" * 100_000),
    "more than 64 bits": written("seed", str(1 << 64)),
    "more than 64 bits, less than none": written("seed", str(-(1 << 64))),
    "more than 31 bits": written("max_tokens", str(1 << 40)),
    "a number as large as a float can be": written("max_tokens", "1e308"),
    "deep lists": written("stop", "[" * 100_000 + "]" * 100_000),
    "deep objects": written("stop", '{"a":' * 100_000 + "1" + "}" * 100_000),
    "a million lists": written("stop", "[" + "[]," * 1_000_000 + "1]"),
    "lists in a message": asked(messages=[{"role": "user", "content": [[]] * 100_000}]),
    "many messages": asked(messages=[{"role": "user", "content": "a"}] * 100_000),
    "many fields": asked(**{f"f{number}": 1 for number in range(100_000)}),
    "many numbers to choose of": asked(choice=[1] * 100_000),
    "many numbers to stop at": asked(stop=[1] * 100_000),
    "many parts": asked(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}] * 4097}]),
    "a long name": written("x" * 100_000, "1"),
    "a long model": asked(model="m" * 100_000),
    "a long question": asked(messages=[{"role": "user", "content": "a" * 3_000_000}]),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_body_that_makes_no_sense_is_told_so(url: str, name: str) -> None:
    told = answer(url, post(BODIES[name]))
    assert told.status == (404 if name == "a long model" else 400) and told.error["code"]
    assert len(told.body) < 8000, "it quotes without end"
    assert is_answered(url)


@pytest.mark.parametrize("path", [CHAT, "/v1/responses"])
@pytest.mark.parametrize("value", [[], {}, 1, None, True, [[]]])
def test_what_names_something_may_be_of_any_type(url: str, path: str, value: object) -> None:
    """It is looked up in tables, where a list cannot be."""
    parts: list[dict[str, object]] = [{"type": value}, {"type": "input_audio", "input_audio": {"data": "", "format": value}}]
    messages = [{"role": "user", "content": [part]} for part in parts] + [{"role": value, "content": "a"}]
    for message in messages:
        told = answer(url, post({"model": "toy", "input": [message]} if path != CHAT else {**QUESTION, "messages": [message]}, path=path))
        assert (told.status, told.error["type"]) == (400, "invalid_request_error")


async def test_what_is_refused_is_not_told_of_each_value(toy: servers.ServerProcesses, tmp_path: Path) -> None:
    """Each number here would be an error of a KiB."""
    bodies = [
        (CHAT, {**QUESTION, "choice": [1] * 100_000}),
        (CHAT, {**QUESTION, **{f"k{number}": 1 for number in range(100_000)}}),
        ("/v1/responses", {"model": "toy", "input": "a", "metadata": {str(number): 1 for number in range(100_000)}}),
        ("/v1/responses", {"model": "toy", "input": "a", "include": [1] * 100_000}),
    ]
    with gateway(toy.address, tmp_path) as server:
        url = f"http://{server.address}"
        assert is_answered(url)
        before = peak_bytes(server.pid)
        for path, body in bodies:
            assert answer(url, post(body, path=path)).error["type"] == "invalid_request_error"
        assert peak_bytes(server.pid) - before < 48 * MIB


def test_of_two_values_of_a_field_the_last_counts(url: str) -> None:
    told = answer(url, post(written("max_tokens", "3")))
    assert json.loads(told.body)["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "text/html; charset=json"])
def test_only_json_is_read_as_json(url: str, kind: str) -> None:
    told = answer(url, post(Content_Type=kind))
    assert told.status == 400 and "application/json" in told.error["hint"]


HEADS = {
    "a long line": head("GET", "/v1/models", {**HOST, "x": "a" * 40_000}),
    "a line longer than what is read at once": head("GET", "/v1/models", {**HOST, "x": "a" * 400_000}),
    "many lines": head("GET", "/v1/models", HOST)[:-2] + b"a:b\r\n" * 9000 + b"\r\n",
    "a long path": head("GET", "/v1/" + "a" * 400_000, HOST),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_head_has_a_bound(url: str, name: str) -> None:
    told = answer(url, HEADS[name])
    assert told.status in (400, 431) and told.error["code"] in ("headers_too_large", "invalid_http")
    assert is_answered(url)


UPGRADE = {**HOST, "Connection": "Upgrade"}
ODD = {
    "HTTP/1.0": (head("GET", "/v1/models", HOST, version="1.0"), 200),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 403),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    "words": (b"hello world\r\n\r\n", 400),
    "WebSocket": (head("GET", "/v1/realtime", {**UPGRADE, "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}), 404),
    "h2c": (head("GET", "/v1/models", {**UPGRADE, "Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c"}), 200),
    "OPTIONS": (head("OPTIONS", CHAT, HOST), 405),
    "OPTIONS *": (head("OPTIONS", "*", HOST), 404),
    "CONNECT": (head("CONNECT", "localhost:80", HOST), 404),
    "an unknown method": (head("BREW", "/v1/models", HOST), 405),
    "a target with a host": (head("GET", "http://localhost/v1/models", HOST), 404),
    "a path with a zero": (head("GET", "/v1/models/%00", HOST), 404),
    "a path with lines": (head("GET", "/v1/models/a%0d%0ab:%20c", HOST), 404),
    "a path with half a pair": (head("GET", "/v1/models/%ed%a0%80", HOST), 404),
    "a path upwards": (head("GET", "/v1/../metrics", HOST), 404),
    "a path upwards, written otherwise": (head("GET", "/%2e%2e/%2e%2e/etc/passwd", HOST), 404),
    "two lengths": (head("POST", CHAT, {**JSON, "Content-Length": "5", "Transfer-Encoding": "chunked"}) + b"0\r\n\r\n", 400),
    "a length twice": (head("POST", CHAT, {**JSON, "Content-Length": "5", "content-length": "6"}) + b"12345", 400),
    "a length below zero": (head("POST", CHAT, {**JSON, "Content-Length": "-1"}), 400),
    "a length beyond all": (head("POST", CHAT, {**JSON, "Content-Length": "9" * 20}), 413),
    "a length of 10,000 digits": (head("POST", CHAT, {**JSON, "Content-Length": "9" * 10_000}), 400),
    "an unknown coding": (head("POST", CHAT, {**JSON, "Transfer-Encoding": "gzip, chunked"}) + b"0\r\n\r\n", 400),
    "a chunk that is none": (CHUNKED + b"zz\r\n", 400),
    "a chunk below zero": (CHUNKED + b"-1\r\n", 400),
    "a chunk line without end": (CHUNKED + b"1;" + b"a" * 100_000, 400),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_requests_get_an_answer(url: str, name: str) -> None:
    request, status = ODD[name]
    told = answer(url, request)
    assert told.status == status and (status < 400 or told.error["message"])
    assert is_answered(url)


def test_what_follows_a_body_of_two_lengths_is_no_request(url: str) -> None:
    """A proxy before us may have taken it for a part of the body, and so let anybody ask in another one's name."""
    hidden = head("GET", "/health", HOST)
    request = head("POST", CHAT, {**JSON, "Content-Length": str(5 + len(hidden)), "Transfer-Encoding": "chunked"}) + b"0\r\n\r\n" + hidden
    with connected(url) as connection:
        connection.sendall(request)
        assert [heard(connection).status for _ in range(2)] == [400, 0]


def test_head_has_no_body(url: str) -> None:
    told = answer(url, head("HEAD", "/v1/models", HOST), method="HEAD")
    assert (told.status, told.body) == (200, b"")


def test_requests_behind_each_other_are_answered_in_order(url: str) -> None:
    with connected(url) as connection:
        connection.sendall(b"".join(post({**QUESTION, "max_tokens": number}) for number in range(1, 21)))
        counts = [json.loads(heard(connection).body)["usage"]["completion_tokens"] for _ in range(20)]
    assert counts == list(range(1, 21))


def test_who_asks_before_he_sends_a_body_is_told(url: str) -> None:
    body = json.dumps(QUESTION).encode()
    with connected(url) as connection:
        connection.sendall(head("POST", CHAT, {**JSON, "Expect": "100-continue", "Content-Length": str(len(body))}))
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 100 ")
        connection.sendall(body)
        assert heard(connection).status == 200
    told = answer(url, head("POST", CHAT, {**JSON, "Expect": "100-continue", "Content-Length": str(1 << 40)}))
    assert told.status == 413, "he need not send it"


def test_a_body_comes_in_chunks_of_any_size(url: str) -> None:
    body = json.dumps(QUESTION).encode()
    pieces = [b"1\r\n" + bytes([each]) + b"\r\n" for each in body]
    assert answer(url, CHUNKED, *pieces, b"0\r\n\r\n").status == 200


def test_a_body_of_many_tiny_chunks_is_refused(url: str) -> None:
    """Each of them is as much work as one of many KiB, and nobody else is answered meanwhile."""
    body = b" " * 4000 + json.dumps(QUESTION).encode()
    refused = answer(url, CHUNKED, b"".join(b"1\r\n" + bytes([each]) + b"\r\n" for each in body))
    assert (refused.status, refused.error["code"]) == (400, "invalid_http")
    pieces = [body[place : place + 64] for place in range(0, len(body), 64)]
    with connected(url) as connection:  # The bytes of the last request count for none of the next ones.
        for _ in range(20):
            connection.sendall(CHUNKED + b"".join(b"%x\r\n" % len(piece) + piece + b"\r\n" for piece in pieces) + b"0\r\n\r\n")
            assert heard(connection).status == 200


async def test_nobody_has_more_than_a_little_in_one_turn(toy: servers.ServerProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    receive = H11Protocol.data_received

    def noted(self: H11Protocol, data: bytes) -> None:
        sizes.append(len(data))
        receive(self, data)

    monkeypatch.setattr(H11Protocol, "data_received", noted)
    async with local_gateway(toy.address) as (url, _):
        told = await asyncio.to_thread(answer, url, post(json.dumps(QUESTION).encode() + b" " * MIB))
    assert told.status == 200 and max(sizes) <= READ_BYTES


@pytest.mark.parametrize(
    ("kind", "code"), [("Multipart/Form-Data; boundary=b", "missing_required_parameter"), ("application/json", "too_many_values")]
)
def test_a_form_is_not_counted_as_json(url: str, kind: str, code: str) -> None:
    """Whatever the case of its type."""
    file = b"," * 300_000
    body = b'--b\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n' + file + b"\r\n--b--\r\n"
    told = answer(url, post(body, "/v1/images/edits", Content_Type=kind))
    assert (told.status, told.error["code"]) == (400, code)


@pytest.mark.parametrize("end", ["\x85", "\u2028", "\u2029"])
def test_no_client_ends_a_line_within_an_event(end: str) -> None:
    data = {"text": f"a{end}b"}
    lines = as_event(data, "x").decode().splitlines()
    assert lines[0] == "event: x" and lines[2:] == [""]
    assert json.loads(lines[1].removeprefix("data: ")) == data


async def test_a_body_is_parsed_once_however_large_it_is(toy: servers.ServerProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("starlette.requests.json", None)
    async with local_gateway(toy.address) as (url, _):
        for size in (1, MIB):
            told = await asyncio.to_thread(answer, url, post(json.dumps(QUESTION).encode() + b" " * size))
            assert told.status == 200


def test_a_body_that_is_too_large_is_refused_while_it_arrives(narrow: servers.ServerProcess) -> None:
    """Its client hears so though it still sends; then the same connection takes the next request."""
    url = f"http://{narrow.address}"
    size = 8 * MIB
    for request in (CHUNKED + f"{size:x}\r\n".encode(), head("POST", CHAT, {**JSON, "Content-Length": str(size)})):
        with connected(url) as connection:
            connection.sendall(request)
            for _ in range(8):
                connection.sendall(b" " * MIB)
            connection.sendall(b"\r\n0\r\n\r\n" if request.startswith(CHUNKED) else b"")
            told = heard(connection)
            assert (told.status, told.error["code"]) == (413, "too_large")
            connection.sendall(post())
            assert heard(connection).status == 200


def test_what_is_refused_takes_no_memory(narrow: servers.ServerProcess) -> None:
    url = f"http://{narrow.address}"
    assert is_answered(url)
    before = peak_bytes(narrow.pid)
    with ExitStack() as opened:
        for _ in range(24):
            connection = opened.enter_context(connected(url))
            connection.sendall(CHUNKED + f"{1 << 40:x}\r\n".encode())
            for _ in range(8):
                connection.sendall(b"[" * MIB)
            assert heard(connection).status == 413
    assert peak_bytes(narrow.pid) - before < 32 * MIB
    assert is_answered(url)


async def test_many_values_at_once_take_little_memory(toy: servers.ServerProcesses, tmp_path: Path) -> None:
    """Each of them would be 40 MiB of objects."""
    body = asked(messages=[{"role": "user", "content": [[]] * 250_000}]).replace(b" ", b"")
    with gateway(toy.address, tmp_path) as server:
        url = f"http://{server.address}"
        assert is_answered(url)
        before = peak_bytes(server.pid)
        told = await asyncio.gather(*(asyncio.to_thread(answer, url, post(body)) for _ in range(12)))
        assert {each.status for each in told} <= {400, 503}
        assert peak_bytes(server.pid) - before < 256 * MIB
        assert is_answered(url)


async def test_a_head_that_drips_in_is_not_waited_for(toy: servers.ServerProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omnistage.gateway.port.HEAD_LIMIT_S", 0.5)

    def drip(url: str) -> None:
        with connected(url) as connection, pytest.raises(ConnectionError):
            for each in head("GET", "/v1/models", {**HOST, "x": "a" * 10_000}):
                connection.sendall(bytes([each]))
                time.sleep(0.01)

    def say_nothing(url: str) -> None:
        with connected(url) as connection, suppress(ConnectionError):
            assert connection.recv(1) == b""

    async with local_gateway(toy.address) as (url, _):
        await asyncio.gather(asyncio.to_thread(drip, url), asyncio.to_thread(say_nothing, url))
        assert await asyncio.to_thread(is_answered, url)


async def test_a_connection_without_a_request_is_kept_for_a_while(toy: servers.ServerProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omnistage.gateway.port.KEPT_LIMIT_S", 1)
    async with local_gateway(toy.address) as (url, _):

        def twice() -> None:
            with connected(url) as connection:
                for _ in range(2):
                    connection.sendall(post())
                    assert heard(connection).status == 200
                assert connection.recv(1) == b""

        await asyncio.to_thread(twice)


async def test_a_piece_of_an_answer_does_not_wait_until_the_one_before_is_acknowledged(
    toy: servers.ServerProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client on another machine, or one that is busy, acknowledges 40 ms late."""
    begin, options = H11Protocol.connection_made, list[int]()

    def note(protocol: H11Protocol, transport: asyncio.Transport) -> None:
        options.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        begin(protocol, transport)

    monkeypatch.setattr(H11Protocol, "connection_made", note)
    async with local_gateway(toy.address) as (url, _):
        assert await asyncio.to_thread(is_answered, url)
    assert options == [1]


async def test_a_body_that_drips_in_is_not_waited_for(toy: servers.ServerProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omnistage.gateway.guard.BODY_LIMIT_S", 0.3)
    async with local_gateway(toy.address) as (url, _):
        told = await asyncio.to_thread(answer, url, head("POST", CHAT, {**JSON, "Content-Length": "10"}) + b"{")
        assert (told.status, told.error["code"]) == (408, "timeout")
        assert await asyncio.to_thread(is_answered, url)


def test_a_gateway_does_not_start_with_fewer_descriptors_than_it_needs(toy: servers.ServerProcesses, tmp_path: Path) -> None:
    with poor(toy, tmp_path, 64) as server, pytest.raises(servers.NotReady, match="ulimit -n") as refused:
        server.wait_ready()
    assert refused.value.exit_code == 1


def poor(toy: servers.ServerProcesses, tmp_path: Path, descriptors: int) -> servers.ServerProcess:
    """A gateway that has only so many."""
    environment = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])}
    words = ("omnistage.gateway", str(descriptors), "", "--router", toy.address)
    return servers.ServerProcess("helpers.poor", *words, log_folder=tmp_path, environment=environment)


def test_one_host_does_not_take_all_connections(toy: servers.ServerProcesses, tmp_path: Path) -> None:
    with poor(toy, tmp_path, DESCRIPTORS) as server:
        server.wait_ready()
        url = f"http://{server.address}"
        with ExitStack() as opened:
            flood: list[socket.socket] = []
            for _ in range(2 * DESCRIPTORS):
                with suppress(OSError):  # One that is closed at once.
                    flood.append(opened.enter_context(connected(url)))
            assert is_answered(url, "127.0.0.2")
        assert is_answered(url)


async def test_a_bug_is_told_as_one_and_costs_no_other_request(toy: servers.ServerProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("a secret of the log")

    async with local_gateway(toy.address) as (url, _):
        for place in ("guard._parse_json", "door.HttpCall.options"):
            with monkeypatch.context() as broken:
                broken.setattr(f"omnistage.gateway.{place}", fails)
                told = await asyncio.to_thread(answer, url, post())
            assert (told.status, told.error["code"], b"secret" in told.body) == (500, "internal", False)
        assert await asyncio.to_thread(is_answered, url)
