"""POST /v1/responses: an answer in text as a response, whole or as server-sent events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from itertools import count
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BeforeValidator, Field
from starlette.responses import JSONResponse, Response

from omnistage.client.events import Done, Event, TextDelta, ThoughtDelta
from omnistage.gateway.answering import Events, Pieces, as_event, stream_response, unless_gone
from omnistage.gateway.body import MAX_MESSAGES, ConversationBody, Ignored, Refused, Seed, StrictBody, limit_keys, new_router, top_p_of
from omnistage.gateway.door import Door, Visitor, visitor_of
from omnistage.gateway.failure import ApiError, fields_of, in_words_of, invalid, unrecognized_error, unsupported_error
from omnistage.gateway.kept import new_name
from omnistage.gateway.messages import Turn, with_fetched
from omnistage.gateway.report import logprobs_of, response_usage

FIELDS = fields_of("input", {"max_tokens": "max_output_tokens", "json_schema": "text.format", "thinker.constraint": "text.format"})
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
            builder = _ResponseBuilder(body)
            if not body.stream:
                return JSONResponse(await unless_gone(request, _collect_response(builder, events)))
            return await stream_response(request, builder.pieces(events), fields, error_piece=builder.failed)

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
        json_schema=body.answer_schema,
        **({"logprobs": True, "top_logprobs": body.top_logprobs} if body.tells_logprobs else {}),
    )
    body.input.clear()  # The library copies the turns, and nothing else holds what was in them.
    turns.clear()
    return visitor.account.ask(visitor.omni.stream_chat, fetched, **options)


async def _collect_response(builder: _ResponseBuilder, events: AsyncGenerator[Event, None]) -> dict[str, Any]:
    """The whole response, when all events have come."""
    async with aclosing(events):
        async for event in events:
            builder.take(event)
    return builder.response


Changes = Iterator[tuple[str, dict[str, Any]]]
"""The kind of each server-sent event, and its fields."""


def _reasoning_text(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


class _ResponseBuilder:
    """A response while it is made: one message with one text, and, before it, an item with the thoughts if there are any."""

    def __init__(self, body: ResponsesRequest) -> None:
        self._body = body
        self._response_id, self._message_id, self._thought_id = new_name("resp_"), new_name("msg_"), new_name("rs_")
        self._created = int(time.time())
        self._sequence_numbers = count()
        self._texts: list[str] = []
        self._thought: list[str] = []
        self._is_answering = False
        """Whether the message has begun."""
        self._logprob_rows: list[dict[str, Any]] = []
        self._done: Done | None = None
        self._has_begun = False
        self._failure: ApiError | None = None

    def take(self, event: Event) -> list[dict[str, Any]]:
        """Take the next event of the answer; returns the rows of logprobs that it adds."""
        rows: list[dict[str, Any]] = []
        match event:
            case TextDelta():
                rows = logprobs_of(event, self._body.top_logprobs or 0) if self._body.tells_logprobs else []
                self._texts.append(event.text)
                self._logprob_rows += rows
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
        return as_event({"type": kind, "sequence_number": next(self._sequence_numbers), **fields}, kind)

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
                    item = {**self._thought_item, "status": "in_progress", "content": []}
                    yield "response.output_item.added", {"output_index": 0, "item": item}
                    yield "response.content_part.added", {**self._thought_place, "part": _reasoning_text("")}
                yield "response.reasoning_text.delta", {**self._thought_place, "delta": event.text}
            case TextDelta() if event.text or rows:
                yield from self._begin_answer()
                yield "response.output_text.delta", {**self._text_place, "delta": event.text, "logprobs": rows}
            case _:
                pass

    def _begin_answer(self) -> Changes:
        """Begin the message, unless it has begun, and complete the thoughts."""
        if self._is_answering:
            return
        self._is_answering = True
        yield from self._end_thought()
        item = {**self._message_item, "status": "in_progress", "content": []}
        yield "response.output_item.added", {"output_index": self._message_index, "item": item}
        yield "response.content_part.added", {**self._text_place, "part": {**self._text_part, "text": "", "logprobs": []}}

    def _end_thought(self) -> Changes:
        """Complete the item of the thoughts, if there are any."""
        if not self._thought:
            return
        yield "response.reasoning_text.done", {**self._thought_place, "text": "".join(self._thought)}
        yield "response.content_part.done", {**self._thought_place, "part": _reasoning_text("".join(self._thought))}
        yield "response.output_item.done", {"output_index": 0, "item": self._thought_item}

    def _end(self) -> Changes:
        """Complete the item that is being made; the answer has ended."""
        if not self._has_message:
            yield from self._end_thought()
            return
        yield from self._begin_answer()
        yield "response.output_text.done", {**self._text_place, "text": "".join(self._texts), "logprobs": self._logprob_rows}
        yield "response.content_part.done", {**self._text_place, "part": self._text_part}
        yield "response.output_item.done", {"output_index": self._message_index, "item": self._message_item}

    @property
    def _message_index(self) -> int:
        """The index of the message among the output items."""
        return 1 if self._thought else 0

    @property
    def _text_place(self) -> dict[str, Any]:
        """The fields that name the place of the text."""
        return {"item_id": self._message_id, "output_index": self._message_index, "content_index": 0}

    @property
    def _thought_place(self) -> dict[str, Any]:
        """The fields that name the place of the thoughts."""
        return {"item_id": self._thought_id, "output_index": 0, "content_index": 0}

    @property
    def _has_message(self) -> bool:
        """Whether the response has a message. After thoughts it has none until the message begins, and none at all if the limit of tokens
        ended the answer while the model was thinking."""
        return not self._thought or self._is_answering or any(self._texts) or self._status == "completed"

    @property
    def _items(self) -> list[dict[str, Any]]:
        return [*([self._thought_item] if self._thought else []), *([self._message_item] if self._has_message else [])]

    @property
    def _thought_item(self) -> dict[str, Any]:
        status = "completed" if self._has_message else "incomplete"
        content = [_reasoning_text("".join(self._thought))]
        return {"id": self._thought_id, "type": REASONING, "summary": [], "content": content, "status": status}

    @property
    def _status(self) -> str:
        if self._failure is not None:
            return "failed"
        if self._done is None:
            return "in_progress"
        return "incomplete" if self._done.finish_reason == "length" else "completed"

    @property
    def _text_part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": "".join(self._texts), "annotations": [], "logprobs": list(self._logprob_rows)}

    @property
    def _message_item(self) -> dict[str, Any]:
        status = "incomplete" if self._status == "failed" else self._status
        return {"id": self._message_id, "type": "message", "role": "assistant", "status": status, "content": [self._text_part]}

    @property
    def response(self) -> dict[str, Any]:
        """The response in its present state, as the client sees it."""
        body, status = self._body, self._status
        form = body.text.format.model_dump(by_alias=True, exclude_none=True) if body.text and body.text.format else {"type": "text"}
        return {
            "id": self._response_id,
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


LOGPROBS = "message.output_text.logprobs"
"""The value of `include` that asks for logprobs; other values ask for things that no answer here has."""


MAX_INCLUDED = 32
MAX_METADATA = 16


def _limit_metadata(metadata: object) -> object:
    """Refuse metadata with too many keys."""
    return limit_keys(metadata, MAX_METADATA)


def _messages_of(value: object) -> object:
    """A text as a list with one message of the user; any other value unchanged."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class TextFormat(StrictBody):
    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(max_length=64)] | None = None
    description: str | None = None
    # `schema` is a method of the base class.
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: Annotated[bool | None, Field(description="Answers always keep to the schema.")] = None

    @property
    def answer_schema(self) -> dict[str, Any] | None:
        """The schema that the text keeps to; None: any text is allowed."""
        if self.type == "text":
            return None
        return self.schema_ or {"type": "object"}


class Text(StrictBody):
    format: TextFormat | None = None
    verbosity: Ignored = None


class ResponseStreamOptions(StrictBody):
    include_obfuscation: Ignored = None


class ResponsesRequest(ConversationBody):
    input: Annotated[
        list[dict[str, Any]],
        BeforeValidator(_messages_of, json_schema_input_type=str | list[dict[str, Any]]),
        (),
        Field(min_length=1, max_length=MAX_MESSAGES),
    ]
    instructions: str | None = None
    text: Text | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    include: Annotated[list[str], Field(max_length=MAX_INCLUDED)] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=MAX_METADATA), BeforeValidator(_limit_metadata)] | None = None
    seed: Annotated[Seed | None, Field(description="Ours: the same seed gives the same answer.")] = None

    max_tool_calls: Ignored = None
    reasoning: Ignored = None
    truncation: Ignored = None

    background: Refused = None
    context_management: Refused = None
    conversation: Refused = None
    previous_response_id: Refused = None
    prompt: Refused = None

    def check(self) -> None:
        """Raises ApiError if the gateway cannot do what is asked."""
        self.refuse(
            *("tools", "tool_choice", "previous_response_id", "conversation", "background", "prompt"),
            *("context_management", "moderation"),
        )

    @property
    def tells_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    @property
    def answer_schema(self) -> dict[str, Any] | None:
        return self.text.format.answer_schema if self.text and self.text.format else None


KEYS = ("type", "role", "content", "id", "status", "phase")
"""The keys that a message may have."""
REASONING = "reasoning"
"""The type of an item with the thoughts before an answer; they are no part of the conversation."""
REASONING_KEYS = ("type", "id", "status", "encrypted_content")
THOUGHTS = {"summary": "summary_text", "content": "reasoning_text"}
"""The lists that such an item may have, and the type of the parts in each."""
PARTS = {"input_text": "text", "output_text": "text", "refusal": "refusal", "input_image": "image_url"}
"""By the type of a part: the key of its content. Except for texts, the key is also the type that chat gives the part."""


def turns_of(body: ResponsesRequest) -> tuple[list[Turn], dict[str, str]]:
    """Returns (the turns, names for errors). The names: by the client library's name of a turn or its content, such as conversation[1], the
    name in the body, such as input[0]. Raises ApiError."""
    turns: list[Turn] = []
    names: dict[str, str] = {}
    if body.instructions:
        names |= {"conversation[0]": "instructions", "conversation[0].content": "instructions"}
        turns.append({"role": "system", "content": body.instructions})
    for i, item in enumerate(body.input):
        if item.get("type") == REASONING:
            _check_reasoning(item, f"input[{i}]")
            continue
        names[f"conversation[{len(turns)}]"] = f"input[{i}]"
        turns.append(_turn(item, f"input[{i}]"))
    return turns, names


def _check_reasoning(item: Mapping[str, Any], field: str) -> None:
    """Raises ApiError if the item does not have the form of reasoning."""
    _check_keys(item, (*REASONING_KEYS, *THOUGHTS), field)
    for name, kind in THOUGHTS.items():
        parts = item.get(name)
        if parts is not None and not isinstance(parts, list):
            raise invalid(f"{field}.{name}", "must be a list")
        for j, part in enumerate(parts or ()):
            if not isinstance(part, Mapping) or part.get("type") != kind:
                raise invalid(f"{field}.{name}[{j}].type", f"must be {kind}")
            if not isinstance(part.get("text"), str):
                raise invalid(f"{field}.{name}[{j}].text", "must be text")
    if not isinstance(item.get("encrypted_content"), str | None):
        raise invalid(f"{field}.encrypted_content", "must be text")


def _check_keys(item: Mapping[str, Any], keys: Sequence[str], field: str) -> None:
    """Raises ApiError for a key that is not among `keys`."""
    unknown = next((key for key in item if key not in keys), None)
    if unknown is not None:
        raise unrecognized_error(f"{field}.{unknown}"[:256])


def _turn(item: Mapping[str, Any], field: str) -> Turn:
    """The turn for a message item. Raises ApiError."""
    kind = item.get("type", "message")
    if kind != "message":
        raise unsupported_error(f"{field}.type", f"is {str(kind)[:64]!r}; nothing here takes items other than messages yet")
    _check_keys(item, KEYS, field)
    content = item.get("content")
    if isinstance(content, list):
        content = [_part(part, f"{field}.content[{j}]") for j, part in enumerate(content)]
    return {"role": item.get("role"), "content": content}


def _part(part: object, field: str) -> dict[str, Any]:
    """The part of a chat message for a part of an item. Raises ApiError."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or not isinstance(kind, str) or kind not in PARTS:
        raise unsupported_error(f"{field}.type", f"is {str(kind)[:64]!r}; give one of {', '.join(PARTS)}")
    if part.get("file_id"):
        raise unsupported_error(f"{field}.file_id", "no files are kept here; give image_url")
    name = PARTS[kind]
    if not isinstance(part.get(name), str):
        raise invalid(f"{field}.{name}", "must be text")
    return {"type": name, name: part[name]}
