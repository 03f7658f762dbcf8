"""How an answer ends: whole and counted as such, without a sample of sound, or by a status without a word of ours, as from a proxy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import pytest

from helpers import lengths
from helpers.peer import TEXT, Bare, Events, Play, PlayingPeer, answer, event, listening
from helpers.playing import playing
from helpers.servers import Local, local_chain, local_router
from omnistage.client import AsyncOmni, Done, Event, Omni, TextDelta, errors
from omnistage.v1 import chunk_pb2, omni_pb2

ANSWERS = 100
CLIENTS = pytest.mark.parametrize("client", [AsyncOmni, Omni])


async def asked(client: type[Any], what: str, *plays: Play, **options: Any) -> tuple[Any, int]:
    """The result of a client's call, in a coroutine or in a thread, as its user makes it, and how many requests it was."""
    peer = PlayingPeer(*plays)

    def ask(address: str) -> Any:
        with Omni(address=address) as omni:
            return getattr(omni, what)(**options)

    async with listening(peer) as wire:
        if client is Omni:
            result = await asyncio.to_thread(ask, wire.address)
        else:
            async with AsyncOmni(address=wire.address) as omni:
                result = await getattr(omni, what)(**options)
    return result, len(peer.requests)


@pytest.fixture
async def router() -> AsyncIterator[Local]:
    async with local_chain({"length": 3}) as chain, local_router({kind: stage.address for kind, stage in chain.items()}) as running:
        yield running


def ended(router: Local) -> dict[str, float]:
    """Requests of the toy pipeline by how they ended."""
    samples = [sample for family in router.registry.collect() for sample in family.samples]
    return {sample.labels["reason"]: sample.value for sample in samples if sample.name == "omnistage_router_requests_total"}


async def test_whole_answers_of_asyncio(router: Local) -> None:
    async with AsyncOmni(address=router.address) as omni:
        for number in range(ANSWERS):
            await omni.say("Hi.", seed=number)
    assert ended(router) == {"OK": ANSWERS}


@lengths.long_form("client/test_answers.py::test_whole_answers_and_streams_without_asyncio")
async def test_streams_that_are_left_at_done(router: Local) -> None:
    async with AsyncOmni(address=router.address) as omni:
        for number in range(ANSWERS):
            async with aclosing(omni.stream_say("Hi.", seed=number)) as events:
                async for told in events:
                    if isinstance(told, Done):
                        break
    assert ended(router) == {"OK": ANSWERS}


async def test_whole_answers_and_streams_without_asyncio(router: Local) -> None:
    def ask() -> None:
        with Omni(address=router.address) as omni:
            for number in range(ANSWERS // 2):
                omni.say("Hi.", seed=number)
                stream = omni.stream_say("Hi.", seed=number)
                while not isinstance(next(stream), Done):
                    pass
                stream.close()

    await asyncio.to_thread(ask)
    assert ended(router) == {"OK": ANSWERS}


async def test_a_status_that_does_not_come_is_not_waited_for() -> None:
    whole = list(answer(omni_pb2.GenerateRequest()))
    async with playing(whole) as (peer, _, omni):  # It sends these and then nothing more, no status either.
        assert (await omni.generate("Hi")).text == TEXT
        async with asyncio.timeout(30):
            await peer.cancelled.wait()


async def test_what_comes_after_the_account_is_an_error() -> None:
    with pytest.raises(errors.ProtocolError, match="after its account"):
        await asked(AsyncOmni, "generate", [*answer(omni_pb2.GenerateRequest()), event(omni_pb2.Usage())], prompt="Hi")


MUTE: Events = [message for message in answer(omni_pb2.GenerateRequest()) if message.chunk.port != "audio"]
"""An answer without a port of sound."""

CODED: Events = [*MUTE[:-1], event(chunk_pb2.Chunk(port="codes", last=True)), MUTE[-1]]
"""An answer whose speech stays codes."""

EMPTY: Events = [*MUTE[:-1], event(chunk_pb2.Chunk(port="audio", last=True)), MUTE[-1]]
"""An answer whose sound ends before the first sample."""


@CLIENTS
@pytest.mark.parametrize(("events", "why"), [(MUTE, "it has no Talker"), (CODED, "it has no Code2Wav"), (EMPTY, "no sound came")])
async def test_what_cannot_be_spoken_is_an_error_with_a_name(events: Events, why: str, client: type[Any]) -> None:
    for options in ({}, {"outputs": ["text", "audio"]}):
        with pytest.raises(errors.NotSpokenError, match=f"nothing of this text could be spoken by peer: {why}") as caught:
            await asked(client, "say", events, text="...", **options)
        assert "voice" in caught.value.hint
    assert (await asked(client, "say", text="Hi"))[0].audio is not None


async def test_a_stream_tells_it_at_its_end_instead_of_done() -> None:
    heard: list[Event] = []
    async with playing(MUTE) as (_, _, omni), aclosing(omni.stream_say("...")) as stream:
        with pytest.raises(errors.NotSpokenError):
            async for told in stream:
                heard.append(told)
    assert "".join(told.text for told in heard if isinstance(told, TextDelta)) == TEXT
    assert not any(isinstance(told, Done) for told in heard)


async def test_who_asked_for_no_sound_misses_none(tmp_path: Path) -> None:
    async with playing(MUTE, MUTE) as (_, _, omni):
        assert (await omni.say("...", outputs=["text"])).text == TEXT
        answered = await omni.generate("Hi")
    assert answered.audio is None  # an answer is worth having without its sound
    with pytest.raises(errors.NotSpokenError, match="no sound"):
        answered.save(tmp_path / "absent.wav")
    assert not (tmp_path / "absent.wav").exists()


CODES = [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK]
MAY_BE_ASKED_AGAIN = errors.BROKEN | {grpc.StatusCode.ABORTED, grpc.StatusCode.RESOURCE_EXHAUSTED}


@CLIENTS
@pytest.mark.parametrize("after", [0, 6])
@pytest.mark.parametrize("code", sorted(errors.BROKEN, key=str))
async def test_an_answer_that_is_cut_off_goes_on(code: grpc.StatusCode, after: int, client: type[Any]):
    answer, count = await asked(client, "generate", Bare(code, after), prompt="Hi")
    assert (answer.text, count) == (TEXT, 2)


@CLIENTS
@pytest.mark.parametrize("code", sorted(errors.BROKEN, key=str))
async def test_an_answer_that_is_cut_off_twice_may_be_asked_again(code: grpc.StatusCode, client: type[Any]):
    with pytest.raises(errors.RouterLostError) as told:
        await asked(client, "generate", Bare(code, 6), Bare(code, 6), prompt="Hi")
    assert told.value.code is code and code.name in str(told.value) and "Ask again" in told.value.hint


@CLIENTS
@pytest.mark.parametrize("code", CODES)
async def test_every_status_is_an_error_that_says_what_to_do(code: grpc.StatusCode, client: type[Any]):
    """For whoever asks once; the task that asks is cancelled by none of them."""
    with pytest.raises(errors.OmniError) as told:
        await asked(client, "pipelines", Bare(code))
    error, task = told.value, asyncio.current_task()
    assert error.code is code and error.hint and str(error)
    assert isinstance(error, errors.UnavailableError) == (code in MAY_BE_ASKED_AGAIN)
    assert not isinstance(error, errors.UnavailableError) or error.retry_delay_s
    assert task is not None and not task.cancelling()


@CLIENTS
async def test_a_time_limit_that_is_not_the_clients_is_not_told_as_its_own(client: type[Any]):
    with pytest.raises(errors.DeadlineError, match="before its own time limit of 60 s") as told:
        await asked(client, "generate", Bare(grpc.StatusCode.DEADLINE_EXCEEDED), prompt="Hi", timeout_s=60)
    assert "proxy" in told.value.hint
