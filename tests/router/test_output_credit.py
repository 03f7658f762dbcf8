"""Converse: a client that says itself how much sound it has room for, and the bounded memory for what clients stream."""

from __future__ import annotations

import asyncio
import weakref
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc
import grpc.aio
import pytest

from helpers.ask import WholeAnswer, refusal, request
from helpers.chain import RouterAndStages, router_and_stages
from helpers.converse import ConverseStream
from helpers.link import link_by, opening, route_to
from helpers.servers import CHAIN, toy_logic
from helpers.waiting import until_collected
from omnistage.router.conversation import WINDOW, Intake
from omnistage.v1 import omni_pb2, stage_pb2

LENGTH = 40


def house(replicas: int = 1, **settings: Any) -> AbstractAsyncContextManager[RouterAndStages]:
    """The toy chain behind a router. settings: of the router."""
    return router_and_stages([toy_logic(kind, {"max_chunk": 1}) for kind in CHAIN for _ in range(replicas)], **settings)


def question(seed: int) -> omni_pb2.GenerateRequest:
    return request("How?", seed, thinker={"max_tokens": LENGTH, "ignore_eos": True})


def sound(total: int) -> stage_pb2.Credit:
    return stage_pb2.Credit(port="audio", total=total)


def is_whole(answer: WholeAnswer, port: str) -> bool:
    return bool(answer.of(port)) and answer.of(port)[-1].last


async def heard(conversation: ConverseStream, given: int) -> WholeAnswer:
    """A whole answer. given: chunks in earlier turns, all that there was room for. There is one more whenever all is used up and the text
    is whole, and nothing may come without room."""
    answer, room = WholeAnswer(), 0
    async for event in conversation.events():
        answer.take(event)
        assert len(answer.of("audio")) <= room
        if is_whole(answer, "text") and not is_whole(answer, "audio") and len(answer.of("audio")) == room:
            room += 1
            await conversation.send(credit=sound(given + room))
    return answer


async def test_sound_comes_as_there_is_room_and_text_does_not_wait_for_it():
    """Two turns: room is counted over the whole conversation."""
    async with house() as stack:
        conversation = ConverseStream(stack.stub)
        await conversation.send(credit=sound(0))
        given = 0
        for seed in (1, 2):
            await conversation.send(turn=question(seed))
            answer = await heard(conversation, given)
            answer.check_toy(seed, "How?", LENGTH)
            given += len(answer.of("audio"))
            assert len(answer.of("audio")) > LENGTH
        assert await conversation.end() is grpc.StatusCode.OK


async def test_without_any_room_said_the_router_grants_as_it_writes():
    async with house() as stack:
        conversation = ConverseStream(stack.stub)
        await conversation.send(turn=question(1))
        (await conversation.answer()).check_toy(1, "How?", LENGTH)
        await conversation.send(credit=sound(1 << 40))
        await conversation.send(credit=stage_pb2.Credit(port="text", total=1))  # A checkpoint is outside of credit.
        await conversation.send(turn=question(2))
        (await conversation.answer()).check_toy(2, "How?", LENGTH)


@pytest.mark.parametrize("lost", CHAIN)
async def test_a_stage_that_is_lost_while_sound_waits_for_room_leaves_no_gap(lost: str):
    async with house(2) as stack:
        conversation = ConverseStream(stack.stub)
        await conversation.send(credit=sound(3))
        await conversation.send(turn=question(1))
        answer = WholeAnswer()
        async for event in conversation.events():
            answer.take(event)
            if len(answer.of("audio")) == 3 and is_whole(answer, "text") and not answer.failovers:
                await stack.end_busy(lost)
                await conversation.send(credit=sound(1000))
        answer.check_toy(1, "How?", LENGTH)
        assert [failover.kind for failover in answer.failovers] == [getattr(stage_pb2, f"STAGE_KIND_{lost.upper()}")]


@pytest.mark.parametrize(("given", "reason"), [(5, "HALF_CLOSED"), (1000, "OK")])
async def test_who_half_closes_gives_no_more(given: int, reason: str):
    async with house() as stack:
        conversation = ConverseStream(stack.stub)
        await conversation.send(credit=sound(given))
        await conversation.send(turn=question(1))
        await conversation.call.done_writing()
        if reason == "OK":
            (await conversation.answer()).check_toy(1, "How?", LENGTH)
        else:
            with pytest.raises(grpc.aio.AioRpcError) as told:
                await conversation.answer()
            assert refusal(told.value).reason == reason and "too little room for audio" in refusal(told.value).message


async def test_what_the_client_has_whole_needs_no_room():
    """It asks for the rest of an answer, of which it has all sound."""
    async with house() as stack:
        answer = await ConverseStream(stack.stub).turn(question(1))
        ends = {port: chunks[-1] for port, chunks in answer.chunks.items()}
        rest = question(1)
        rest.resume.positions.extend(
            stage_pb2.Position(port=port, seq=end.seq + 1, first=end.first + end.count, ended=True) for port, end in ends.items()
        )
        rest.resume.history.extend(answer.of("text"))
        conversation = ConverseStream(stack.stub)
        await conversation.send(credit=sound(0))
        await conversation.send(turn=rest)
        await conversation.call.done_writing()
        assert not [event async for event in conversation.events() if event.HasField("chunk")]


async def test_who_gives_no_room_loses_its_place_to_one_who_waits():
    async with house(max_sessions=1) as stack:
        conversation = ConverseStream(stack.stub)
        await conversation.send(credit=sound(1))
        await conversation.send(turn=question(1))
        answer = WholeAnswer()
        events = conversation.events()
        while not answer.of("audio"):
            answer.take(await anext(events))
        (await ConverseStream(stack.stub, key="another").turn(question(2))).check_toy(2, "How?", LENGTH)
        with pytest.raises(Exception, match="CLIENT_STALLED"):
            async for event in events:
                answer.take(event)
        await conversation.send(credit=sound(1000))
        await conversation.send(turn=question(3))
        (await conversation.answer()).check_toy(3, "How?", LENGTH)


def test_ports_share_the_window_of_a_turn() -> None:
    async def tell(credit: stage_pb2.Credit) -> None:
        raise AssertionError("no answer runs yet")

    for count, each in ((0, WINDOW), (1, WINDOW), (3, WINDOW // 3), (8, WINDOW // 8), (9, 2)):
        ports = [stage_pb2.Port(name=f"media{n}", payload=stage_pb2.PAYLOAD_MEDIA) for n in range(count)]
        intake = Intake(ports, tell, stall_s=1, replay_bytes=0)
        assert intake.window == each
        assert intake.waits_for == [port.name for port in ports]


async def test_a_client_that_leaves_while_it_is_given_room_is_no_error_that_nobody_looks_at() -> None:
    """The write goes on when its turn is over, and fails with the call."""
    complaints = list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _, complaint: complaints.append(complaint))
    writing, gone = asyncio.Event(), asyncio.Event()

    async def tell(credit: stage_pb2.Credit) -> None:
        writing.set()
        await gone.wait()
        raise ConnectionError("the call is over")

    intake = Intake([stage_pb2.Port(name="media0", payload=stage_pb2.PAYLOAD_MEDIA)], tell, stall_s=1, replay_bytes=0)
    async with link_by(route_to("127.0.0.1:1"), opening()) as link:
        async with intake.passed_on(link):
            await writing.wait()
            tasks = [weakref.ref(task) for task in asyncio.all_tasks() - {asyncio.current_task()}]
        gone.set()
        # asyncio complains when it forgets a task.
        await until_collected(lambda: complaints or not any(task() for task in tasks))
    assert tasks and not complaints
