"""POST /v1/audio/generate: sound that a prompt describes, streamed while it is decoded."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from omnistage.client.events import Done, Event, Failover, Progress
from omnistage.gateway import additions
from omnistage.gateway.answering import Pieces, as_event, stream_response, unless_gone
from omnistage.gateway.body import DrawnBody
from omnistage.gateway.door import Door, visitor_of
from omnistage.gateway.failure import in_words_of
from omnistage.gateway.fields import fields_of
from omnistage.gateway.offer import SOUND
from omnistage.gateway.parsed import new_router
from omnistage.gateway.sound import MEDIA_TYPES, check_format, encode_sound, file_of

MOST_SECONDS = 3600
FORMAT = "response_format"

FIELDS = fields_of("prompt", {})
"""The field of this interface, by the name that the client library and the stages use."""


class SoundRequest(DrawnBody):
    prompt: Annotated[str, Field(min_length=1)]
    model: str | None = None
    seconds: Annotated[float, Field(gt=0, le=MOST_SECONDS, allow_inf_nan=False)] | None = None
    begin_s: Annotated[float, Field(ge=0, le=MOST_SECONDS, allow_inf_nan=False)] | None = None
    response_format: Literal["mp3", "opus", "aac", "flac", "wav", "pcm"] = "wav"
    stream_format: Literal["audio", "sse"] = "audio"


def routes(door: Door) -> APIRouter:
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
            **body.drawn,
        )
        with in_words_of(FIELDS):
            outputs = ["audio", "progress"] if body.stream_format == "sse" else ["audio"]
            events = visitor.account.ask(visitor.omni.stream_sound, body.prompt, outputs=outputs, **options)
        if body.stream_format == "sse":
            return await stream_response(request, _events(events, body.response_format), FIELDS)
        media_type = MEDIA_TYPES[body.response_format]
        return await stream_response(request, file_of(events, body.response_format, FORMAT), FIELDS, media_type=media_type, telling=None)

    return router


async def _events(events: AsyncGenerator[Event, None], form: str) -> Pieces:
    """Yield server-sent events: the pieces of the sound, its progress, lost servers, and at the end the account."""
    async with aclosing(encode_sound(events, form, FORMAT)) as pieces:
        async for piece in pieces:
            match piece:
                case bytes():
                    yield as_event({"type": "audio.delta", "audio": base64.b64encode(piece).decode()})
                case Progress():
                    yield as_event({"type": "omnistage.progress", "done": piece.done, "total": piece.total})
                case Failover():
                    yield as_event({"type": "omnistage.failover", **additions.failover(piece)})
                case Done():
                    yield as_event({"type": "audio.done", **additions.account(piece)})
                case _:
                    pass
