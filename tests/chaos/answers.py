"""Whether what comes back is exactly what was asked for: checked chunk by chunk, so that the part of an answer that was cancelled or
lost is checked as well."""

from __future__ import annotations

import numpy as np

from chaos.questions import DrawingQuestion, LookingQuestion, Question, SpeechQuestion, check_text, expect
from omnistage.client import AudioChunk, Done, Event, Picture, TextDelta
from omnistage.v1 import chunk_pb2, omni_pb2


class EventsOfAnswer:
    """One answer of a bare stub, event by event."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._places: dict[str, tuple[int, int, bool]] = {}
        self._started = self._over = False
        self.failovers = 0

    def take(self, event: omni_pb2.GenerateResponse) -> None:
        """Raises WrongAnswer."""
        expect(not self._over, "an event after Usage")
        match event.WhichOneof("event"):
            case "started":
                expect(not self._started, "Started twice")
                self._started = True
            case "chunk":
                self._take_chunk(event.chunk)
            case "failover":
                self.failovers += 1
            case "usage":
                self._over = True

    def _take_chunk(self, chunk: chunk_pb2.Chunk) -> None:
        expect(self._started, "a chunk before Started")
        expect(chunk.port in self._question.totals(), f"port {chunk.port!r} was not asked for")
        seq, first, ended = self._places.get(chunk.port, (0, 0, False))
        expect(not ended, f"{chunk.port}: a chunk after the last one")
        place = f"{chunk.port}: chunk {chunk.seq} at item {chunk.first}"
        expect((chunk.seq, chunk.first) == (seq, first), f"{place}; chunk {seq} at item {first} was due")
        self._question.check(chunk)
        self._places[chunk.port] = (seq + 1, first + chunk.count, chunk.last)

    def check_whole(self) -> None:
        """The stream ended well: every port that was asked for must be there to its end."""
        expect(self._over, "the stream ended without Usage")
        for port, total in self._question.totals().items():
            _, first, ended = self._places.get(port, (0, 0, False))
            expect(ended and first == total, f"{port}: {first} of {total} items, {'with' if ended else 'without'} an end")


class Collected:
    """One answer of the client library, event by event."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._items: dict[str, int] = dict.fromkeys(question.totals(), 0)
        self._over = False
        self.router_losses = 0
        self.failovers = 0

    def take(self, event: Event) -> None:
        """Raises WrongAnswer."""
        match event, self._question:
            case TextDelta(), (SpeechQuestion() | LookingQuestion()) as question:
                begin, end = self._move("text", event.first_token, len(event.token_ids))
                check_text(question.tokens, begin, end - begin, event.text, event.token_ids)
            case AudioChunk(), SpeechQuestion() as question:
                begin, end = self._move("audio", event.first_sample, len(event.samples))
                expect(np.array_equal(event.samples * 32768, question.samples[begin:end]), f"samples {begin} to {end} are wrong")
            case Picture(), DrawingQuestion() as question if event.preview_step is None:
                number, _ = self._move("image", event.index, 1)
                expect(event.data == question.picture(number), f"picture {number} is wrong")
            case Done(), _:
                self._over = True
                self.failovers = len(event.failovers)
                self.router_losses = sum(failover.stage == "router" for failover in event.failovers)

    def _move(self, port: str, first: int, count: int) -> tuple[int, int]:
        expect(port in self._items, f"{port} was not asked for")
        expect(first == self._items[port], f"{port}: item {first} came, {self._items[port]} was due")
        self._items[port] += count
        return first, first + count

    def check_whole(self) -> None:
        """The stream ended well: every port that was asked for must be there to its end."""
        expect(self._over, "the stream ended without Done")
        expect(self._items == self._question.totals(), f"{self._items} items came of {self._question.totals()}")
