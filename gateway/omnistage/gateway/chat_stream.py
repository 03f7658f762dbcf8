"""The chunks of a streamed chat answer."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Any

from omnistage.client.events import AudioChunk, Done, Failover, TextDelta, ThoughtDelta
from omnistage.gateway import additions
from omnistage.gateway.answering import DONE, Pieces, as_event
from omnistage.gateway.chat_schema import ChatRequest, StreamOptions
from omnistage.gateway.choices import Numbered
from omnistage.gateway.kept import new_name
from omnistage.gateway.logprobs import logprobs_of
from omnistage.gateway.sound import RATE_HZ, new_encoder
from omnistage.gateway.usage import chat_usage

Keep = Callable[[str, str], int]
"""Called with (text of a sound, name): keeps the text under this name, and returns until when, as Unix time."""

FINISHED = {"length": "length"}
"""OpenAI's names of the reasons that end an answer; every other reason is "stop"."""


class ChatStream:
    """Makes server-sent events of the answers to one request. frame: the fields that all chunks have. keep: see `Keep`."""

    def __init__(self, body: ChatRequest, frame: Mapping[str, Any], keep: Keep) -> None:
        self._asked = body
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
                        rows = logprobs_of(event, self._asked.top_logprobs or 0) if self._asked.logprobs else []
                        if event.text or rows:
                            yield self._chunk(number, choice.text(event), rows=rows)
                    case ThoughtDelta() if event.text:
                        yield self._chunk(number, {**choice.first(), "reasoning_content": event.text})
                    case AudioChunk():
                        if self._options.include_events and not choice.is_heard:
                            yield self._own_chunk(number, {"sound": additions.sound(event)})
                        if delta := await choice.sound(event):
                            yield self._chunk(number, delta)
                    case Failover() if self._options.include_events:
                        yield self._own_chunk(number, {"failover": additions.failover(event)})
                    case Done():
                        done[number] = event
                        for delta in await choice.end():
                            yield self._chunk(number, delta)
                        yield self._chunk(number, choice.first(), FINISHED.get(event.finish_reason, "stop"))
                    case _:
                        pass
        if self._options.include_events:
            for number, event in sorted(done.items()):
                yield self._own_chunk(number, additions.account(event))
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
