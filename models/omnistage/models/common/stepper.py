"""Runs drawings step by step, many at once: the loop around the policy of steps.py. No torch.

    prepare --> job --forward, advance--> job, a step further --...--> decode --> pieces

One unit of work runs at a time, steps of a group or one piece of a drawing that is decoded, where the model says (its thread). Where a
group is all that there is, the thread goes on with it until somebody comes or goes: else it would wait for the event loop after each step,
and a GPU for both. A reader that does not read holds only its own drawing up.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Hashable, Iterator, Sequence
from functools import partial
from typing import Generic, Protocol, TypeVar

from omnistage.models.common.steps import Policy
from omnistage.models.common.together import Stepping, step_all
from omnistage.models.interface import Batches, Drawn, Load, Progress

J = TypeVar("J")
T = TypeVar("T")
Job = TypeVar("Job", contravariant=True)

MAX_UNREAD = 8
"""Pieces that a drawing is ahead of its reader before it has to wait. Progress does not count: a newer one takes the place of an older."""


MAX_AHEAD = 4
"""Steps that the thread is ahead of the event loop before it waits for that."""


class Drawing(Protocol[Job]):
    """What a model offers that draws in steps. A job is what it knows of one request; `forward` and what follows it run on its thread."""

    def cost(self, job: Job) -> int:
        """See steps.Policy. Constant."""

    def steps(self, job: Job) -> int:
        """About how many it takes in all. Constant."""

    def group_key(self, job: Job) -> Hashable | None:
        """Jobs of equal keys can step together. May change from step to step. None: see steps.Policy.choose."""

    def forward(self, jobs: Sequence[Job]) -> None:
        """Compute one step of all of them at once, and leave in each what `advance` needs. Where it raises, each of them is asked alone
        again: it may change nothing else in them."""

    def advance(self, job: Job) -> Sequence[Drawn]:
        """Take the step; what there is to show: progress, and previews."""

    def is_drawn(self, job: Job) -> bool:
        """All its steps were taken."""

    def decode(self, job: Job) -> Generator[Drawn, None, None]:
        """The pieces of what was drawn; each is one unit of work."""

    def give_up(self, job: Job) -> None:
        """Its reader has gone, or it has ended: free what it holds beside itself. No unit has it in it. Takes no time."""


class UnitRunner(Protocol):
    """Where units of work run, such as Worker.run. Cancelled, it returns when the unit is not running any more."""

    def __call__(self, call: Callable[[], T], /) -> Awaitable[T]: ...


class _Session(Generic[J]):
    """A job and its reader."""

    def __init__(self, job: J) -> None:
        self.job = job
        self.decoding: Generator[Drawn, None, None] | None = None
        self.error: Exception | None = None
        self.over = False
        self.changed = asyncio.Event()
        self._pieces: deque[Drawn] = deque()

    @property
    def can_step(self) -> bool:
        return not self.over and len(self._pieces) < MAX_UNREAD

    def put(self, pieces: Sequence[Drawn]) -> None:
        for piece in pieces:
            if isinstance(piece, Progress) and self._pieces and isinstance(self._pieces[-1], Progress):
                self._pieces.pop()
            self._pieces.append(piece)
        self.changed.set()

    def end(self, error: Exception | None = None) -> None:
        self.over, self.error = True, error
        self.changed.set()

    async def take(self) -> Drawn | None:
        """The next piece; None after the last. Raises the error that ended it."""
        while not self._pieces:
            if self.error is not None:
                raise self.error
            if self.over:
                return None
            self.changed.clear()
            await self.changed.wait()
        return self._pieces.popleft()


class Stepper(Generic[J]):
    """All drawings of one model. `draw` from any number of sessions of one event loop."""

    def __init__(self, drawing: Drawing[J], run: UnitRunner, *, budget: int, step_budget: int, most: int = 0, ahead: bool = False) -> None:
        """See steps.Policy. ahead: units run on another thread, which may go on by itself."""
        self._drawing = drawing
        self._run = run
        self._policy: Policy[_Session[J]] = Policy(budget, step_budget, most)
        self._sessions: set[_Session[J]] = set()
        self._stepping = Stepping[_Session[J]]()
        self._changed = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None
        self._may_go_on = False
        """Looked at by the thread after each step."""
        self._ahead = ahead
        self.steps = 0
        """Of groups, and pieces that were decoded."""
        self.stepped = 0
        """Drawings that were in them, each counted once a step."""

    @property
    def queued(self) -> int:
        """Drawings that wait for admission."""
        return self._policy.waiting

    @property
    def running(self) -> int:
        return self._policy.admitted

    @property
    def load(self) -> Load:
        return Load(queued=self.queued, batches=Batches(self.steps, self.stepped))

    async def draw(self, job: J, client: str = "") -> AsyncGenerator[Drawn, None]:
        """The pieces of a job as they come. client: see DrawRequest. Closed, it returns when no work is done for the job any more. Raises
        TooCostly, and what a step of this job raises."""
        session = _Session(job)
        self._policy.submit(session, self._drawing.cost(job), self._drawing.steps(job), client)
        self._sessions.add(session)
        self._wake()
        try:
            while (piece := await session.take()) is not None:
                self._changed.set()
                yield piece
        finally:
            session.over = True
            self._sessions.discard(session)
            self._policy.withdraw(session)
            self._interrupt()
            await self._stepping.left(session)
            if session.decoding is not None:
                session.decoding.close()
            self._drawing.give_up(job)

    def _interrupt(self) -> None:
        """Somebody came or went."""
        self._may_go_on = False
        self._changed.set()

    def _wake(self) -> None:
        self._interrupt()
        if self._loop is None or self._loop.done():
            self._changed = asyncio.Event()  # The last loop's may belong to an event loop that is gone.
            self._loop = asyncio.create_task(self._step_on())

    async def _step_on(self) -> None:
        """Until there is nothing to do. Whatever ends it before that ends all drawings, whose readers are told of it."""
        try:
            await self._all_steps()
        except BaseException as error:
            for session in tuple(self._sessions):
                self._end(session, RuntimeError(f"drawing has ended: {error!r}"))
            if not isinstance(error, Exception):
                raise

    async def _all_steps(self) -> None:
        while self._policy.waiting or self._policy.admitted:
            self._policy.admit()
            chosen = self._policy.choose(self._group_key, lambda session: session.can_step)
            if not chosen:
                self._changed.clear()
                await self._changed.wait()
                continue
            self._policy.stepped(chosen)
            self._stepping.begin(chosen)
            try:
                await step_all(chosen, self._unit, self._end)
            finally:
                self._stepping.end(chosen)

    def _group_key(self, session: _Session[J]) -> Hashable | None:
        """What is decoded is decoded alone."""
        return id(session) if session.decoding is not None else self._drawing.group_key(session.job)

    async def _unit(self, sessions: Sequence[_Session[J]]) -> None:
        """Steps of a group, or a piece of one drawing."""
        if sessions[0].decoding is not None:
            await self._piece(sessions[0])
            return
        sessions = [session for session in sessions if not session.over]
        if not sessions:
            return
        self._may_go_on = self._ahead and len(sessions) == len(self._sessions)
        self._show(sessions, await self._run(partial(self._steps, sessions, asyncio.get_running_loop())))
        for session in sessions:
            if not session.over and self._drawing.is_drawn(session.job):
                session.decoding = self._drawing.decode(session.job)

    def _steps(self, sessions: Sequence[_Session[J]], loop: asyncio.AbstractEventLoop) -> Sequence[Sequence[Drawn] | Exception]:
        """On the thread: what the last of them shows, and what each of those before it shows is shown meanwhile."""
        jobs, first = [session.job for session in sessions], self.steps
        for number in itertools.count():
            taken = _step(self._drawing, jobs)
            alike = len({self._drawing.group_key(job) for job in jobs}) == 1
            waits = not self._may_go_on or number - (self.steps - first) >= MAX_AHEAD
            if waits or not alike or any(map(self._has_ended, jobs, taken)):
                break
            loop.call_soon_threadsafe(self._show_and_go_on, sessions, taken)
        return taken

    def _has_ended(self, job: J, shown: Sequence[Drawn] | Exception) -> bool:
        return isinstance(shown, Exception) or self._drawing.is_drawn(job)

    def _show_and_go_on(self, sessions: Sequence[_Session[J]], taken: Sequence[Sequence[Drawn] | Exception]) -> None:
        """The thread is at the next step already: nobody else is due."""
        self._show(sessions, taken)
        self._policy.stepped([session for session in sessions if not session.over])
        if not all(session.can_step for session in sessions):
            self._may_go_on = False

    def _show(self, sessions: Sequence[_Session[J]], taken: Sequence[Sequence[Drawn] | Exception]) -> None:
        self.steps += 1
        self.stepped += len(sessions)
        for session, shown in zip(sessions, taken, strict=True):
            if session.over:
                continue
            if isinstance(shown, Exception):
                self._end(session, shown)
            else:
                session.put(shown)

    async def _piece(self, session: _Session[J]) -> None:
        assert session.decoding is not None
        pieces = await self._run(partial(_next, session.decoding))
        self.steps += 1
        self.stepped += 1
        if pieces is None:
            self._end(session, None)
        else:
            session.put(pieces)

    def _end(self, session: _Session[J], error: Exception | None) -> None:
        self._policy.withdraw(session)
        session.end(error)


def _step(drawing: Drawing[J], jobs: Sequence[J]) -> list[Sequence[Drawn] | Exception]:
    """One step of all of them, in one go: to hand each over to the thread by itself would cost as much as a small step. What each shows, or
    why it ends. Raises what the step itself raises, which is not known to be of one of them."""
    drawing.forward(jobs)
    taken = list[Sequence[Drawn] | Exception]()
    for job in jobs:
        try:
            taken.append(drawing.advance(job))
        except Exception as error:  # It belongs to whoever waits for this one.
            taken.append(error)
    return taken


def _next(pieces: Iterator[Drawn]) -> Sequence[Drawn] | None:
    """The next piece; None after the last."""
    for piece in pieces:
        return [piece]
    return None
