"""POST /v1/audio/speech speaks a text; POST /v1/audio/generate makes sound that a prompt describes. Both stream it while it is made."""

from __future__ import annotations

import base64
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import asdict
from functools import partial
from typing import Annotated, Literal

from pydantic import Field
from starlette.responses import Response

from omnistage.client.events import Alignment, AudioChunk, Done, Event, Failover, Progress
from omnistage.client.files import channels_of
from omnistage.gateway.accounts import Events
from omnistage.gateway.answering import Pieces, as_event, stream_response
from omnistage.gateway.body import Body, Ignored, Seed, Voice, body_with, bounds_of, drawing_body, new_router
from omnistage.gateway.door import HttpCall, ThisCall
from omnistage.gateway.failure import fields_of, invalid
from omnistage.gateway.offer import SOUND, SPEAK
from omnistage.gateway.report import account_fields, failover_fields, speech_usage, unspoken_fields
from omnistage.gateway.sound import MEDIA_TYPES, RATE_HZ, RAW, Encoder, check_format, new_encoder

FORMAT = "response_format"

SPEECH_FIELDS = fields_of("speech", "input")
"""The field of this interface, by the name that the client library and the stages use."""

SOUND_FIELDS = fields_of("sounds", "prompt")
"""The same for sound of a prompt."""

OUTPUTS_WITH_WORDS = ("text", "audio", "alignment")
"""The text is among them because words come without their characters otherwise."""

FIXED_RATE = (*RAW, "opus")
"""Formats that are made at `RATE_HZ`, whatever the model's rate is: nothing in raw samples says the rate, and Opus has few rates."""


WORD_TIMES = "timestamp_granularities"
MAX_GRANULARITIES = 8


class SpeechBody(body_with(Body, "speed", "profile", "sample_rate_hz")):  # type: ignore[misc]  # A class that is made when this runs.
    input: str
    model: str | None = None
    voice: Voice | None = None
    response_format: Literal["mp3", "opus", "aac", "flac", "wav", "pcm"] = "mp3"
    stream_format: Literal["audio", "sse"] = "audio"
    timestamp_granularities: Annotated[list[Literal["word"]], Field(max_length=MAX_GRANULARITIES)] | None = None
    instructions: Ignored = None
    seed: Seed | None = None
    markdown: bool | None = None


class SoundRequest(drawing_body("sounds", "audio")):  # type: ignore[misc]  # A class that is made when this runs.
    prompt: Annotated[str, Field(min_length=1)]
    model: str | None = None
    seconds: Annotated[float, bounds_of("seconds")] | None = None
    begin_s: Annotated[float, bounds_of("begin_s")] | None = None
    response_format: Literal["mp3", "opus", "aac", "flac", "wav", "pcm"] = "wav"
    stream_format: Literal["audio", "sse"] = "audio"


PieceWriter = Callable[[bytes | Event], bytes]
"""Writes the next bytes of a sound file, or an event of the answer, as a piece of the HTTP answer; an empty piece is not sent."""


async def _respond(call: HttpCall, body: SpeechBody | SoundRequest, events: Events, write_event: PieceWriter) -> Response:
    """The answer with a sound: one file while it is made, or server-sent events, which `write_event` writes."""
    if body.stream_format == "sse":
        return await stream_response(call.account, _pieces(events, body.response_format, write_event))
    pieces = _pieces(events, body.response_format, lambda piece: piece if isinstance(piece, bytes) else b"")
    return await stream_response(call.account, pieces, media_type=MEDIA_TYPES[body.response_format], error_piece=None)


async def _pieces(events: Events, form: str, write: PieceWriter) -> Pieces:
    """Yield the pieces of the HTTP answer. form: the format of the sound."""
    encoder: Encoder | None = None
    async with aclosing(events):
        async for event in events:
            data = b""
            if isinstance(event, AudioChunk):
                encoder = encoder or new_encoder(form, event.sample_rate_hz, FORMAT, channels_of(event.samples))
                data = await encoder.grown(event.samples)
            elif isinstance(event, Done) and encoder is not None:
                data = await encoder.finished()
            for piece in (write(data) if data else b"", write(event)):
                if piece:
                    yield piece


def _speech_event(piece: bytes | Event) -> bytes:
    """A server-sent event with a piece of speech, the times of words, or at the end the usage and the text that was not spoken."""
    match piece:
        case Alignment():
            return as_event({"type": "omnistage.words", "words": [asdict(word) for word in piece.words]})
        case bytes():
            return as_event({"type": "speech.audio.delta", "audio": base64.b64encode(piece).decode()})
        case Done():
            ours = {"omnistage": unspoken_fields(piece.usage)} if piece.unspoken else {}
            return as_event({"type": "speech.audio.done", "usage": speech_usage(piece.usage), **ours})
    return b""


def _sound_event(seed: int | None, piece: bytes | Event) -> bytes:
    """A server-sent event with a piece of the sound, its progress, a lost server, or at the end the account. seed: the client's."""
    match piece:
        case bytes():
            return as_event({"type": "audio.delta", "audio": base64.b64encode(piece).decode()})
        case Progress():
            return as_event({"type": "omnistage.progress", "done": piece.done, "total": piece.total})
        case Failover():
            return as_event({"type": "omnistage.failover", **failover_fields(piece)})
        case Done():
            return as_event({"type": "audio.done", **account_fields(piece, seed)})
    return b""


router = new_router("/v1/audio")


@router.post("/speech", response_class=Response, tags=["speech"])
async def speech(call: ThisCall, body: SpeechBody) -> Response:
    """Speak a text: one file while it is made, or server-sent events with its pieces."""
    call.account.fields = SPEECH_FIELDS
    rate_hz: int | None = body.sample_rate_hz
    check_format(body.response_format, rate_hz or 0, FORMAT)
    if body.timestamp_granularities and body.stream_format != "sse":
        hint = "Ask with stream_format: sse, whose events hold the bytes of the same file."
        raise invalid(WORD_TIMES, "a file of sound has no room for the times of words", hint)
    if body.timestamp_granularities:
        call.account.fields = {**SPEECH_FIELDS, "outputs": WORD_TIMES}
    if rate_hz is None and body.response_format in FIXED_RATE:
        rate_hz = RATE_HZ
    options = body.same_options | {
        "pipeline": await call.door.offer.pipeline_that_can(SPEAK, body.model),
        "voice": await call.door.offer.voice(body.voice),
        "sample_rate_hz": rate_hz,
        "outputs": OUTPUTS_WITH_WORDS if body.timestamp_granularities else None,
    }
    return await _respond(call, body, call.ask(call.omni.stream_say, body.input, **options), _speech_event)


@router.post("/generate", response_class=Response, tags=["sound"])
async def generate(call: ThisCall, body: SoundRequest) -> Response:
    """Make the sound that a description asks for: one file while it is made, or server-sent events with its pieces."""
    call.account.fields = SOUND_FIELDS
    check_format(body.response_format, 0, FORMAT)
    options = body.same_options | {
        "pipeline": await call.door.offer.pipeline_that_can(SOUND, body.model),
        "begin_s": body.begin_s or None,
        "outputs": ["audio", "progress"] if body.stream_format == "sse" else ["audio"],
    }
    return await _respond(call, body, call.ask(call.omni.stream_sound, body.prompt, **options), partial(_sound_event, body.seed))
