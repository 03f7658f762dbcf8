"""The four toy models. They cut their output into chunks of random size on purpose, as real ones do, so that only content is comparable."""

from __future__ import annotations

import asyncio
import random
import struct
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omnistage.engine.activity import Activity
from omnistage.engine.types import FinishReason
from omnistage.models.errors import LoadError
from omnistage.models.interface import (
    BadRequest,
    Content,
    DrawRequest,
    Frames,
    Load,
    ModelInfo,
    Picture,
    PortSpec,
    Sound,
    SpeechFrames,
    SpeechRequest,
    TextPiece,
    TextRequest,
    WaveRequest,
)
from omnistage.models.toy import formulas

MAX_SESSIONS = 1024
REVISION = "1"
DIFFERENCE = 7
"""What a Talker that differs adds to its codes."""


@dataclass(frozen=True, slots=True)
class ToyOptions:
    """interval_s: pause before each token. max_chunk: most tokens, frames or blocks in one piece; 1 takes the chance out of the cut.
    stamp: put the time of emission into rows, codes and samples, for latency figures. length: tokens when the model ends by itself.
    chunk_samples: most samples in one piece of sound; 0 is all that is there. interval_s of a Code2Wav is the pause before each piece.
    context: frames that a Code2Wav asks for before the one that it goes on in, as one with a left context would. differs: a Talker that
    makes other codes than others of its revision, as one that samples differently would."""

    interval_s: float = 0.0
    max_chunk: int = 4
    stamp: bool = False
    width: int = formulas.WIDTH
    samples_per_frame: int = formulas.SAMPLES_PER_FRAME
    length: int = formulas.NATURAL_LENGTH
    chunk_samples: int = 0
    context: int = 2
    differs: bool = False
    max_sessions: int = MAX_SESSIONS

    @classmethod
    def from_settings(cls, options: dict[str, Any]) -> ToyOptions:
        known = {field.name for field in fields(cls)}
        unknown = set(options) - known
        if unknown:
            raise LoadError(f"unknown options {sorted(unknown)} of the toy models; known are {sorted(known)}")
        for name, value in options.items():
            default = getattr(cls(), name)
            wanted = (int, float) if isinstance(default, float) else type(default)
            if not isinstance(value, wanted) or isinstance(value, bool) is not isinstance(default, bool):
                raise LoadError(f"option {name} of the toy models is {value!r} and must be like {default!r}")
        return cls(**options)

    @property
    def row_width(self) -> int:
        return self.width + (formulas.LIMBS if self.stamp else 0)

    @property
    def codebooks(self) -> int:
        return formulas.CODEBOOKS + (formulas.LIMBS if self.stamp else 0)


class _Toy:
    """What all toys have in common: they hold nothing."""

    info: ModelInfo
    threads: Sequence[Activity] = ()

    def __init__(self, options: ToyOptions) -> None:
        self.options = options

    def load(self) -> Load:
        return Load()

    async def warm_up(self) -> None:
        return

    async def close(self) -> None:
        return

    def _cut(self) -> int:
        return random.randint(1, self.options.max_chunk)


class ToyThinker(_Toy):
    """Counts in sevens."""

    def __init__(self, options: ToyOptions) -> None:
        super().__init__(options)
        hidden = PortSpec("hidden", Content.TENSOR, width=options.row_width)
        text = PortSpec("text", Content.TEXT, compact=True)
        self.info = ModelInfo("toy-thinker", REVISION, (), (text, hidden), options.max_sessions)

    async def prepare(self, request: TextRequest) -> TextRequest:
        if not request.turns and not request.verbatim:
            raise BadRequest("thinker.messages", "at least one turn is needed")
        if request.finished is None and request.history and len(request.history) >= self._length(request):
            raise BadRequest("resume.history", f"the answer has {self._length(request)} tokens: it ends before it can go on")
        return request

    def _length(self, request: TextRequest) -> int:
        """Tokens of the whole answer."""
        spoken = request.verbatim.split()
        natural = len(spoken) if spoken else self.options.length
        return request.max_tokens if request.ignore_eos and not spoken else min(natural, request.max_tokens)

    async def generate(self, request: TextRequest) -> AsyncGenerator[TextPiece, None]:
        """The words of `formulas.text`, or those of `verbatim`; ends after `length` tokens or at max_tokens, whichever is less."""
        await self.prepare(request)
        async with aclosing(self._earlier(request)) as earlier:
            async for piece in earlier:
                yield piece
        if request.finished is not None:
            return
        spoken = request.verbatim.split()
        prompt = next((turn.text for turn in reversed(request.turns) if turn.role == "user"), "")
        natural, total = len(spoken) if spoken else self.options.length, self._length(request)
        finish = FinishReason.STOP if total == natural else FinishReason.LENGTH
        n = len(request.history)
        while n < total:
            if self.options.interval_s:
                await asyncio.sleep(self.options.interval_s)
            count = min(self._cut(), total - n)
            tokens = tuple(formulas.token(request.seed, prompt, n + i) for i in range(count))
            words = "".join(f"{spoken[n + i]} " if spoken else formulas.word(tokens[i]) for i in range(count))
            n += count
            yield TextPiece(words, tokens, hidden=self._rows(tokens), finish_reason=finish if n == total else None)
        if total == 0:
            yield TextPiece("", (), hidden=self._rows(()), finish_reason=finish)

    async def _earlier(self, request: TextRequest) -> AsyncGenerator[TextPiece, None]:
        """The rows of the history again, without a pause: like a prefill they cost next to nothing."""
        left = request.history[request.rows_from :]
        while left:
            tokens, left = left[: (cut := self._cut())], left[cut:]
            yield TextPiece("", tokens, hidden=self._rows(tokens), finish_reason=None if left else request.finished)
        if request.finished is not None and request.rows_from == len(request.history):
            yield TextPiece("", (), hidden=self._rows(()), finish_reason=request.finished)

    def _rows(self, tokens: tuple[int, ...]) -> NDArray[np.float32]:
        rows = np.empty((len(tokens), self.options.row_width), np.float32)
        for i, token in enumerate(tokens):
            rows[i, : self.options.width] = formulas.row(token, self.options.width)
        if self.options.stamp:
            rows[:, self.options.width :] = formulas.stamp()
        return rows


class ToyTalker(_Toy):
    """Two frames of four codes for each row."""

    def __init__(self, options: ToyOptions) -> None:
        super().__init__(options)
        hidden = PortSpec("hidden", Content.TENSOR, width=options.row_width)
        codes = PortSpec("codes", Content.CODES, rate_hz=self._rate(), width=options.codebooks, compact=True)
        self.info = ModelInfo("toy-talker", REVISION, (hidden,), (codes,), options.max_sessions, voices=("toy",))

    def _rate(self) -> float:
        return formulas.SAMPLE_RATE_HZ / self.options.samples_per_frame

    def check(self, request: SpeechRequest) -> None:
        if request.voice not in ("", "toy"):
            raise BadRequest("talker.voice", f"no voice {request.voice!r}; there is only 'toy'")
        if request.max_frames and request.first >= request.max_frames:
            raise BadRequest("resume.history", f"{request.first} frames are there and talker.max_frames is {request.max_frames}")

    async def speak(self, request: SpeechRequest, inputs: AsyncIterator[TextPiece | NDArray[np.float32]]) -> AsyncGenerator[Frames, None]:
        """Codes depend on the rows alone: of the frames that were made before only the number counts."""
        self.check(request)
        made = 0
        async for rows in inputs:
            if isinstance(rows, TextPiece):
                raise TypeError("the toy Talker takes hidden rows")
            codes = self._codes(rows)
            before, made = made, made + len(codes)
            codes = codes[max(request.first - before, 0) :]
            if request.max_frames and made >= request.max_frames:
                yield Frames(codes[: len(codes) - (made - request.max_frames)], FinishReason.LENGTH)
                return
            while len(codes):
                cut = min(self._cut(), len(codes))
                yield Frames(codes[:cut])
                codes = codes[cut:]
        if made < request.first:
            raise BadRequest("resume.positions", f"the speech has {made} frames: it cannot go on at frame {request.first}")
        yield Frames(np.empty((0, self.options.codebooks), np.uint32), FinishReason.STOP)

    def _codes(self, rows: NDArray[np.float32]) -> NDArray[np.uint32]:
        codes = formulas.frames(rows)
        if self.options.differs:
            codes = (codes + np.uint32(DIFFERENCE)) % np.uint32(1024)
        if self.options.stamp:
            stamps = rows[:, self.options.width :].astype(np.uint32)
            codes = np.concatenate([codes, stamps.repeat(formulas.FRAMES_PER_ROW, axis=0)], axis=1)
        return codes


class ToyCode2Wav(_Toy):
    """A saw tooth for each frame."""

    def __init__(self, options: ToyOptions) -> None:
        super().__init__(options)
        rate = formulas.SAMPLE_RATE_HZ / options.samples_per_frame
        codes = PortSpec("codes", Content.CODES, rate_hz=rate, width=options.codebooks, window=True)
        audio = PortSpec("audio", Content.AUDIO, rate_hz=formulas.SAMPLE_RATE_HZ, width=1)
        self.info = ModelInfo("toy-code2wav", REVISION, (codes,), (audio,), options.max_sessions)

    def check(self, request: WaveRequest) -> None:
        if request.sample_rate_hz not in (0, formulas.SAMPLE_RATE_HZ):
            raise BadRequest("code2wav.sample_rate_hz", f"only {formulas.SAMPLE_RATE_HZ} is possible")

    def first_frame(self, request: WaveRequest) -> int:
        return self._needs(request.first)

    def _needs(self, sample: int) -> int:
        return max(sample // self.options.samples_per_frame - self.options.context, 0)

    async def decode(self, request: WaveRequest, frames: AsyncIterator[SpeechFrames]) -> AsyncGenerator[Sound, None]:
        """Samples depend on their own frame alone: those of the context are dropped, and those of the frame that were heard before."""
        reached = 0
        async for part in frames:
            if not reached and part.first > self.first_frame(request):
                needed = f"frames from {self.first_frame(request)} on are needed for sample {request.first}"
                raise BadRequest("codes", f"{needed}, the first one is {part.first}")
            begin, reached = (place * self.options.samples_per_frame for place in (part.first, part.first + len(part.rows)))
            if reached <= request.first or not len(part.rows):
                continue
            sound = self._sound(np.asarray(part.rows, np.uint32))[max(request.first - begin, 0) :]
            given = reached - len(sound)
            most = self.options.chunk_samples or max(len(sound), 1)
            for place in range(0, len(sound), most):
                if self.options.interval_s:
                    await asyncio.sleep(self.options.interval_s)
                piece = sound[place : place + most]
                given += len(piece)
                yield Sound(piece, self._needs(given))
        if reached < request.first:
            raise BadRequest("resume.positions", f"the sound has {reached} samples: it cannot go on at sample {request.first}")

    def _sound(self, codes: NDArray[np.uint32]) -> NDArray[np.float32]:
        sound = formulas.samples(codes, self.options.samples_per_frame)
        if self.options.stamp:
            sound[: 2 * formulas.LIMBS, 0] = np.concatenate([codes[0, formulas.CODEBOOKS :].astype(np.int64), formulas.stamp()]) / 32768
        return sound


class ToyDiffusion(_Toy):
    """A grey picture: pixel (x, y) of result n = (seed + n + x + y) mod 256, PNG. Previews have 16 shades."""

    def __init__(self, options: ToyOptions) -> None:
        super().__init__(options)
        image = PortSpec("image", Content.IMAGE)
        progress = PortSpec("progress", Content.PROGRESS)
        self.info = ModelInfo("toy-diffusion", REVISION, (), (image, progress), options.max_sessions)

    def check(self, request: DrawRequest) -> None:
        for name, value in (("width", request.width), ("height", request.height)):
            if value > 1024:
                raise BadRequest(f"diffusion.{name}", "at most 1024 pixels")

    async def draw(self, request: DrawRequest) -> AsyncGenerator[Picture, None]:
        width, height, steps = request.width or 64, request.height or 64, request.steps or 4
        for step in range(1, steps + 1):
            await asyncio.sleep(self.options.interval_s)
            yield Picture(b"", "", step, steps)
            if step * request.previews // steps > (step - 1) * request.previews // steps:
                yield Picture(png(self._pixels(request.seed, width, height) // 16 * 16), "image/png", step, steps, preview=True)
        for n in range(request.first, request.results):
            yield Picture(png(self._pixels(request.seed + n, width, height)), "image/png", steps, steps)

    def _pixels(self, seed: int, width: int, height: int) -> NDArray[np.uint8]:
        return ((seed % 256 + np.add.outer(np.arange(height), np.arange(width))) % 256).astype(np.uint8)


def png(pixels: NDArray[np.uint8]) -> bytes:
    """A grey 8-bit PNG of [height, width] pixels (PNG specification, third edition: IHDR, IDAT with filter 0, IEND)."""
    height, width = pixels.shape
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels], axis=1).tobytes()
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
