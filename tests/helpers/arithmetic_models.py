"""A Thinker and a Talker on the real engine, with the decoder of arithmetic.py: pictures as given rows at places on three axes, prompt rows
and reply rows as taps, and speech that starves until its next row comes. They show that the engine and the interface fit together."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

import numpy as np
import torch

from helpers import arithmetic
from helpers.arithmetic import GIVEN, IDS, TAPS, engine, prompt_items
from helpers.engines import TAPPED, TINY, tiny_weights
from omnistage.engine.adapter import TokenHead
from omnistage.engine.decoder import PackedDecoder
from omnistage.engine.detokenizer import Detokenizer
from omnistage.engine.engine import Engine
from omnistage.engine.request import Given, Prompt, SequenceEvent, SequenceRequest
from omnistage.engine.scheduler import SchedulerLimits
from omnistage.engine.sequence import SequenceStream
from omnistage.models.conversation import Media
from omnistage.models.interface import (
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
from omnistage.models.options import with_resumed
from omnistage.models.requests import check_constraint, check_parts, refuse_unfit
from omnistage.models.speech.talker import PortFeed
from omnistage.models.text.answer import AnswerAssembler, EngineStream, answer_pieces
from omnistage.models.text.engine_model import EngineModel, array_of
from omnistage.models.toy import formulas
from omnistage.models.toy.files import Unreadable, pixels_of

SESSIONS = 16
TAIL = 3
"""Frames after the last row."""
MAX_ROWS = 500
OPENING = Prompt(prompt_items([1, 2, 3]))
"""The beginning of every speech."""


class OnEngine(EngineModel):
    def __init__(self, info: ModelInfo, own: Engine | None = None) -> None:
        super().__init__(own or engine(200, max_sequences=8, max_waiting=with_resumed(SESSIONS)), info)

    async def warm_up(self) -> None:
        return


@dataclass(frozen=True, slots=True)
class PreparedArithmetic:
    """asked: as if all was wanted."""

    request: TextRequest
    asked: SequenceRequest


class ArithmeticThinker(OnEngine):
    """A token is a frame of two codes as one number."""

    def __init__(self, own: Engine | None = None) -> None:
        text = PortSpec("text", Content.TEXT, compact=True)
        rows = (PortSpec(name, Content.TENSOR, width=TAPS) for name in ("prompt", "hidden"))
        super().__init__(ModelInfo("arithmetic-thinker", "1", (), (text, *rows), SESSIONS, inputs=("text", "image"), draws=True), own)

    async def prepare(self, request: TextRequest) -> PreparedArithmetic:
        check_parts(request, self.info)
        check_constraint(request, self.info)
        if request.verbatim:
            raise BadRequest("thinker.verbatim", "this model says only what it thinks; leave it out")
        if request.finished is None and len(request.history) >= request.max_tokens:
            raise BadRequest("resume.history", f"the answer has {request.max_tokens} tokens at most: it ended before")
        with refuse_unfit("thinker"):
            asked = self.asked(request)
            self.engine.check(asked)
        return PreparedArithmetic(request, asked)

    def asked(self, request: TextRequest) -> SequenceRequest:
        """The request that the engine gets. Raises Unfit, or BadRequest."""
        parts = [part for turn in request.turns for part in turn.parts]
        seen = [_read(part) if isinstance(part, Media) else str(part) for part in parts]
        places = formulas.items(seen)
        given, at = [], 0
        for part, one in zip(parts, seen, strict=True):
            count = len(formulas.items([one]))
            if isinstance(part, Media):
                values = places[at : at + count, :1]
                vectors = torch.from_numpy(np.concatenate([values % 20, values // 20 % 20], axis=1)).float()
                given.append(Given(at, vectors, part.digest))
            at += count
        delta = formulas.next_place(places) - len(places)
        positions = np.ascontiguousarray(places[:, 1:].T)
        return SequenceRequest(
            Prompt(prompt_items((places[:, 0] % IDS).tolist()), tuple(given), positions, delta, request.scope.encode()),
            request.seed,
            request.max_tokens + 1,
            request.sampling,
            history=tuple(divmod(token_id, IDS) for token_id in request.history),
            client=request.client,
        )

    def tokens(self, stream: SequenceStream) -> EngineStream[torch.Tensor]:
        """The items of the engine as the tokens of the answer."""
        return _Tokens(stream)

    async def generate(
        self, prepared: PreparedArithmetic, inputs: AsyncIterator[Piece], ports: Wanted
    ) -> AsyncGenerator[TextPiece | TensorRows, None]:
        request = prepared.request
        answer = AnswerAssembler(
            Detokenizer(lambda token_id: f"{token_id} ".encode(), request.stop),
            ports,
            history=request.history,
            finished=request.finished,
            max_tokens=request.max_tokens,
            row_port="hidden",
            prompt_port="prompt",
            prompt_rows=len(prepared.asked.prompt),
        )
        asked = replace(prepared.asked, max_items=answer.items, taps_from=answer.first_slot)
        async with aclosing(self.engine.submit(asked)) as stream, aclosing(answer_pieces(self.tokens(stream), answer, array_of)) as pieces:
            async for piece in pieces:
                yield piece


def _read(media: Media) -> formulas.Seen:
    try:
        return pixels_of(media.data)
    except Unreadable as error:
        raise BadRequest("thinker.messages.parts.media", str(error)) from None


@dataclass(frozen=True, slots=True)
class _Tokens:
    """A stream of frames as a stream of tokens."""

    stream: SequenceStream

    async def take(self) -> Sequence[SequenceEvent]:
        events = await self.stream.take()
        return [replace(event, item=None if event.item is None else (event.item[0] * IDS + event.item[1],)) for event in events]


class ArithmeticTalker(OnEngine):
    """One frame for each row, and TAIL more."""

    def __init__(self) -> None:
        hidden = PortSpec("hidden", Content.TENSOR, width=GIVEN)
        codes = PortSpec("codes", Content.CODES, rate_hz=50, width=2, compact=True)
        super().__init__(ModelInfo("arithmetic-talker", "1", (hidden,), (codes,), SESSIONS, voices=("one",), draws=True))

    async def prepare(self, request: SpeechRequest) -> SequenceRequest:
        if request.voice not in ("", *self.info.voices):
            raise BadRequest("talker.voice", f"no voice {request.voice!r}; there is only 'one'")
        with refuse_unfit("talker"):
            asked = SequenceRequest(
                OPENING, request.seed, MAX_ROWS, request.sampling, history=request.history_items, appended=True, client=request.client
            )
            self.engine.check(asked)
        return asked

    async def speak(self, prepared: SequenceRequest, inputs: AsyncIterator[Piece], ports: Wanted) -> AsyncGenerator[Frames, None]:
        made, whole = len(prepared.history), MAX_ROWS
        async with aclosing(self.engine.submit(prepared)) as stream:
            feed = PortFeed(stream, inputs, "hidden")
            async with feed.feeding():
                while made < whole:
                    items = [event.item for event in await feed.take() if event.item is not None]
                    whole = feed.rows + TAIL if feed.has_ended else MAX_ROWS
                    items = items[: max(whole - made, 0)]
                    made += len(items)
                    if items:
                        yield Frames(np.array(items, np.uint32))
        yield Frames(np.empty((0, 2), np.uint32), FinishReason.STOP)


def frames_by_hand(rows: np.ndarray, seed: int) -> list[tuple[int, ...]]:
    """The codes that the Talker says for rows."""
    return arithmetic.answer(OPENING, seed, len(rows) + TAIL, rows.tolist())[0]


class TinyThinker(ArithmeticThinker):
    """With the decoder of engines.py in bfloat16, whose rows go out as they are. It reads the bytes of a conversation, and says the numbers
    of its tokens."""

    def __init__(self) -> None:
        text = PortSpec("text", Content.TEXT, compact=True)
        width = TINY.hidden_size
        rows = (PortSpec(name, Content.TENSOR, width=width, element_type=ElementType.BFLOAT16) for name in ("prompt", "hidden"))
        decoder = PackedDecoder(TINY, tiny_weights(torch.bfloat16), TAPPED)
        limits = SchedulerLimits(max_sequences=8, max_waiting=with_resumed(SESSIONS))
        own = Engine(decoder, TokenHead(decoder.logits), pages=100, limits=limits, poison=True)
        OnEngine.__init__(self, ModelInfo("tiny-thinker", "1", (), (text, *rows), SESSIONS, inputs=("text",)), own)

    def asked(self, request: TextRequest) -> SequenceRequest:
        return SequenceRequest(
            Prompt.of_tokens("".join(turn.text for turn in request.turns).encode(), request.scope.encode()),
            request.seed,
            request.max_tokens + 1,
            request.sampling,
            history=tuple((token_id,) for token_id in request.history),
            client=request.client,
        )

    def tokens(self, stream: SequenceStream) -> EngineStream[torch.Tensor]:
        return stream
