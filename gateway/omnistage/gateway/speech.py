"""POST /v1/audio/speech: a text is spoken."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from omnistage.client.errors import NotSpokenError
from omnistage.client.events import AudioChunk, Done, Event, Usage
from omnistage.gateway.answering import Pieces, Streamed, begun, told, unless_gone, with_errors
from omnistage.gateway.chat_schema import MOST_SEED, Body, Ignored, Seed
from omnistage.gateway.door import Door
from omnistage.gateway.failure import ApiError, in_words_of
from omnistage.gateway.sound import MEDIA_TYPES, RATE_HZ, RAW, Encoder, check_format, new_encoder
from omnistage.gateway.usage import audio_tokens

FIELDS = {
    "pipeline": "model",
    "text": "input",
    "request": "input",
    "thinker.verbatim": "input",
    "talker.voice": "voice",
    "talker.speed": "speed",
    "code2wav.profile": "profile",
    "code2wav.sample_rate_hz": "sample_rate_hz",
}
"""By a field of the client library or of the protos, the field of this interface."""

FORMAT = "response_format"

FIXED_RATE = (*RAW, "opus")
"""Formats that are asked for at one rate, whatever the model's is: nothing in raw samples says theirs, and Opus has few."""


class VoiceId(Body):
    id: str


class SpeechRequest(Body):
    input: str
    model: str | None = None
    voice: str | VoiceId | None = None
    response_format: Literal["mp3", "opus", "aac", "flac", "wav", "pcm"] = "mp3"
    stream_format: Literal["audio", "sse"] = "audio"
    speed: Annotated[float, Field(ge=0.5, le=2)] | None = None
    instructions: Ignored = None
    seed: Seed | None = None
    profile: Literal["latency", "balanced", "quality", "offline"] | None = None
    sample_rate_hz: Literal[8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000] | None = None


def routes(door: Door) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["speech"])

    @router.post("/audio/speech", response_class=Response)
    async def speech(request: Request, asked: SpeechRequest) -> Response:
        """Speak a text: one file while it is made, or server-sent events with its pieces."""
        visitor = door.visitor(request)
        rate_hz: int | None = asked.sample_rate_hz
        check_format(asked.response_format, rate_hz or 0, FORMAT)
        if rate_hz is None and asked.response_format in FIXED_RATE:
            rate_hz = RATE_HZ
        voice = asked.voice.id if isinstance(asked.voice, VoiceId) else asked.voice
        options = door.options(
            visitor,
            pipeline=await door.offer.model(asked.model),
            voice=await door.offer.voice(voice),
            speed=asked.speed,
            seed=None if asked.seed is None else asked.seed & MOST_SEED,
            profile=asked.profile,
            sample_rate_hz=rate_hz,
        )
        with in_words_of(FIELDS):
            events = visitor.account.followed(visitor.omni.stream_say(asked.input, **options))
        if asked.stream_format == "sse":
            told_pieces = await unless_gone(request, begun(_events(events, asked.response_format)))
            return Streamed(with_errors(told_pieces, visitor.account), visitor.account, "text/event-stream")
        pieces = await unless_gone(request, begun(_file(events, asked.response_format)))
        return Streamed(pieces, visitor.account, MEDIA_TYPES[asked.response_format])

    return router


async def _file(events: AsyncGenerator[Event, None], form: str) -> Pieces:
    """The bytes of one file, as they come."""
    async with aclosing(_made(events, form)) as made:
        async for piece in made:
            if isinstance(piece, bytes):
                yield piece


async def _events(events: AsyncGenerator[Event, None], form: str) -> Pieces:
    """The same, each piece in an event, and what it cost."""
    async with aclosing(_made(events, form)) as made:
        async for piece in made:
            if isinstance(piece, bytes):
                yield told({"type": "speech.audio.delta", "audio": base64.b64encode(piece).decode()})
            else:
                yield told({"type": "speech.audio.done", "usage": _usage(piece)})


async def _made(events: AsyncGenerator[Event, None], form: str) -> AsyncGenerator[bytes | Usage, None]:
    """Bytes of the file, none of them empty, and the account at the end. Raises ApiError where there is nothing to be heard."""
    encoder: Encoder | None = None
    with in_words_of(FIELDS):
        async with aclosing(events):
            try:
                async for event in events:
                    if isinstance(event, AudioChunk):
                        encoder = encoder or new_encoder(form, event.sample_rate_hz, FORMAT)
                        if grown := await encoder.grown(event.samples):
                            yield grown
                    elif isinstance(event, Done):
                        if encoder is not None and (rest := await encoder.finished()):
                            yield rest
                        yield event.usage
            except NotSpokenError as error:
                raise ApiError(400, f"input: {error.message}", param="input", code="not_spoken", hint=error.hint) from error


def _usage(usage: Usage) -> dict[str, int]:
    """input_tokens: of the text, as the model cut it."""
    read, spoken = usage.completion_tokens or 0, audio_tokens(usage)
    return {"input_tokens": read, "output_tokens": spoken, "total_tokens": read + spoken}
