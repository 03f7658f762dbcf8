"""Omni: the client for programs without asyncio. It runs each call of an `AsyncOmni` on a thread with an event loop; other threads read
the events of a stream one at a time."""

from __future__ import annotations

import asyncio
import atexit
import copy
import time
import weakref
from collections.abc import AsyncGenerator, Coroutine, Generator, Mapping, Sequence
from contextlib import ExitStack
from os import PathLike
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, overload

from omnistage.client import threads
from omnistage.client.about import takes
from omnistage.client.answer import Answer
from omnistage.client.async_omni import RESUME_TIMEOUT_S, AsyncOmni
from omnistage.client.connection import CONNECT_TIMEOUT_S
from omnistage.client.errors import ClosedError, OmniError
from omnistage.client.events import Event
from omnistage.client.limits import MAX_RETRIES
from omnistage.client.media import Audios, Images, Videos
from omnistage.client.omni_calls import BlockingCalls
from omnistage.client.options import SETTINGS, Options, StackSettings
from omnistage.client.request import time_limit_s
from omnistage.client.threads import LoopThread
from omnistage.client.wording import explain_calls, takes_options

T = TypeVar("T")

CLOSE_TIMEOUT_S = 5.0
"""Seconds that closing the connections may take; the private stack has a limit of its own."""


@takes(SETTINGS)
class Omni(BlockingCalls):
    """Asks a router. Safe to use from many threads at once; use it as `with`, or call `close`.

    to_start: the stack to start, as an unnamed first argument in the form that `omnistage serve` takes: the name or YAML file of a
    pipeline, the folder of a checkpoint, or the name of one at a hub; `Omni("smol")` is `Omni(pipeline="smol")`.

    address: HOST:PORT of a router, or several with commas between them: the first that answers is asked. Without an address, and without a
    stack to start, the client asks the router that `OMNISTAGE_ROUTER` names, or one that runs where `omnistage serve` listens, if it
    belongs to the same user or to root; `OMNISTAGE_ROUTER=none` turns that off. Otherwise the client starts a private stack. It serves the
    default pipelines, the first at once and the others when they are asked; or the checkpoint in `model_path`, a folder or a name at a hub
    (owner/name, owner/name@revision), with the engine settings of `StackSettings`. Its processes end with this client and with this Python
    process, also if this process is killed.

    api_key: tells the router which client asks; by default the key in `OMNISTAGE_API_KEY`, or none. The client sends it with every call,
    and shows it in no message, repr or log. Before it goes to another host over a connection that is not encrypted, there is an
    `UnencryptedKeyWarning`.

    resume_timeout_s: if the connection to the router breaks in the middle of an answer, the client looks for so many seconds for the same
    router, started again, or for the next one, and goes on with the answer without gap or repeat. It does so once for each answer. 0:
    never; the loss is an error.

    max_retries: how often a call is retried, within its time limit, if the server gives a delay (`retry_delay_s`) and you have no part of
    the answer yet: no event of a stream, or an answer that comes whole and is not whole yet. 0: never. A call may set its own number.

    Every call takes the keyword arguments of `Options`, and ends within `timeout_s` (120 s) in an answer or in an error of
    `omnistage.client.errors`; if the thread that runs it is stuck, within 5 s more.

    After a fork the child can use neither this client nor a new one (ForkedError); the parent and its private stack are not disturbed."""

    @explain_calls
    def __init__(
        self,
        to_start: str | PathLike[str] | Sequence[str] | None = None,
        /,
        *,
        address: str | None = None,
        api_key: str | None = None,
        model_path: str | PathLike[str] | None = None,
        tensor_parallel_size: int | Mapping[str, int] = 1,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        resume_timeout_s: float = RESUME_TIMEOUT_S,
        max_retries: int = MAX_RETRIES,
        **settings: Unpack[StackSettings],
    ) -> None:
        self._client = AsyncOmni(
            to_start,
            address=address,
            api_key=api_key,
            model_path=model_path,
            tensor_parallel_size=tensor_parallel_size,
            connect_timeout_s=connect_timeout_s,
            resume_timeout_s=resume_timeout_s,
            max_retries=max_retries,
            **settings,
        )
        self._thread = LoopThread.acquire()
        self._abandoned = weakref.finalize(self, _abandon, self._client, self._thread)
        self._abandoned.atexit = False
        self._owner: Omni | None = None
        """On a view: the client that it keeps open, and that closes it."""
        _open.add(self)
        try:
            self._run(self._client.start_limit_s, self._client.start())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Omni({self._client.whereabouts})"

    @explain_calls
    def as_client(self, api_key: str | None) -> Self:
        """A view of this client with another user's key: for a gateway that serves many users. api_key: None: no key, whatever key this
        client or `OMNISTAGE_API_KEY` has. The view uses this client's connection and stack. Closing the view closes nothing; once this
        client is closed, the view raises ClosedError. Raises BadRequestError for a text that cannot be a key."""
        view = copy.copy(self)
        view._client, view._owner = self._client.as_client(api_key), self._owner or self
        return view

    @property
    def address(self) -> str:
        """HOST:PORT of the router in use; others may use it while this client is open."""
        return self._client.address

    def close(self) -> None:
        """Cancel what runs, close the connection, end the private stack and wait for its processes. May be called again.

        In a forked child it does nothing: connection and stack belong to the parent."""
        if threads.is_child_of_grpc_user() or self._owner is not None or self._abandoned.detach() is None:
            return
        _open.discard(self)
        if self._thread.is_current:  # a finalizer of the caller runs on our thread, which must not wait for itself
            _abandon(self._client, self._thread)
            return
        try:
            self._thread.run(self._client.disconnect(), CLOSE_TIMEOUT_S)
        finally:
            LoopThread.release()
            self._client.stop_stack()

    @overload
    def generate(
        self, prompt: str, *, images: Images = (), audios: Audios = (), videos: Videos = (), **options: Unpack[Options]
    ) -> Answer: ...

    @overload
    def generate(
        self,
        prompt: list[str] | tuple[str, ...],
        *,
        images: Images = (),
        audios: Audios = (),
        videos: Videos = (),
        **options: Unpack[Options],
    ) -> list[Answer]: ...

    @takes_options()
    def generate(
        self,
        prompt: str | list[str] | tuple[str, ...],
        *,
        images: Images = (),
        audios: Audios = (),
        videos: Videos = (),
        **options: Unpack[Options],
    ) -> Answer | list[Answer]:
        """Answer one prompt. Its media come before it: pictures, sounds, films, one or several of each; `chat` takes them in any order. A
        pipeline that only draws makes a picture of the prompt: `answer.images`.

        A list of texts gives a list of answers, in the same order: all with these media and options, also the same seed, each within its
        own time limit. They are asked at the same time, as many at once as there are places. If some fail, the error of the first of
        them is raised when all have ended; `error.answers` has the answers to the others."""
        # Each of several texts may first wait for a place for `timeout_s`, and then take `timeout_s` for its answer.
        times = 2 * len(prompt) if isinstance(prompt, list | tuple) else 1
        limit_s = time_limit_s(options) * max(times, 1)
        call: Any = self._client.generate(prompt, images=images, audios=audios, videos=videos, **options)
        answered: Answer | list[Answer] = self._run(limit_s, call)
        return answered

    def _run(self, limit_s: float, work: Coroutine[Any, Any, T]) -> T:
        """Run a call on the loop thread and return its result. limit_s: the call's own time limit in seconds. Raises ClosedError if this
        client is closed, ForkedError in a forked child."""
        try:
            threads.check_fork()
            if not self._abandoned.alive:
                raise ClosedError("this client is closed")
        except OmniError:
            work.close()
            raise
        return self._thread.run(work, limit_s)

    def _iterate(self, limit_s: float, events: AsyncGenerator[Event, None]) -> Generator[Event, None, None]:
        """Yield the events of a stream; the loop thread gets each from the router. limit_s: the stream's own time limit in seconds."""
        steps = AsyncSteps(events)
        until = time.monotonic() + limit_s
        try:
            while (event := self._run(max(until - time.monotonic(), 0.0), steps.next())) is not None:
                yield event
        finally:
            # A stream that was not read to its end is closed as garbage, perhaps on the loop's own thread: so this must not wait.
            self._thread.detach(steps.close)


def _abandon(client: AsyncOmni, thread: LoopThread) -> None:
    """Clean up after an `Omni` that became garbage without being closed."""
    thread.detach(lambda: _end(client))


async def _end(client: AsyncOmni) -> None:
    try:
        await client.close()
    finally:
        LoopThread.release()


_open: weakref.WeakSet[Omni] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Close the clients that are still open when the interpreter ends, while threads can still run."""
    with ExitStack() as exits:
        for omni in list(_open):
            exits.callback(omni.close)


class AsyncSteps:
    """Reads an async generator event by event, on the client's loop only. `close` first waits until a running `next` has ended."""

    def __init__(self, events: AsyncGenerator[Event, None]) -> None:
        self._events = events
        self._turn = asyncio.Lock()

    async def next(self) -> Event | None:
        """The next event; None at the end."""
        async with self._turn:
            return await anext(self._events, None)

    async def close(self) -> None:
        """Close the generator, which cancels the rest of the answer."""
        async with self._turn:
            await self._events.aclose()
