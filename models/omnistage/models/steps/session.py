"""Jobs whose readers are given pieces: a session is a job, what was shown of it, and what decodes it.

    job --step, take--> a step further: progress, previews --> ... --decode--> pieces

Above the loop, to which a session is a job like any other: steps first, and then each piece that is decoded is one. A reader that does not
read holds only its own session up.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Generator, Hashable, Sequence
from typing import Generic, Protocol, TypeVar

from omnistage.models.interface import Drawn, Load, Progress
from omnistage.models.steps.fair import Fair, Work
from omnistage.models.steps.interface import Aside, Steps, Worker
from omnistage.models.steps.loop import Loop

J = TypeVar("J")
Job = TypeVar("Job", contravariant=True)

MAX_UNREAD = 8
"""Pieces that a drawing is ahead of its reader before it has to wait. Progress does not count: a newer one takes the place of an older."""


class Drawing(Steps[Job, Sequence[Drawn]], Protocol[Job]):
    """What a family offers whose jobs become pieces. `take` shows progress and previews."""

    def cost(self, job: Job) -> int:
        """See fair.Work. Constant."""

    def steps(self, job: Job) -> int:
        """About how many it takes in all. Constant."""

    def decode(self, job: Job) -> Generator[Drawn, None, None]:
        """The pieces of a job that is done; each is one step, alone, on the worker."""


class _Session(Generic[J]):
    """A job and its reader. piece: that was decoded last; None behind the last."""

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

    def put(self, pieces: Sequence[Drawn]) -> bool:
        """Whether there is room for more."""
        for piece in pieces:
            if isinstance(piece, Progress) and self._unread and isinstance(self._unread[-1], Progress):
                self._unread.pop()
            self._unread.append(piece)
        self._changed.set()
        return self.has_room

    def wake(self, over: asyncio.Future[None]) -> None:
        """Nothing more will be put."""
        self._changed.set()

    async def take(self, over: asyncio.Future[None]) -> Drawn | None:
        """The next piece; None behind the last. over: ends with the session. Raises what it raises."""
        while not self._unread:
            if over.done():
                return over.result()
            self._changed.clear()
            await self._changed.wait()
        return self._unread.popleft()


class Sessions(Generic[J]):
    """All drawings of one model; implements `Steps` of sessions. `draw` from any number of tasks of one event loop."""

    def __init__(
        self, drawing: Drawing[J], workers: Sequence[Worker], *, budget: int, step_budget: int, most: int = 0, ahead: bool = False
    ) -> None:
        """budget, step_budget, most: see Fair. ahead: see Loop."""
        self._drawing = drawing
        self._order = Fair[_Session[J]](budget, step_budget, most)
        self._loop: Loop[_Session[J], Work, Sequence[Drawn]] = Loop(self, self._order, workers, ahead=ahead)

    @property
    def load(self) -> Load:
        return self._loop.load

    @property
    def steps(self) -> int:
        """Of groups, and pieces that were decoded."""
        return self._loop.steps

    @property
    def running(self) -> int:
        """Drawings that were admitted."""
        return self._order.admitted

    async def draw(self, job: J, client: str = "") -> AsyncGenerator[Drawn, None]:
        """The pieces of a job as they come. client: see DrawRequest. Closed, it returns when no work is done for the job any more. Raises
        TooCostly, and what a step of this job raises."""
        session = _Session(job)
        over = self._loop.submit(session, Work(self._drawing.cost(job), self._drawing.steps(job), client), session.put)
        over.add_done_callback(session.wake)
        try:
            while (piece := await session.take(over)) is not None:
                if session.has_room:
                    self._loop.go_on(session)
                yield piece
        finally:
            await self._loop.withdraw(session)
            del over  # Its error leads to this frame.

    def key(self, session: _Session[J]) -> Hashable | None:
        return id(session) if session.decoding is not None else self._drawing.key(session.job)

    def step(self, sessions: Sequence[_Session[J]], aside: Aside | None) -> None:
        decoding = sessions[0].decoding
        if decoding is not None:
            sessions[0].piece = next(decoding, None)
        else:
            self._drawing.step([session.job for session in sessions], aside)

    def take(self, session: _Session[J]) -> Sequence[Drawn]:
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
