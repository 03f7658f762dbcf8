"""A toy that sees and hears. It is arithmetic, but uses all that a model with media, prompt rows and a Talker uses.

Its Thinker reads pictures and sound, puts every item of the prompt at a place on three axes, makes prompt rows and reply rows in
bfloat16, and the items themselves as int64. Its Talker makes a frame of two codes from its own last frame and the next row: it waits for
rows, and to go on it needs its last frame. The formulas are in formulas.py.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import numpy as np
from numpy.typing import NDArray

from omnistage.engine.detokenizer import Detokenizer
from omnistage.models.conversation import Media, Medium, Part, Streamed
from omnistage.models.interface import (
    Array,
    BadRequest,
    Content,
    ElementType,
    FinishReason,
    Frames,
    ModelInfo,
    Piece,
    PortSpec,
    SpeechRequest,
    TensorRows,
    TextPiece,
    TextRequest,
    Wanted,
)
from omnistage.models.media.spool import MEDIA_PORTS, Files, Spool, Spooled, next_piece
from omnistage.models.options import LoadOptions, validate_options
from omnistage.models.requests import check_bias, check_constraint, check_parts, check_place
from omnistage.models.text.answer import AnswerAssembler
from omnistage.models.toy import formulas
from omnistage.models.toy.files import MAX_BYTES, Unreadable, pixels_of, samples_of
from omnistage.models.toy.stages import MAX_SESSIONS, Toy, ToyCode2Wav, ToyOptions

REVISION = "1"
VOICES = ("toy", "other")
MAX_FILM_BYTES = 512 << 20
ENDLESS = 1 << 16
"""The limit of frames of a speech."""

TEXT = PortSpec("text", Content.TEXT, compact=True)
PROMPT = PortSpec("prompt", Content.TENSOR, width=formulas.OMNI_WIDTH, element_type=ElementType.BFLOAT16)
PLACES = PortSpec("places", Content.TENSOR, width=4, element_type=ElementType.INT64)
HIDDEN = PortSpec("hidden", Content.TENSOR, width=formulas.OMNI_WIDTH, element_type=ElementType.BFLOAT16)
MICROPHONE = PortSpec("microphone", Content.AUDIO, rate_hz=formulas.SAMPLE_RATE_HZ, width=1)


@dataclass(frozen=True, slots=True)
class OmniOptions:
    """The options of ToyOptions that every stage of toy-omni has. of: the stages, as error texts name them."""

    of: ClassVar[str] = "the talker and the code2wav of toy-omni"

    interval_s: float = 0.0
    max_chunk: int = 4
    length: int = formulas.NATURAL_LENGTH
    samples_per_frame: int = formulas.SAMPLES_PER_FRAME

    @classmethod
    def from_settings(cls, options: dict[str, Any]) -> Self:
        return cls(**validate_options(options, cls(), cls.of))

    @property
    def common(self) -> ToyOptions:
        return ToyOptions(self.interval_s, self.max_chunk, samples_per_frame=self.samples_per_frame)


@dataclass(frozen=True, slots=True)
class OmniThinkerOptions(OmniOptions):
    """microphone: it also reads sound that comes on the port `microphone`. films: also films, by digest, and all media on ports."""

    of: ClassVar[str] = "the thinker of toy-omni"

    microphone: bool = False
    films: bool = False


class _Omni(Toy):
    """A stage of toy-omni, with its options."""

    def __init__(self, options: OmniOptions) -> None:
        super().__init__(options.common)
        self.omni = options


@dataclass(frozen=True, slots=True)
class PreparedToy:
    """A request. contents: of its parts, in order. A `Streamed` stands for a medium that still has to come on its port."""

    request: TextRequest
    contents: tuple[formulas.Seen | Streamed, ...]


class OmniThinker(_Omni):
    """Implements `ThinkerModel`: each token is the token before it plus 7; the first token depends on all items of the prompt."""

    def __init__(self, options: OmniThinkerOptions) -> None:
        super().__init__(options)
        films: tuple[Medium, ...] = ("video",) if options.films else ()
        self.info = ModelInfo(
            "toy-omni-thinker",
            REVISION,
            accepts=(MICROPHONE,) * options.microphone + MEDIA_PORTS * options.films,
            produces=(TEXT, PROMPT, PLACES, HIDDEN),
            max_sessions=MAX_SESSIONS,
            inputs=("text", "image", "audio", *films),
            draws=True,
        )
        self._spool = Spool()

    async def prepare(self, request: TextRequest) -> PreparedToy:
        check_parts(request, self.info)
        check_constraint(request, self.info)
        check_bias(request, formulas.VOCABULARY)
        if request.verbatim:
            raise BadRequest("thinker.verbatim", f"{self.info.name} says only what it thinks; leave it out")
        if request.finished is None and request.history and len(request.history) >= self._length(request):
            raise BadRequest("resume.history", f"the answer has {self._length(request)} tokens: it ends before it can go on")
        self._files(part for turn in request.turns for part in turn.parts)  # Refuses media whose declared size is too large.
        # Not on the event loop, like a model with weights: many small pictures cost as much as a large one.
        return await asyncio.to_thread(_prepare, request)

    def _length(self, request: TextRequest) -> int:
        return request.max_tokens if request.ignore_eos else min(self.omni.length, request.max_tokens)

    async def generate(
        self, prepared: PreparedToy, inputs: AsyncIterator[Piece], ports: Wanted
    ) -> AsyncGenerator[TextPiece | TensorRows, None]:
        """See ThinkerModel.generate. Prompt rows come first; the row of a token comes a step after the token."""
        request, total = prepared.request, self._length(prepared.request)
        streamed = await self._streamed(prepared, inputs)
        parts = [streamed[one.port] if isinstance(one, Streamed) else one for one in prepared.contents]
        first, prompt_rows = await asyncio.to_thread(self._read_through, parts, request.seed, ports)
        for rows in prompt_rows:
            yield rows
        detokenizer = Detokenizer(lambda token_id: formulas.word(token_id).encode(), request.stop)
        answer = AnswerAssembler(detokenizer, ports, history=request.history, finished=request.finished, row_port=HIDDEN.name)
        answer.asked_with(len(formulas.items(parts)))
        due_tokens = list(request.history[ports[HIDDEN.name] :]) if HIDDEN.name in ports else []
        n = len(request.history)
        while True:
            for piece in answer.take():
                yield piece
            if answer.complete:
                return
            if due_tokens:
                answer.rows(formulas.omni_rows(due_tokens))
            due_tokens = []
            if not answer.ended:
                if self.omni.interval_s:
                    await asyncio.sleep(self.omni.interval_s)
                tokens = [formulas.later_token(first, n + i) for i in range(min(self._draw_count(), total - n))]
                for token in tokens:
                    answer.token(token)
                n += len(tokens)
                due_tokens = tokens if HIDDEN.name in ports else []
                if n == total:
                    answer.end(FinishReason.STOP if total == self.omni.length else FinishReason.LENGTH)

    def _files(self, parts: Iterable[object]) -> Files:
        return self._spool.files((part for part in parts if isinstance(part, Streamed) and part.port != MICROPHONE.name), _most_bytes)

    async def _streamed(self, prepared: PreparedToy, inputs: AsyncIterator[Piece]) -> dict[str, formulas.Seen]:
        """Wait until all media on ports are complete; returns their contents, by port."""
        sound = [np.empty(0, np.int16)]
        is_sound_whole = not any(isinstance(one, Streamed) and one.port == MICROPHONE.name for one in prepared.contents)
        async with self._files(prepared.contents) as files:
            while not (is_sound_whole and files.are_whole):
                piece = await next_piece(inputs)
                if not await files.take(piece) and piece.port == MICROPHONE.name:
                    assert isinstance(piece.content, np.ndarray)
                    sound.append(np.clip(np.rint(piece.content[:, 0] * 32768), -32768, 32767).astype(np.int16))
                    is_sound_whole = piece.last
            read = {port: await asyncio.to_thread(_look_at_port, medium) for port, medium in files.complete_media.items()}
        return {MICROPHONE.name: np.concatenate(sound), **read}

    def _read_through(self, parts: Sequence[formulas.Seen], seed: int, ports: Wanted) -> tuple[int, list[TensorRows]]:
        """The first token of the answer, and the wanted rows of the prompt."""
        prompt = formulas.items(parts)
        return formulas.omni_token(seed, prompt, 0), list(self._prompt(prompt, ports))

    def _prompt(self, prompt: NDArray[np.int64], ports: Wanted) -> Iterator[TensorRows]:
        """Yield the wanted rows of the two ports of the prompt, of each in two halves. prompt: as from formulas.items."""
        for port, make_rows in ((PROMPT.name, formulas.prompt_rows), (PLACES.name, lambda items: items)):
            if port in ports:
                check_place(ports, port, len(prompt), "items of the prompt")
                rows: Array = make_rows(prompt[ports[port] :])
                if half := len(rows) // 2:
                    yield TensorRows(port, rows[:half])
                yield TensorRows(port, rows[half:], last=True)


def _prepare(request: TextRequest) -> PreparedToy:
    numbers = map(str, count(1))
    parts = ((turn.role[0], *(_read(part, numbers) for part in turn.parts)) for turn in request.turns)
    return PreparedToy(request, tuple(chain.from_iterable(parts)))


def _read(part: Part, numbers: Iterator[str]) -> formulas.Seen | Streamed:
    """The content of a part; a `Streamed` stays. numbers: yields the number of the next medium, for error texts."""
    if isinstance(part, str):
        return part
    number = next(numbers)
    return _look_at(part, "thinker.messages.parts.media", medium=number) if isinstance(part, Media) else part


def _look_at_port(medium: Spooled) -> formulas.Seen:
    """Read the medium that came on a port. Raises BadRequest."""
    if medium.streamed.kind == "video":
        return formulas.film(medium.digest, use_audio=medium.streamed.use_audio)
    media = Media(medium.streamed.media_type, os.pread(medium.file, medium.size, 0))
    return _look_at(media, "thinker.messages.parts.port", port=medium.streamed.port)


def _look_at(media: Media, field: str, **place: str) -> formulas.Seen:
    """The content of a medium. Raises BadRequest with `field` and `place`, which say where the medium stands."""
    try:
        if media.kind == "video":
            return formulas.film(media.digest, use_audio=media.use_audio)
        if media.kind == "image":
            return pixels_of(media.data)
        return samples_of(media.data, formulas.SAMPLE_RATE_HZ)
    except Unreadable as error:
        raise BadRequest(field, str(error), **place) from None


def _most_bytes(streamed: Streamed) -> int:
    return MAX_FILM_BYTES if streamed.kind == "video" else MAX_BYTES


class OmniTalker(_Omni):
    """Implements `TalkerModel`: makes a frame of two codes from the frame before and the next row."""

    def __init__(self, options: OmniOptions) -> None:
        super().__init__(options)
        rate = formulas.SAMPLE_RATE_HZ / options.samples_per_frame
        codes = PortSpec("codes", Content.CODES, rate_hz=rate, width=formulas.OMNI_CODEBOOKS, compact=True)
        self.info = ModelInfo("toy-omni-talker", REVISION, (PROMPT, PLACES, HIDDEN), (codes,), MAX_SESSIONS, voices=VOICES, draws=False)

    async def prepare(self, request: SpeechRequest) -> SpeechRequest:
        if request.voice not in ("", *VOICES):
            raise BadRequest("talker.voice", f"no voice {request.voice!r}; there are {', '.join(VOICES)}")
        history_frames = 0 if request.history is None else len(request.history)
        if history_frames >= (request.max_frames or ENDLESS):
            raise BadRequest("resume.history", f"{history_frames} frames are there and speech has at most {request.max_frames or ENDLESS}")
        return request

    async def speak(self, prepared: SpeechRequest, inputs: AsyncIterator[Piece], ports: Wanted) -> AsyncGenerator[Frames, None]:
        """See TalkerModel.speak. Each row makes one frame, and TAIL more follow. Frames of the history are not made again."""
        history = prepared.history if prepared.history is not None else np.empty((0, formulas.OMNI_CODEBOOKS), np.uint32)
        limit = prepared.max_frames or ENDLESS
        prompt, rows = _Prompt(prepared.voice), list[int]()
        frame_before = tuple(map(int, history[-1])) if len(history) else None
        n, is_over = len(history), False
        async for piece in inputs:
            content = cast(Array, piece.content)
            if piece.port == HIDDEN.name:
                rows += formulas.from_bfloat16(content[:, 0].astype(np.uint16)).tolist()
                is_over = piece.last
            else:
                prompt.take(piece.port, content, last=piece.last)
            if not prompt.is_whole:
                continue
            frames = []
            tail = [0] * formulas.TAIL if is_over else []
            for row in [*rows, *tail][n:limit]:
                frame_before = formulas.next_frame(frame_before or (prompt.key, 0), row, n)
                frames.append(frame_before)
                n += 1
            for chunk in self._cuts(frames):
                yield Frames(np.array(chunk, np.uint32))
            if n == limit or (is_over and n == len(rows) + formulas.TAIL):
                reason = FinishReason.LENGTH if n == limit else FinishReason.STOP
                yield Frames(np.empty((0, formulas.OMNI_CODEBOOKS), np.uint32), reason)
                return
        raise BadRequest("resume.history", f"the speech has fewer frames than the {len(history)} that are there")

    def _cuts(self, frames: Sequence[Sequence[int]]) -> Iterator[Sequence[Sequence[int]]]:
        """Cut frames into pieces of random size."""
        while frames:
            size = self._draw_count()
            yield frames[:size]
            frames = frames[size:]


class _Prompt:
    """Adds up a prompt for the Talker. is_whole: whether all of it has come. key: its sum, from which the first frame is made."""

    def __init__(self, voice: str) -> None:
        self._sum = 100 * VOICES.index(voice or VOICES[0])
        self._missing = {PROMPT.name, PLACES.name}

    def take(self, port: str, content: Array, *, last: bool) -> None:
        """Add rows of a port of the prompt. last: the port has no more."""
        values = formulas.from_bfloat16(content[:, 0].astype(np.uint16)) if port == PROMPT.name else content[:, 0].astype(np.int64)
        self._sum += int(values.sum())
        if last:
            self._missing.discard(port)

    @property
    def is_whole(self) -> bool:
        return not self._missing

    @property
    def key(self) -> int:
        return self._sum % 1024


class OmniCode2Wav(ToyCode2Wav):
    """Implements `Code2WavModel` as ToyCode2Wav does, for frames of two codes."""

    def __init__(self, options: OmniOptions) -> None:
        super().__init__(options.common, formulas.OMNI_CODEBOOKS)


# Functions of the table of families -----------------------------------------------------------------------------------------------------


def load_thinker(folder: Path | None, options: LoadOptions) -> OmniThinker:
    return OmniThinker(OmniThinkerOptions.from_settings(dict(options.family)))


def load_talker(folder: Path | None, options: LoadOptions) -> OmniTalker:
    return OmniTalker(OmniOptions.from_settings(dict(options.family)))


def load_code2wav(folder: Path | None, options: LoadOptions) -> OmniCode2Wav:
    return OmniCode2Wav(OmniOptions.from_settings(dict(options.family)))
