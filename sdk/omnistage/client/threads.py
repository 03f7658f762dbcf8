"""The threads of the client, and forks of its process.

`LoopThread` runs the sync client's calls on an event loop: one per process, shared by every `Omni`, ended with the last. Every wait here
has an end. Functions that the garbage collector calls wait for nothing, because it may run on any thread, also on the loop's own, whatever
locks that thread holds. `run_on_thread` runs work that neither an event loop nor the interpreter waits for at its end.

gRPC's threads do not exist in a forked child, so a child cannot use gRPC if its parent has used it: its calls would wait for these
threads, and objects that it frees would write on the connections of its parent."""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent import futures
from contextlib import suppress
from typing import Any, ClassVar, Self, TypeVar
from weakref import WeakSet

from omnistage.client.errors import ClosedError, DeadlineError, ForkedError, WrongLoopError

T = TypeVar("T")

ALLOWANCE_S = 5.0
"""Seconds by which a call may end later than its own limit: time for its clean-up on a busy machine, and for a loop that is stuck."""

STOP_TIMEOUT_S = 5.0
"""Seconds to wait for the end of the thread. It is a daemon: one that is stuck ends with the process."""


class LoopThread:
    """A thread that runs an event loop. All clients of a process share it, because gRPC's asyncio layer polls once per process, not once
    per loop."""

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _shared: ClassVar[LoopThread | None] = None
    _users: ClassVar[int] = 0  # calls of `acquire` without their `release`

    def __init__(self) -> None:
        """Raises OSError if this process cannot have another thread or loop."""
        started: futures.Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = futures.Future()
        self._waiting: set[futures.Future[Any]] = set()  # one for each caller that waits in `run`
        self._detached: set[asyncio.Task[Any]] = set()  # kept, because the loop alone does not keep its tasks
        self._thread = threading.Thread(target=self._work, args=(started,), name="omnistage-client", daemon=True)
        self._thread.start()
        self._loop, self._stop = started.result()

    def _work(self, started: futures.Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]) -> None:
        """The thread's work: run the loop, then cancel the futures that callers still wait for. started: gets (loop, event that stops it),
        or the error."""
        try:
            asyncio.run(self._main(started))
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)
        finally:
            for future in list(self._waiting):
                future.cancel()

    async def _main(self, started: futures.Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]) -> None:
        """Runs on the loop until `_stop` is set."""
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        loop.set_exception_handler(_report)
        started.set_result((loop, stop))
        await stop.wait()

    @classmethod
    def acquire(cls) -> Self:
        """The shared thread, which the first call starts; call `release` once for each call of this. Raises ForkedError."""
        use_grpc()
        with cls._lock:
            if cls._shared is None:
                cls._shared = cls()
            cls._users += 1
            shared: Self = cls._shared  # type: ignore[assignment]
            return shared

    @classmethod
    def release(cls) -> None:
        """Undo one `acquire`. The last one ends the loop and waits for its thread, unless this is called on that thread."""
        with cls._lock:
            cls._users -= 1
            if cls._users or cls._shared is None:
                return
            shared, cls._shared = cls._shared, None
        shared._loop.call_soon_threadsafe(shared._stop.set)
        if not shared.is_current:
            shared._thread.join(STOP_TIMEOUT_S)

    @property
    def is_current(self) -> bool:
        """Whether this is called on the loop's own thread, which must never wait for itself."""
        return threading.current_thread() is self._thread

    def run(self, work: Coroutine[Any, Any, T], limit_s: float) -> T:
        """Run `work` on the loop and wait for it. An interrupt of this thread cancels it.

        limit_s: the most seconds that `work` should take. Raises DeadlineError if it has not ended `ALLOWANCE_S` after them, whatever
        delays the loop; WrongLoopError on the loop's own thread; ClosedError if the loop ends first.
        """
        if self.is_current:
            work.close()
            raise WrongLoopError("an Omni was called on the thread that runs its calls: it would wait for itself")
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            raise ClosedError("this client is closed") from None
        self._waiting.add(future)
        try:
            if self._loop.is_closed():
                future.cancel()  # the loop has ended: it neither begins the work nor cancels the future
            futures.wait([future], min(limit_s + ALLOWANCE_S, threading.TIMEOUT_MAX))
            if not future.done():
                raise DeadlineError(f"the client's own thread did not answer within {limit_s + ALLOWANCE_S:g} s: something holds it up")
            return future.result()
        except futures.CancelledError:
            if self._loop.is_closed():
                work.close()
            raise ClosedError("the client was closed while it answered") from None
        finally:
            future.cancel()
            self._waiting.discard(future)

    def detach(self, work: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Have the loop run a coroutine soon, without waiting and without a lock, so that a finalizer may call this on any thread.

        work: makes the coroutine. It is not called if the loop has ended: then there is nothing left to do."""
        if not is_child_of_grpc_user():
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._start, work)

    def _start(self, work: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """On the loop: start a detached coroutine, and keep its task until it ends."""
        task = self._loop.create_task(work())
        self._detached.add(task)
        task.add_done_callback(self._detached.discard)


def is_of_another_loop(context: Mapping[str, object]) -> bool:
    """Whether a report to the exception handler of an event loop is about another loop of this process, with which gRPC's poller is shared:
    that loop has read a byte of the poller or closed its socket, or was closed before the end of one of its calls came."""
    error = context.get("exception")
    is_of_poller = "PollerCompletionQueue._handle_events" in str(context.get("message"))
    is_closed_loop = isinstance(error, RuntimeError) and "loop is closed" in str(error)
    return is_of_poller and (is_closed_loop or isinstance(error, OSError))


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Pass reports about callbacks on to asyncio, except those about other loops."""
    if not is_of_another_loop(context):
        loop.default_exception_handler(context)


async def run_on_thread(work: Callable[[], T], name: str) -> T:
    """Return or raise the result of `work`, run on a daemon thread of this name. The work goes on if the caller is cancelled."""
    return await asyncio.wrap_future(on_thread(work, name))


def on_thread(work: Callable[[], T], name: str) -> futures.Future[T]:
    """Start `work` on a daemon thread. Several callers may wait for the future, each by `asyncio.wrap_future`; a cancelled one does not end
    the work."""
    future: futures.Future[T] = futures.Future()
    future.set_running_or_notify_cancel()  # From now on no caller can cancel the future, so it always gets a result.

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class _GrpcUse:
    """Records the use of gRPC. uses_grpc: this process has used it. is_child_of_user: an ancestor used it before the fork. connected:
    channels and calls that must not be freed in a forked child."""

    def __init__(self) -> None:
        self.uses_grpc = False
        self.is_child_of_user = False
        self.connected: WeakSet[object] = WeakSet()


_grpc_use = _GrpcUse()


def use_grpc() -> None:
    """Note that this process uses gRPC; call it before objects of gRPC or the loop thread are made. Raises ForkedError as `check_fork`."""
    check_fork()
    _grpc_use.uses_grpc = True


def check_fork() -> None:
    """Raises ForkedError in a child whose parent has used gRPC."""
    if _grpc_use.is_child_of_user:
        raise ForkedError("this process was forked from one that had used the client before, and gRPC does not work in it")


def is_child_of_grpc_user() -> bool:
    """Whether this process was forked from one that had used gRPC: then `check_fork` raises."""
    return _grpc_use.is_child_of_user


def leave_to_parent(connected: object) -> None:
    """Note a channel or a call, so that a forked child never frees it: freeing would end a connection that the parent still uses."""
    _grpc_use.connected.add(connected)


def _after_fork_in_child() -> None:
    """Runs in each child right after the fork."""
    if _grpc_use.uses_grpc:
        _grpc_use.is_child_of_user = True
    for connected in list(_grpc_use.connected):
        # Adds a reference that nobody gives back, so the object is never freed. A list is emptied when the interpreter ends.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(connected))


os.register_at_fork(after_in_child=_after_fork_in_child)
