"""A body counts until it was copied, small ones have a reserve, and nothing is counted at the end."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.processes import peak_bytes
from helpers import lengths, servers
from helpers.gateway import gateway, local_gateway
from helpers.raw_http import CHAT, QUESTION, answer, connected, head, post
from helpers.servers import all_free, watch_until
from helpers.waiting import until
from omnistage.gateway import held
from omnistage.gateway.failure import ApiError
from omnistage.gateway.held import HOST_SHARE, HeldMemory, Ledger, size_of

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
                assert (error.status, error.reason) == (503, "OVERLOADED")
        by_host = {host: sum(sum(sizes) for _, holder, sizes in requests if holder == host) for host in HOSTS}
        assert sum(by_host.values()) <= 1100 and max(by_host.values()) <= HOST_SHARE * 1100
    for memory, _, _ in requests:
        memory.free()
    for ledger, limit in zip(ledgers, (1000, 100), strict=True):
        share = int(HOST_SHARE * limit)
        assert not ledger.take(HOSTS[0], share + 1) and ledger.take(HOSTS[0], share) and ledger.take(HOSTS[1], limit - share)


def test_texts_and_files_are_measured_wherever_they_are() -> None:
    turns = [{"role": "user", "content": [{"type": "text", "text": "abc"}, {"type": "image_url", "image_url": b"12345"}]}]
    words = ("role", "user", "content", "type", "text", "text", "type", "image_url", "image_url")
    assert size_of((turns,)) == sum(map(len, words)) + 3 + 5
    assert size_of({"x": ("日本", 1, None, 2.5)}) == 1 + 8


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.ServerProcesses]:
    """A toy whose answers take longer than the tests."""
    with servers.stack(tmp_path_factory.mktemp("slow"), options={"interval_s": 5.0}, router_args=("--max-sessions", "64")) as running:
        yield running


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


async def test_what_no_answer_needs_counts_until_the_rest_was_copied(
    slow: servers.ServerProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of these bodies counts for half of all that one host may have."""
    monkeypatch.setattr(held, "BODIES_BYTES", 16 * MIB)
    async with local_gateway(slow.address) as (url, _):
        with ExitStack() as stack:
            await ask_and_wait(stack, url, slow, 5, with_values(MIB // 16))
            large = head("POST", CHAT, {**JSON, "Content-Length": str(4 * MIB)}) + b" " * (4 * MIB)
            refused = await asyncio.to_thread(answer, url, large)
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
    monkeypatch.setattr(held, "BODIES_BYTES", 4 * MIB)
    content = [{"type": "text", "text": "a" * (MIB - 1000)}]
    async with local_gateway(slow.address) as (url, _):
        question = {**QUESTION, "messages": [{"role": "user", "content": content}], "n": 4}
        refused = await asyncio.to_thread(answer, url, post(question))
        assert (refused.status, refused.error["reason"]) == (503, "OVERLOADED")
    await all_free([*slow.addresses.values()])


async def test_all_bodies_together_have_a_bound_and_one_host_a_share_of_it(
    toy: servers.ServerProcesses, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held, "BODIES_BYTES", 4 * MIB)
    monkeypatch.setattr(held, "SMALL_BODIES_BYTES", 0)
    half = head("POST", CHAT, {**JSON, "Content-Length": str(2 * MIB)}) + b" " * (2 * MIB - 64 * 1024)
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
        refused = await asyncio.to_thread(answer, url, head("POST", CHAT, {**JSON, "Content-Length": str(MIB)}) + b" " * MIB)
        assert refused.status == 400, "what the others held is free again"


async def test_small_requests_have_a_reserve(toy: servers.ServerProcesses, taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts hold all that requests may take, with bodies that do not end."""
    monkeypatch.setattr(held, "BODIES_BYTES", 4 * MIB)
    async with local_gateway(toy.address) as (url, _):
        with ExitStack() as stack:
            for host, size_bytes in (("127.0.0.1", 3 * MIB), ("127.0.0.2", MIB)):
                holder = stack.enter_context(connected(url, host))
                part = head("POST", CHAT, {**JSON, "Content-Length": str(8 * MIB)}) + b" " * size_bytes
                await asyncio.to_thread(holder.sendall, part)
            await until(lambda: sum(taken) == 4 * MIB)
            for host in HOSTS:
                small = await asyncio.to_thread(answer, url, post(), source=host)
                assert small.status == 200
