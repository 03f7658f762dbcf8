"""POST /v1/chat/completions: its body, the options that the client library gets, the whole answer or its chunks."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, Field
from starlette.responses import JSONResponse, Response

from omnistage.client import __version__
from omnistage.client.about import max_count
from omnistage.client.answer import Answer, collect
from omnistage.client.events import AudioChunk, Done, Failover, TextDelta, ThoughtDelta, Usage
from omnistage.gateway.accounts import Events
from omnistage.gateway.answering import DONE, Numbered, Pieces, as_event, merge_events, run_all, stream_response
from omnistage.gateway.body import (
    MAX_MESSAGES,
    ConversationBody,
    Ignored,
    Refused,
    StrictBody,
    TextSchema,
    ToolChoice,
    Voice,
    bounds_of,
    new_router,
)
from omnistage.gateway.door import HttpCall, ThisCall
from omnistage.gateway.failure import fields_of, invalid
from omnistage.gateway.kept import new_name
from omnistage.gateway.messages import Turn, turns_of
from omnistage.gateway.report import account_fields, chat_usage, failover_fields, logprobs_of, notes_of, sound_fields
from omnistage.gateway.sound import RATE_HZ, Encoder, new_encoder

MAX_CHOICES = 8
MAX_STOPS = max_count("ThinkerParams.stop")
MAX_TEXTS = max_count("Choices.texts")
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


class JsonSchema(TextSchema):
    name: Annotated[str, Field(max_length=64)]


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


class TextBody(ConversationBody):
    """Fields of chat and of completions: how a text is written."""

    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    presence_penalty: Annotated[float, bounds_of("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, bounds_of("frequency_penalty")] | None = None
    stop: Stops | None = None

    # Our own options; docs/client.md explains them.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(max_length=MAX_TEXTS)] | None = None

    logit_bias: Refused = None

    @property
    def row_length(self) -> int | None:
        """How many likeliest tokens a row of logprobs lists; None: there are no rows."""
        raise NotImplementedError

    @property
    def limit_name(self) -> str:
        """The name of the field that limits the tokens."""
        return "max_tokens"


class ChatRequest(TextBody):
    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES)]
    modalities: Annotated[list[Literal["text", "audio"]], Field(min_length=1, max_length=2)] | None = None
    audio: SpeechOptions | None = None
    response_format: ResponseFormat | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None

    # Our own options.
    speed: float | None = None
    profile: str | None = None
    conversation_id: str | None = None
    background: str | None = None
    mm_processor_kwargs: MediaOptions | None = None

    metadata: Ignored = None
    reasoning_effort: Ignored = None
    verbosity: Ignored = None

    functions: Refused = None
    prediction: Refused = None
    web_search_options: Refused = None
    function_call: ToolChoice = None

    @property
    def row_length(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def limit_name(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

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


def options_of(body: ChatRequest, pipeline: str, voice: str | None, number: int) -> dict[str, Any]:
    """The options for the answer with this number, from 0. voice: the pipeline's name for it; None: the default. Raises ApiError."""
    options = body.text_options(number) | {
        "pipeline": pipeline,
        "max_tokens": body.max_completion_tokens or body.max_tokens,
        "json_schema": body.response_format and body.response_format.answer_schema,
        "logprobs": body.logprobs or None,
    }
    if body.is_spoken:
        options |= {"outputs": ["text", "audio"], "voice": voice, "sample_rate_hz": RATE_HZ}
    return options


FIELDS = fields_of("chat", "messages")


def names_of(body: ChatRequest) -> Mapping[str, str]:
    """The request's name of a field, by the name that the client library and the stages use."""
    constraint_name = next((name for name in ("regex", "choice") if getattr(body, name) is not None), "response_format")
    return {**FIELDS, "max_tokens": body.limit_name, "thinker.max_tokens": body.limit_name, "thinker.constraint": constraint_name}


async def _ask_all(call: HttpCall, body: ChatRequest, pipeline: str) -> list[Events]:
    """The events of each answer to a request. The router is asked for an answer when its first event is read."""
    transcripts = call.door.transcripts
    turns = await turns_of(body.messages, lambda name: transcripts.get(call.client, name), call.fetch, use_audio=body.hears_films)
    body.messages.clear()  # The turns have what was in them, and go with this call.
    voice = await call.door.offer.voice(body.audio.voice if body.audio else None)
    return ask_for_each(call, [(turns, options_of(body, pipeline, voice, number)) for number in range(body.n or 1)])


def ask_for_each(call: HttpCall, questions: Sequence[tuple[list[Turn], dict[str, Any]]]) -> list[Events]:
    """The events of each answer to a request. questions: the turns and the options of each."""
    for number, (_, options) in enumerate(questions[1:], 1):  # To a router, calls with one id are the same request.
        options["request_id"] = f"{call.account.request_id}-{number}"
    return [call.ask(call.omni.stream_chat, turns, **options) for turns, options in questions]


def shown_reason(finish_reason: str) -> str:
    """OpenAI's name of the reason that ended an answer."""
    return "length" if finish_reason == "length" else "stop"


async def whole_choice(call: HttpCall, body: TextBody, number: int, events: Events) -> tuple[dict[str, Any], Usage]:
    """The answer with this number, as one object, and what it cost. events: of the answer."""
    encoder = _new_encoder(body)
    deltas: list[TextDelta] = []
    async with aclosing(_note_text(events, deltas)) as noted_events:
        answer = await collect(noted_events)
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.thought:
        message["reasoning_content"] = answer.thought
    if encoder is not None:
        data = await asyncio.to_thread(_sound, answer, encoder)
        name, expires_at = call.door.transcripts.put(call.host, call.client, answer.text)
        sound = {"id": name, "expires_at": expires_at, "data": data, "transcript": answer.text}
        message |= {"content": None, "audio": sound}
    rows = [row for delta in deltas for row in logprobs_of(delta, body.row_length or 0)]
    logprobs = None if body.row_length is None else {"content": rows, "refusal": None}
    reason = shown_reason(answer.finish_reason)
    choice = {"index": number, "message": message, "finish_reason": reason, "logprobs": logprobs}
    return {**choice, "notes": notes_of(answer, body.limit_name)}, answer.usage


async def _note_text(events: Events, deltas: list[TextDelta]) -> Events:
    """Yield the same events, and append the events of text to `deltas`."""
    async with aclosing(events):
        async for event in events:
            if isinstance(event, TextDelta):
                deltas.append(event)
            yield event


def _new_encoder(body: TextBody) -> Encoder | None:
    """An encoder for the sound of one answer; None: it is not spoken. Raises ApiError for a format that cannot be made here."""
    return new_encoder(body.sound_format, RATE_HZ, "audio.format") if isinstance(body, ChatRequest) and body.is_spoken else None


def _sound(answer: Answer, encoder: Encoder) -> str:
    """The sound of a whole answer, as a file in base64. It may take a while, so call it on a thread."""
    return base64.b64encode(encoder.encode_whole(answer.audio.samples if answer.audio else np.empty(0, np.float32))).decode()


class ChatStream:
    """Makes server-sent events of the answers to one request. frame: the fields that all chunks have. choices: how many answers there
    are."""

    kind = "chat.completion.chunk"
    """The field `object` of all chunks."""

    def __init__(self, call: HttpCall, body: TextBody, frame: Mapping[str, Any], choices: int) -> None:
        self._body = body
        self._options = body.stream_options or StreamOptions()
        self._frame = {**frame, "object": self.kind, **({"usage": None} if self._options.include_usage else {})}
        self._choices = [_Choice(call, body) for _ in range(choices)]

    async def pieces(self, events: Numbered) -> Pieces:
        """Yield all server-sent events. events: (number of its answer, event), of all answers."""
        done: dict[int, Done] = {}
        async with aclosing(events):
            async for number, event in events:
                choice = self._choices[number]
                match event:
                    case TextDelta():
                        rows = [] if self._body.row_length is None else logprobs_of(event, self._body.row_length)
                        if event.text or rows:
                            yield self._chunk(number, choice.text(event), rows=rows)
                    case ThoughtDelta() if event.text:
                        yield self._chunk(number, choice.delta({"reasoning_content": event.text}))
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
                        yield self._chunk(number, choice.delta(), shown_reason(event.finish_reason))
        if self._options.include_events:
            for number, event in sorted(done.items()):
                yield self._own_chunk(number, account_fields(event, self._body.seed, self._body.limit_name))
        if self._options.include_usage:
            usages = [event.usage for _, event in sorted(done.items())]
            yield as_event({**self._frame, "choices": [], "usage": chat_usage(usages, self._body.n or 1)})
        yield DONE

    def _chunk(self, number: int, delta: Mapping[str, Any], reason: str | None = None, rows: list[dict[str, Any]] | None = None) -> bytes:
        """A chunk for one answer, as a server-sent event. number: of the answer. reason: why it ended; None: it goes on. rows: logprobs."""
        return as_event({**self._frame, "choices": [self.choice(number, delta, reason, rows)]})

    def choice(self, number: int, delta: Mapping[str, Any], reason: str | None, rows: list[dict[str, Any]] | None) -> dict[str, Any]:
        """The only entry of `choices` of such a chunk."""
        logprobs = {"content": rows, "refusal": None} if rows else None
        return {"index": number, "delta": delta, "finish_reason": reason, "logprobs": logprobs}

    def _own_chunk(self, number: int, fields: Mapping[str, Any]) -> bytes:
        """A chunk with fields that OpenAI does not have, as a server-sent event. number: of the answer. fields: the fields."""
        index = {"index": number} if len(self._choices) > 1 else {}
        return as_event({**self._frame, "choices": [], "omnistage": {**fields, **index}})


class _Choice:
    """One of the answers while it is streamed. Its methods return the field `delta` of a chunk; `end` returns several. is_heard: whether
    any sound has come."""

    def __init__(self, call: HttpCall, body: TextBody) -> None:
        self._call = call
        self._name = new_name("audio_")
        self._texts: list[str] = []
        self._encoder = _new_encoder(body)
        self._has_begun = self.is_heard = False

    def delta(self, fields: Mapping[str, Any] | None = None, **sound_fields: Any) -> dict[str, Any]:
        """These fields, and `sound_fields` in the field `audio`. The first chunk also has the role, and the id of the sound."""
        first = {} if self._has_begun else {"role": "assistant", "content": ""}
        sound = {**({"id": self._name} if first and self._encoder else {}), **sound_fields}
        self._has_begun = True
        return {**first, **(fields or {}), **({"audio": sound} if sound else {})}

    def text(self, event: TextDelta) -> dict[str, Any]:
        """The delta of a piece of text: content, or the transcript if the answer is spoken."""
        if self._encoder is None:
            return self.delta({"content": event.text})
        self._texts.append(event.text)
        return self.delta(transcript=event.text)

    async def sound(self, event: AudioChunk) -> dict[str, Any]:
        """The delta of a piece of sound; empty if the encoder has no bytes yet and keeps the sound for the next piece."""
        assert self._encoder is not None, "sound came that nobody asked for"
        self.is_heard = True
        data = await self._encoder.grown(event.samples)
        return self.delta(data=base64.b64encode(data).decode()) if data else {}

    async def end(self) -> list[dict[str, Any]]:
        """The deltas of the last chunks: the rest of the sound, and the time up to which its id can be sent in place of its text."""
        if self._encoder is None:
            return []
        rest = await self._encoder.finished()
        last_data = [self.delta(data=base64.b64encode(rest).decode())] if rest else []
        _, expires_at = self._call.door.transcripts.put(self._call.host, self._call.client, "".join(self._texts), self._name)
        return [*last_data, self.delta(expires_at=expires_at)]


router = new_router("/v1", "chat")


@router.post("/chat/completions", response_model=None)
async def chat(call: ThisCall, body: ChatRequest) -> Response:
    """Answer a conversation: text and speech, whole or as server-sent events."""
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "goes with logprobs: true")
    call.account.fields = names_of(body)
    pipeline = await call.door.offer.chat_pipeline(body.model)
    answers = await _ask_all(call, body, pipeline)
    name = f"chatcmpl-{call.account.request_id}"
    frame = {"id": name, "created": int(time.time()), "model": body.model, "system_fingerprint": f"{pipeline}-{__version__}"}
    if body.stream:
        return await stream_response(call.account, ChatStream(call, body, frame, len(answers)).pieces(merge_events(answers)))
    choices = await run_all([whole_choice(call, body, number, events) for number, events in enumerate(answers)])
    usage = chat_usage([usage for _, usage in choices], len(answers))
    return JSONResponse({**frame, "object": "chat.completion", "choices": [choice for choice, _ in choices], "usage": usage})
