"""Clients that stream media to `Converse`, two turns in one call."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import grpc
import grpc.aio

from chaos.answers import EventsOfAnswer
from chaos.questions import LookingQuestion, expect
from helpers.converse import ConverseStream, Pause, TurnFailed
from omnistage.v1 import omni_pb2_grpc

SECOND = 1 << 20
"""Added to the seed of the first turn."""

Turn = tuple[LookingQuestion, Pause | None]
"""A question, and what is waited for before every piece of its media."""


async def two_turns(stub: omni_pb2_grpc.OmniServiceAsyncStub, question: LookingQuestion, timeout_s: float) -> int:
    """Failovers that were told. Raises WrongAnswer, AioRpcError for the call, and TurnFailed for a turn."""
    return await _converse(stub, [(question, None), (_second(question), None)], timeout_s)


async def stopped_streaming(stub: omni_pb2_grpc.OmniServiceAsyncStub, question: LookingQuestion, timeout_s: float) -> None:
    """One piece, if that is not all, and then nothing more for ever, though there is room: the turn has to fail, and the next one is asked
    in the same call. Raises as `two_turns`."""
    pieces = sum(1 for cut in question.pieces().values() for _ in cut)
    room = iter([True] * (pieces > 1))

    async def once() -> None:
        if not next(room, False):
            await asyncio.Event().wait()

    await _converse(stub, [(question, once), (_second(question), None)], timeout_s)
    expect(False, "an answer to media that were not sent")


def _second(question: LookingQuestion) -> LookingQuestion:
    return replace(question, seed=question.seed + SECOND)


async def _converse(stub: omni_pb2_grpc.OmniServiceAsyncStub, turns: Sequence[Turn], timeout_s: float) -> int:
    """A turn that failed is followed by the next one all the same, when it said that: its error is raised at the end."""
    conversation = ConverseStream(stub, timeout_s)
    failovers, failure = 0, None
    try:
        for question, pause in turns:
            try:
                failovers += await _turn(conversation, question, pause)
            except TurnFailed as error:
                if failure is not None:
                    raise
                failure = error
                await asyncio.sleep(error.failed.retry_delay.ToTimedelta().total_seconds())
        status = await conversation.end()
        expect(status is grpc.StatusCode.OK, f"a conversation ended with {status}")
    except (asyncio.InvalidStateError, grpc.aio.UsageError):
        raise await conversation.failure() from None
    finally:
        conversation.call.cancel()
    if failure is not None:
        raise failure
    return failovers


async def _turn(conversation: ConverseStream, question: LookingQuestion, pause: Pause | None) -> int:
    heard = EventsOfAnswer(question)
    conversation.room.clear()
    await conversation.send(turn=question.request())
    async with conversation.streaming(question.pieces(), pause):
        async for event in conversation.events():
            heard.take(event)
    heard.check_whole()
    return heard.failovers
