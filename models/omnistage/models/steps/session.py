"""Jobs whose readers get pieces: a session is a job, the pieces shown of it, and its decoding.

    job --step, take--> a step further: progress, previews --> ... --decode--> pieces

Sessions stand above the loop, for which a session is a job like any other: its steps come first, and then each decoded piece is a step.
A reader that does not read holds up only its own session.

Between two pieces a decoder may hold gigabytes, such as what it remembers of earlier frames. So only as many of these decode at a time
as there is memory for, and they do not wait for their readers: the pieces are smaller than what would be held until they are read."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Generator, Hashable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Generic, Protocol, TypeVar

from omnistage.models.interface import Clip, Drawn, DrawRequest, EncodedPicture, Load, PortSpec, StepsDone, TensorRows, Wanted
from omnistage.models.steps.loop import Aside, Loop, Steps, StepWorker
from omnistage.models.steps.orders import Fair, JobWork

J = TypeVar("J")
Job = TypeVar("Job", contravariant=True)

MAX_UNREAD = 8
"""How many pieces a drawing may be ahead of its reader before it must wait, unless its decoder holds memory. Progress does not count: newer
progress replaces older."""


MAX_UNREAD_BYTES = 256 << 20
"""How many bytes of pieces a drawing whose decoder holds memory may be ahead of its reader. Only raw frames of a large film are as many."""


class Drawing(Steps[Job, Sequence[Drawn]], Protocol[Job]):
    """The interface of a family whose jobs become pieces. `take` shows progress and previews."""

    def cost(self, job: Job) -> int:
        """The cost of a step, as in JobWork. Constant."""

    def steps(self, job: Job) -> int:
        """The approximate number of steps in all. Constant."""

    def decoder_share(self, job: Job) -> float:
        """The part of the memory for decoders that decoding this job holds between two pieces; 0: next to nothing. Constant."""

    def decode(self, job: Job) -> Generator[Drawn, None, None]:
        """The pieces of a job that is done; each is one step, alone, on the worker."""


class _Session(Generic[J]):
    """A job and its reader. decoding: yields the pieces after all steps. piece: the piece decoded last; None at the end. decoded:
    whether decoding has ended."""

    def __init__(self, job: J) -> None:
        self.job = job
        self.decoding: Generator[Drawn, None, None] | None = None
        self.piece: Drawn | None = None
        self.decoded = False
        self._changed = asyncio.Event()
        self._unread: deque[Drawn] = deque()

    @property
    def has_room(self) -> bool:
        return len(self._unread) < MAX_UNREAD

    @property
    def unread_bytes(self) -> int:
        """Bytes of the pieces that the reader has not taken, as far as they can be large."""
        return sum(_bytes_of(piece) for piece in self._unread)

    def put(self, pieces: Sequence[Drawn]) -> None:
        """Add pieces for the reader. Newer progress replaces older."""
        for piece in pieces:
            if isinstance(piece, StepsDone) and self._unread and isinstance(self._unread[-1], StepsDone):
                self._unread.pop()
            self._unread.append(piece)
        self._changed.set()

    def wake(self) -> None:
        """Wake the reader: no more pieces will come."""
        self._changed.set()

    async def take(self, over: asyncio.Future[None]) -> Drawn | None:
        """The next piece; None after the last one. over: done when the session ends. Raises the session's error."""
        while not self._unread:
            if over.done():
                return over.result()
            self._changed.clear()
            await self._changed.wait()
        return self._unread.popleft()


def _bytes_of(piece: Drawn) -> int:
    match piece:
        case TensorRows():
            return piece.rows.nbytes
        case Clip() | EncodedPicture():
            return len(piece.data)
    return 0


class Sessions(Generic[J]):
    """All drawings of one model; implements `Steps` of sessions. Any number of tasks of one event loop may call `draw`."""

    def __init__(
        self, drawing: Drawing[J], workers: Sequence[StepWorker], *, budget: int, step_budget: int, batch: int = 0, is_eager: bool = False
    ) -> None:
        """budget: limit of the cost of admitted drawings. step_budget, batch: limits of cost and number in a step. is_eager: see Loop."""
        self._drawing = drawing
        self._decoding: dict[_Session[J], float] = {}
        """Sessions whose decoders hold memory, each with its part of it."""
        self._waiting_to_decode: deque[_Session[J]] = deque()
        self._order = Fair[_Session[J]](budget, step_budget, batch)
        self._loop: Loop[_Session[J], JobWork, Sequence[Drawn]] = Loop(self, self._order, workers, is_eager=is_eager)

    @property
    def load(self) -> Load:
        return self._loop.load

    @property
    def steps(self) -> int:
        """How many steps were taken: steps of groups, and decoded pieces."""
        return self._loop.steps

    @property
    def running(self) -> int:
        """Number of admitted drawings."""
        return self._order.admitted

    async def draw(self, job: J, client: str = "") -> AsyncGenerator[Drawn, None]:
        """Yields a job's pieces. client: see DrawRequest. Closing waits until no step has the job. Raises TooCostly or a step's error."""
        session = _Session(job)
        work = JobWork(self._drawing.cost(job), self._drawing.steps(job), client)
        over = self._loop.submit(session, work, partial(self._show, session))
        over.add_done_callback(partial(self._end, session))
        try:
            while (piece := await session.take(over)) is not None:
                if self._may_step(session):
                    self._loop.go_on(session)
                yield piece
        finally:
            with suppress(ValueError):
                self._waiting_to_decode.remove(session)
            try:
                await self._loop.withdraw(session)
            finally:
                self._end_decoding(session)
            del over  # Its error refers to this frame: each would keep the other in memory.

    def _end(self, session: _Session[J], over: asyncio.Future[None]) -> None:
        """Wake the reader of a session that has ended. One that has failed decodes no more."""
        session.wake()
        if not over.cancelled() and over.exception() is not None:
            session.decoded = True
            self._end_decoding(session)

    def _show(self, session: _Session[J], pieces: Sequence[Drawn]) -> bool:
        """Give a session's pieces to its reader; returns whether the session may step on."""
        session.put(pieces)
        if session.decoded:
            self._end_decoding(session)
        return self._may_step(session)

    def _may_step(self, session: _Session[J]) -> bool:
        """Whether a session may step on. While its decoder holds memory, the session needs its part of that memory, for which it waits, and
        few unread bytes. At all other times, its reader needs room."""
        is_decoding = session.decoding is not None and not session.decoded
        share = self._drawing.decoder_share(session.job) if is_decoding else 0.0
        if not share:
            return session.has_room
        if session not in self._decoding and session not in self._waiting_to_decode:
            self._waiting_to_decode.append(session)
            self._begin_decoding()
        return session in self._decoding and session.unread_bytes < MAX_UNREAD_BYTES

    def _begin_decoding(self) -> None:
        """Let as many waiting sessions decode as there is memory for, in turn; a session that decodes alone may need more than there is."""
        while self._waiting_to_decode:
            share = self._drawing.decoder_share(self._waiting_to_decode[0].job)
            if self._decoding and sum(self._decoding.values()) + share > 1:
                return
            session = self._waiting_to_decode.popleft()
            self._decoding[session] = share
            self._loop.go_on(session)

    def _end_decoding(self, session: _Session[J]) -> None:
        """Count a session's decoder no more; it may have none."""
        if self._decoding.pop(session, None) is not None:
            self._begin_decoding()

    def key(self, session: _Session[J]) -> Hashable | None:
        """The key of the session's job; while its pieces are decoded, a key that no other session has."""
        return id(session) if session.decoding is not None else self._drawing.key(session.job)

    def step(self, sessions: Sequence[_Session[J]], aside: Aside | None) -> None:
        """If the steps of the one session have ended, decode its next piece; else compute a step of all sessions."""
        decoding = sessions[0].decoding
        if decoding is not None:
            sessions[0].piece = next(decoding, None)
        else:
            self._drawing.step([session.job for session in sessions], aside)

    def take(self, session: _Session[J]) -> Sequence[Drawn]:
        """The result of the last step: a decoded piece, or progress and previews. After the last step of the family, decoding begins."""
        if session.decoding is not None:
            piece, session.piece = session.piece, None
            session.decoded = piece is None
            return [] if piece is None else [piece]
        shown = self._drawing.take(session.job)
        if self._drawing.is_done(session.job):
            session.decoding = self._drawing.decode(session.job)
        return shown

    def is_done(self, session: _Session[J]) -> bool:
        return session.decoded

    def give_up(self, session: _Session[J]) -> None:
        if session.decoding is not None:
            session.decoding.close()
        self._drawing.give_up(session.job)


Plan = TypeVar("Plan", contravariant=True)
Latents = TypeVar("Latents", contravariant=True)


class Product(Protocol[Plan, Latents]):
    """The product of one model. A plan is what the model made of a request; latents are what all steps made of a plan."""

    @property
    def ports(self) -> tuple[PortSpec, ...]:
        """The ports of the product."""

    def check(self, request: DrawRequest) -> None:
        """Raises BadRequest for a request that the product cannot meet, before any step."""

    def items(self, plan: Plan) -> Mapping[str, int]:
        """How many items of the whole plan come on each port."""

    def decode(self, plan: Plan, latents: Latents, ports: Wanted) -> Generator[Drawn, None, None]:
        """The pieces from the wanted items on, each small enough to be made in one step."""
