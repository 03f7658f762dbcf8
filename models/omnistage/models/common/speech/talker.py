"""The shared part of Talkers that speak the rows of an answer as they come, one frame of codes after the other.

A sequence begins with the rows of the conversation, rows that the Talker adds, and the row of the answer's first token, with which the
frames begin. The row of every further frame is the sum of its codes' embeddings and the next row of the answer. After the last row of the
answer come a row for the end of the text and, for the rest of the speech, a row for nothing.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from omnistage.engine.decoder import PackedDecoder
from omnistage.engine.engine import Engine
from omnistage.engine.memory import PAGE_ROWS, page_bytes
from omnistage.engine.request import Prompt, SequenceRequest
from omnistage.engine.sequence import SequenceStream
from omnistage.engine.types import Unfit
from omnistage.models.common.arrays import array_of
from omnistage.models.common.cache_size import CacheSize
from omnistage.models.common.engine_model import EngineModel
from omnistage.models.common.feed import PortFeed, next_rows
from omnistage.models.common.real_time import computing_s, speakers_text
from omnistage.models.common.requests import refuse_unfit
from omnistage.models.common.speech.blocks import Blocks
from omnistage.models.common.speech.opening import Opening
from omnistage.models.common.speech.ports import HIDDEN, PLACES, PROMPT
from omnistage.models.common.voices import choose_voice
from omnistage.models.common.worker import Worker
from omnistage.models.interface import BadRequest, FinishReason, Frames, ModelInfo, Piece, PortSpec, SpeechRequest, Wanted
from omnistage.models.options import LoadOptions

SPEAKERS = 8
"""Number of speeches at once when it is measured how many speakers the Talker serves in real time."""

LEAST_MEASURED = 4
"""Least number of frames of each speech in this measurement. It is above 1, because the first frame comes with the prompt."""


@dataclass(frozen=True, slots=True)
class Manner:
    """The constants of a family's Talker. place: how many numbers a place has on the port of places. codes: the output port. block: number
    of frames that go out together, after the first frame. ends: first codes that end a speech. silent: first codes that are never drawn.
    seen: first codes that the repetition penalty counts as drawn before the first frame."""

    place: int
    codes: PortSpec
    block: int
    ends: frozenset[int]
    silent: frozenset[int]
    seen: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, eq=False)
class AddedRows:
    """Rows [n, row_size] that a Talker adds. between: name of a voice -> rows between the conversation and the answer, equally many for
    each voice. behind: the two rows after the last row of an answer: a row for the end of the text, and a row for nothing."""

    between: Mapping[str, torch.Tensor]
    behind: torch.Tensor


@dataclass(frozen=True, slots=True)
class PreparedSpeaker:
    """A request to speak, and the name of its voice."""

    request: SpeechRequest
    voice: str


class RowTalker(EngineModel):
    """A Talker that speaks rows; implements `TalkerModel`. A family implements `lay_out`, which makes the prompt."""

    def __init__(self, manner: Manner, engine: Engine, added: AddedRows, info: ModelInfo, context: int) -> None:
        """added: rows that the Talker adds. context: largest number of rows of a conversation and frames of its speech together."""
        self._worker = Worker("rows", threads=1)
        super().__init__(engine, info, [self._worker])
        self._manner, self._added, self._context = manner, added, context

    @abstractmethod
    def lay_out(self, places: NDArray[np.int64], voice: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(items [rows, codebooks], positions [axes, rows]) of a prompt: the conversation, the added rows, and the first row of the answer.
        places: places of the conversation's rows, from the Thinker, [place, rows]."""

    async def warm_up(self) -> None:
        """Speak a little, to touch every weight; then speak several answers at once, to measure how many speakers it serves in real
        time."""
        await self._spoken(SpeechRequest(seed=0, max_frames=2))
        thread, device = self.engine.activity, self.engine.spec.device.type
        begin_s = computing_s(thread, device)
        max_frames = max(self._manner.block, LEAST_MEASURED)
        frames = await asyncio.gather(*(self._spoken(SpeechRequest(seed, max_frames=max_frames)) for seed in range(SPEAKERS)))
        seconds = max(sum(frames), 1) / self._manner.codes.rate_hz
        speakers = seconds / (computing_s(thread, device) - begin_s)
        self.info = replace(self.info, settings={**self.info.settings, "real_time_speakers": speakers_text(speakers)})

    async def _spoken(self, request: SpeechRequest) -> int:
        """Speak an answer of one token; returns the number of frames."""
        rows = array_of(self._added.behind[:1])
        places = np.zeros((1, self._manner.place), np.int32)
        pieces = [Piece(PROMPT, 0, True, rows), Piece(PLACES, 0, True, places), Piece(HIDDEN, 0, True, rows)]
        async with aclosing(self.speak(await self.prepare(request), _in_turn(pieces), {self._manner.codes.name: 0})) as frames:
            return sum([len(piece.rows) async for piece in frames])

    async def prepare(self, request: SpeechRequest) -> PreparedSpeaker:
        """See TalkerModel.prepare."""
        voice = choose_voice(self._added.between, request.voice, "talker.voice")
        if request.speed != 1:
            raise BadRequest("talker.speed", "this voice speaks at its own pace: leave it out, or give 1")
        prepared = PreparedSpeaker(request, voice)
        with refuse_unfit("talker"):
            # Faults of the request itself are reported before anything is read.
            self.engine.check(self.sequence(prepared, np.zeros((self._manner.place, 0), np.int64)))
        return prepared

    async def speak(self, prepared: PreparedSpeaker, inputs: AsyncIterator[Piece], ports: Wanted) -> AsyncGenerator[Frames, None]:
        """See TalkerModel.speak. An answer whose only token is its end has no row, and no speech."""
        request, width = prepared.request, self._manner.codes.width
        async with AsyncExitStack() as stack:
            opening, stream = await self._begun(prepared, inputs, stack)
            if stream is None:
                if request.history_items:
                    raise BadRequest("resume.history", "there is nothing to speak, and frames are there already")
                yield Frames(np.empty((0, width), np.uint32), FinishReason.STOP)
                return
            feed = PortFeed(stream, inputs, HIDDEN, self._added.behind)
            feed.give(torch.cat(opening.reply)[1:], last=opening.ended)
            blocks = Blocks(self._manner.block, len(request.history_items))
            async with feed.feeding():
                while True:
                    events = await feed.take()
                    reason = events[-1].finish_reason if events else None
                    codes = blocks.take([event.item for event in events if event.item is not None], end=reason is not None)
                    if codes or reason is not None:
                        yield Frames(np.array(codes, np.uint32).reshape(-1, width), reason)
                    if reason is not None:
                        return

    async def _begun(
        self, prepared: PreparedSpeaker, inputs: AsyncIterator[Piece], stack: AsyncExitStack
    ) -> tuple[Opening, SequenceStream | None]:
        """Begin a speech: collect its beginning, and start the sequence while the beginning comes, because a Thinker sends the rows of a
        long conversation long before it answers. stack: closes the stream. The stream is None if there is nothing to speak. Raises
        BadRequest, EngineFull or EngineClosed."""
        stream = None
        opening = Opening(self._manner.place, self._added.between[prepared.voice], self._context)
        while not opening.complete:
            opening.take(await next_rows(inputs))
            if not opening.readable:
                continue
            pages = await self._worker.run(opening.read)
            if stream is None:
                with refuse_unfit("talker"):
                    stream = self.engine.submit(self.sequence(prepared, opening.places))
                await stack.enter_async_context(aclosing(stream))
            for rows, digest in pages:
                stream.give(rows, digest)
        return opening, stream if opening.reply else None

    def sequence(self, prepared: PreparedSpeaker, places: NDArray[np.int64]) -> SequenceRequest:
        """The request to the engine for a speech after a conversation; the vectors of its prompt are given later. places: as in `lay_out`.
        Raises Unfit.

        A speech has at most as many frames as rows and positions are left: pictures and films may take more positions than rows."""
        request = prepared.request
        items, positions = self.lay_out(places, prepared.voice)
        prompt = Prompt(items, (), positions, int(positions.max()) + 1 - len(items), request.scope.encode(), given_later=True)
        room = min(self._context, self.engine.spec.context - prompt.delta) - len(prompt) + 1
        if room < 1:
            raise Unfit("prompt", f"shorten the conversation: its places reach beyond the {self.engine.spec.context} that there are")
        return SequenceRequest(
            prompt,
            seed=request.seed,
            max_items=min(request.max_frames or room, room),
            sampling=request.sampling,
            end_ids=self._manner.ends,
            banned=self._manner.silent,
            history=request.history_items,
            seen=self._manner.seen,
            appended=True,
            client=request.client,
        )


def positions_behind(positions: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Positions [axes, rows] of a conversation and of `count` rows after it. These count on, equal on all axes, from one more than the
    largest position of the conversation's last row."""
    after = int(positions[:, -1].max()) + 1 if positions.shape[1] else 0
    return np.concatenate((positions, np.broadcast_to(np.arange(after, after + count), (len(positions), count))), axis=1)


def cache_of_rows(decoder: PackedDecoder, row_size: int, options: LoadOptions, context: int, user_context: int) -> tuple[CacheSize, int]:
    """(the memory that a Talker takes, how many bytes of it are for keys and values). row_size: width of the rows that come. context,
    user_context: as in `CacheSize.choose`. Raises LoadError. A row that came is kept in the CPU's memory until its speech ends, because it
    may have to be computed again."""
    kv_row, spec = page_bytes(decoder.spec) // PAGE_ROWS, decoder.spec
    row_bytes = kv_row + (row_size * spec.dtype.itemsize if spec.device.type == "cpu" else 0)
    cache = CacheSize.choose(options, row_bytes=row_bytes, context=context, user_context=user_context)
    return cache, cache.kv_bytes // row_bytes * kv_row


async def _in_turn(pieces: Sequence[Piece]) -> AsyncIterator[Piece]:
    for piece in pieces:
        yield piece
