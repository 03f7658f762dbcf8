"""POST /v1/chat/completions: its body, the options that the client library gets, the whole answer or its chunks, and the texts of earlier
sounds."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from pydantic import BeforeValidator, Field
from starlette.responses import JSONResponse, Response

from omnistage.client import __version__
from omnistage.client.answer import Answer
from omnistage.client.events import AudioChunk, Done, Event, Failover, TextDelta, ThoughtDelta
from omnistage.gateway.answering import DONE, Events, Numbered, Pieces, as_event, collect_all, merge_events, stream_response, unless_gone
from omnistage.gateway.body import (
    MAX_MESSAGES,
    ConversationBody,
    Ignored,
    Refused,
    Seed,
    StrictBody,
    ToolChoice,
    Voice,
    new_router,
    seed_of,
    top_p_of,
)
from omnistage.gateway.door import Door, Visitor, visitor_of
from omnistage.gateway.failure import fields_of, in_words_of, invalid
from omnistage.gateway.kept import ExpiringCache, new_name
from omnistage.gateway.messages import turns_of
from omnistage.gateway.report import account_fields, chat_usage, failover_fields, logprobs_of, sound_fields
from omnistage.gateway.sound import RATE_HZ, Encoder, new_encoder


def routes(door: Door) -> APIRouter:
    router = new_router("/v1", "chat")
    transcripts = Transcripts()

    @router.post("/chat/completions", response_model=None)
    async def chat(request: Request, body: ChatRequest) -> Response:
        """Answer a conversation: text and speech, whole or as server-sent events."""
        body.check()
        visitor = visitor_of(request)
        fields = names_of(body)
        with in_words_of(fields):
            pipeline = await unless_gone(request, door.offer.chat_pipeline(body.model))
            answers = await unless_gone(request, _ask_all(door, visitor, body, pipeline, transcripts))
            frame = _frame(visitor, body, pipeline)
            if not body.stream:
                return JSONResponse(await unless_gone(request, _completion(answers, body, frame, visitor, transcripts)))
            stream = ChatStream(body, frame, lambda text, name: transcripts.put(visitor, text, name)[1])
            return await stream_response(request, stream.pieces(merge_events(answers)), fields)

    return router


async def _ask_all(door: Door, visitor: Visitor, body: ChatRequest, pipeline: str, transcripts: Transcripts) -> list[Events]:
    """The events of each answer to a request. The router is asked for an answer when its first event is read."""
    fetch = door.fetcher.of(visitor.account)
    turns = await turns_of(body.messages, lambda name: transcripts.get(visitor.name, name), fetch, use_audio=body.hears_films)
    body.messages.clear()  # The turns have what was in them, and go with this call.
    voice = await door.offer.voice(body.audio.voice if body.audio else None)
    options = [door.options(visitor, **options_of(body, pipeline, voice, number)) for number in range(body.n or 1)]
    for number, further_options in enumerate(options[1:], 1):
        further_options["request_id"] += f"-{number}"  # To a router, calls with one id are the same request.
    return [visitor.account.ask(visitor.omni.stream_chat, turns, **each) for each in options]


def _frame(visitor: Visitor, body: ChatRequest, pipeline: str) -> dict[str, Any]:
    """The fields that all chunks of an answer share."""
    name = f"chatcmpl-{visitor.account.request_id}"
    return {"id": name, "created": int(time.time()), "model": body.model, "system_fingerprint": f"{pipeline}-{__version__}"}


async def _completion(
    answers: list[Events], body: ChatRequest, frame: dict[str, Any], visitor: Visitor, transcripts: Transcripts
) -> dict[str, Any]:
    """The whole completion, as one object. answers: the events of each answer. frame: see `_frame`."""
    encoders = [new_encoder(body.sound_format, RATE_HZ, "audio.format") for _ in answers if body.is_spoken]
    deltas: list[list[TextDelta]] = [[] for _ in answers]
    whole_answers = await collect_all([_note_text(events, noted) for events, noted in zip(answers, deltas, strict=True)])
    choices = []
    for number, answer in enumerate(whole_answers):
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        if answer.thought:
            message["reasoning_content"] = answer.thought
        if body.is_spoken:
            data = await asyncio.to_thread(_sound, answer, encoders[number])
            name, expires_at = transcripts.put(visitor, answer.text)
            sound = {"id": name, "expires_at": expires_at, "data": data, "transcript": answer.text}
            message |= {"content": None, "audio": sound}
        rows = [row for delta in deltas[number] for row in logprobs_of(delta, body.top_logprobs or 0)]
        logprobs = {"content": rows, "refusal": None} if body.logprobs else None
        reason = FINISHED.get(answer.finish_reason, "stop")
        choices.append({"index": number, "message": message, "finish_reason": reason, "logprobs": logprobs})
    usage = chat_usage([answer.usage for answer in whole_answers])
    return {**frame, "object": "chat.completion", "choices": choices, "usage": usage}


async def _note_text(events: Events, noted: list[TextDelta]) -> AsyncGenerator[Event, None]:
    """Yield the same events, and append the events of text to `noted`."""
    try:
        async for event in events:
            if isinstance(event, TextDelta):
                noted.append(event)
            yield event
    finally:
        await events.aclose()


def _sound(answer: Answer, encoder: Encoder) -> str:
    """The sound of a whole answer, as a file in base64. It may take a while, so call it on a thread."""
    return base64.b64encode(encoder.encode_whole(answer.audio.samples if answer.audio else np.empty(0, np.float32))).decode()


MAX_CHOICES = 8
MAX_STOPS = 16
MAX_TEXTS = 1024
"""The most texts that an answer can be chosen from."""


def _list_of(value: object) -> object:
    """Make a list of a single text."""
    return [value] if isinstance(value, str) else value


Stops = Annotated[list[str], Field(max_length=MAX_STOPS), BeforeValidator(_list_of, json_schema_input_type=str | list[str])]


class StreamOptions(StrictBody):
    include_usage: bool | None = None
    include_obfuscation: Ignored = None
    include_events: Annotated[bool | None, Field(description="Ours: chunks that tell of servers, losses and times.")] = None


class SpeechOptions(StrictBody):
    """How an answer is spoken."""

    voice: Voice | None = None
    format: Literal["wav", "mp3", "flac", "opus", "aac", "pcm16"] | None = None


class JsonSchema(StrictBody):
    name: Annotated[str, Field(max_length=64)]
    description: str | None = None
    # `schema` is a method of the base class.
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: Annotated[bool | None, Field(description="Answers always keep to the schema.")] = None


class ResponseFormat(StrictBody):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def answer_schema(self) -> dict[str, Any] | None:
        """The schema that the text keeps to; None: any text is allowed. Raises ApiError."""
        if self.type == "json_schema" and self.json_schema is None:
            raise invalid("response_format.json_schema", "is missing")
        if self.type == "text":
            return None
        # Any object will do if no schema says which.
        return (self.json_schema.schema_ if self.json_schema else None) or {"type": "object"}


class MediaOptions(StrictBody):
    """How media are read, by the name that model cards and vLLM have for it."""

    use_audio_in_video: Annotated[bool | None, Field(description="Films are also heard, unless their part says use_audio.")] = None


class ChatRequest(ConversationBody):
    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES)]
    stream_options: StreamOptions | None = None
    modalities: Annotated[list[Literal["text", "audio"]], Field(min_length=1, max_length=2)] | None = None
    audio: SpeechOptions | None = None
    response_format: ResponseFormat | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Seed | None = None
    stop: Stops | None = None
    logprobs: bool | None = None

    # Our own options; docs/client.md explains them.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(max_length=MAX_TEXTS)] | None = None
    speed: float | None = None
    profile: str | None = None
    conversation_id: str | None = None
    background: str | None = None
    mm_processor_kwargs: MediaOptions | None = None

    metadata: Ignored = None
    reasoning_effort: Ignored = None
    verbosity: Ignored = None

    functions: Refused = None
    logit_bias: Refused = None
    prediction: Refused = None
    web_search_options: Refused = None
    function_call: ToolChoice = None

    def check(self) -> None:
        """Raises ApiError if the gateway cannot do what is asked."""
        self.refuse(
            *("tools", "functions", "tool_choice", "function_call"),
            *("logit_bias", "moderation", "prediction", "web_search_options"),
        )
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs", "goes with logprobs: true")

    @property
    def hears_films(self) -> bool:
        """Whether a film is also heard if its part does not say."""
        return bool(self.mm_processor_kwargs and self.mm_processor_kwargs.use_audio_in_video)

    @property
    def is_spoken(self) -> bool:
        return "audio" in (self.modalities or ())

    @property
    def sound_format(self) -> str:
        """The format of the sound. A stream of pieces defaults to raw samples."""
        return (self.audio and self.audio.format) or ("pcm16" if self.stream else "wav")

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def seed_of(self, number: int) -> int | None:
        """The seed of the answer with this number: one more for each further answer."""
        return None if self.seed is None else seed_of(self.seed + number)


SAME_NAMES = (
    *("temperature", "presence_penalty", "frequency_penalty", "stop", "top_k", "min_p", "repetition_penalty", "min_tokens"),
    *("ignore_eos", "regex", "choice", "speed", "profile", "conversation_id", "background"),
)
"""Options whose name is also the name of the field."""

OTHER_NAMES = {"outputs": "modalities", "voice": "audio.voice", "json_schema": "response_format", "sample_rate_hz": "audio.format"}
"""The field of an option in the request, by the option's name, if the two names differ."""


def options_of(body: ChatRequest, pipeline: str, voice: str | None, number: int) -> dict[str, Any]:
    """The options for the answer with this number, from 0. voice: the pipeline's name for it; None: the default. Raises ApiError."""
    options: dict[str, Any] = {name: getattr(body, name) for name in SAME_NAMES}
    options |= {
        "pipeline": pipeline,
        "outputs": ["text"],
        "max_tokens": body.most_tokens,
        "seed": body.seed_of(number),
        "top_p": top_p_of(body.top_p),
        "json_schema": body.response_format and body.response_format.answer_schema,
    }
    if body.logprobs:
        options |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    if body.is_spoken:
        options |= {"outputs": ["text", "audio"], "voice": voice, "sample_rate_hz": RATE_HZ}
    return options


FIELDS = fields_of("messages", OTHER_NAMES)


def names_of(body: ChatRequest) -> Mapping[str, str]:
    """The request's name of a field, by the name that the client library and the stages use."""
    limit_name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    constraint_name = next((name for name in ("regex", "choice") if getattr(body, name) is not None), "response_format")
    return {**FIELDS, "max_tokens": limit_name, "thinker.max_tokens": limit_name, "thinker.constraint": constraint_name}


Keep = Callable[[str, str], int]
"""Called with (text of a sound, name): keeps the text under this name, and returns until when, as Unix time."""

FINISHED = {"length": "length"}
"""OpenAI's names of the reasons that end an answer; every other reason is "stop"."""


class ChatStream:
    """Makes server-sent events of the answers to one request. frame: the fields that all chunks have. keep: see `Keep`."""

    def __init__(self, body: ChatRequest, frame: Mapping[str, Any], keep: Keep) -> None:
        self._body = body
        self._options = body.stream_options or StreamOptions()
        self._frame = {**frame, "object": "chat.completion.chunk", **({"usage": None} if self._options.include_usage else {})}
        self._choices = [_Choice(body, keep) for _ in range(body.n or 1)]

    async def pieces(self, events: Numbered) -> Pieces:
        """Yield all server-sent events. events: (number of its answer, event), of all answers."""
        done: dict[int, Done] = {}
        async with aclosing(events):
            async for number, event in events:
                choice = self._choices[number]
                match event:
                    case TextDelta():
                        rows = logprobs_of(event, self._body.top_logprobs or 0) if self._body.logprobs else []
                        if event.text or rows:
                            yield self._chunk(number, choice.text(event), rows=rows)
                    case ThoughtDelta() if event.text:
                        yield self._chunk(number, {**choice.first(), "reasoning_content": event.text})
                    case AudioChunk():
                        if self._options.include_events and not choice.is_heard:
                            yield self._own_chunk(number, {"sound": sound_fields(event)})
                        if delta := await choice.sound(event):
                            yield self._chunk(number, delta)
                    case Failover() if self._options.include_events:
                        yield self._own_chunk(number, {"failover": failover_fields(event)})
                    case Done():
                        done[number] = event
                        for delta in await choice.end():
                            yield self._chunk(number, delta)
                        yield self._chunk(number, choice.first(), FINISHED.get(event.finish_reason, "stop"))
                    case _:
                        pass
        if self._options.include_events:
            for number, event in sorted(done.items()):
                yield self._own_chunk(number, account_fields(event))
        if self._options.include_usage:
            yield as_event({**self._frame, "choices": [], "usage": chat_usage([event.usage for _, event in sorted(done.items())])})
        yield DONE

    def _chunk(self, number: int, delta: Mapping[str, Any], reason: str | None = None, rows: list[dict[str, Any]] | None = None) -> bytes:
        """A chunk for one answer, as a server-sent event. number: of the answer. reason: why it ended; None: it goes on. rows: logprobs."""
        logprobs = {"content": rows, "refusal": None} if rows else None
        return as_event({**self._frame, "choices": [{"index": number, "delta": delta, "finish_reason": reason, "logprobs": logprobs}]})

    def _own_chunk(self, number: int, fields: Mapping[str, Any]) -> bytes:
        """A chunk with fields that OpenAI does not have, as a server-sent event. number: of the answer. fields: the fields."""
        index = {"index": number} if len(self._choices) > 1 else {}
        return as_event({**self._frame, "choices": [], "omnistage": {**fields, **index}})


class _Choice:
    """One of the answers while it is streamed. Its methods return the field `delta` of a chunk; `end` returns several."""

    def __init__(self, body: ChatRequest, keep: Keep) -> None:
        self._keep = keep
        self._name = new_name("audio_")
        self._texts: list[str] = []
        # A format that cannot be made here is refused before the router is asked.
        self._encoder = new_encoder(body.sound_format, RATE_HZ, "audio.format") if body.is_spoken else None
        self._has_begun = False
        self.is_heard = False
        """Whether any sound has come."""

    def first(self) -> dict[str, Any]:
        """The fields that only the first chunk has; empty for later chunks."""
        if self._has_begun:
            return {}
        self._has_begun = True
        return {"role": "assistant", "content": "", **({"audio": {"id": self._name}} if self._encoder else {})}

    def text(self, event: TextDelta) -> dict[str, Any]:
        """The fields of a piece of text: content, or the transcript if the answer is spoken."""
        first = self.first()
        if self._encoder is None:
            return {**first, "content": event.text}
        self._texts.append(event.text)
        return {**first, "audio": {**first.get("audio", {}), "transcript": event.text}}

    async def sound(self, event: AudioChunk) -> dict[str, Any]:
        """The fields of a piece of sound; empty if the encoder has no bytes yet and keeps the sound for the next piece."""
        assert self._encoder is not None, "sound came that nobody asked for"
        self.is_heard = True
        data = await self._encoder.grown(event.samples)
        return self._data(data) if data else {}

    async def end(self) -> list[dict[str, Any]]:
        """The deltas of the last chunks: the rest of the sound, and the time up to which its id can be sent in place of its text."""
        if self._encoder is None:
            return []
        rest = await self._encoder.finished()
        expires_at = self._keep("".join(self._texts), self._name)
        return [*([self._data(rest)] if rest else []), {**self.first(), "audio": {"expires_at": expires_at}}]

    def _data(self, data: bytes) -> dict[str, Any]:
        """The delta that carries these encoded bytes of sound."""
        first = self.first()
        return {**first, "audio": {**first.get("audio", {}), "data": base64.b64encode(data).decode()}}


TRANSCRIPTS_BYTES = 16 << 20
"""The most bytes of all texts."""

ENTRY_BYTES = 512
"""Bytes that an entry counts for in addition to its text: they bound the number of empty texts too."""


class Transcripts:
    """Keeps each text for the client that heard it."""

    def __init__(self) -> None:
        self._texts: ExpiringCache[tuple[str, str]] = ExpiringCache(TRANSCRIPTS_BYTES)

    def put(self, visitor: Visitor, text: str, name: str = "") -> tuple[str, int]:
        """Keep a text for a client. Returns (its name, Unix time until which it is kept). name: its name if the client has it
        already; empty: make a new one."""
        return self._texts.put(visitor.host, (visitor.name, text), len(text.encode()) + ENTRY_BYTES, "audio_", name)

    def get(self, client: str, name: str) -> str | None:
        """The text of this name; None if it is gone, or was not kept for this client."""
        entry = self._texts.get(name)
        return entry[1] if entry is not None and entry[0] == client else None
