"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from omnistage.client.answer import Answer, collect
from omnistage.client.events import Done, Event, TextDelta
from omnistage.gateway.answering import DONE, Pieces, Streamed, begun, told, unless_gone, with_errors
from omnistage.gateway.chat_schema import ChatRequest
from omnistage.gateway.door import Door, Visitor

FIELDS = {"conversation": "messages", "pipeline": "model"}
"""By an option of the client library, the field of this interface."""


def routes(door: Door) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["chat"])

    @router.post("/chat/completions", response_model=None)
    async def chat(request: Request, asked: ChatRequest) -> Response:
        """Answer a conversation: text and speech, whole or as server-sent events."""
        visitor = door.visitor(request)
        pipeline = await door.offer.chat_model(asked.model)
        options = door.options(
            visitor,
            pipeline=pipeline,
            outputs=["text"],
            max_tokens=asked.max_completion_tokens or asked.max_tokens,
            temperature=asked.temperature,
            top_p=asked.top_p,
            seed=asked.seed,
            stop=asked.stop,
        )
        events = visitor.account.followed(visitor.omni.stream_chat(asked.messages, **options))
        frame = _frame(visitor, asked.model)
        if asked.stream:
            pieces = await unless_gone(request, begun(_pieces(events, frame)))
            return Streamed(with_errors(pieces, visitor.account, FIELDS), visitor.account, "text/event-stream")
        answer = await unless_gone(request, _whole(events))
        return JSONResponse(_completion(answer, frame))

    return router


def _frame(visitor: Visitor, model: str) -> dict[str, Any]:
    """What all chunks of an answer have."""
    return {"id": f"chatcmpl-{visitor.account.request_id}", "created": int(time.time()), "model": model}


async def _whole(events: AsyncGenerator[Event, None]) -> Answer:
    async with aclosing(events):
        return await collect(events)


def _completion(answer: Answer, frame: Mapping[str, Any]) -> dict[str, Any]:
    message = {"role": "assistant", "content": answer.text, "refusal": None}
    choice = {"index": 0, "message": message, "finish_reason": answer.finish_reason, "logprobs": None}
    prompt, completion = answer.usage.prompt_tokens or 0, answer.usage.completion_tokens or 0
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return {**frame, "object": "chat.completion", "choices": [choice], "usage": usage}


async def _pieces(events: AsyncGenerator[Event, None], frame: Mapping[str, Any]) -> Pieces:
    def chunk(delta: Mapping[str, Any], finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
        return told({**frame, "object": "chat.completion.chunk", "choices": [choice]})

    role: dict[str, Any] = {"role": "assistant"}
    async with aclosing(events):
        async for event in events:
            match event:
                case TextDelta():
                    yield chunk({**role, "content": event.text})
                    role = {}
                case Done():
                    yield chunk(role, event.finish_reason)
                case _:
                    pass
    yield DONE
