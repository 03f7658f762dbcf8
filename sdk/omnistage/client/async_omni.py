"""AsyncOmni: ask a router, or a private stack, from asyncio."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from os import PathLike
from types import TracebackType
from typing import Any, Self, Unpack, overload

from omnistage.client import request as requests
from omnistage.client import threads
from omnistage.client.about import takes
from omnistage.client.answer import Answer, collect
from omnistage.client.call import Call, Together, checked_texts
from omnistage.client.connection import CONNECT_TIMEOUT_S, Connection, Found, Pipeline, Replica
from omnistage.client.errors import ClosedError, OmniError, RequestError
from omnistage.client.events import Event
from omnistage.client.limits import MAX_RETRIES, Limit, Retries, checked_retries
from omnistage.client.media import Audios, Images, Videos, is_none
from omnistage.client.options import DEFAULT_TIMEOUT_S, DRAWING, SETTINGS, SPEECH, Options, StackSettings
from omnistage.client.private_stack import StackPlan, with_first
from omnistage.client.request import Conversation
from omnistage.client.routers import ApiKey, Router, key_of
from omnistage.client.threads import run_on_thread
from omnistage.client.wording import explain_calls, takes_options
from omnistage.v1 import omni_pb2

RESUME_TIMEOUT_S = 10.0


@takes(SETTINGS)
class AsyncOmni:
    """Asks a router from asyncio. Use it as `async with`, on one event loop; any number of calls may run at once.

    `help(Omni)` explains its arguments, which router it asks, and the time limit of a call. A private stack ends with this client."""

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
        settings = with_first(to_start, settings)
        plan = StackPlan(settings, model_path, tensor_parallel_size)
        if address is not None and (model_path is not None or settings):
            rule = "model_path and engine settings belong to a private stack, leave one of them out"
            raise TypeError(f"address is for a running router: {rule}")
        target = plan if address is None else Found(address, is_named=True)
        self._connection = Connection(target, requests.checked_seconds("connect_timeout_s", connect_timeout_s))
        self._resume_timeout_s = requests.checked_seconds("resume_timeout_s", resume_timeout_s, may_be_0=True)
        self._max_retries = checked_retries(max_retries)
        self._api_key = key_of(api_key)
        self._is_view = False

    @classmethod
    def over(cls, connection: Connection, api_key: ApiKey | None, *, max_retries: int = MAX_RETRIES) -> Self:
        """A client that asks over `connection`, and closes it at the end. api_key: None: no key, also if `OMNISTAGE_API_KEY` has one."""
        client = cls.__new__(cls)
        client._connection, client._resume_timeout_s = connection, RESUME_TIMEOUT_S
        client._max_retries, client._api_key, client._is_view = max_retries, api_key, False
        return client

    @explain_calls
    def as_client(self, api_key: str | ApiKey | None) -> Self:
        """A view of this client with another user's key: for a gateway that serves many users. api_key: the key, also as an ApiKey; None:
        no key, whatever key this client or `OMNISTAGE_API_KEY` has. The view uses this client's connection and stack. Closing the view
        closes nothing; once this client is closed, the view raises ClosedError. Raises BadRequestError for a text that cannot be a key."""
        view = copy.copy(self)
        view._api_key = api_key if api_key is None or isinstance(api_key, ApiKey) else ApiKey(api_key)
        view._is_view = True
        return view

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:  # Without `__aexit__`, which does not run if this raises, nothing else ends the stack.
            await self.close()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"AsyncOmni({self.whereabouts})"

    @property
    def whereabouts(self) -> str:
        """A text for people: the router's address, whether this client started the stack, and whether the router can be asked."""
        return self._connection.whereabouts

    @property
    def address(self) -> str:
        """HOST:PORT of the router in use; empty until a private stack has started."""
        return self._connection.address

    @property
    def start_limit_s(self) -> float:
        """The most seconds that `start` takes."""
        return self._connection.start_limit_s

    async def start(self) -> None:
        """Start the private stack, if there is one, and connect. Calls do this by themselves; call it to wait for the start."""
        await self._connection.connect(self._connection.connect_timeout_s, self._api_key)

    async def close(self) -> None:
        """Cancel what runs, close the connection, end the private stack and wait for its processes. May be called again.

        In a forked child it does nothing: connection and stack belong to the parent."""
        if threads.is_child_of_grpc_user() or self._is_view:
            return
        await self.disconnect()
        await run_on_thread(self.stop_stack, "omnistage-stop")

    async def disconnect(self) -> None:
        """The first half of `close`: cancel what runs and close the connection."""
        await self._connection.disconnect()

    def stop_stack(self) -> None:
        """The second half of `close`: end the private stack. Blocks; needs no event loop, so that it also works while Python shuts down."""
        self._connection.stop_stack()

    @overload
    async def generate(
        self, prompt: str, *, images: Images = (), audios: Audios = (), videos: Videos = (), **options: Unpack[Options]
    ) -> Answer: ...

    @overload
    async def generate(
        self,
        prompt: list[str] | tuple[str, ...],
        *,
        images: Images = (),
        audios: Audios = (),
        videos: Videos = (),
        **options: Unpack[Options],
    ) -> list[Answer]: ...

    @takes_options()
    async def generate(
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
        if not isinstance(prompt, list | tuple):
            return await self._collect(requests.for_prompt(prompt, images, audios, videos, options))
        requests.check_options(options)
        texts = checked_texts(prompt, options, has_media=any(not is_none(one) for one in (images, audios, videos)))
        limit_s = requests.time_limit_s(options)
        async with self._connection.waiting():
            media: Any = await requests.read_once(images, audios, videos, Limit(limit_s))

        async def ask(text: str) -> Answer:
            return await self._collect(requests.for_prompt(text, **media, options=options))

        return await Together(ask, limit_s, self._connection.places, self._connection.pause).answers(texts)

    @takes_options()
    async def chat(self, conversation: Conversation, **options: Unpack[Options]) -> Answer:
        """Answer the last turn of a conversation; `answer["content"]` is the text. See `request.Conversation` for the form of a turn."""
        return await self._collect(requests.for_conversation(conversation, options))

    @takes_options(SPEECH)
    async def say(self, text: str, **options: Unpack[Options]) -> Answer:
        """Speak exactly this text. Raises NotSpokenError if nothing of it could be spoken."""
        return await self._collect(requests.for_verbatim(text, options))

    @takes_options(DRAWING)
    async def draw(self, prompt: str, *, images: Images = (), **options: Unpack[Options]) -> Answer:
        """Draw a picture, with a drawing pipeline. `answer.images` has it, `answer.pictures` has it encoded, and `answer.rows` has its
        latents and pixels if `outputs` names them. If there are several `results`, only the first has previews. In a private stack of
        the default pipelines the first drawing starts the pipeline that draws, and waits for it."""
        return await self._collect(requests.for_drawing(prompt, images, options, "image"))

    @takes_options(DRAWING)
    async def film(self, prompt: str, *, image: Images = (), **options: Unpack[Options]) -> Answer:
        """Make a film of a prompt, with a pipeline that makes films: `answer.videos[0].save("x.webm")`, or .mp4 if `media_type` is
        video/mp4. image: the picture with which it begins; or two, the first and the last one, if the model takes them. `answer.rows`
        has its latents and pixels if `outputs` names them."""
        return await self._collect(requests.for_drawing(prompt, image, options, "video", "image"))

    @takes_options(DRAWING)
    async def sound(self, prompt: str, **options: Unpack[Options]) -> Answer:
        """Make the sound that a prompt describes, `seconds` long, with a pipeline that makes sounds: `answer.audio`,
        `answer.save("x.wav")`. To have a text spoken, call `say`."""
        return await self._collect(requests.for_drawing(prompt, (), options, "audio"))

    @takes_options()
    def stream(
        self, prompt: str, *, images: Images = (), audios: Audios = (), videos: Videos = (), **options: Unpack[Options]
    ) -> AsyncGenerator[Event, None]:
        """The events of an answer to one prompt, as they come. Closing the generator cancels the answer."""
        return self._events(requests.for_prompt(prompt, images, audios, videos, options))

    @takes_options()
    def stream_chat(self, conversation: Conversation, **options: Unpack[Options]) -> AsyncGenerator[Event, None]:
        """The events of an answer to a conversation, as they come."""
        return self._events(requests.for_conversation(conversation, options))

    @takes_options(SPEECH)
    def stream_say(self, text: str, **options: Unpack[Options]) -> AsyncGenerator[Event, None]:
        """The events while exactly this text is spoken, as they come; NotSpokenError at the end if there was no sound."""
        return self._events(requests.for_verbatim(text, options))

    @takes_options(DRAWING)
    def stream_draw(self, prompt: str, *, images: Images = (), **options: Unpack[Options]) -> AsyncGenerator[Event, None]:
        """The progress, previews and pictures for a prompt, as they come; see `draw`."""
        return self._events(requests.for_drawing(prompt, images, options, "image"))

    @takes_options(DRAWING)
    def stream_film(self, prompt: str, *, image: Images = (), **options: Unpack[Options]) -> AsyncGenerator[Event, None]:
        """The progress and the pieces of the film for a prompt, as they come; see `film`. The pieces, joined in order, are the file;
        those that have come can be played already."""
        return self._events(requests.for_drawing(prompt, image, options, "video", "image"))

    @takes_options(DRAWING)
    def stream_sound(self, prompt: str, **options: Unpack[Options]) -> AsyncGenerator[Event, None]:
        """The progress and the samples of the sound for a prompt, as they come; see `sound`."""
        return self._events(requests.for_drawing(prompt, (), options, "audio"))

    @explain_calls
    async def pipelines(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[Pipeline]:
        """The pipelines of the router, also those that are still starting."""
        router, limit = await self._connected(timeout_s)
        with limit.explained():
            listed = await router.stub.ListModels(omni_pb2.ListModelsRequest(), timeout=limit.left_s, metadata=router.metadata)
        return Pipeline.all_of(listed)

    @explain_calls
    async def voices(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> dict[str, tuple[str, ...]]:
        """The voices of each pipeline that speaks, by its name; the first voice is its default."""
        return {one.name: one.voices for one in await self.pipelines(timeout_s=timeout_s) if one.voices}

    @explain_calls
    async def replicas(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[Replica]:
        """The stage servers and their states."""
        router, limit = await self._connected(timeout_s)
        with limit.explained():
            listed = await router.stub.ListReplicas(omni_pb2.ListReplicasRequest(), timeout=limit.left_s, metadata=router.metadata)
        return [Replica.of(replica) for replica in listed.replicas]

    async def _connected(self, timeout_s: float) -> tuple[Router, Limit]:
        """The router to ask, and the time limit of the call. The limit begins when the router is connected, so the start of a private stack
        does not count."""
        limit = Limit(requests.checked_seconds("timeout_s", timeout_s))
        with limit.paused():
            await self._connection.start(self._api_key)
        return await self._connection.connect(min(limit.left_s, self._connection.connect_timeout_s), self._api_key), limit

    async def _collect(self, request: requests.Request) -> Answer:
        """The whole answer to a request."""
        async with aclosing(self._events(request, is_whole=True)) as events:
            return await collect(events)

    async def _events(self, order: requests.Request, is_whole: bool = False) -> AsyncGenerator[Event, None]:
        """Send a request and yield its events. is_whole: as in `Call`. The time limit does not include the start of a private stack, which
        has a limit of its own."""
        limit = Limit(order.timeout_s)
        async with self._connection.waiting():
            request = await order.read(limit)
        with limit.paused():
            await self._connection.start(self._api_key)
        retries = Retries(self._max_retries if order.max_retries is None else order.max_retries)
        call = Call(self._connection, self._api_key, request, order.uploads, limit, self._resume_timeout_s, retries, is_whole)
        try:
            async with aclosing(call.events()) as events:
                async for event in events:
                    yield event
        except OmniError as error:
            self._connection.advise(error, request)
            refusal = order.translate_refusal(error) if isinstance(error, RequestError) else None
            if call.has_asked:
                (refusal or error).name_request(request.request_id)
            if refusal is None:
                raise
            raise refusal from error
        except asyncio.CancelledError:
            # Closing a channel raises CancelledError in its calls. If nobody cancelled this task itself, that becomes a ClosedError.
            task = asyncio.current_task()
            if self._connection.is_closed and task is not None and not task.cancelling():
                raise ClosedError("the client was closed while it answered") from None
            raise
