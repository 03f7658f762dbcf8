"""The questions, the right values of every part of an answer by the formulas of the toys, and the check of what comes back, chunk by
chunk."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from helpers.ask import request
from helpers.converse import PIECE, Pieces, file_chunks, on_port, sound_chunks
from omnistage.client import AudioChunk, Done, Event, Picture, TextDelta
from omnistage.models.toy import formulas
from omnistage.models.toy.files import png, wav
from omnistage.v1 import chunk_pb2, omni_pb2, stage_pb2

SAMPLES_PER_FRAME = 960
SIDE = 48
"""The side of a drawn picture, in pixels."""

LIVE = "microphone"
"""The port of live sound."""


class WrongAnswer(AssertionError):
    """An answer has a gap, a repeat or other content than the formulas of the toy models."""


def expect(is_right: bool, what: str) -> None:
    if not is_right:
        raise WrongAnswer(what)


def check_text(tokens: Sequence[int], first: int, count: int, text: str, token_ids: Sequence[int]) -> None:
    """A piece of an answer of these tokens, at its place."""
    end = first + count
    expect(list(token_ids) == tokens[first:end], f"tokens {first} to {end} are {list(token_ids)}, not {tokens[first:end]}")
    expect(text == "".join(map(formulas.word, token_ids)), f"text of tokens {first} to {end}: {text!r}")


@dataclass(frozen=True)
class SpeechQuestion:
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
            check_text(self.tokens, begin, chunk.count, chunk.text.text, chunk.text.token_ids)
        elif chunk.count:
            expect(chunk.audio.data == self.samples[begin:end].tobytes(), f"samples {begin} to {end} are wrong")


@dataclass(frozen=True)
class ShownMedium:
    """One that is shown. media_type: empty for live sound. seen: what the toy makes of it."""

    media_type: str
    data: bytes
    seen: formulas.Seen


@dataclass(frozen=True)
class LookingQuestion:
    """A question to the pipeline that sees and hears. kinds: of its media, in order: image, audio, video, and LIVE once at most. streamed:
    all of them come on ports; live sound always does. film_bytes: of a film."""

    seed: int
    length: int
    kinds: tuple[str, ...]
    streamed: bool
    film_bytes: int

    @cached_property
    def media(self) -> list[ShownMedium]:
        rng = np.random.default_rng(self.seed)
        return [_medium(kind, rng, self.film_bytes) for kind in self.kinds]

    def _ports(self) -> Mapping[str, ShownMedium]:
        """The streamed ports, each with its medium."""
        named = {LIVE if kind == LIVE else f"media{n}": medium for n, (kind, medium) in enumerate(zip(self.kinds, self.media, strict=True))}
        return {port: medium for port, medium in named.items() if self.streamed or port == LIVE}

    def request(self) -> omni_pb2.GenerateRequest:
        ports = {id(medium): port for port, medium in self._ports().items()}
        parts = [
            on_port(ports[id(medium)], medium.media_type, len(medium.data))
            if id(medium) in ports
            else stage_pb2.Part(media=stage_pb2.Media(data=medium.data, media_type=medium.media_type))
            for medium in self.media
        ]
        thinker = stage_pb2.ThinkerParams(
            messages=[stage_pb2.Message(role="user", parts=[*parts, stage_pb2.Part(text="?")])], max_tokens=self.length, ignore_eos=True
        )
        return omni_pb2.GenerateRequest(model="toy-media", seed=self.seed, thinker=thinker)

    def pieces(self) -> dict[str, Pieces]:
        """The streamed content by port, in pieces of any size."""
        chance = random.Random(self.seed)
        cut: dict[str, Pieces] = {}
        for port, medium in self._ports().items():
            if port == LIVE:
                assert isinstance(medium.seen, np.ndarray)
                cut[port] = sound_chunks(port, medium.seen.astype(np.int16))
            else:
                cut[port] = file_chunks(port, medium.data, [chance.randint(1, PIECE), PIECE])
        return cut

    @cached_property
    def tokens(self) -> list[int]:
        first = formulas.omni_token(self.seed, formulas.items(["u", *(medium.seen for medium in self.media), "?"]), 0)
        return [formulas.later_token(first, n) for n in range(self.length)]

    def totals(self) -> dict[str, int]:
        return {"text": self.length}

    def check(self, chunk: chunk_pb2.Chunk) -> None:
        check_text(self.tokens, chunk.first, chunk.count, chunk.text.text, chunk.text.token_ids)


def _medium(kind: str, rng: np.random.Generator, film_bytes: int) -> ShownMedium:
    if kind == "image":
        pixels = rng.integers(0, 256, rng.integers(1, 65, 2), np.uint8)
        return ShownMedium("image/png", png(pixels), pixels)
    if kind == "video":
        data = b"\0\0\0\x10ftypisom" + rng.bytes(film_bytes)
        return ShownMedium("video/mp4", data, formulas.film(hashlib.sha256(data).digest()))
    sound: NDArray[np.int16] = rng.integers(-2000, 2000, rng.integers(1, 20_000), np.int16)
    return ShownMedium("audio/wav" if kind == "audio" else "", wav(sound, formulas.SAMPLE_RATE_HZ), sound)


@dataclass(frozen=True)
class DrawingQuestion:
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


Question = SpeechQuestion | DrawingQuestion | LookingQuestion


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
