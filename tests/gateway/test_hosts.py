"""Hosts behind a gateway share the router's places, whatever keys they invent, if the gateway proves that it is of the router's stack."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import httpx2
import pytest

from helpers.ask import ask
from helpers.chain import addresses_of, good
from helpers.gateway import local_gateway
from helpers.raw_http import CHAT
from helpers.servers import Local, local_chain, local_router, omni_stub
from helpers.waiting import until
from omnistage.wire.token import GATEWAY_HOST, GATEWAY_KEY, Token

TOKEN = Token("s" * 32)
PLACES = 8
QUESTION = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
LONG = {**QUESTION, "max_tokens": 20_000, "ignore_eos": True, "stream": True}


@asynccontextmanager
async def crowded(token: Token | None) -> AsyncIterator[tuple[Local, str]]:
    """A router, and the URL of a gateway with this token. One host wants more places than there are, each with a key of its own."""
    async with (
        local_chain({"interval_s": 0.01}) as stages,
        local_router(addresses_of(stages), max_sessions=PLACES, token=TOKEN) as router,
        local_gateway(router.address, token) as (url, _),
        httpx2.AsyncClient(transport=httpx2.AsyncHTTPTransport(local_address="127.0.0.2"), timeout=60) as greedy,
        AsyncExitStack() as streams,
    ):
        statuses: list[int] = []

        async def begin(number: int) -> None:
            headers = {"Authorization": f"Bearer invented-{number}"}
            answer = await streams.enter_async_context(greedy.stream("POST", f"{url}{CHAT}", json=LONG, headers=headers))
            statuses.append(answer.status_code)

        asking = [asyncio.create_task(begin(number)) for number in range(2 * PLACES)]
        await until(lambda: statuses.count(200) >= PLACES * 3 // 4)
        yield router, url
        await asyncio.gather(*asking)
        assert sorted(statuses) == [200] * (PLACES * 3 // 4) + [503] * (2 * PLACES - PLACES * 3 // 4)


async def status_for(url: str, host: str, key: str = "") -> int:
    transport = httpx2.AsyncHTTPTransport(local_address=host)
    async with httpx2.AsyncClient(transport=transport, headers={"Authorization": f"Bearer {key}"} if key else {}, timeout=60) as client:
        return (await client.post(f"{url}{CHAT}", json=QUESTION)).status_code


@pytest.mark.parametrize("key", ["", "invented-0", "mine"])
async def test_another_host_gets_its_place_at_once(key: str) -> None:
    async with crowded(TOKEN.for_gateway()) as (_, url):
        assert [await status_for(url, "127.0.0.9", key) for _ in range(3)] == [200] * 3


async def test_behind_a_gateway_without_a_token_all_are_of_one_host() -> None:
    """That is the gateway's own host. A caller whose host the right token names gets a place beside it."""
    async with crowded(None) as (router, url), omni_stub(router.address) as stub:
        assert await status_for(url, "127.0.0.9") == 503
        proof = [(GATEWAY_KEY, TOKEN.for_gateway().secret), (GATEWAY_HOST, "elsewhere")]
        (await ask(stub, good(), metadata=proof)).check_toy(5, "good")
