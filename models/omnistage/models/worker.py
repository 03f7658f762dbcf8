"""One compute thread, which the sessions of one event loop share, and a generator that makes things before they are requested.

A session requests one small unit of work at a time and waits for it. So each session has at most one unit in the queue, and it is fair to
run units in the order in which they come. An urgent unit (the first of a session, for which a listener waits) overtakes at most OVERTAKES
others, so every unit runs in the end. `make_ahead` makes the next thing while its caller works with the one before it.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import TypeVar, cast

import torch

from omnistage.engine.types import STEP_LIMIT_S, Activity
from omnistage.models.steps.loop import Aside, settable

T = TypeVar("T")

OVERTAKES = 64

LOOK_S = 0.3
"""Seconds after which a thread that waits for another thread reports to the watchdog that it does not hang."""

_this_thread = threading.local()


def still_working() -> None:
    """Called by a unit of work on its thread: reports to the watchdog that the unit goes on, however long it takes."""
    activity: Activity | None = getattr(_this_thread, "activity", None)
    if activity is not None:
        activity.step()


def by_two(aside: Aside, own_call: Callable[[], None], other_call: Callable[[], None]) -> None:
    """Call `own_call` on this thread and, through `aside`, `other_call` on another thread; return when both are done. Raises their
    errors."""
    other_end = aside(other_call)
    try:
        own_call()
    finally:
        while not wait([other_end], timeout=LOOK_S).done:
            still_working()  # This thread only waits; the watchdog sees by itself whether the other thread goes on.
    other_end.result()


@dataclass(order=True, slots=True)
class _Unit:
    """A unit of work in the queue. The lowest rank runs first; among equal ranks, the lowest number."""

    rank: int
    number: int
    work: Callable[[], None] = field(compare=False)


class Worker:
    """Runs units of work on a thread of its own. name: of the thread. threads: number of torch threads for a unit. last: called on the
    thread before it ends. step_limit_s: see Activity. activity: the thread's state, for the watchdog."""

    def __init__(self, name: str, threads: int, last: Callable[[], None] = lambda: None, step_limit_s: float = STEP_LIMIT_S) -> None:
        self._threads, self._last = threads, last
        self._changed = threading.Condition()
        self._queue: list[_Unit] = []
        self._numbers = itertools.count()
        self._open = True  # False: no more units are accepted
        self.activity = Activity(name, step_limit_s)
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def queued(self) -> int:
        """Number of units that wait for the thread."""
        with self._changed:
            return len(self._queue)

    async def run(self, call: Callable[[], T], urgent: bool = False) -> T:
        """Run `call` on the thread; returns its result, or raises its error. urgent: it may overtake other units. If the caller is
        cancelled, a unit that has not begun is dropped. For a running unit this waits, so that nothing that the unit uses is freed before
        its end."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        # Awaiting `done` itself would cancel it, and the end of a running unit would then go unnoticed.
        unit_end: asyncio.Future[None] = loop.create_future()

        def tell(result: T | None, error: BaseException | None) -> None:
            unit_end.set_result(None)
            if done.done():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(cast(T, result))

        def work() -> None:
            try:
                result = call()
            except BaseException as error:  # not handled here: it belongs to the task that awaits the unit
                loop.call_soon_threadsafe(tell, None, settable(error))
            else:
                loop.call_soon_threadsafe(tell, result, None)

        unit = self._put(work, urgent)
        try:
            return await done
        except asyncio.CancelledError:
            if not self._drop(unit):
                await _wait_settled(unit_end)
            raise

    def aside(self, call: Callable[[], None]) -> Future[None]:
        """Run an urgent unit for a caller on another computing thread. The returned future ends with the unit, and has its error."""
        done: Future[None] = Future()

        def work() -> None:
            try:
                call()
            except BaseException as error:  # As above.
                done.set_exception(settable(error))
            else:
                done.set_result(None)

        self._put(work, urgent=True)
        return done

    async def close(self) -> None:
        """Finish the queued units and end the thread."""
        with self._changed:
            self._open = False
            self._changed.notify()
        await asyncio.to_thread(self._thread.join)

    def _put(self, work: Callable[[], None], urgent: bool) -> _Unit:
        """Put a unit into the queue. Raises RuntimeError if the worker is closed."""
        with self._changed:
            if not self._open:
                raise RuntimeError("the model is closed")
            number = next(self._numbers)
            unit = _Unit(number - OVERTAKES if urgent else number, number, work)
            bisect.insort(self._queue, unit)
            self.activity.begin()
            self._changed.notify()
        return unit

    def _drop(self, unit: _Unit) -> bool:
        """Take a unit out of the queue. Returns whether it was there; False: it has begun already."""
        with self._changed:
            if unit not in self._queue:
                return False
            self._queue.remove(unit)
            return True

    def _work(self) -> None:
        """The thread's function: run units until the worker is closed and the queue is empty."""
        torch.set_num_threads(self._threads)
        self.activity.enter()
        _this_thread.activity = self.activity
        while True:
            with self._changed:
                while not self._queue:
                    self.activity.rest()
                    if not self._open:
                        self._last()
                        return
                    self._changed.wait()
                unit = self._queue.pop(0)
            unit.work()
            # Without this, the unit's data, such as a film of hundreds of megabytes, would live until the next unit comes.
            del unit
            self.activity.step()


async def _wait_settled(future: asyncio.Future[None]) -> None:
    """Wait for the future, even if the waiting task is cancelled meanwhile."""
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            continue  # the caller raises the first cancellation when this returns


async def make_ahead(source: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """Yields the items of `source`. The source runs in a task of its own: it makes the next item while the caller works with an item, then
    waits. When this generator is closed, it closes the source first. Raises the source's error after all items that the source yielded."""
    items: list[T] = []
    item_ready, item_taken = asyncio.Event(), asyncio.Event()

    async def make() -> None:
        try:
            async for thing in source:
                items.append(thing)
                del thing
                item_ready.set()
                while items:
                    item_taken.clear()
                    await item_taken.wait()
        finally:
            await source.aclose()

    making = asyncio.create_task(make())
    making.add_done_callback(lambda _: item_ready.set())
    try:
        while True:
            while not items and not making.done():
                item_ready.clear()
                await item_ready.wait()
            if not items:
                making.result()
                return
            thing = items.pop()
            item_taken.set()
            yield thing
            del thing
    finally:
        await _end_task(making)
        del making  # Its error refers to this frame, which would be a cycle.


async def _end_task(task: asyncio.Task[None]) -> None:
    """Cancel `task` and wait for its end. If the caller is cancelled meanwhile, it waits all the same, and raises CancelledError at the
    end. The error of `task` is dropped, because the caller has seen it, or does not need it any more."""
    task.cancel()
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancelled = True
    if not task.cancelled():
        task.exception()
    if cancelled:
        raise asyncio.CancelledError
