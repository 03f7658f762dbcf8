"""Jobs whose readers get pieces: a session is a job, the pieces shown of it, and its decoding.

    job --step, take--> a step further: progress, previews --> ... --decode--> pieces

Sessions stand above the loop, for which a session is a job like any other: its steps come first, and then each decoded piece is a step. A
reader that does not read holds up only its own session.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Generator, Hashable, Sequence
from typing import Generic, Protocol, TypeVar

from omnistage.models.interface import Drawn, Load, StepsDone
from omnistage.models.steps.fair import Fair, JobWork
from omnistage.models.steps.interface import Aside, Steps, StepWorker
from omnistage.models.steps.loop import Loop

J = TypeVar("J")
Job = TypeVar("Job", contravariant=True)

MAX_UNREAD = 8
"""How many pieces a drawing may be ahead of its reader before it must wait. Progress does not count: newer progress replaces older."""


class Drawing(Steps[Job, Sequence[Drawn]], Protocol[Job]):
    """The interface of a family whose jobs become pieces. `take` shows progress and previews."""

    def cost(self, job: Job) -> int:
        """The cost of a step, as in JobWork. Constant."""

    def steps(self, job: Job) -> int:
        """The approximate number of steps in all. Constant."""

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

    def put(self, pieces: Sequence[Drawn]) -> bool:
        """Add pieces for the reader; returns whether there is room for more. Newer progress replaces older."""
        for piece in pieces:
            if isinstance(piece, StepsDone) and self._unread and isinstance(self._unread[-1], StepsDone):
                self._unread.pop()
            self._unread.append(piece)
        self._changed.set()
        return self.has_room

    def wake(self, over: asyncio.Future[None]) -> None:
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


class Sessions(Generic[J]):
    """All drawings of one model; implements `Steps` of sessions. Any number of tasks of one event loop may call `draw`."""

    def __init__(
        self, drawing: Drawing[J], workers: Sequence[StepWorker], *, budget: int, step_budget: int, most: int = 0, ahead: bool = False
    ) -> None:
        """budget: limit of the cost of admitted drawings. step_budget, most: limits of cost and number in a step. ahead: see Loop."""
        self._drawing = drawing
        self._order = Fair[_Session[J]](budget, step_budget, most)
        self._loop: Loop[_Session[J], JobWork, Sequence[Drawn]] = Loop(self, self._order, workers, ahead=ahead)

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
        over = self._loop.submit(session, JobWork(self._drawing.cost(job), self._drawing.steps(job), client), session.put)
        over.add_done_callback(session.wake)
        try:
            while (piece := await session.take(over)) is not None:
                if session.has_room:
                    self._loop.go_on(session)
                yield piece
        finally:
            await self._loop.withdraw(session)
            del over  # Its error refers to this frame: each would keep the other in memory.

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
