"""A call that ends with a status and not a word of ours: gRPC itself ends calls so when much is reset, and so do proxies."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from helpers.peer import TEXT, Bare, PlayingPeer, listening
from omnistage.client import AsyncOmni, DeadlineError, Omni, OmniError, RouterLostError, UnavailableError
from omnistage.client.errors import BROKEN

CODES = [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK]
MAY_BE_ASKED_AGAIN = BROKEN | {grpc.StatusCode.ABORTED, grpc.StatusCode.RESOURCE_EXHAUSTED}
CLIENTS = pytest.mark.parametrize("client", [AsyncOmni, Omni])


async def asked(client: type[Any], address: str, what: str, **options: Any) -> Any:
    """The result of a client's call, in a coroutine or in a thread, as its user makes it."""
    if client is AsyncOmni:
        async with AsyncOmni(address=address) as omni:
            return await getattr(omni, what)(**options)

    def ask() -> Any:
        with Omni(address=address) as omni:
            return getattr(omni, what)(**options)

    return await asyncio.to_thread(ask)


@CLIENTS
@pytest.mark.parametrize("after", [0, 6])
@pytest.mark.parametrize("code", sorted(BROKEN, key=str))
async def test_an_answer_that_is_cut_off_goes_on(code: grpc.StatusCode, after: int, client: type[Any]):
    peer = PlayingPeer(Bare(code, after))
    async with listening(peer) as wire:
        answer = await asked(client, wire.address, "generate", prompt="Hi")
    assert answer.text == TEXT and len(peer.requests) == 2


@CLIENTS
@pytest.mark.parametrize("code", sorted(BROKEN, key=str))
async def test_an_answer_that_is_cut_off_twice_may_be_asked_again(code: grpc.StatusCode, client: type[Any]):
    async with listening(PlayingPeer(Bare(code, 6), Bare(code, 6))) as wire:
        with pytest.raises(RouterLostError) as told:
            await asked(client, wire.address, "generate", prompt="Hi")
    assert told.value.code is code and code.name in str(told.value) and "Ask again" in told.value.hint


@CLIENTS
@pytest.mark.parametrize("code", CODES)
async def test_every_status_is_an_error_that_says_what_to_do(code: grpc.StatusCode, client: type[Any]):
    """For whoever asks once; the task that asks is cancelled by none of them."""
    async with listening(PlayingPeer(Bare(code))) as wire:
        with pytest.raises(OmniError) as told:
            await asked(client, wire.address, "pipelines")
    error = told.value
    assert error.code is code and error.hint and str(error)
    assert isinstance(error, UnavailableError) == (code in MAY_BE_ASKED_AGAIN)
    if isinstance(error, UnavailableError):
        assert error.retry_delay_s
    task = asyncio.current_task()
    assert task is not None and not task.cancelling()


@CLIENTS
async def test_a_time_limit_that_is_not_the_clients_is_not_told_as_its_own(client: type[Any]):
    async with listening(PlayingPeer(Bare(grpc.StatusCode.DEADLINE_EXCEEDED))) as wire:
        with pytest.raises(DeadlineError, match="before its own time limit of 60 s") as told:
            await asked(client, wire.address, "generate", prompt="Hi", timeout_s=60)
    assert "proxy" in told.value.hint
