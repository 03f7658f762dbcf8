"""Omni: the same client without asyncio. Every call runs an `AsyncOmni` on a private loop thread."""

from __future__ import annotations

import threading
import weakref
from collections.abc import AsyncGenerator, Coroutine, Generator, Sequence
from os import PathLike
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from omnistage.client.answer import Answer
from omnistage.client.async_omni import CONNECT_TIMEOUT_S, DEFAULT_TIMEOUT_S, RESUME_TIMEOUT_S, AsyncOmni
from omnistage.client.errors import ClosedError
from omnistage.client.events import Event
from omnistage.client.listing import Model, Replica
from omnistage.client.loop_thread import LoopThread
from omnistage.client.media import MediaLike
from omnistage.client.private_stack import StackSettings
from omnistage.client.request import Conversation, Options

T = TypeVar("T")


class Omni:
    """Asks a router. Safe to use from many threads at once; use it as `with`, or call `close`.

    address: HOST:PORT of a router, or several with commas between them: the first that answers is asked. Without it a private stack is
    started: the default one, or that of the checkpoint in `model_path`, with the engine settings of `StackSettings`. Its processes end with
    this client, with this Python process, and also if that is killed.

    resume_timeout_s: if the connection to the router breaks in the middle of an answer, the client looks for that router, started again, or
    for the next one, for so long, and goes on with the answer without gap or repeat; once for each answer. 0: never, the loss is an error.

    Every call takes the keyword arguments of `Options`, and ends within `timeout_s` (120 s) in an answer or in an error of
    `omnistage.client.errors`.
    """

    def __init__(
        self,
        *,
        address: str | None = None,
        model_path: str | PathLike[str] | None = None,
        tensor_parallel_size: int = 1,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        resume_timeout_s: float = RESUME_TIMEOUT_S,
        **settings: Unpack[StackSettings],
    ) -> None:
        self._client = AsyncOmni(
            address=address,
            model_path=model_path,
            tensor_parallel_size=tensor_parallel_size,
            connect_timeout_s=connect_timeout_s,
            resume_timeout_s=resume_timeout_s,
            **settings,
        )
        self._thread = LoopThread.acquire()
        self._finalizer = weakref.finalize(self, _close, self._client, self._thread, threading.Lock())
        try:
            self._run(self._client.start())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def address(self) -> str:
        """HOST:PORT of the router in use; others may use it while this client is open."""
        return self._client.address

    def close(self) -> None:
        """Cancel what runs, close the connection, end the private stack and wait for its processes. May be called again."""
        self._finalizer()

    def generate(
        self, prompt: str, *, images: Sequence[MediaLike] = (), audios: Sequence[MediaLike] = (), **options: Unpack[Options]
    ) -> Answer:
        """Answer one prompt."""
        return self._run(self._client.generate(prompt, images=images, audios=audios, **options))

    def chat(self, conversation: Conversation, **options: Unpack[Options]) -> Answer:
        """Answer the last turn of a conversation; `answer["content"]` is the text. See `request.Conversation` for the form of a turn."""
        return self._run(self._client.chat(conversation, **options))

    def say(self, text: str, **options: Unpack[Options]) -> Answer:
        """Speak exactly this text. Raises NotSpokenError if nothing of it could be spoken."""
        return self._run(self._client.say(text, **options))

    def draw(self, prompt: str, *, images: Sequence[MediaLike] = (), **options: Unpack[Options]) -> Answer:
        """Draw a picture, with a drawing pipeline; `answer.pictures` has it."""
        return self._run(self._client.draw(prompt, images=images, **options))

    def stream(
        self, prompt: str, *, images: Sequence[MediaLike] = (), audios: Sequence[MediaLike] = (), **options: Unpack[Options]
    ) -> Generator[Event, None, None]:
        """The events of an answer to one prompt, as they come. Leaving the loop early cancels the answer."""
        return self._iterate(self._client.stream(prompt, images=images, audios=audios, **options))

    def stream_chat(self, conversation: Conversation, **options: Unpack[Options]) -> Generator[Event, None, None]:
        """The events of an answer to a conversation, as they come."""
        return self._iterate(self._client.stream_chat(conversation, **options))

    def stream_say(self, text: str, **options: Unpack[Options]) -> Generator[Event, None, None]:
        """The events of exactly this text being spoken, as they come; NotSpokenError at the end if there was no sound."""
        return self._iterate(self._client.stream_say(text, **options))

    def stream_draw(self, prompt: str, *, images: Sequence[MediaLike] = (), **options: Unpack[Options]) -> Generator[Event, None, None]:
        """The previews and pictures of a prompt, as they come."""
        return self._iterate(self._client.stream_draw(prompt, images=images, **options))

    def models(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[Model]:
        """The pipelines that this router serves."""
        return self._run(self._client.models(timeout_s=timeout_s))

    def replicas(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[Replica]:
        """The stage servers behind this router and how they are."""
        return self._run(self._client.replicas(timeout_s=timeout_s))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if not self._finalizer.alive:
            work.close()
            raise ClosedError("this client is closed")
        return self._thread.run(work)

    def _iterate(self, events: AsyncGenerator[Event, None]) -> Generator[Event, None, None]:
        try:
            while True:
                try:
                    event = self._run(anext(events))
                except StopAsyncIteration:
                    return
                yield event
        finally:
            if self._finalizer.alive:
                self._thread.run(events.aclose())


def _close(client: AsyncOmni, thread: LoopThread, once: threading.Lock) -> None:
    """Runs in `Omni.close`, at garbage collection, or at interpreter exit; whichever comes first."""
    if thread.is_current:
        # Garbage is collected on any thread. The loop must not wait for itself.
        threading.Thread(target=_close, args=(client, thread, once), name="omnistage-client-close").start()
        return
    with once:
        try:
            thread.run(client.disconnect())
        finally:
            LoopThread.release()
            client.stop_stack()
