"""The four toy models. They cut their output into chunks of random size on purpose, so that tests can only compare contents."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omnistage.engine.detokenizer import Detokenizer
from omnistage.models.interface import (
    Activity,
    Array,
    BadRequest,
    Content,
    DrawRequest,
    EncodedPicture,
    FinishReason,
    Frames,
    Load,
    ModelInfo,
    Piece,
    PortSpec,
    Preview,
    Sound,
    SpeechRequest,
    StepsDone,
    TensorRows,
    TextPiece,
    TextRequest,
    Unspoken,
    Wanted,
    WaveRequest,
)
from omnistage.models.options import LoadOptions, check_counts, validate_options
from omnistage.models.requests import check_bias, check_constraint, check_parts, check_plain_drawing
from omnistage.models.text.answer import AnswerAssembler
from omnistage.models.toy import formulas
from omnistage.models.toy.files import png

MAX_SESSIONS = 1024
"""A session of a toy holds nothing, so there may be many."""

REVISION = "1"
DIFFERENCE = 7
"""The number that a Talker with the option `differs` adds to its codes."""


@dataclass(frozen=True, slots=True)
class ToyOptions:
    """interval_s: pause before each token, and of a Code2Wav before each piece. max_chunk: limit of tokens, frames or blocks in a piece; 1
    makes the cuts certain. stamp: put the time of emission into rows, codes and samples, for latency figures. length: tokens after which
    the model ends by itself. chunk_samples: limit of samples in a piece of sound; 0: all that can be made. context: frames that a Code2Wav
    requests before the frame in which it goes on, as if it had a left context. differs: the Talker makes other codes than others of its
    revision, as if it sampled differently. room: limit of characters of a conversation; 0: none. prebuffer_s: as in Sound; below 0:
    None. mute_every: the Talker reports the word of each row with a number divisible by this as unspoken; 0: none. thinks: how many of the
    first tokens of an answer are a thought. load_s: seconds that the model takes to load."""

    interval_s: float = 0.0
    max_chunk: int = 4
    stamp: bool = False
    width: int = formulas.WIDTH
    samples_per_frame: int = formulas.SAMPLES_PER_FRAME
    length: int = formulas.NATURAL_LENGTH
    chunk_samples: int = 0
    context: int = 2
    differs: bool = False
    room: int = 0
    prebuffer_s: float = -1.0
    mute_every: int = 0
    thinks: int = 0
    load_s: float = 0.0

    @classmethod
    def from_settings(cls, options: dict[str, Any]) -> ToyOptions:
        toy_options = cls(**validate_options(options, cls(), "the toy models"))
        check_counts(toy_options, ("max_chunk", "width", "samples_per_frame", "length"), "the toy models")
        return toy_options

    @property
    def row_width(self) -> int:
        return self.width + (formulas.LIMBS if self.stamp else 0)

    @property
    def codebooks(self) -> int:
        return formulas.CODEBOOKS + (formulas.LIMBS if self.stamp else 0)


class Toy:
    """The part that all toys share: they hold nothing."""

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

    def _draw_count(self) -> int:
        return random.randint(1, self.options.max_chunk)


class FirstTokens:
    """Implements `ThoughtLike`: the first `max_tokens` of an answer are its thought."""

    def __init__(self, max_tokens: int) -> None:
        self.count, self._max_tokens = 0, max_tokens

    def take(self, token_id: int) -> str | None:
        """The word of a token of the thought; None for a token of the answer."""
        if self.count == self._max_tokens:
            return None
        self.count += 1
        return formulas.word(token_id)

    def finish(self) -> str:
        return ""


class ToyThinker(Toy):
    """Implements `ThinkerModel`: each token is the last token plus 7 (`formulas.token`), and its row counts up from it (`formulas.row`)."""

    def __init__(self, options: ToyOptions) -> None:
        super().__init__(options)
        hidden = PortSpec("hidden", Content.TENSOR, width=options.row_width)
        text = PortSpec("text", Content.TEXT, compact=True)
        self.info = ModelInfo("toy-thinker", REVISION, (), (text, hidden), MAX_SESSIONS, draws=True)

    async def prepare(self, request: TextRequest) -> TextRequest:
        check_parts(request, self.info)
        check_constraint(request, self.info)
        check_bias(request, formulas.VOCABULARY)
        characters, room = sum(len(turn.text) for turn in request.turns), self.options.room
        if room and characters > room:
            raise BadRequest("thinker.messages", f"shorten the conversation: it has {characters} characters, the model takes {room}")
        if request.finished is None and request.history and len(request.history) >= self._length(request):
            raise BadRequest("resume.history", f"the answer has {self._length(request)} tokens: it ends before it can go on")
        words = request.verbatim.split()
        if words and len(request.history) > len(words):
            raise BadRequest("resume.history", f"the text to be spoken has {len(words)} words: it ends before")
        return request

    def _length(self, request: TextRequest) -> int:
        """Tokens of the whole answer."""
        words = request.verbatim.split()
        natural = len(words) or self.options.length
        return request.max_tokens if request.ignore_eos and not words else min(natural, request.max_tokens)

    async def generate(
        self, prepared: TextRequest, inputs: AsyncIterator[Piece], ports: Wanted
    ) -> AsyncGenerator[TextPiece | TensorRows, None]:
        """See ThinkerModel.generate. Says `formulas.text` or the verbatim text; ends after `length` tokens or at max_tokens."""
        request, total = prepared, self._length(prepared)
        thinks = 0 if request.verbatim else self.options.thinks
        answer = AnswerAssembler(
            self._detokenizer(request),
            ports,
            history=request.history,
            finished=request.finished,
            row_port="hidden",
            thought=FirstTokens(thinks) if thinks else None,
        )
        answer.asked_with(sum(len(turn.text) for turn in request.turns))  # A character counts as a token, as with toy-omni.
        for piece in self._earlier(request.history[thinks:], answer, ports):
            yield piece
        prompt = next((turn.text for turn in reversed(request.turns) if turn.role == "user"), "")
        first, n = formulas.token(request.seed, prompt, 0), len(request.history)
        while not answer.ended:
            if self.options.interval_s and n < total:
                await asyncio.sleep(self.options.interval_s)
            for _ in range(min(self._draw_count(), total - n)):
                token = formulas.later_token(first, n)
                answer.token(token)
                if "hidden" in ports and n >= thinks:
                    answer.rows(self._rows((token,)))
                n += 1
            if n == total:
                answer.end(FinishReason.LENGTH if self._is_cut(request) else FinishReason.STOP)
            for piece in answer.take():
                yield piece

    def _detokenizer(self, request: TextRequest) -> Detokenizer:
        """The detokenizer of an answer. For verbatim text each token becomes the next word, whatever its id: tokens come in order."""
        words = iter(request.verbatim.split())
        if request.verbatim.split():
            return Detokenizer(lambda token_id: f"{next(words)} ".encode())
        return Detokenizer(lambda token_id: formulas.word(token_id).encode(), request.stop)

    def _is_cut(self, request: TextRequest) -> bool:
        """Whether the answer has another length than it would have by itself."""
        return self._length(request) != (len(request.verbatim.split()) or self.options.length)

    def _earlier(self, history: Sequence[int], answer: AnswerAssembler, ports: Wanted) -> Iterator[TextPiece | TensorRows]:
        """Make the wanted rows of the history's tokens, without a pause: in a prefill they cost next to nothing."""
        remaining = tuple(history[ports["hidden"] :]) if "hidden" in ports else ()
        while remaining:
            count = self._draw_count()
            tokens, remaining = remaining[:count], remaining[count:]
            answer.rows(self._rows(tokens))
            yield from answer.take()
        if answer.ended:
            yield from answer.take()

    def _rows(self, tokens: tuple[int, ...]) -> NDArray[np.float32]:
        """The rows of tokens, [n, row_width], with a time stamp if the option asks for it."""
        rows = np.empty((len(tokens), self.options.row_width), np.float32)
        for i, token in enumerate(tokens):
            rows[i, : self.options.width] = formulas.row(token, self.options.width)
        if self.options.stamp:
            rows[:, self.options.width :] = formulas.stamp()
        return rows


class ToyTalker(Toy):
    """Implements `TalkerModel`: makes two frames of four codes from each row."""

    def __init__(self, options: ToyOptions) -> None:
        super().__init__(options)
        hidden = PortSpec("hidden", Content.TENSOR, width=options.row_width)
        rate = formulas.SAMPLE_RATE_HZ / options.samples_per_frame
        codes = PortSpec("codes", Content.CODES, rate_hz=rate, width=options.codebooks, compact=True)
        self.info = ModelInfo(
            "toy-talker", REVISION, (hidden,), (codes,), MAX_SESSIONS, voices=("toy",), draws=False, tells_unspoken=options.mute_every > 0
        )

    async def prepare(self, request: SpeechRequest) -> SpeechRequest:
        if request.voice not in ("", "toy"):
            raise BadRequest("talker.voice", f"no voice {request.voice!r}; there is only 'toy'")
        history_frames = 0 if request.history is None else len(request.history)
        if request.max_frames and history_frames >= request.max_frames:
            raise BadRequest("resume.history", f"{history_frames} frames are there and talker.max_frames is {request.max_frames}")
        return request

    async def speak(self, prepared: SpeechRequest, inputs: AsyncIterator[Piece], ports: Wanted) -> AsyncGenerator[Frames | Unspoken, None]:
        """See TalkerModel.speak. Codes depend on the rows alone, so of the frames in the history only the number counts."""
        request, first, frame_count = prepared, ports.get("codes", 0), 0
        async for piece in inputs:
            assert isinstance(piece.content, np.ndarray)
            # Rows of which at least one frame belongs to the speech.
            spoken_rows = -(-(request.max_frames - frame_count) // formulas.FRAMES_PER_ROW) if request.max_frames else len(piece.content)
            if unspoken := self._unspoken(piece.first, piece.content[:spoken_rows]):
                yield Unspoken(unspoken)
            codes = self._codes(piece.content)
            frames_before, frame_count = frame_count, frame_count + len(codes)
            codes = codes[max(first - frames_before, 0) :]
            if request.max_frames and frame_count >= request.max_frames:
                if ports:
                    excess = frame_count - request.max_frames
                    yield Frames(codes[: len(codes) - excess], FinishReason.LENGTH)
                return
            while ports and len(codes):
                count = min(self._draw_count(), len(codes))
                yield Frames(codes[:count])
                codes = codes[count:]
        if frame_count < first:
            raise BadRequest("resume.positions", f"the speech has {frame_count} frames: it cannot go on at frame {first}")
        if ports:
            yield Frames(np.empty((0, self.options.codebooks), np.uint32), FinishReason.STOP)

    def _unspoken(self, first: int, rows: Array) -> tuple[str, ...]:
        """The words of those rows that count as unspoken: see `mute_every`. first: index of the first row."""
        if not (every := self.options.mute_every):
            return ()
        # `-first % every` is the first of these rows whose number is divisible.
        return tuple(formulas.word(int(row[0])).strip() for row in rows[-first % every :: every])

    def _codes(self, rows: Array) -> NDArray[np.uint32]:
        """The codes of n rows, [2n, codebooks], with the time stamps of the rows if the option asks for them."""
        codes = formulas.frames(rows)
        if self.options.differs:
            codes = (codes + np.uint32(DIFFERENCE)) % np.uint32(1024)
        if self.options.stamp:
            stamps = rows[:, self.options.width :].astype(np.uint32)
            codes = np.concatenate([codes, stamps.repeat(formulas.FRAMES_PER_ROW, axis=0)], axis=1)
        return codes


class ToyCode2Wav(Toy):
    """Implements `Code2WavModel`: makes a saw tooth of each frame."""

    def __init__(self, options: ToyOptions, codebooks: int = 0) -> None:
        """codebooks: codes in a frame; 0: as many as the toy Talker makes."""
        super().__init__(options)
        rate = formulas.SAMPLE_RATE_HZ / options.samples_per_frame
        codes = PortSpec("codes", Content.CODES, rate_hz=rate, width=codebooks or options.codebooks, window=True)
        audio = PortSpec("audio", Content.AUDIO, rate_hz=formulas.SAMPLE_RATE_HZ, width=1)
        self.info = ModelInfo("toy-code2wav", REVISION, (codes,), (audio,), MAX_SESSIONS, draws=False)

    async def prepare(self, request: WaveRequest) -> WaveRequest:
        return request

    def first_frame(self, prepared: WaveRequest, sample: int) -> int:
        return max(sample // self.options.samples_per_frame - self.options.context, 0)

    async def decode(self, prepared: WaveRequest, inputs: AsyncIterator[Piece], ports: Wanted) -> AsyncGenerator[Sound, None]:
        """See Code2WavModel.decode. Each sample depends on its own frame alone; samples before the first wanted sample are dropped."""
        first, reached = ports["audio"], 0
        first_needed = self.first_frame(prepared, first)
        async for piece in inputs:
            assert isinstance(piece.content, np.ndarray)
            if not reached and piece.first > first_needed:
                raise BadRequest("codes", f"frames from {first_needed} on are needed for sample {first}, the first one is {piece.first}")
            begin, reached = (place * self.options.samples_per_frame for place in (piece.first, piece.first + len(piece.content)))
            if reached <= first or not len(piece.content):
                continue
            sound = self._sound(np.asarray(piece.content, np.uint32))[max(first - begin, 0) :]
            end = reached - len(sound)
            limit = self.options.chunk_samples or max(len(sound), 1)
            for place in range(0, len(sound), limit):
                if self.options.interval_s:
                    await asyncio.sleep(self.options.interval_s)
                part = sound[place : place + limit]
                end += len(part)
                yield Sound(part, self.first_frame(prepared, end), None if self.options.prebuffer_s < 0 else self.options.prebuffer_s)
        if reached < first:
            raise BadRequest("resume.positions", f"the sound has {reached} samples: it cannot go on at sample {first}")

    def _sound(self, codes: NDArray[np.uint32]) -> NDArray[np.float32]:
        """The samples of frames, [n, 1]; with the option `stamp` the first samples are time stamps."""
        sound = formulas.samples(codes, self.options.samples_per_frame)
        if self.options.stamp:
            stamps = np.concatenate([codes[0, formulas.CODEBOOKS :].astype(np.int64), formulas.stamp()])  # The Thinker's, and now.
            sound[: 2 * formulas.LIMBS, 0] = stamps / 32768
        return sound


class ToyDiffusion(Toy):
    """Implements `DiffusionModel`, in grey: pixel (x, y) of result n = (seed + n + x + y) mod 256, PNG. Previews have 16 shades."""

    def __init__(self, options: ToyOptions) -> None:
        super().__init__(options)
        image = PortSpec("image", Content.IMAGE)
        progress = PortSpec("progress", Content.PROGRESS)
        self.info = ModelInfo("toy-diffusion", REVISION, (), (image, progress), MAX_SESSIONS)

    async def prepare(self, request: DrawRequest) -> DrawRequest:
        check_plain_drawing(request, self.info.name)
        for name, value in (("width", request.width), ("height", request.height)):
            if value > 1024:
                raise BadRequest(f"diffusion.{name}", "at most 1024 pixels")
        for name, setting in (("frames", request.frames), ("duration_s", request.seconds), ("layers", request.layers)):
            if setting:
                raise BadRequest(f"diffusion.{name}", "this model draws still pictures of one layer; leave it out")
        if request.images:
            raise BadRequest("diffusion.images", "this model takes no pictures; leave them out")
        if request.media_type not in ("", "image/png"):
            raise BadRequest("diffusion.media_type", "this model makes image/png; ask for that or leave it out")
        return request

    def items(self, prepared: DrawRequest) -> Mapping[str, int]:
        return {"image": prepared.results}

    async def draw(
        self, prepared: DrawRequest, inputs: AsyncIterator[Piece], ports: Wanted
    ) -> AsyncGenerator[StepsDone | Preview | EncodedPicture, None]:
        width, height, steps = prepared.width or 64, prepared.height or 64, prepared.steps or 4
        for step in range(1, steps + 1):
            await asyncio.sleep(self.options.interval_s)
            yield StepsDone(step, steps)
            if step * prepared.previews // steps > (step - 1) * prepared.previews // steps:  # A preview is due.
                yield Preview(png(self._pixels(prepared.seed, width, height) // 16 * 16), "image/png", step)
        for n in range(ports.get("image", prepared.results), prepared.results):
            yield EncodedPicture(png(self._pixels(prepared.seed + n, width, height)), "image/png")

    def _pixels(self, seed: int, width: int, height: int) -> NDArray[np.uint8]:
        return ((seed % 256 + np.add.outer(np.arange(height), np.arange(width))) % 256).astype(np.uint8)


# Functions of the table of families -----------------------------------------------------------------------------------------------------


def _options(options: LoadOptions) -> ToyOptions:
    """The options of a toy that loads now, after the time that this takes."""
    toy_options = ToyOptions.from_settings(dict(options.family))
    time.sleep(toy_options.load_s)
    return toy_options


def load_thinker(folder: Path | None, options: LoadOptions) -> ToyThinker:
    return ToyThinker(_options(options))


def load_talker(folder: Path | None, options: LoadOptions) -> ToyTalker:
    return ToyTalker(_options(options))


def load_code2wav(folder: Path | None, options: LoadOptions) -> ToyCode2Wav:
    return ToyCode2Wav(_options(options))


def load_diffusion(folder: Path | None, options: LoadOptions) -> ToyDiffusion:
    return ToyDiffusion(_options(options))
