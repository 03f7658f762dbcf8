"""The Talker of Qwen2.5-Omni (Xu et al. 2025): speaks the rows of an answer as they come, one code after the other.

A sequence begins with the rows of the conversation, the voice token, and the row of the first token of the answer, with which the
codes begin. The row of every further code is its embedding and the next row of the answer; behind the last one stand the embeddings of the
end of the text and, for all that is still to be spoken, of nothing. As `Qwen2_5OmniForConditionalGeneration.generate` of Transformers means
it: what 5.20 to 5.23 compute for a request alone is something else, since they drop its mask, and with it places and special codes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from omnistage.engine.engine import Engine
from omnistage.engine.request import Prompt, SequenceRequest
from omnistage.engine.stream import SequenceStream
from omnistage.engine.types import Unfit
from omnistage.models.common.arrays import array_of
from omnistage.models.common.engine_model import EngineModel
from omnistage.models.common.feed import Feed, next_rows
from omnistage.models.common.real_time import computing_s, told
from omnistage.models.common.requests import unfit_refused
from omnistage.models.common.speech.blocks import Blocks
from omnistage.models.common.speech.opening import Opening
from omnistage.models.common.voices import choose_voice
from omnistage.models.common.worker import Worker
from omnistage.models.interface import BadRequest, FinishReason, Frames, ModelInfo, Piece, SpeechRequest, Wanted
from omnistage.models.qwen2_5_omni.config import TalkerConfig
from omnistage.models.qwen2_5_omni.ports import AXES, CODE_RATE_HZ, CODES, HIDDEN, PLACES, PROMPT, ROW_PORTS

SPEAKERS = 8
"""At once, when it is measured how many of them there can be."""

_EMPTY = np.empty((0, 1), np.uint32)


@dataclass(frozen=True, slots=True, eq=False)
class TextRows:
    """Embeddings of the Thinker, [n, row_size]. voices: of the voice tokens, by the names of the voices. behind: of the end of the text
    and of nothing, which follow the last row of an answer."""

    voices: Mapping[str, torch.Tensor]
    behind: torch.Tensor


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request, and the row of its voice token, [1, row_size]."""

    request: SpeechRequest
    voice: torch.Tensor


class QwenTalker(EngineModel):
    """Implements `TalkerModel`. Build it with `loading_talker.load_talker`."""

    def __init__(self, config: TalkerConfig, engine: Engine, text: TextRows, info: ModelInfo, context: int) -> None:
        """context: rows of a conversation and frames of its speech together."""
        self._worker = Worker("rows", threads=1)
        super().__init__(engine, info, [self._worker])
        self.config, self._text, self._context = config, text, context

    async def warm_up(self) -> None:
        """Speak a little, which touches every weight, and then with several at once, to tell how many speak in real time."""
        await self._spoken(SpeechRequest(seed=0, max_frames=2))
        thread, device = self.engine.activity, self.engine.spec.device.type
        begun = computing_s(thread, device)
        codes = await asyncio.gather(*(self._spoken(SpeechRequest(seed, max_frames=self.config.block)) for seed in range(SPEAKERS)))
        seconds = max(sum(codes), 1) / CODE_RATE_HZ
        speakers = seconds / (computing_s(thread, device) - begun)
        self._info = replace(self._info, settings={**self._info.settings, "real_time_speakers": told(speakers)})

    async def _spoken(self, request: SpeechRequest) -> int:
        """Codes of an answer of one token."""
        rows = array_of(self._text.behind[:1])
        pieces = [Piece(PROMPT, 0, True, rows), Piece(PLACES, 0, True, np.zeros((1, AXES), np.int32)), Piece(HIDDEN, 0, True, rows)]
        async with aclosing(self.speak(await self.prepare(request), _in_turn(pieces), {CODES: 0})) as frames:
            return sum([len(made.rows) async for made in frames])

    async def prepare(self, request: SpeechRequest) -> Prepared:
        """See TalkerModel.prepare."""
        voice = choose_voice(self._text.voices, request.voice, "talker.voice")
        if request.speed != 1:
            raise BadRequest("talker.speed", "this voice speaks at its own pace: leave it out, or give 1")
        with unfit_refused("talker"):
            # What is wrong with the request itself is told before anything is read.
            self.engine.check(self._asked(request, self._prompt(np.zeros((AXES, 0), np.int64), "")))
        return Prepared(request, self._text.voices[voice])

    async def speak(self, prepared: Prepared, inputs: AsyncIterator[Piece], wanted: Wanted) -> AsyncGenerator[Frames, None]:
        """See TalkerModel.speak. An answer whose only token is its end has no row, and no speech."""
        request = prepared.request
        async with AsyncExitStack() as held:
            opening, stream = await self._begun(prepared, inputs, held)
            if stream is None:
                if request.history_items:
                    raise BadRequest("resume.history", "there is nothing to speak, and frames are there already")
                yield Frames(_EMPTY, FinishReason.STOP)
                return
            feed = Feed(stream, inputs, HIDDEN, self._text.behind)
            feed.give(torch.cat(opening.reply)[1:], last=opening.ended)
            blocks = Blocks(self.config.block, len(request.history_items))
            async with feed.feeding():
                while True:
                    events = await feed.take()
                    reason = events[-1].finish_reason if events else None
                    codes = blocks.take([event.item for event in events if event.item is not None], end=reason is not None)
                    if codes or reason is not None:
                        yield Frames(np.array(codes, np.uint32).reshape(-1, 1), reason)
                    if reason is not None:
                        return

    async def _begun(self, prepared: Prepared, inputs: AsyncIterator[Piece], held: AsyncExitStack) -> tuple[Opening, SequenceStream | None]:
        """A speech up to its first code, read while it comes: a Thinker gives rows of a long conversation long before it answers. held:
        gets the stream, to close it. None: there is nothing to speak. Raises BadRequest, EngineFull or EngineClosed."""
        request, opening, stream = prepared.request, Opening(ROW_PORTS, AXES, prepared.voice, self._context), None
        while not opening.complete:
            opening.take(await next_rows(inputs))
            if not opening.readable:
                continue
            pages = await self._worker.run(opening.read)
            if stream is None:
                with unfit_refused("talker"):
                    stream = self.engine.submit(self._asked(request, self._prompt(opening.places, request.scope)))
                await held.enter_async_context(aclosing(stream))
            for rows, digest in pages:
                stream.give(rows, digest)
        return opening, stream if opening.reply else None

    def _prompt(self, places: NDArray[np.int64], scope: str) -> Prompt:
        """The rows of a conversation in their places, the voice token, and the first row of the answer."""
        codec, count = self.config.codec, places.shape[1] + 2
        items = np.full((count, 1), self.config.nothing, np.int64)
        items[-2:, 0] = codec.pad, codec.bos
        after = int(places[:, -1].max()) + 1 if places.shape[1] else 0
        positions = np.concatenate((places, np.broadcast_to(np.arange(after, after + 2), (AXES, 2))), axis=1)
        return Prompt(items, (), positions, int(positions.max()) + 1 - count, scope.encode(), given_later=True)

    def _asked(self, request: SpeechRequest, prompt: Prompt) -> SequenceRequest:
        """Raises Unfit. Speech has as many frames as there are rows left, and places: those of pictures and films may outrun their rows."""
        codec = self.config.codec
        room = min(self._context, self.engine.spec.context - prompt.delta) - len(prompt) + 1
        if room < 1:
            raise Unfit("prompt", f"shorten the conversation: its places reach beyond the {self.engine.spec.context} that there are")
        return SequenceRequest(
            prompt,
            seed=request.seed,
            max_items=min(request.max_frames or room, room),
            sampling=request.sampling,
            end_ids=frozenset({codec.eos, codec.pad}),
            banned=self.config.silent,
            history=request.history_items,
            seen=frozenset({codec.mask, codec.pad, codec.bos}),
            appended=True,
            client=request.client,
        )


async def _in_turn(pieces: Sequence[Piece]) -> AsyncIterator[Piece]:
    for piece in pieces:
        yield piece
