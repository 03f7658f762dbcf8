"""POST /v1/responses: text, from text and pictures."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from itertools import count
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from omnistage.client.events import Done, Event, TextDelta
from omnistage.gateway.answering import Pieces, as_event, streamed, unless_gone
from omnistage.gateway.body import top_p_of
from omnistage.gateway.choices import Events
from omnistage.gateway.door import Door, Visitor, visitor_of
from omnistage.gateway.failure import ApiError, in_words_of
from omnistage.gateway.fields import fields_of
from omnistage.gateway.kept import new_name
from omnistage.gateway.logprobs import logprobs_of
from omnistage.gateway.messages import Turn, with_fetched
from omnistage.gateway.parsed import new_router
from omnistage.gateway.response_items import turns_of
from omnistage.gateway.responses_schema import ResponsesRequest
from omnistage.gateway.usage import response_usage

FIELDS = fields_of(
    {
        **dict.fromkeys(("request", "conversation", "messages", "text", "verbatim"), "input"),
        "pipeline": "model",
        "outputs": "model",
        "max_tokens": "max_output_tokens",
        "json_schema": "text.format",
        "thinker.constraint": "text.format",
    }
)
"""By a field as the client library and the stages call it, the one of this interface."""


def routes(door: Door) -> APIRouter:
    router = new_router("/v1", "responses")

    @router.post("/responses", response_model=None)
    async def respond(request: Request, asked: ResponsesRequest) -> Response:
        """Answer in text, whole or as server-sent events. Nothing of it is kept."""
        asked.check()
        visitor = visitor_of(request)
        turns, names = turns_of(asked)
        fields = {**FIELDS, **names}
        with in_words_of(fields):
            pipeline = await unless_gone(request, door.offer.chat_model(asked.model))
            events = await unless_gone(request, _asked(door, visitor, asked, pipeline, turns, names))
            making = _Making(asked)
            if not asked.stream:
                return JSONResponse(await unless_gone(request, _whole(making, events)))
            return await streamed(request, making.pieces(events), fields, telling=making.failed)

    return router


async def _asked(
    door: Door, visitor: Visitor, asked: ResponsesRequest, pipeline: str, turns: list[Turn], names: Mapping[str, str]
) -> Events:
    """The answer, which has not begun."""
    fetched = await with_fetched(turns, [names[f"conversation[{i}]"] for i in range(len(turns))], door.fetcher.of(visitor.account))
    options = door.options(
        visitor,
        pipeline=pipeline,
        outputs=["text"],
        max_tokens=asked.max_output_tokens,
        temperature=asked.temperature,
        top_p=top_p_of(asked.top_p),
        seed=asked.seed,
        json_schema=asked.kept_to,
        **({"logprobs": True, "top_logprobs": asked.top_logprobs} if asked.tells_logprobs else {}),
    )
    return visitor.account.followed(visitor.omni.stream_chat(fetched, **options))


async def _whole(making: _Making, events: AsyncGenerator[Event, None]) -> dict[str, Any]:
    async with aclosing(events):
        async for event in events:
            making.take(event)
    return making.response


class _Making:
    """A response while it is made: one message with one text."""

    def __init__(self, asked: ResponsesRequest) -> None:
        self._asked = asked
        self._name, self._item_name = new_name("resp_"), new_name("msg_")
        self._created = int(time.time())
        self._numbers = count()
        self._said: list[str] = []
        self._rows: list[dict[str, Any]] = []
        self._done: Done | None = None
        self._has_begun = False
        self._failure: ApiError | None = None

    def take(self, event: Event) -> list[dict[str, Any]]:
        """The next event of the answer; what it adds to the rows of logprobs."""
        rows: list[dict[str, Any]] = []
        match event:
            case TextDelta():
                rows = logprobs_of(event, self._asked.top_logprobs or 0) if self._asked.tells_logprobs else []
                self._said.append(event.text)
                self._rows += rows
            case Done():
                self._done = event
            case _:
                pass
        self._has_begun = True
        return rows

    async def pieces(self, events: AsyncGenerator[Event, None]) -> Pieces:
        """Server-sent events, numbered."""
        place = {"item_id": self._item_name, "output_index": 0, "content_index": 0}
        async with aclosing(events):
            async for one in events:
                if not self._has_begun:
                    for kind, what in self._beginning(place):
                        yield self._event(kind, **what)
                rows = self.take(one)
                if isinstance(one, TextDelta) and (one.text or rows):
                    yield self._event("response.output_text.delta", **place, delta=one.text, logprobs=rows)
        yield self._event("response.output_text.done", **place, text="".join(self._said), logprobs=self._rows)
        yield self._event("response.content_part.done", **place, part=self._part)
        yield self._event("response.output_item.done", output_index=0, item=self._item)
        yield self._event(f"response.{self._status}", response=self.response)

    def failed(self, failure: ApiError) -> bytes:
        """The last event of one that fails."""
        self._failure = failure
        return self._event("response.failed", response=self.response)

    def _event(self, kind: str, **what: Any) -> bytes:
        return as_event({"type": kind, "sequence_number": next(self._numbers), **what}, kind)

    def _beginning(self, place: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        yield "response.created", {"response": self.response}
        yield "response.in_progress", {"response": self.response}
        yield "response.output_item.added", {"output_index": 0, "item": {**self._item, "content": []}}
        yield "response.content_part.added", {**place, "part": self._part}

    @property
    def _status(self) -> str:
        if self._failure is not None:
            return "failed"
        if self._done is None:
            return "in_progress"
        return "incomplete" if self._done.finish_reason == "length" else "completed"

    @property
    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": "".join(self._said), "annotations": [], "logprobs": list(self._rows)}

    @property
    def _item(self) -> dict[str, Any]:
        status = "incomplete" if self._status == "failed" else self._status
        return {"id": self._item_name, "type": "message", "role": "assistant", "status": status, "content": [self._part]}

    @property
    def response(self) -> dict[str, Any]:
        """As far as it is made."""
        asked, status = self._asked, self._status
        form = asked.text.format.model_dump(by_alias=True, exclude_none=True) if asked.text and asked.text.format else {"type": "text"}
        return {
            "id": self._name,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": self._failure and {"code": "server_error", "message": self._failure.message},
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "model": asked.model,
            "output": [] if status == "in_progress" else [self._item],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": asked.temperature,
            "text": {"format": form},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": asked.top_logprobs or 0,
            "top_p": asked.top_p,
            "truncation": "disabled",
            **({"usage": response_usage(self._done.usage)} if self._done else {}),
        }
