"""The shared part of Talkers that speak the rows of an answer as they come, one frame of codes after the other, and the ports from a
Thinker to a Talker, and on to a Code2Wav.

A sequence begins with the rows of the conversation, rows that the Talker adds, and the row of the answer's first token, with which the
frames begin (`Opening` collects this beginning as it comes). The row of every further frame is the sum of its codes' embeddings and the
next row of the answer. After the last row of the answer come a row for the end of the text and, for the rest of the speech, a row for
nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray

from omnistage.engine.adapter import Head, TokenHead
from omnistage.engine.decoder import PackedDecoder
from omnistage.engine.engine import Engine
from omnistage.engine.memory import PAGE_ROWS, page_bytes
from omnistage.engine.request import Prompt, SequenceEvent, SequenceRequest
from omnistage.engine.sequence import SequenceStream
from omnistage.engine.types import Item, Unfit
from omnistage.models.checkpoint.files import BadCheckpoint, name_of
from omnistage.models.checkpoint.revision import compute_on_thread
from omnistage.models.checkpoint.weights import Weights
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
    Wanted,
    inputs_of,
)
from omnistage.models.memory import CacheSize
from omnistage.models.options import LoadOptions
from omnistage.models.requests import choose_voice, refuse_unfit
from omnistage.models.speech.pace import computing_s, speakers_text
from omnistage.models.text.engine_model import EngineModel, Logits, Started, array_of, limits_of, tensor_of
from omnistage.models.text.thinker import TEXT
from omnistage.models.worker import Worker

PROMPT, PLACES, HIDDEN, CODES = "prompt", "places", "hidden", "codes"
"""Names of ports: rows of the conversation, places of these rows, rows of the answer, and codes of speech."""

AXES = 3
"""Number of axes of a place: time, height, width. A family may add further numbers to a place."""


def thinker_ports(width: int, dtype: str, *, place: int) -> tuple[PortSpec, ...]:
    """The output ports of a Thinker. width, dtype: of its rows. place: how many numbers a place has; 0: there is no Talker."""
    text = PortSpec(TEXT, Content.TEXT, compact=True)
    return (text, *row_ports(width, dtype, place=place)) if place else (text,)


def row_ports(width: int, dtype: str, *, place: int) -> tuple[PortSpec, ...]:
    """The ports from a Thinker to a Talker; arguments as in `thinker_ports`."""
    rows = PortSpec("", Content.TENSOR, width=width, element_type=ElementType(dtype))
    places = PortSpec(PLACES, Content.TENSOR, width=place, element_type=ElementType.INT32)
    return replace(rows, name=PROMPT), places, replace(rows, name=HIDDEN)


def codes_port(width: int, rate_hz: float) -> PortSpec:
    """The output port of a Talker. width: number of codes in a frame. rate_hz: frames in a second."""
    return PortSpec(CODES, Content.CODES, rate_hz=rate_hz, width=width, compact=True)


Page = tuple[torch.Tensor, bytes]
"""Rows [n, row_size] and a digest of their bits."""


class Opening:
    """The beginning of one speech. Call `take` with each piece until it is `complete`; meanwhile its rows can be read page by page. places:
    places of the conversation's rows, int64 [axes, rows]; empty until all have come. reply: rows of the answer that have come. has_ended:
    whether no more rows of the answer come. `_missing`: ports whose end has not come."""

    def __init__(self, axes: int, between: torch.Tensor, context: int) -> None:
        """axes: how many numbers a place has. between: rows [n, row_size] between the conversation and the answer. context: largest number
        of rows of a conversation and frames of its speech together."""
        self._between, self._context = between, context
        self._missing = {PROMPT, PLACES}
        # Counted as they come, because rows may come one by one, and adding up all lengths each time would delay all sessions.
        self._count = dict.fromkeys((PROMPT, PLACES, HIDDEN), 0)
        self._read = 0  # number of rows that `read` has returned
        self._unread: list[torch.Tensor] = []  # rows of the conversation that `read` has not returned
        self._parts: list[torch.Tensor] = []  # places that have come
        self.places: NDArray[np.int64] = np.zeros((axes, 0), np.int64)
        self.reply: list[torch.Tensor] = []
        self.has_ended = False

    @property
    def complete(self) -> bool:
        return not self._missing and bool(self.reply or self.has_ended)

    @property
    def readable(self) -> bool:
        """Whether `read` would return rows now: a whole page, or the last rows."""
        return PLACES not in self._missing and (self._has_all or self._count[PROMPT] - self._read >= PAGE_ROWS)

    @property
    def _has_all(self) -> bool:
        """Whether all rows are there, including the first row of the answer."""
        return not self._missing and bool(self.reply)

    def take(self, piece: Piece) -> None:
        """Add a piece. Raises BadRequest for a conversation that is too long, and for rows and places whose numbers differ."""
        rows = tensor_of(cast(Array, piece.content))
        if piece.port == HIDDEN:
            # Further rows of the answer are dropped, because a Thinker may have a longer context than its Talker, which could not speak
            # them.
            rows = rows[: self._context - self._count[HIDDEN]]
        if len(rows):
            {PROMPT: self._unread, PLACES: self._parts, HIDDEN: self.reply}[piece.port].append(rows)
            self._count[piece.port] += len(rows)
        if piece.last:
            self._missing.discard(piece.port)
            self.has_ended = self.has_ended or piece.port == HIDDEN
            if piece.port == PLACES and self._parts:
                self.places = torch.cat(self._parts).to(torch.int64).T.numpy()
        self._check()

    def _check(self) -> None:
        """Raises BadRequest, see `take`."""
        rows, places = self._count[PROMPT], self._count[PLACES]
        # One row less, to leave room for the first row of the answer, with which the codes begin.
        max_rows = self._context - len(self._between) - 1
        if max(rows, places) > max_rows:
            raise BadRequest("thinker.messages", f"shorten the conversation: the Talker takes {max_rows} rows")
        has_places, has_both = PLACES not in self._missing, not self._missing
        if (has_places and rows > places) or (has_both and rows != places):
            raise BadRequest("talker", f"a conversation of {rows} rows has {places} places: give each row one")

    def read(self) -> list[Page]:
        """Rows of the sequence that were not read before, as pages with digests, by which the prefix cache finds them when the conversation
        goes on later. Before the first row of the answer has come, only whole pages are read. Call it on a thread that may compute."""
        rows = torch.cat([*self._unread, self._between, self.reply[0][:1]] if self._has_all else self._unread)
        count = len(rows) if self._has_all else len(rows) // PAGE_ROWS * PAGE_ROWS
        # Cloned, because the rest may be few rows, and a view of them would keep all rows in memory.
        self._unread = [rows[count:].clone()]
        self._read += count
        pages = [rows[first : min(first + PAGE_ROWS, count)] for first in range(0, count, PAGE_ROWS)]
        return [(page, hashlib.sha256(array_of(page).data).digest()) for page in pages]


async def next_rows(inputs: AsyncIterator[Piece]) -> Piece:
    """The next piece of the inputs. Raises BadRequest if there is none, as after an interrupt."""
    piece = await anext(inputs, None)
    if piece is None:
        raise BadRequest("talker", "the rows of the answer ended before the last one")
    return piece


class PortFeed:
    """Passes the rows of a port to a sequence as they come, while the caller takes the sequence's items. rows: number of rows passed so
    far, including `end_rows`. has_ended: whether all rows have been passed."""

    def __init__(self, stream: SequenceStream, inputs: AsyncIterator[Piece], port: str, end_rows: torch.Tensor | None = None) -> None:
        """stream: the sequence. inputs: pieces of all ports. port: the port whose rows are used. end_rows: rows [n, width] that follow the
        port's last row; None: there are none."""
        self._stream, self._inputs, self._port, self._end_rows = stream, inputs, port, end_rows
        self._task: asyncio.Task[None] | None = None
        self.rows, self.has_ended = 0, False

    def give(self, rows: torch.Tensor, *, last: bool) -> None:
        """Pass the next rows [n, width] to the sequence; do not change them afterwards. last: the port has no more."""
        if last and self._end_rows is not None:
            rows = torch.cat((rows, self._end_rows))
        self.rows += len(rows)
        self.has_ended = last
        self._stream.append(rows, end=last)

    @asynccontextmanager
    async def feeding(self) -> AsyncIterator[None]:
        """Pass rows in a task while the context is open."""
        self._task = asyncio.create_task(self._feed())
        try:
            yield
        finally:
            # Forgotten here, because a cancelled task refers to its frames, and these to this object: a cycle.
            task, self._task = self._task, None
            task.cancel()
            await asyncio.wait([task])

    async def take(self) -> list[SequenceEvent]:
        """Wait for events of the sequence, and return them. Empty: the last row was passed before an event came, or the sequence ended.
        Raises the errors of `inputs`."""
        assert self._task is not None
        taking = asyncio.ensure_future(self._stream.take())
        try:
            waited = [taking] if self._task.done() else [taking, self._task]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if self._task.done():
                self._task.result()
            return taking.result() if taking.done() else []
        finally:
            taking.cancel()
            del taking  # Its error refers to this frame, which would be a cycle.

    async def _feed(self) -> None:
        """The task that passes rows until the last row."""
        while not self.has_ended:
            piece = await next_rows(self._inputs)
            if piece.port == self._port:
                self.give(tensor_of(cast(Array, piece.content)), last=piece.last)


class Blocks:
    """Groups the codes of a speech for sending: the first code goes out at once, later codes when their block is complete, and at the end
    the rest. Sound is made of whole blocks, so a code that is held back here delays no sound; and sending a message costs every process on
    the way more than the code in it. size: number of codes in a block. count: number of codes that were sent before, as in a resume."""

    def __init__(self, size: int, count: int) -> None:
        self._size, self._count = size, count
        self._waiting: list[Item] = []

    def take(self, codes: Sequence[Item], *, end: bool) -> Sequence[Item]:
        """Add codes that came, and return the codes to send now. end: no more codes come."""
        is_first = self._count == 0
        self._count += len(codes)
        codes = [*self._waiting, *codes]
        # The first codes of the block may have been sent already: at the beginning, or before a resume.
        waiting_count = 0 if end or is_first else min(self._count % self._size, len(codes))
        self._waiting = codes[len(codes) - waiting_count :]
        return codes[: len(codes) - waiting_count]


SPEAKERS = 8
"""Number of speeches at once when it is measured how many speakers the Talker serves in real time."""

MIN_MEASURED_CHUNKS = 4
"""Least number of frames of each speech in this measurement. It is above 1, because the first frame comes with the prompt."""


@dataclass(frozen=True, slots=True)
class Manner:
    """The constants of a family's Talker. place: how many numbers a place has on the port of places. codes: the output port. block: number
    of frames that go out together, after the first frame. ends: first codes that end a speech. silent: first codes that are never drawn.
    seen_codes: first codes that the repetition penalty counts as drawn before the first frame."""

    place: int
    codes: PortSpec
    block: int
    ends: frozenset[int]
    silent: frozenset[int]
    seen_codes: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, eq=False)
class AddedRows:
    """Rows [n, row_size] that a Talker adds. between: name of a voice -> rows between the conversation and the answer, equally many for
    each voice. end_rows: the two rows after the last row of an answer: a row for the end of the text, and a row for nothing."""

    between: Mapping[str, torch.Tensor]
    end_rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class ReadyTalker:
    """The running parts of a Talker. context: largest number of rows of a conversation and frames of its speech together."""

    manner: Manner
    engine: Engine
    added: AddedRows
    info: ModelInfo
    context: int

    @classmethod
    def of(
        cls,
        folder: Path,
        options: LoadOptions,
        context: int,
        manner: Manner,
        decoder: PackedDecoder,
        added: AddedRows,
        *,
        code: str,
        head: Callable[[Logits], Head] = TokenHead,
        further_results: Callable[[], list[torch.Tensor]] = list,
        settings: Mapping[str, str] | None = None,
    ) -> Self:
        """Start the engine. context: number of rows that the user asks for; 0: the model chooses. code: see `Started.revision`. head: see
        `Started.of`. further_results: returns the results of other parts than the decoder for fixed inputs. settings: of other parts, for
        the user. Raises LoadError.

        A row that came is kept in the CPU's memory until its speech ends, because it may have to be computed again."""
        spec, row_size = decoder.spec, added.end_rows.shape[1]
        kv_row = page_bytes(spec) // PAGE_ROWS
        row_bytes = kv_row + (row_size * spec.dtype.itemsize if spec.device.type == "cpu" else 0)
        cache = CacheSize.choose(options, row_bytes=row_bytes, context=spec.context, user_context=context)
        # The cache counts whole rows; of each row, keys and values take `kv_row` bytes.
        kv_bytes = cache.kv_bytes // row_bytes * kv_row
        started = Started.of(decoder, head, folder, options, limits=limits_of(options), kv_bytes=kv_bytes)
        results = compute_on_thread(further_results, options.threads)
        info = ModelInfo(
            name=name_of(folder) + "-talker",
            revision=started.revision(code, results=results, settings=str(cache.context)),
            accepts=row_ports(row_size, started.dtype, place=manner.place),
            produces=(manner.codes,),
            max_sessions=options.sessions,
            voices=tuple(added.between),
            settings={**started.settings, **cache.reasons, **(settings or {})},
        )
        return cls(manner, started.engine, added, info, cache.context)


def embedding_of_text(weights: Weights, name: str, tokens: Mapping[str, int]) -> torch.Tensor:
    """The embeddings of the Thinker's tokens, [tokens, row_size], from the weight of this name. tokens: key of config.json -> a token that
    a Talker needs. Raises BadCheckpoint, also if there is no such token."""
    embedding = weights.need(name)
    for key, token in tokens.items():
        if not 0 <= token < len(embedding):
            raise BadCheckpoint(f"{weights.directory}: {key!r} is {token}, the Thinker has {len(embedding)} tokens")
    return embedding


@dataclass(frozen=True, slots=True)
class PreparedSpeaker:
    """A request to speak, and the name of its voice."""

    request: SpeechRequest
    voice: str


class RowTalker(EngineModel):
    """A Talker that speaks rows; implements `TalkerModel`. A family implements `lay_out`, which makes the prompt."""

    def __init__(self, config: Any, ready: ReadyTalker) -> None:
        """config: of the checkpoint, in the family's own type."""
        self.config = config
        self._worker = Worker("rows", threads=1)
        super().__init__(ready.engine, ready.info, [self._worker])
        self._manner, self._added, self._context = ready.manner, ready.added, ready.context

    @abstractmethod
    def lay_out(self, places: NDArray[np.int64], voice: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(items [rows, codebooks], positions [axes, rows]) of a prompt: the conversation, the added rows, and the first row of the answer.
        places: places of the conversation's rows, from the Thinker, [place, rows]."""

    async def warm_up(self) -> None:
        """Speak a little, to touch every weight; then speak several answers at once, to measure how many speakers it serves in real
        time."""
        await self._speak_token(SpeechRequest(seed=0, max_frames=2))
        thread, device = self.engine.activity, self.engine.spec.device.type
        begin_s = computing_s(thread, device)
        max_frames = max(self._manner.block, MIN_MEASURED_CHUNKS)
        frames = await asyncio.gather(*(self._speak_token(SpeechRequest(seed, max_frames=max_frames)) for seed in range(SPEAKERS)))
        seconds = max(sum(frames), 1) / self._manner.codes.rate_hz
        speakers = seconds / (computing_s(thread, device) - begin_s)
        self.info = replace(self.info, settings={**self.info.settings, "real_time_speakers": speakers_text(speakers)})

    async def _speak_token(self, request: SpeechRequest) -> int:
        """Speak an answer of one token; returns the number of frames."""
        rows = array_of(self._added.end_rows[:1])
        places = np.zeros((1, self._manner.place), np.int32)
        pieces = [Piece(PROMPT, 0, True, rows), Piece(PLACES, 0, True, places), Piece(HIDDEN, 0, True, rows)]
        async with aclosing(self.speak(await self.prepare(request), inputs_of(*pieces), {self._manner.codes.name: 0})) as frames:
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
            opening, stream = await self._begin(prepared, inputs, stack)
            if stream is None:
                if request.history_items:
                    raise BadRequest("resume.history", "there is nothing to speak, and frames are there already")
                yield Frames(np.empty((0, width), np.uint32), FinishReason.STOP)
                return
            feed = PortFeed(stream, inputs, HIDDEN, self._added.end_rows)
            feed.give(torch.cat(opening.reply)[1:], last=opening.has_ended)
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

    async def _begin(
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
        # One frame more than there is room for rows, because the last row of the prompt makes a frame too.
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
            seen_ids=self._manner.seen_codes,
            appended=True,
            client=request.client,
        )


def positions_behind(positions: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Positions [axes, rows] of a conversation and of `count` rows after it. These count on, equal on all axes, from one more than the
    largest position of the conversation's last row."""
    after = int(positions[:, -1].max()) + 1 if positions.shape[1] else 0
    return np.concatenate((positions, np.broadcast_to(np.arange(after, after + count), (len(positions), count))), axis=1)
