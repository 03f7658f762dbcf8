"""A body counts until it was copied, small ones have a reserve, and nothing is counted at the end."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response

from helpers import lengths, servers
from helpers.gateway import gateway, local_gateway
from helpers.memory import peak_bytes
from helpers.raw_http import CHAT, QUESTION, answer, connected, head, heard, post
from helpers.servers import all_free, watch_until
from helpers.waiting import until
from omnistage.gateway import accounts, guard
from omnistage.gateway.accounts import HeldMemory, HttpAccount, Ledger, size_of
from omnistage.gateway.failure import ApiError
from omnistage.host.places import HOST_SHARE

MIB = 1 << 20
JSON = {"Host": "localhost", "Content-Type": "application/json"}
HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")


@lengths.rounds(300, 20_000)
def test_no_more_is_held_than_there_may_be_and_nothing_at_the_end(seed: int, rounds: int) -> None:
    source = random.Random(seed)
    ledgers = [Ledger(1000), Ledger(100)]
    requests: list[tuple[HeldMemory, str, list[int]]] = []
    for _ in range(rounds):
        if source.random() < 0.3:
            number = source.choice([1, 2])
            host = source.choice(HOSTS)
            requests.append((HeldMemory(ledgers[:number], host), host, []))
        if requests and source.random() < 0.25:
            memory, _, sizes = requests.pop(source.randrange(len(requests)))
            memory.free()
        elif requests:
            memory, host, sizes = source.choice(requests)
            size_bytes = source.choice([0, 1, source.randrange(400)])
            try:
                memory.take(size_bytes)
                sizes.append(size_bytes)
            except ApiError as error:
                can_never_be = sum(sizes) + size_bytes > HOST_SHARE * 1000
                assert error.status == 503 or (error.status == 413 and can_never_be)
        by_host = {host: sum(sum(sizes) for _, holder, sizes in requests if holder == host) for host in HOSTS}
        assert sum(by_host.values()) <= 1100 and max(by_host.values()) <= HOST_SHARE * 1100
    for memory, _, _ in requests:
        memory.free()
    for ledger, limit in zip(ledgers, (1000, 100), strict=True):
        share = int(HOST_SHARE * limit)
        assert not ledger.take(HOSTS[0], share + 1) and ledger.take(HOSTS[0], share) and ledger.take(HOSTS[1], limit - share)


def test_however_many_hosts_take_what_they_can_there_is_room_for_another_one() -> None:
    ledger = Ledger(MIB)
    for number in range(8):
        while ledger.take(f"greedy {number}", 100):
            pass
    assert ledger.take("honest", 1)


def test_what_is_held_already_may_become_less_whoever_came_meanwhile() -> None:
    ledger = Ledger(256)
    first = [HeldMemory([ledger], HOSTS[0]) for _ in range(3)]
    for memory in first:
        memory.take(60)
    assert ledger.take(HOSTS[1], 40)
    first[0].resize(60)
    first[0].resize(45)
    with pytest.raises(ApiError):
        first[0].resize(61)
    for memory in first:
        memory.free()
    ledger.give_back(HOSTS[1], 40)
    assert ledger.take(HOSTS[2], 192)


def test_texts_and_files_are_measured_wherever_they_are() -> None:
    turns = [{"role": "user", "content": [{"type": "text", "text": "abc"}, {"type": "image_url", "image_url": b"12345"}]}]
    words = ("role", "user", "content", "type", "text", "text", "type", "image_url", "image_url")
    assert size_of((turns,)) == sum(map(len, words)) + 3 + 5 and size_of({"x": ("日本", 1, None, 2.5)}) == 1 + 8


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.ServerProcesses]:
    """A toy whose answers take longer than the tests."""
    with servers.stack(tmp_path_factory.mktemp("slow"), options={"interval_s": 5.0}, router_args=("--max-sessions", "64")) as running:
        yield running


def with_spaces(size_bytes: int, sent_bytes: int | None = None) -> bytes:
    """A question of so many spaces, of which some are sent."""
    return head("POST", CHAT, {**JSON, "Content-Length": str(size_bytes)}) + b" " * (size_bytes if sent_bytes is None else sent_bytes)


def with_values(count: int) -> bytes:
    """A question with so many values that no answer needs."""
    body = {**QUESTION, "stream": True, "metadata": [0.5] * count}
    return post(json.dumps(body, separators=(",", ":")).encode())


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that requests to a gateway in this process have taken."""
    sizes: list[int] = []
    take = HeldMemory.take

    def noting(self: HeldMemory, size_bytes: int) -> None:
        take(self, size_bytes)
        sizes.append(size_bytes)

    monkeypatch.setattr(HeldMemory, "take", noting)
    return sizes


async def ask_and_wait(stack: ExitStack, url: str, slow: servers.ServerProcesses, questions: int, request: bytes, before: int = 0) -> None:
    """Ask so many questions, one after the other; each waits for its answer until the stack is closed. before: the number of those that
    wait already."""
    for number in range(before + 1, before + questions + 1):
        holder = stack.enter_context(connected(url))
        await asyncio.to_thread(holder.sendall, request)
        await watch_until(slow.addresses["thinker"], lambda report, number=number: report.sessions == number)  # type: ignore[misc]


async def test_what_no_answer_needs_counts_until_the_rest_is_copied(slow: servers.ServerProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these bodies counts for half of all that one host may have."""
    monkeypatch.setattr(accounts, "BODIES_BYTES", 16 * MIB)
    async with local_gateway(slow.address) as (url, _):
        with ExitStack() as stack:
            await ask_and_wait(stack, url, slow, 5, with_values(MIB // 16))
            refused = await asyncio.to_thread(answer, url, with_spaces(4 * MIB))
            assert (refused.status, refused.error["code"]) == (400, "invalid_json"), "it has room"
        await all_free([*slow.addresses.values()])


async def test_what_no_answer_needs_is_not_held_while_it_is_made(slow: servers.ServerProcesses, tmp_path: Path) -> None:
    request = with_values(MIB // 4 - 100)
    with gateway(slow.address, tmp_path) as server, ExitStack() as stack:
        url = f"http://{server.address}"
        await ask_and_wait(stack, url, slow, 2, request)
        before = peak_bytes(server.pid)
        await ask_and_wait(stack, url, slow, 16, request, before=2)
        assert peak_bytes(server.pid) - before < 50 * MIB, "they would be 120 MiB"
        stack.close()
        await all_free([*slow.addresses.values()])


async def test_each_of_several_answers_has_its_copy_of_the_media(slow: servers.ServerProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "BODIES_BYTES", 4 * MIB)
    content = [{"type": "text", "text": "a" * (MIB - 1000)}]
    async with local_gateway(slow.address) as (url, _):
        question = {**QUESTION, "messages": [{"role": "user", "content": content}], "n": 4}
        refused = await asyncio.to_thread(answer, url, post(question))
        assert (refused.status, refused.error["code"], refused.header("retry-after")) == (413, "too_large", None)
    await all_free([*slow.addresses.values()])


async def test_all_bodies_together_have_a_bound(toy: servers.ServerProcesses, taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "BODIES_BYTES", 4 * MIB)
    monkeypatch.setattr(accounts, "SMALL_BODIES_BYTES", 0)
    half = with_spaces(2 * MIB, 2 * MIB - 64 * 1024)
    async with local_gateway(toy.address) as (url, door):
        with connected(url) as holder:
            await asyncio.to_thread(holder.sendall, half)
            await until(lambda: sum(taken) == 2 * MIB - 64 * 1024)
            refused = await asyncio.to_thread(answer, url, half)
            assert (refused.status, refused.error["reason"], refused.header("retry-after")) == (503, "OVERLOADED", "1")
            for host in HOSTS[:2]:
                small = await asyncio.to_thread(answer, url, post(), source=host)
                assert small.status == 200, "small ones still have room"
        await until(lambda: door.running == 0)
        refused = await asyncio.to_thread(answer, url, with_spaces(MIB))
        assert refused.status == 400, "what the others held is free again"


METHODS = ("GET", "HEAD", "DELETE", "OPTIONS", "TRACE", "BREW", "POST", "PUT", "PATCH")
PATHS = (CHAT, "/v1/models", "/v1/videos", "/v1/videos/video_x/content", "/v1/audio/speech", "/health", "/", "/elsewhere")


def drawn_request(source: random.Random) -> tuple[str, list[bytes]]:
    """A method, and a request with a body of any kind, whole or cut off, of one length or in chunks, in pieces."""
    method, path = source.choice(METHODS), source.choice(PATHS)
    size_bytes = source.choice([0, 1, source.randrange(1000), source.randrange(64 * 1024), source.randrange(MIB)])
    body = source.choice([json.dumps(QUESTION).encode(), b"[" + b"0," * (size_bytes // 2) + b"0]", b" " * size_bytes, source.randbytes(99)])
    headers = {**JSON, "Content-Type": source.choice(["application/json", "text/plain", "multipart/form-data; boundary=x"])}
    if source.random() < 0.3:
        chunk = f"{len(body):x}\r\n".encode() + body + b"\r\n"
        content, headers["Transfer-Encoding"] = (chunk if body else b"") + b"0\r\n\r\n", "chunked"
    else:
        content, headers["Content-Length"] = body, str(len(body) + source.choice([0, 0, 0, 7]))
    whole = head(method, path, headers) + content[: source.choice([len(content), len(content), source.randrange(len(content) + 1)])]
    cut = source.randrange(len(whole))
    return method, [whole[:cut], whole[cut:]]


@lengths.rounds(100, 500)
async def test_whatever_is_sent_all_is_freed(toy: servers.ServerProcesses, monkeypatch: pytest.MonkeyPatch, seed: int, rounds: int) -> None:
    monkeypatch.setattr(accounts, "BODIES_BYTES", 4 * MIB)
    monkeypatch.setattr(accounts, "SMALL_BODIES_BYTES", MIB // 4)
    source, ledgers = random.Random(seed), list[tuple[Ledger, int]]()
    begin = Ledger.__init__

    def noting(self: Ledger, limit_bytes: int) -> None:
        begin(self, limit_bytes)
        ledgers.append((self, limit_bytes))

    monkeypatch.setattr(Ledger, "__init__", noting)

    async def send(url: str) -> None:
        """Send one, and wait for its answer or leave."""
        method, pieces = drawn_request(source)
        host, leaves = source.choice(HOSTS), source.random() < 0.3

        def exchange() -> None:
            with connected(url, host) as connection, suppress(OSError):
                for piece in pieces:
                    connection.sendall(piece)
                connection.shutdown(socket.SHUT_WR)
                if not leaves:
                    heard(connection, method)

        await asyncio.to_thread(exchange)

    async with local_gateway(toy.address) as (url, door):
        for _ in range(0, rounds, 10):
            await asyncio.gather(*(send(url) for _ in range(10)))
            assert (await asyncio.to_thread(answer, url, post(), source="127.0.0.9")).status == 200
        await until(lambda: door.running == 0)
    await all_free([*toy.addresses.values()])
    for ledger, limit_bytes in ledgers:
        share_bytes = int(HOST_SHARE * limit_bytes)
        assert ledger.take("one", share_bytes) and ledger.take("another", limit_bytes - share_bytes), "all of it is free again"
    assert len(ledgers) == 3, "large bodies, small ones, media that are fetched"


async def test_small_requests_have_a_reserve(toy: servers.ServerProcesses, taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts hold all that they may, with bodies that do not end."""
    monkeypatch.setattr(accounts, "BODIES_BYTES", 4 * MIB)
    async with local_gateway(toy.address) as (url, _):
        with ExitStack() as stack:
            for host, size_bytes, held_bytes in (("127.0.0.1", 3 * MIB, 3 * MIB), ("127.0.0.2", MIB * 3 // 4, MIB * 15 // 4)):
                holder = stack.enter_context(connected(url, host))
                await asyncio.to_thread(holder.sendall, with_spaces(8 * MIB, size_bytes))
                await until(lambda held_bytes=held_bytes: sum(taken) == held_bytes)  # type: ignore[misc]
            for host in HOSTS:
                small = await asyncio.to_thread(answer, url, post(), source=host)
                assert small.status == 200


class UnreadAnswer:
    """An answer of 600 KiB to a client of a host, who reads nothing until `reads` is set. sent: the messages that went out."""

    body = random.Random(1).randbytes(600 * 1024)

    def __init__(self, ledger: Ledger, host: str) -> None:
        self.reads, self.sent = asyncio.Event(), list[Any]()
        self.answer = guard.AnswerSender(HttpAccount("GET", "/v1/videos"), self._send, self._refuse)
        self.answer.memory = HeldMemory([ledger], host)

    async def _send(self, message: Any) -> None:
        self.sent.append(message)
        await self.reads.wait()

    async def _refuse(self, error: ApiError, send: Any) -> None:
        self.reads.set()
        await error.response_at("")({"type": "http"}, no_receive, send)

    async def give(self) -> int:
        """Returns the status of what was sent."""
        await Response(self.body)({"type": "http"}, no_receive, self.answer.send)
        return int(self.sent[0]["status"])


async def no_receive() -> Any:
    raise AssertionError("nobody asks for the body")


async def test_an_answer_counts_until_it_is_read() -> None:
    ledger = Ledger(MIB)
    slow, second, other = UnreadAnswer(ledger, "a"), UnreadAnswer(ledger, "a"), UnreadAnswer(ledger, "b")
    waiting = asyncio.create_task(slow.give())
    await until(lambda: bool(slow.sent))
    assert await second.give() == await other.give() == 503, "there is no room for two"
    slow.reads.set()
    assert await waiting == 200
    pieces = [message["body"] for message in slow.sent[1:]]
    assert b"".join(pieces) == slow.body and max(map(len, pieces)) <= guard.PIECE_BYTES
    assert [message.get("more_body", False) for message in slow.sent[1:]] == [True] * (len(pieces) - 1) + [False]
    other = UnreadAnswer(ledger, "b")
    other.reads.set()
    assert await other.give() == 200
    assert ledger.take("a", MIB * 3 // 4) and ledger.take("b", MIB // 4), "all of it is free again"
