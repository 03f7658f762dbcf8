"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from omnistage.client import __version__
from omnistage.client.answer import Answer
from omnistage.client.events import Event, TextDelta
from omnistage.gateway.answering import stream_response, unless_gone
from omnistage.gateway.chat_options import names_of, options_of
from omnistage.gateway.chat_schema import ChatRequest
from omnistage.gateway.chat_stream import FINISHED, ChatStream
from omnistage.gateway.choices import Events, collect_all, merge_events
from omnistage.gateway.door import Door, Visitor, visitor_of
from omnistage.gateway.failure import in_words_of
from omnistage.gateway.logprobs import logprobs_of
from omnistage.gateway.messages import turns_of
from omnistage.gateway.parsed import new_router
from omnistage.gateway.sound import RATE_HZ, Encoder, new_encoder
from omnistage.gateway.transcripts import Transcripts
from omnistage.gateway.usage import chat_usage


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
    turns = await turns_of(body.messages, lambda name: transcripts.get(visitor.who, name), fetch, use_audio=body.hears_films)
    body.messages.clear()  # The turns have what was in them, and go with this call.
    voice = await door.offer.voice(body.audio.voice if body.audio else None)
    options = [options_of(body, pipeline, voice, number) for number in range(body.n or 1)]
    calls = [door.options(visitor, **one) for one in options]
    for number, call in enumerate(calls[1:], 1):
        call["request_id"] += f"-{number}"
    return [visitor.account.ask(visitor.omni.stream_chat, turns, **call) for call in calls]


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
    done = await collect_all([_note_text(events, noted) for events, noted in zip(answers, deltas, strict=True)])
    choices = []
    for number, answer in enumerate(done):
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
    usage = chat_usage([answer.usage for answer in done])
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
    return base64.b64encode(encoder.whole(answer.audio.samples if answer.audio else np.empty(0, np.float32))).decode()
