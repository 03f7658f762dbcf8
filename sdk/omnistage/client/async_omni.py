"""AsyncOmni: ask a router, or a private stack, from asyncio."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from os import PathLike
from types import TracebackType
from typing import Self, Unpack

import grpc

from omnistage.client import fork
from omnistage.client import request as requests
from omnistage.client.about import takes
from omnistage.client.answer import Answer, collect
from omnistage.client.beside import beside
from omnistage.client.call import Call, CallLimits
from omnistage.client.errors import BadRequestError, ClosedError, OmniError, RequestError, WrongLoopError
from omnistage.client.events import Event
from omnistage.client.found import Found, find_router, is_ours
from omnistage.client.limit import Limit
from omnistage.client.listing import Pipeline, Replica
from omnistage.client.media import AudioLike, ImageLike, VideoLike
from omnistage.client.options import DRAWN, OPTIONS, SPOKEN, Options
from omnistage.client.private_stack import DRAWING_PIPELINE, PrivateStack, StackPlan
from omnistage.client.request import DEFAULT_TIMEOUT_S as DEFAULT_TIMEOUT_S
from omnistage.client.request import Conversation
from omnistage.client.routers import Router, Routers
from omnistage.client.settings import SETTINGS, StackSettings
from omnistage.v1 import omni_pb2

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
RESUME_TIMEOUT_S = 10.0

OF_PIPELINES = ("model", "outputs", "thinker", "diffusion")
"""Fields in whose name a router says that none of its pipelines, or not the one that was named, does what is asked."""


@takes(SETTINGS)
class AsyncOmni:
    """Asks a router from asyncio. Use it as `async with`, on one event loop.

    address: HOST:PORT of a router, or several with commas between them: the first that answers is asked. Without it, and without anything
    that says what to start, the router is asked that `OMNISTAGE_ROUTER` names, or that runs where `omnistage serve` listens, of the same
    user or of root; `OMNISTAGE_ROUTER=none` turns that off. Else a private stack is started: the default one, or that of the checkpoint in
    `model_path`, a folder or the name of one at a hub (owner/name, owner/name@revision), with the engine settings of `StackSettings`; it
    ends with this client. Any number of calls may run at once.

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
        tensor_parallel_size: int | Mapping[str, int] = 1,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        resume_timeout_s: float = RESUME_TIMEOUT_S,
        **settings: Unpack[StackSettings],
    ) -> None:
        plan = StackPlan(settings, model_path, tensor_parallel_size)
        if address is not None and (model_path is not None or settings):
            raise TypeError(
                "address is for a running router: model_path and engine settings belong to a private stack, leave one of them out"
            )
        self._stack = PrivateStack(plan) if address is None else None
        self._plan = plan
        self._drawing: AsyncOmni | None = None
        self._drawn_by: tuple[int, Sequence[Pipeline]] = 0, ()
        """The connection on which a prompt was drawn that was no drawing, and the pipelines for which that was so."""
        self._routers = None if address is None else Routers(address)
        self._may_find = address is None and plan.says_nothing
        """Whether a router that runs is as good as a stack of its own; until it has been looked for."""
        self._found: Found | None = None
        self._starting = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connect_timeout_s = requests.checked_seconds("connect_timeout_s", connect_timeout_s)
        self._resume_timeout_s = resume_timeout_s and requests.checked_seconds("resume_timeout_s", resume_timeout_s)
        self._closed = False

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:  # An interrupt cancels the start, and nobody else ends it.
            await self.close()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"AsyncOmni({self.whereabouts})"

    @property
    def whereabouts(self) -> str:
        """Where it asks, whether that is a stack of its own, and whether it can be asked, for people."""
        is_private = self._stack is not None and self._stack.address == self.address
        kind = ", private stack" if is_private else ""
        return f"{self.address or 'not started'}{kind}, {'closed' if self._closed else 'open'}"

    @property
    def address(self) -> str:
        """HOST:PORT of the router in use; empty until a private stack has started."""
        return "" if self._routers is None else self._routers.address

    @property
    def start_limit_s(self) -> float:
        """How long `start` takes at most, seconds."""
        return self._connect_timeout_s + (0.0 if self._stack is None else self._stack.start_limit_s)

    async def start(self) -> None:
        """Start the private stack, if there is one, and connect. Calls do it by themselves; here it can be waited for."""
        await self._connected(self._connect_timeout_s)

    async def close(self) -> None:
        """Cancel what runs, close the connection, end the private stack and wait for its processes. May be called again.

        In a forked child it does nothing: all of it belongs to the parent."""
        if fork.is_child_of_user():
            return
        await self.disconnect()
        await beside(self.stop_stack, "omnistage-stop")

    async def disconnect(self) -> None:
        """The first half of `close`: cancel what runs and close the connection."""
        if self._loop is not None and self._loop.is_closed():
            self._closed = True  # and all that ran on it has ended
            return
        self._stay_on_loop()
        self._closed = True
        if self._stack is not None:
            self._stack.give_up()
        async with self._starting:
            if self._routers is not None:
                await self._routers.close()
        if self._drawing is not None:
            await self._drawing.disconnect()

    def stop_stack(self) -> None:
        """The second half of `close`: end the private stack. Blocks; needs no event loop, so that it also works while Python shuts down."""
        if self._drawing is not None:
            self._drawing.stop_stack()
        if self._stack is not None:
            self._stack.stop()

    @takes(OPTIONS)
    async def generate(
        self,
        prompt: str,
        *,
        images: Sequence[ImageLike] = (),
        audios: Sequence[AudioLike] = (),
        videos: Sequence[VideoLike] = (),
        **options: Unpack[Options],
    ) -> Answer:
        """Answer one prompt. Its media come before it: pictures, sounds, films; `chat` takes them in any order. A pipeline that only draws
        draws it: `answer.images`."""
        return await self._whole(self.stream(prompt, images=images, audios=audios, videos=videos, **options))

    @takes(OPTIONS)
    async def chat(self, conversation: Conversation, **options: Unpack[Options]) -> Answer:
        """Answer the last turn of a conversation; `answer["content"]` is the text. See `request.Conversation` for the form of a turn."""
        return await self._whole(self.stream_chat(conversation, **options))

    @takes(OPTIONS, SPOKEN)
    async def say(self, text: str, **options: Unpack[Options]) -> Answer:
        """Speak exactly this text. Raises NotSpokenError if nothing of it could be spoken."""
        return await self._whole(self.stream_say(text, **options))

    @takes(OPTIONS, DRAWN)
    async def draw(self, prompt: str, *, images: Sequence[ImageLike] = (), **options: Unpack[Options]) -> Answer:
        """Draw a picture, with a drawing pipeline; `answer.images` has it, `answer.pictures` the same encoded, `answer.rows` its
        latents and pixels where `outputs` names them. Previews are of the first of several `results` alone. Where nothing is said to be
        started, a stack of the default picture model is, with the first drawing; its pipeline is there from then on."""
        return await self._whole(self.stream_draw(prompt, images=images, **options))

    @takes(OPTIONS)
    def stream(
        self,
        prompt: str,
        *,
        images: Sequence[ImageLike] = (),
        audios: Sequence[AudioLike] = (),
        videos: Sequence[VideoLike] = (),
        **options: Unpack[Options],
    ) -> AsyncGenerator[Event, None]:
        """The events of an answer to one prompt, as they come. Closing the generator cancels the answer."""
        return self._stream(requests.for_prompt(prompt, images, audios, videos, options), options)

    @takes(OPTIONS)
    def stream_chat(self, conversation: Conversation, **options: Unpack[Options]) -> AsyncGenerator[Event, None]:
        """The events of an answer to a conversation, as they come."""
        return self._stream(requests.for_conversation(conversation, options), options)

    @takes(OPTIONS, SPOKEN)
    def stream_say(self, text: str, **options: Unpack[Options]) -> AsyncGenerator[Event, None]:
        """The events of exactly this text being spoken, as they come; NotSpokenError at the end if there was no sound."""
        return self._stream(requests.for_verbatim(text, options), options)

    @takes(OPTIONS, DRAWN)
    def stream_draw(self, prompt: str, *, images: Sequence[ImageLike] = (), **options: Unpack[Options]) -> AsyncGenerator[Event, None]:
        """The progress, previews and pictures of a prompt, as they come; see `draw`."""
        return self._stream(requests.for_drawing(prompt, images, options), options, draws=True)

    async def _stream(self, asked: requests.Request, options: Options, *, draws: bool = False) -> AsyncGenerator[Event, None]:
        await self._look()
        async with aclosing(self._asked(options, draws=draws)._events(asked, options)) as events:
            async for event in events:
                yield event

    def _asked(self, options: Options, *, draws: bool = False) -> AsyncOmni:
        """Who answers a call: this client, or the one beside it that draws, whose pipeline is named, or drawn with where none is."""
        plan = self._painter_plan
        named = options.get("pipeline")
        if plan is None or self._closed or not (named == DRAWING_PIPELINE or (draws and not named)):
            return self
        if self._drawing is None:
            connect_s, resume_s = self._connect_timeout_s, self._resume_timeout_s
            self._drawing = AsyncOmni(connect_timeout_s=connect_s, resume_timeout_s=resume_s, **plan.settings)
        return self._drawing

    @property
    def _painter_plan(self) -> StackPlan | None:
        """Of the stack beside this one's; None where this one is to draw as well."""
        if self._stack is None or (self._found is not None and (self._found.is_named or self._found.draws)):
            return None
        return self._plan.for_drawing()

    @property
    def _running(self) -> Sequence[AsyncOmni]:
        """This client, and the one beside it once that has a stack."""
        painter = self._drawing
        return (self,) if painter is None or painter._routers is None else (self, painter)

    async def pipelines(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[Pipeline]:
        """The pipelines that can be asked."""
        return await self._listed(Limit(requests.checked_seconds("timeout_s", timeout_s)))

    async def replicas(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[Replica]:
        """The stage servers and how they are."""
        limit = Limit(requests.checked_seconds("timeout_s", timeout_s))
        return [replica for client in self._running for replica in await client._listed_replicas(limit)]

    async def _whole(self, events: AsyncGenerator[Event, None]) -> Answer:
        async with aclosing(events):
            return await collect(events)

    async def _listed(self, limit: Limit) -> list[Pipeline]:
        return [pipeline for client in self._running for pipeline in await client._listed_pipelines(limit)]

    async def _listed_replicas(self, limit: Limit) -> list[Replica]:
        router = await self._connected(limit.left_s)
        try:
            response = await router.stub.ListReplicas(omni_pb2.ListReplicasRequest(), timeout=limit.left_s)
        except grpc.aio.AioRpcError as error:
            raise limit.explain(error) from error
        return [Replica.of(replica) for replica in response.replicas]

    async def _listed_pipelines(self, limit: Limit) -> list[Pipeline]:
        router = await self._connected(limit.left_s)
        try:
            response = await router.stub.ListModels(omni_pb2.ListModelsRequest(), timeout=limit.left_s)
        except grpc.aio.AioRpcError as error:
            raise limit.explain(error) from error
        return [Pipeline.of(model) for model in response.models]

    async def _events(self, asked: requests.Request, options: Options) -> AsyncGenerator[Event, None]:
        """A prompt is asked as one to answer; where nothing does but something draws, it is drawn, and from then on at once."""
        limit, begun = Limit(requests.time_limit_s(options)), False
        await _read(asked, limit)
        drawing = self._drawing_as_before(asked)
        if drawing is not None:
            try:
                async with aclosing(self._asked(options, draws=True)._answer(drawing, limit)) as events:
                    async for event in events:
                        begun = True
                        yield event
                return
            except RequestError as error:
                if begun or error.metadata.get("field") not in OF_PIPELINES:
                    raise
                self._drawn_by = 0, ()  # The router has other pipelines by now.
        try:
            async with aclosing(self._answer(asked, limit)) as events:
                async for event in events:
                    begun = True
                    yield event
            return
        except BadRequestError as error:
            drawing = None if begun else await self._drawing_instead(asked, error, limit)
            if drawing is None:
                raise
        async with aclosing(self._asked(options, draws=True)._answer(drawing, limit)) as events:
            async for event in events:
                yield event

    def _drawing_as_before(self, asked: requests.Request) -> requests.Request | None:
        """What to ask, where by all that this connection has told the request would be refused and drawn. None: what was asked."""
        connection, pipelines = self._drawn_by
        if self._routers is None or not connection or self._routers.connection != connection:
            return None
        with suppress(BadRequestError):  # The router tells it, if its pipelines are still those.
            return asked.drawing(pipelines)
        return None

    async def _drawing_instead(self, asked: requests.Request, error: BadRequestError, limit: Limit) -> requests.Request | None:
        """What to ask after a refusal; None: nothing. A drawing that was refused is told what draws. Raises BadRequestError."""
        field = error.metadata.get("field")
        if field not in ("model", "thinker", "diffusion"):
            return None
        try:
            pipelines = await self._listed(limit)
        except OmniError:  # The refusal says more.
            return None
        drawing = asked.drawing(pipelines)
        if drawing is not None and self._routers is not None:
            self._drawn_by = self._routers.connection, pipelines
        elif field == "diffusion":
            draw = [one.name for one in pipelines if one.draws]
            beside = "`draw` draws, with a stack of the default picture model." if self._painter_plan is not None else ""
            error.hint = f"These draw: {', '.join(draw)}." if draw else beside or "No pipeline of this router draws: `omnistage pipelines`."
        return drawing

    async def _answer(self, asked: requests.Request, limit: Limit) -> AsyncGenerator[Event, None]:
        request = await _read(asked, limit)
        limits = CallLimits(limit.seconds, self._connect_timeout_s, self._resume_timeout_s, limit.spent_s)
        call = Call(await self._known(), request, limits, asked.uploads)
        try:
            async with aclosing(call.events()) as events:
                async for event in events:
                    yield event
        except BadRequestError as error:
            if (named := asked.named(error)) is None:
                raise
            raise named from error
        except asyncio.CancelledError:
            # Closing a channel cancels its calls from inside: for a task that nobody cancelled this is an error, not a cancellation.
            task = asyncio.current_task()
            if self._closed and task is not None and not task.cancelling():
                raise ClosedError("the client was closed while it answered") from None
            raise

    async def _connected(self, timeout_s: float) -> Router:
        routers = await self._known()
        return await routers.connect(min(timeout_s, self._connect_timeout_s))

    async def _known(self) -> Routers:
        """Where to ask. The time of a private stack's start is bounded by its own setting."""
        await self._look()
        async with self._starting:
            if self._closed:
                raise ClosedError("this client is closed")
            if self._routers is None:
                assert self._stack is not None
                self._routers = Routers(await self._stack.started())
            return self._routers

    async def _look(self) -> None:
        """Where nothing was said to be started, a router that runs is asked instead; it is looked for once."""
        fork.check()
        self._stay_on_loop()
        if not self._may_find:
            return
        async with self._starting:
            if self._may_find and not self._closed:
                found = await find_router()
                if found is not None:
                    self._routers = Routers(found.address, None if found.is_named else is_ours)
                    log.info("asking the router at %s, which runs already", found.address)
                self._found, self._may_find = found, False

    def _stay_on_loop(self) -> None:
        """Channels belong to the loop on which they were opened. Raises WrongLoopError on another one."""
        running = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = running
        if self._loop is not running:
            raise WrongLoopError("this AsyncOmni was first used on another event loop")


async def _read(asked: requests.Request, limit: Limit) -> omni_pb2.GenerateRequest:
    """The whole request, its media read beside the event loop."""
    if not asked.has_unread:
        return asked.complete()
    with suppress(TimeoutError):
        async with asyncio.timeout(limit.left_s):
            return await asyncio.to_thread(asked.complete)
    # Behind the TimeoutError, not beside it: that leads to the task, and would keep the media with it.
    raise limit.passed("its media were not read by then")
