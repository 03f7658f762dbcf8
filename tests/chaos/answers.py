"""What was asked, and whether what comes back is exactly that: checked chunk by chunk, so that the part of an answer that was cancelled or
lost is checked as well."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from helpers.ask import request
from omnistage.client import AudioChunk, Done, Event, Picture, TextDelta
from omnistage.models.toy import formulas
from omnistage.models.toy.files import png
from omnistage.v1 import chunk_pb2, omni_pb2, stage_pb2

SAMPLES_PER_FRAME = 960
SIDE = 48
"""Of a picture, in pixels."""


class WrongAnswer(AssertionError):
    """An answer has a gap, a repeat or other content than the formulas of the toy models."""


def expect(is_right: bool, what: str) -> None:
    if not is_right:
        raise WrongAnswer(what)


@dataclass(frozen=True)
class Speech:
    """A question to the speaking pipeline. length: tokens of its answer. outputs: the ports wanted."""

    prompt: str
    seed: int
    length: int
    outputs: tuple[str, ...] = ("text", "audio")

    def request(self) -> omni_pb2.GenerateRequest:
        return request(self.prompt, self.seed, thinker={"max_tokens": self.length, "ignore_eos": True}, outputs=self.outputs)

    @cached_property
    def tokens(self) -> list[int]:
        return [formulas.token(self.seed, self.prompt, n) for n in range(self.length)]

    @cached_property
    def samples(self) -> np.ndarray:
        """[n] int16."""
        return (formulas.audio(self.seed, self.prompt, self.length, SAMPLES_PER_FRAME)[:, 0] * 32768).astype("<i2")

    def totals(self) -> dict[str, int]:
        """Items of every port that is wanted."""
        all_ports = {"text": self.length, "audio": self.length * formulas.FRAMES_PER_ROW * SAMPLES_PER_FRAME}
        return {port: all_ports[port] for port in self.outputs}

    def check(self, chunk: chunk_pb2.Chunk) -> None:
        """The content of a chunk at its place."""
        begin, end = chunk.first, chunk.first + chunk.count
        if chunk.port == "text":
            tokens = self.tokens[begin:end]
            expect(list(chunk.text.token_ids) == tokens, f"tokens {begin} to {end} are {list(chunk.text.token_ids)}, not {tokens}")
            expect(chunk.text.text == "".join(map(formulas.word, tokens)), f"text of tokens {begin} to {end}: {chunk.text.text!r}")
        elif chunk.count:
            expect(chunk.audio.data == self.samples[begin:end].tobytes(), f"samples {begin} to {end} are wrong")


@dataclass(frozen=True)
class Drawing:
    """A question to the drawing pipeline."""

    seed: int
    results: int
    previews: int
    steps: int

    def request(self) -> omni_pb2.GenerateRequest:
        params = stage_pb2.DiffusionParams(
            prompt="a slope", width=SIDE, height=SIDE, steps=self.steps, results=self.results, previews=self.previews
        )
        return omni_pb2.GenerateRequest(model="toy-picture", seed=self.seed, diffusion=params, outputs=["image"])

    def totals(self) -> dict[str, int]:
        return {"image": self.results}

    def picture(self, number: int) -> bytes:
        pixels = (self.seed + number + np.add.outer(np.arange(SIDE), np.arange(SIDE))) % 256
        return png(pixels.astype(np.uint8))

    def check(self, chunk: chunk_pb2.Chunk) -> None:
        if chunk.count:
            expect(chunk.image.data.data == self.picture(chunk.first), f"picture {chunk.first} is wrong")


Question = Speech | Drawing


class Heard:
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
            case TextDelta(), Speech() as question:
                begin, end = self._move("text", event.first_token, len(event.token_ids))
                expect(list(event.token_ids) == question.tokens[begin:end], f"tokens {begin} to {end} are wrong")
                expect(event.text == "".join(map(formulas.word, event.token_ids)), f"text of tokens {begin} to {end}: {event.text!r}")
            case AudioChunk(), Speech() as question:
                begin, end = self._move("audio", event.first_sample, len(event.samples))
                expect(np.array_equal(event.samples * 32768, question.samples[begin:end]), f"samples {begin} to {end} are wrong")
            case Picture(), Drawing() as question if event.preview_step is None:
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
