"""POST /v1/responses: text, from text and pictures."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from itertools import count
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from omnistage.client.events import Done, Event, TextDelta, ThoughtDelta
from omnistage.gateway.answering import Pieces, as_event, stream_response, unless_gone
from omnistage.gateway.body import top_p_of
from omnistage.gateway.choices import Events
from omnistage.gateway.door import Door, Visitor, visitor_of
from omnistage.gateway.failure import ApiError, in_words_of
from omnistage.gateway.fields import fields_of
from omnistage.gateway.kept import new_name
from omnistage.gateway.logprobs import logprobs_of
from omnistage.gateway.messages import Turn, with_fetched
from omnistage.gateway.parsed import new_router
from omnistage.gateway.response_items import REASONING, turns_of
from omnistage.gateway.responses_schema import ResponsesRequest
from omnistage.gateway.usage import response_usage

FIELDS = fields_of(
    "input",
    {
        "max_tokens": "max_output_tokens",
        "json_schema": "text.format",
        "thinker.constraint": "text.format",
    },
)
"""The field of this interface, by the name that the client library and the stages use."""


def routes(door: Door) -> APIRouter:
    router = new_router("/v1", "responses")

    @router.post("/responses", response_model=None)
    async def respond(request: Request, body: ResponsesRequest) -> Response:
        """Answer in text, whole or as server-sent events. Nothing of it is kept."""
        body.check()
        visitor = visitor_of(request)
        turns, names = turns_of(body)
        fields = {**FIELDS, **names}
        with in_words_of(fields):
            pipeline = await unless_gone(request, door.offer.chat_pipeline(body.model))
            events = await unless_gone(request, _ask(door, visitor, body, pipeline, turns, names))
            making = _Making(body)
            if not body.stream:
                return JSONResponse(await unless_gone(request, _whole(making, events)))
            return await stream_response(request, making.pieces(events), fields, telling=making.failed)

    return router


async def _ask(door: Door, visitor: Visitor, body: ResponsesRequest, pipeline: str, turns: list[Turn], names: Mapping[str, str]) -> Events:
    """The events of the answer; the router is asked when the first of them is read. names: the client's name of each turn, by
    `conversation[i]`."""
    fetched = await with_fetched(turns, [names[f"conversation[{i}]"] for i in range(len(turns))], door.fetcher.of(visitor.account))
    options = door.options(
        visitor,
        pipeline=pipeline,
        outputs=["text"],
        max_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=top_p_of(body.top_p),
        seed=body.seed,
        json_schema=body.kept_to,
        **({"logprobs": True, "top_logprobs": body.top_logprobs} if body.tells_logprobs else {}),
    )
    body.input.clear()  # The library copies the turns, and nothing else holds what was in them.
    turns.clear()
    return visitor.account.ask(visitor.omni.stream_chat, fetched, **options)


async def _whole(making: _Making, events: AsyncGenerator[Event, None]) -> dict[str, Any]:
    """The whole response, when all events have come."""
    async with aclosing(events):
        async for event in events:
            making.take(event)
    return making.response


Changes = Iterator[tuple[str, dict[str, Any]]]
"""The kind of each server-sent event, and its fields."""


def _reasoning_text(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


class _Making:
    """A response while it is made: one message with one text, and, before it, an item with the thoughts if there are any."""

    def __init__(self, body: ResponsesRequest) -> None:
        self._asked = body
        self._name, self._item_name, self._thought_name = new_name("resp_"), new_name("msg_"), new_name("rs_")
        self._created = int(time.time())
        self._numbers = count()
        self._said: list[str] = []
        self._thought: list[str] = []
        self._is_answering = False
        """Whether the message has begun."""
        self._rows: list[dict[str, Any]] = []
        self._done: Done | None = None
        self._has_begun = False
        self._failure: ApiError | None = None

    def take(self, event: Event) -> list[dict[str, Any]]:
        """Take the next event of the answer; returns the rows of logprobs that it adds."""
        rows: list[dict[str, Any]] = []
        match event:
            case TextDelta():
                rows = logprobs_of(event, self._asked.top_logprobs or 0) if self._asked.tells_logprobs else []
                self._said.append(event.text)
                self._rows += rows
            case ThoughtDelta() if event.text:
                self._thought.append(event.text)
            case Done():
                self._done = event
            case _:
                pass
        self._has_begun = True
        return rows

    async def pieces(self, events: AsyncGenerator[Event, None]) -> Pieces:
        """Yield numbered server-sent events, to the last one."""
        async with aclosing(events):
            async for one in events:
                for kind, fields in self._changes(one):
                    yield self._event(kind, **fields)
        for kind, fields in self._end():
            yield self._event(kind, **fields)
        yield self._event(f"response.{self._status}", response=self.response)

    def failed(self, failure: ApiError) -> bytes:
        """The last server-sent event of a response that fails."""
        self._failure = failure
        return self._event("response.failed", response=self.response)

    def _event(self, kind: str, **fields: Any) -> bytes:
        """One server-sent event with the next number."""
        return as_event({"type": kind, "sequence_number": next(self._numbers), **fields}, kind)

    def _changes(self, event: Event) -> Changes:
        """The server-sent events for the next event of the answer."""
        if not self._has_begun:
            yield "response.created", {"response": self.response}
            yield "response.in_progress", {"response": self.response}
        is_first_thought = not self._thought
        rows = self.take(event)
        match event:
            case ThoughtDelta() if event.text:
                if is_first_thought:
                    item = {**self._reasoning, "status": "in_progress", "content": []}
                    yield "response.output_item.added", {"output_index": 0, "item": item}
                    yield "response.content_part.added", {**self._thought_place, "part": _reasoning_text("")}
                yield "response.reasoning_text.delta", {**self._thought_place, "delta": event.text}
            case TextDelta() if event.text or rows:
                yield from self._begin_answer()
                yield "response.output_text.delta", {**self._place, "delta": event.text, "logprobs": rows}
            case _:
                pass

    def _begin_answer(self) -> Changes:
        """Begin the message, unless it has begun, and complete the thoughts."""
        if self._is_answering:
            return
        self._is_answering = True
        yield from self._end_thought()
        yield "response.output_item.added", {"output_index": self._index, "item": {**self._item, "status": "in_progress", "content": []}}
        yield "response.content_part.added", {**self._place, "part": {**self._part, "text": "", "logprobs": []}}

    def _end_thought(self) -> Changes:
        """Complete the item of the thoughts, if there are any."""
        if not self._thought:
            return
        yield "response.reasoning_text.done", {**self._thought_place, "text": "".join(self._thought)}
        yield "response.content_part.done", {**self._thought_place, "part": _reasoning_text("".join(self._thought))}
        yield "response.output_item.done", {"output_index": 0, "item": self._reasoning}

    def _end(self) -> Changes:
        """Complete the item that is being made; the answer has ended."""
        if not self._has_message:
            yield from self._end_thought()
            return
        yield from self._begin_answer()
        yield "response.output_text.done", {**self._place, "text": "".join(self._said), "logprobs": self._rows}
        yield "response.content_part.done", {**self._place, "part": self._part}
        yield "response.output_item.done", {"output_index": self._index, "item": self._item}

    @property
    def _index(self) -> int:
        """The index of the message among the output items."""
        return 1 if self._thought else 0

    @property
    def _place(self) -> dict[str, Any]:
        """The fields that name the place of the text."""
        return {"item_id": self._item_name, "output_index": self._index, "content_index": 0}

    @property
    def _thought_place(self) -> dict[str, Any]:
        """The fields that name the place of the thoughts."""
        return {"item_id": self._thought_name, "output_index": 0, "content_index": 0}

    @property
    def _has_message(self) -> bool:
        """Whether the response has a message. After thoughts it has none until the message begins, and none at all if the limit of tokens
        ended the answer while the model was thinking."""
        return not self._thought or self._is_answering or any(self._said) or self._status == "completed"

    @property
    def _items(self) -> list[dict[str, Any]]:
        return [*([self._reasoning] if self._thought else []), *([self._item] if self._has_message else [])]

    @property
    def _reasoning(self) -> dict[str, Any]:
        status = "completed" if self._has_message else "incomplete"
        content = [_reasoning_text("".join(self._thought))]
        return {"id": self._thought_name, "type": REASONING, "summary": [], "content": content, "status": status}

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
        """The response in its present state, as the client sees it."""
        body, status = self._asked, self._status
        form = body.text.format.model_dump(by_alias=True, exclude_none=True) if body.text and body.text.format else {"type": "text"}
        return {
            "id": self._name,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": self._failure and {"code": "server_error", "message": self._failure.message},
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": body.model,
            "output": [] if status == "in_progress" else self._items,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": {"format": form},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": body.top_p,
            "truncation": "disabled",
            **({"usage": response_usage(self._done.usage)} if self._done else {}),
        }
