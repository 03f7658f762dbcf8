"""POST /v1/responses: an answer in text as a response, whole or as server-sent events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from itertools import count
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from starlette.responses import JSONResponse, Response

from omnistage.client.events import Done, Event, TextDelta, ThoughtDelta
from omnistage.gateway.accounts import Events
from omnistage.gateway.answering import Pieces, as_event, stream_response
from omnistage.gateway.body import MAX_MESSAGES, ConversationBody, Ignored, Refused, Seed, StrictBody, TextSchema, limit_keys, new_router
from omnistage.gateway.door import HttpCall, ThisCall
from omnistage.gateway.failure import ApiError, fields_of, invalid, unsupported_error
from omnistage.gateway.kept import new_name
from omnistage.gateway.messages import Turn, check_keys, check_name, with_fetched
from omnistage.gateway.report import logprobs_of, notes_of, response_usage

FIELDS = fields_of("responses", "input", {"thinker.constraint": "text.format"})
"""The field of this interface, by the name that the client library and the stages use."""


LOGPROBS = "message.output_text.logprobs"
"""The value of `include` that asks for logprobs; other values ask for things that no answer here has."""


MAX_INCLUDED = 32
MAX_METADATA = 16


Metadata = Annotated[dict[str, str], Field(max_length=MAX_METADATA), BeforeValidator(partial(limit_keys, max_keys=MAX_METADATA))]


def _messages_of(value: object) -> object:
    """A text as a list with one message of the user; any other value unchanged."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class TextFormat(TextSchema):
    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(max_length=64)] | None = None

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
        Field(min_length=1, max_length=MAX_MESSAGES),
    ]
    instructions: str | None = None
    text: Text | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    include: Annotated[list[str], Field(max_length=MAX_INCLUDED)] | None = None
    metadata: Metadata | None = None
    seed: Annotated[Seed | None, Field(description="Ours: the same seed gives the same answer.")] = None

    client_metadata: Ignored = None
    max_tool_calls: Ignored = None
    reasoning: Ignored = None
    truncation: Ignored = None

    background: Refused = None
    context_management: Refused = None
    conversation: Refused = None
    previous_response_id: Refused = None
    prompt: Refused = None

    @property
    def tells_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())


KEYS = ("type", "role", "content", "id", "status", "phase", "name")
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
    check_keys(item, (*REASONING_KEYS, *THOUGHTS), field)
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


def _turn(item: Mapping[str, Any], field: str) -> Turn:
    """The turn for a message item. Raises ApiError."""
    kind = item.get("type", "message")
    if kind != "message":
        raise unsupported_error(f"{field}.type", f"is {str(kind)[:64]!r}; nothing here takes items other than messages yet")
    check_keys(item, KEYS, field)
    check_name(item, field)
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


Change = tuple[str, dict[str, Any]]
"""The kind of a server-sent event, and its fields."""


class _Item:
    """An item of the output with one part, a text that grows: the thoughts, or the message. index: of the item in the output. has_begun:
    whether the client knows of it."""

    def __init__(self, prefix: str, part_kind: str, *, has_logprobs: bool, **fields: Any) -> None:
        """prefix: of the item's id. has_logprobs: whether the part has rows of logprobs. fields: of the item, beside those of all items."""
        self._id, self._part_kind, self._has_logprobs, self._fields = new_name(prefix), part_kind, has_logprobs, fields
        self._texts: list[str] = []
        self._rows: list[dict[str, Any]] = []
        self.index = 0
        self.has_begun = False

    def begin(self) -> Iterator[Change]:
        """Tell the client of the item, which is still empty."""
        self.has_begun = True
        item = {**self.shown("in_progress"), "content": []}
        yield "response.output_item.added", {"output_index": self.index, "item": item}
        yield "response.content_part.added", {**self._place, "part": self._part}

    def grow(self, text: str, rows: Sequence[dict[str, Any]] = ()) -> Change:
        """Append a piece of text. rows: the logprobs of its tokens."""
        self._texts.append(text)
        self._rows += rows
        return f"response.{self._part_kind}.delta", {**self._place, "delta": text, **self._logprobs(rows)}

    def end(self, status: str) -> Iterator[Change]:
        """Complete the item."""
        text = {"text": "".join(self._texts), **self._logprobs(self._rows)}
        yield f"response.{self._part_kind}.done", {**self._place, **text}
        yield "response.content_part.done", {**self._place, "part": self._part}
        yield "response.output_item.done", {"output_index": self.index, "item": self.shown(status)}

    def shown(self, status: str) -> dict[str, Any]:
        """The item as the client sees it."""
        return {"id": self._id, **self._fields, "status": status, "content": [self._part]}

    @property
    def _place(self) -> dict[str, Any]:
        """The fields that name the place of the text."""
        return {"item_id": self._id, "output_index": self.index, "content_index": 0}

    @property
    def _part(self) -> dict[str, Any]:
        ours = {"type": self._part_kind, "text": "".join(self._texts), **self._logprobs(self._rows)}
        return {**ours, "annotations": []} if self._has_logprobs else ours

    def _logprobs(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {"logprobs": list(rows)} if self._has_logprobs else {}


class _ResponseBuilder:
    """A response while it is made: one message with one text, and, before it, an item with the thoughts if there are any."""

    def __init__(self, body: ResponsesRequest) -> None:
        self._body = body
        self._id, self._created = new_name("resp_"), int(time.time())
        self._sequence_numbers = count()
        self._thought = _Item("rs_", "reasoning_text", has_logprobs=False, type=REASONING, summary=[])
        self._message = _Item("msg_", "output_text", has_logprobs=True, type="message", role="assistant")
        self._done: Done | None = None
        self._failure: ApiError | None = None

    async def collect(self, events: Events) -> dict[str, Any]:
        """The whole response, when all events of the answer have come."""
        async with aclosing(self._changes(events)) as changes:
            async for _ in changes:
                pass
        return self._response

    async def pieces(self, events: Events) -> Pieces:
        """Yield numbered server-sent events, to the last one."""
        async with aclosing(self._changes(events)) as changes:
            async for kind, fields in changes:
                yield self._event(kind, fields)

    def failed(self, failure: ApiError) -> bytes:
        """The last server-sent event of a response that fails."""
        self._failure = failure
        return self._event("response.failed", {"response": self._response})

    def _event(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        """One server-sent event with the next number."""
        return as_event({"type": kind, "sequence_number": next(self._sequence_numbers), **fields}, kind)

    async def _changes(self, events: Events) -> AsyncGenerator[Change, None]:
        """Yield all changes of the response while the events of the answer come."""
        has_begun = False
        async with aclosing(events):
            async for event in events:
                if not has_begun:
                    has_begun = True
                    yield "response.created", {"response": self._response}
                    yield "response.in_progress", {"response": self._response}
                for change in self._take(event):
                    yield change
        for change in self._end():
            yield change
        yield f"response.{self._status}", {"response": self._response}

    def _take(self, event: Event) -> Iterator[Change]:
        """Take the next event of the answer, and yield what it changes."""
        match event:
            case ThoughtDelta() if event.text:
                if not self._thought.has_begun:
                    yield from self._thought.begin()
                yield self._thought.grow(event.text)
            case TextDelta():
                rows = logprobs_of(event, self._body.top_logprobs or 0) if self._body.tells_logprobs else []
                if event.text or rows:
                    yield from self._begin_message()
                    yield self._message.grow(event.text, rows)
            case Done():
                self._done = event

    def _begin_message(self) -> Iterator[Change]:
        """Begin the message, unless it has begun, and complete the thoughts."""
        if self._message.has_begun:
            return
        if self._thought.has_begun:
            yield from self._thought.end("completed")
            self._message.index = 1
        yield from self._message.begin()

    def _end(self) -> Iterator[Change]:
        """Complete the item that is being made; the answer has ended."""
        if self._has_message:
            yield from self._begin_message()
            yield from self._message.end(self._status)
        else:
            yield from self._thought.end("incomplete")

    @property
    def _has_message(self) -> bool:
        """Whether the response has a message. After thoughts it has none until the message begins, and none at all if the limit of tokens
        ended the answer while the model was thinking."""
        return not self._thought.has_begun or self._message.has_begun or self._status == "completed"

    @property
    def _items(self) -> list[dict[str, Any]]:
        status = "incomplete" if self._status == "failed" else self._status
        thoughts = [self._thought.shown("completed" if self._has_message else "incomplete")] if self._thought.has_begun else []
        return [*thoughts, *([self._message.shown(status)] if self._has_message else [])]

    @property
    def _status(self) -> str:
        if self._failure is not None:
            return "failed"
        if self._done is None:
            return "in_progress"
        return "incomplete" if self._done.finish_reason == "length" else "completed"

    @property
    def _response(self) -> dict[str, Any]:
        """The response in its present state, as the client sees it."""
        body, status = self._body, self._status
        form = body.text.format.model_dump(by_alias=True, exclude_none=True) if body.text and body.text.format else {"type": "text"}
        return {
            "id": self._id,
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
            "notes": notes_of(self._done, "max_output_tokens") if self._done else [],
        }


async def _ask(call: HttpCall, body: ResponsesRequest, pipeline: str, turns: list[Turn], names: Mapping[str, str]) -> Events:
    """The events of the answer; the router is asked when the first of them is read. turns, names: see `turns_of`."""
    fetched_turns = await with_fetched(turns, [names[f"conversation[{i}]"] for i in range(len(turns))], call.fetch)
    options = body.text_options() | {
        "pipeline": pipeline,
        "max_tokens": body.max_output_tokens,
        "json_schema": body.text.format.answer_schema if body.text and body.text.format else None,
        "logprobs": body.tells_logprobs or None,
        "top_logprobs": body.top_logprobs if body.tells_logprobs else None,
    }
    body.input.clear()  # The library copies the turns, and nothing else holds what was in them.
    turns.clear()
    return call.ask(call.omni.stream_chat, fetched_turns, **options)


router = new_router("/v1", "responses")


@router.post("/responses", response_model=None)
async def respond(call: ThisCall, body: ResponsesRequest) -> Response:
    """Answer in text, whole or as server-sent events. Nothing of it is kept."""
    turns, names = turns_of(body)
    call.account.fields = {**FIELDS, **names}
    pipeline = await call.door.offer.chat_pipeline(body.model)
    events = await _ask(call, body, pipeline, turns, names)
    builder = _ResponseBuilder(body)
    if body.stream:
        return await stream_response(call.account, builder.pieces(events), error_piece=builder.failed)
    return JSONResponse(await builder.collect(events))
