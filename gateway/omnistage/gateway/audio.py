"""POST /v1/audio/speech speaks a text; POST /v1/audio/generate makes sound that a prompt describes. Both stream it while it is made."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from omnistage.client.events import Done, Event, Failover, Progress
from omnistage.gateway.answering import Pieces, as_event, stream_response, unless_gone
from omnistage.gateway.body import Body, DrawnBody, Ignored, Seed, Voice, new_router
from omnistage.gateway.door import Door, visitor_of
from omnistage.gateway.failure import fields_of, in_words_of
from omnistage.gateway.offer import SOUND, SPEAK
from omnistage.gateway.report import account_fields, failover_fields, speech_usage, unspoken_fields
from omnistage.gateway.sound import MEDIA_TYPES, RATE_HZ, RAW, check_format, encode_sound, file_of

FORMAT = "response_format"

SPEECH_FIELDS = fields_of("input", {"encoding": FORMAT})
"""The field of this interface, by the name that the client library and the stages use."""

FIXED_RATE = (*RAW, "opus")
"""Formats that are made at `RATE_HZ`, whatever the model's rate is: nothing in raw samples says the rate, and Opus has few rates."""


class SpeechBody(Body):
    input: str
    model: str | None = None
    voice: Voice | None = None
    response_format: Literal["mp3", "opus", "aac", "flac", "wav", "pcm"] = "mp3"
    stream_format: Literal["audio", "sse"] = "audio"
    speed: Annotated[float, Field(ge=0.5, le=2)] | None = None
    instructions: Ignored = None
    seed: Seed | None = None
    profile: Literal["latency", "balanced", "quality", "offline"] | None = None
    markdown: bool | None = None
    sample_rate_hz: Literal[8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000] | None = None


def speech_routes(door: Door) -> APIRouter:
    router = new_router("/v1", "speech")

    @router.post("/audio/speech", response_class=Response)
    async def speech(request: Request, body: SpeechBody) -> Response:
        """Speak a text: one file while it is made, or server-sent events with its pieces."""
        visitor = visitor_of(request)
        rate_hz: int | None = body.sample_rate_hz
        check_format(body.response_format, rate_hz or 0, FORMAT)
        if rate_hz is None and body.response_format in FIXED_RATE:
            rate_hz = RATE_HZ
        options = door.options(
            visitor,
            pipeline=await unless_gone(request, door.offer.pipeline_that_can(SPEAK, body.model)),
            voice=await unless_gone(request, door.offer.voice(body.voice)),
            speed=body.speed,
            markdown=body.markdown,
            seed=body.seed,
            profile=body.profile,
            sample_rate_hz=rate_hz,
        )
        with in_words_of(SPEECH_FIELDS):
            events = visitor.account.ask(visitor.omni.stream_say, body.input, **options)
        if body.stream_format == "sse":
            return await stream_response(request, _speech_events(events, body.response_format), SPEECH_FIELDS)
        pieces = file_of(events, body.response_format, FORMAT)
        return await stream_response(request, pieces, SPEECH_FIELDS, media_type=MEDIA_TYPES[body.response_format], error_piece=None)

    return router


async def _speech_events(events: AsyncGenerator[Event, None], form: str) -> Pieces:
    """Yield server-sent events: the pieces of the sound, and at the end the usage and the text that was not spoken."""
    async with aclosing(encode_sound(events, form, FORMAT)) as encoded:
        async for piece in encoded:
            if isinstance(piece, bytes):
                yield as_event({"type": "speech.audio.delta", "audio": base64.b64encode(piece).decode()})
            elif isinstance(piece, Done):
                ours = {"omnistage": unspoken_fields(piece.usage)} if piece.unspoken else {}
                yield as_event({"type": "speech.audio.done", "usage": speech_usage(piece.usage), **ours})


MAX_SECONDS = 3600

SOUND_FIELDS = fields_of("prompt", {})
"""The field of this interface, by the name that the client library and the stages use."""


class SoundRequest(DrawnBody):
    prompt: Annotated[str, Field(min_length=1)]
    model: str | None = None
    seconds: Annotated[float, Field(gt=0, le=MAX_SECONDS, allow_inf_nan=False)] | None = None
    begin_s: Annotated[float, Field(ge=0, le=MAX_SECONDS, allow_inf_nan=False)] | None = None
    response_format: Literal["mp3", "opus", "aac", "flac", "wav", "pcm"] = "wav"
    stream_format: Literal["audio", "sse"] = "audio"


def sound_routes(door: Door) -> APIRouter:
    router = new_router("/v1/audio", "sound")

    @router.post("/generate", response_class=Response)
    async def generate(request: Request, body: SoundRequest) -> Response:
        """Make the sound that a description asks for: one file while it is made, or server-sent events with its pieces."""
        visitor = visitor_of(request)
        check_format(body.response_format, 0, FORMAT)
        options = door.options(
            visitor,
            pipeline=await unless_gone(request, door.offer.pipeline_that_can(SOUND, body.model)),
            seconds=body.seconds,
            begin_s=body.begin_s or None,
            **body.drawing_options,
        )
        with in_words_of(SOUND_FIELDS):
            outputs = ["audio", "progress"] if body.stream_format == "sse" else ["audio"]
            events = visitor.account.ask(visitor.omni.stream_sound, body.prompt, outputs=outputs, **options)
        if body.stream_format == "sse":
            return await stream_response(request, _sound_events(events, body.response_format), SOUND_FIELDS)
        pieces = file_of(events, body.response_format, FORMAT)
        return await stream_response(request, pieces, SOUND_FIELDS, media_type=MEDIA_TYPES[body.response_format], error_piece=None)

    return router


async def _sound_events(events: AsyncGenerator[Event, None], form: str) -> Pieces:
    """Yield server-sent events: the pieces of the sound, its progress, lost servers, and at the end the account."""
    async with aclosing(encode_sound(events, form, FORMAT)) as pieces:
        async for piece in pieces:
            match piece:
                case bytes():
                    yield as_event({"type": "audio.delta", "audio": base64.b64encode(piece).decode()})
                case Progress():
                    yield as_event({"type": "omnistage.progress", "done": piece.done, "total": piece.total})
                case Failover():
                    yield as_event({"type": "omnistage.failover", **failover_fields(piece)})
                case Done():
                    yield as_event({"type": "audio.done", **account_fields(piece)})
                case _:
                    pass
