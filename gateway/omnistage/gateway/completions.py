"""POST /v1/completions, OpenAI's interface before chat: each prompt is one turn of a user, answered as chat answers it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError
from starlette.responses import JSONResponse, Response

from omnistage.client import __version__
from omnistage.client.request import MAX_TEXT_CHARACTERS
from omnistage.gateway.answering import merge_events, run_all, stream_response
from omnistage.gateway.body import Refused, bounds_of, new_router
from omnistage.gateway.chat import MAX_CHOICES, ChatStream, TextBody, ask_for_each, whole_choice
from omnistage.gateway.door import HttpCall, ThisCall
from omnistage.gateway.failure import fields_of, invalid, unsupported_error
from omnistage.gateway.report import chat_usage

FIELDS = fields_of("chat", "prompt")
"""The field of this interface, by the name that the client library and the stages use."""


def _texts_of(prompt: object) -> object:
    """A list of one text for a text. Raises an error for ids of tokens, and for a text that is empty or too long."""
    prompts = [prompt] if isinstance(prompt, str) else prompt
    if isinstance(prompts, list) and any(isinstance(one, int | list) for one in prompts):
        raise PydanticCustomError("token_ids", "has ids of tokens; give text, because each model here cuts text into tokens of its own")
    if not isinstance(prompts, list) or not all(isinstance(one, str) for one in prompts):
        raise PydanticCustomError("no_text", "must be text, or a list of texts")
    if not all(map(str.strip, prompts)):
        raise PydanticCustomError("empty_text", "is empty; give the text to answer")
    characters = max(map(len, prompts), default=0)
    if characters > MAX_TEXT_CHARACTERS:
        text = "has {characters} characters of text; at most {most} are allowed"
        raise PydanticCustomError("long_text", text, {"characters": characters, "most": MAX_TEXT_CHARACTERS})
    return prompts


Prompts = Annotated[
    list[str],
    BeforeValidator(_texts_of, json_schema_input_type=str | list[str]),
    Field(min_length=1, max_length=MAX_CHOICES),
]


class CompletionRequest(TextBody):
    prompt: Prompts
    echo: bool | None = None
    logprobs: Annotated[int, bounds_of("top_logprobs")] | None = None
    best_of: int | None = None

    suffix: Refused = None
    top_logprobs: Refused = None

    @property
    def row_length(self) -> int | None:
        return self.logprobs

    @property
    def prompt_of_each(self) -> list[str]:
        """The prompt of each answer, in the order of the answers."""
        return [prompt for prompt in self.prompt for _ in range(self.n or 1)]


def _check(body: CompletionRequest) -> None:
    """Raises ApiError for a request that cannot be done."""
    if len(body.prompt_of_each) > MAX_CHOICES:
        raise invalid("n", f"prompts times n is {len(body.prompt_of_each)}; at most {MAX_CHOICES} answers are made at once")
    if body.best_of not in (None, body.n or 1):
        raise unsupported_error("best_of", "answers are not chosen from others here; leave it out, or give what n is")
    if body.echo and body.logprobs is not None:
        raise unsupported_error("echo", "tokens of a prompt have no logprobs here; leave out one of both")


def _ask(call: HttpCall, body: CompletionRequest, pipeline: str) -> list[Any]:
    """The events of each answer; the router is asked for an answer when its first event is read. The seeds of a prompt do not depend on
    the other prompts."""
    options = {"pipeline": pipeline, "max_tokens": body.max_tokens}
    if body.logprobs is not None:
        options |= {"logprobs": True, "top_logprobs": body.logprobs}
    numbers = [number % (body.n or 1) for number in range(len(body.prompt_of_each))]
    questions = [
        ([{"role": "user", "content": prompt}], body.text_options(number) | options)
        for prompt, number in zip(body.prompt_of_each, numbers, strict=True)
    ]
    return ask_for_each(call, questions)


class LegacyChoices:
    """Writes answers as this interface has them, whole or piece by piece."""

    def __init__(self, body: CompletionRequest) -> None:
        self._row_length = body.logprobs
        self._echoes = body.prompt_of_each if body.echo else [""] * len(body.prompt_of_each)
        self._offsets = [0] * len(self._echoes)

    def choice(self, number: int, text: str, reason: str | None, rows: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
        """The next piece of an answer. number: of the answer. rows: logprobs of its tokens, as chat has them."""
        echo, self._echoes[number] = self._echoes[number], ""
        logprobs = None if rows is None or self._row_length is None else self._logprobs(number, rows)
        return {"index": number, "text": echo + text, "finish_reason": reason, "logprobs": logprobs}

    def _logprobs(self, number: int, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        tokens, offsets = [row["token"] for row in rows], []
        for token in tokens:
            offsets.append(self._offsets[number])
            self._offsets[number] += len(token)
        tops = [{one["token"]: one["logprob"] for one in row["top_logprobs"]} for row in rows]
        logprobs = [row["logprob"] for row in rows]
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops if self._row_length else None, "text_offset": offsets}


class CompletionStream(ChatStream):
    """Makes server-sent events of the answers."""

    kind = "text_completion"

    def __init__(self, call: HttpCall, body: CompletionRequest, frame: Mapping[str, Any], choices: int) -> None:
        super().__init__(call, body, frame, choices)
        self._texts = LegacyChoices(body)

    def choice(self, number: int, delta: Mapping[str, Any], reason: str | None, rows: list[dict[str, Any]] | None) -> dict[str, Any]:
        return self._texts.choice(number, delta.get("content", ""), reason, rows or None)


router = new_router("/v1", "chat")


@router.post("/completions", response_model=None)
async def complete(call: ThisCall, body: CompletionRequest) -> Response:
    """Answer prompts in text, whole or as server-sent events. New programs should ask /v1/chat/completions."""
    _check(body)
    call.account.fields = FIELDS
    pipeline = await call.door.offer.chat_pipeline(body.model)
    answers = _ask(call, body, pipeline)
    name = f"cmpl-{call.account.request_id}"
    frame = {"id": name, "created": int(time.time()), "model": body.model, "system_fingerprint": f"{pipeline}-{__version__}"}
    if body.stream:
        return await stream_response(call.account, CompletionStream(call, body, frame, len(answers)).pieces(merge_events(answers)))
    results = await run_all([whole_choice(call, body, number, events) for number, events in enumerate(answers)])
    texts = LegacyChoices(body)
    choices = []
    for number, (choice, _) in enumerate(results):
        rows = choice["logprobs"] and choice["logprobs"]["content"]
        text_choice = texts.choice(number, choice["message"]["content"], choice["finish_reason"], rows)
        choices.append({**text_choice, "notes": choice["notes"]})
    usage = chat_usage([usage for _, usage in results], body.n or 1)
    return JSONResponse({**frame, "object": "text_completion", "choices": choices, "usage": usage})
