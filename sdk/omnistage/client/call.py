"""Sends one request, again if needed, until its answer is whole or an error is final."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing

import grpc

from omnistage.client import fork
from omnistage.client.connection import Connection
from omnistage.client.errors import OmniError, RouterLostError, StartingError, UnavailableError, is_broken, says_when
from omnistage.client.events import Event, Failover, Progress
from omnistage.client.key import ApiKey
from omnistage.client.limit import Limit
from omnistage.client.reader import Reader
from omnistage.client.request import due
from omnistage.client.retries import Retries
from omnistage.client.routers import Router
from omnistage.client.upload import Conversing, Uploads
from omnistage.v1 import omni_pb2

FIRST_WAIT_S, LONGEST_WAIT_S = 0.05, 0.4
"""Seconds to pause between attempts to go on, doubled each time: a router that has just come back may break the first attempts."""

NOT_YET = ("DRAINING", "OVERLOADED", "STARTING")
"""Reasons for which a router refuses to go on with an answer for now: it is not ready or has no place. These refusals carry a delay
after which it may take the answer."""

NO_OUTPUT = (Failover, Progress)
"""Events that are no part of the answer itself: the answer may begin anew although the caller has them."""

GenerateCall = grpc.aio.UnaryStreamCall[omni_pb2.GenerateRequest, omni_pb2.GenerateResponse]

ROUTER_LOST = "its router was lost on the way"


class Call:
    """Sends one request and reads its answer. It asks again, under the same request id and within the one time limit, for three reasons:

    - The connection broke. It asks a router for the rest, and the caller gets the further events; a second loss is an error.
    - The pipeline is still starting. It waits until the pipeline serves.
    - The router gives a delay, and the caller has no part of the answer yet. The answer begins anew, up to `retries` times."""

    def __init__(
        self,
        connection: Connection,
        key: ApiKey | None,
        request: omni_pb2.GenerateRequest,
        uploads: Uploads,
        limit: Limit,
        resume_s: float,
        retries: Retries,
        is_whole: bool,
    ) -> None:
        """key: the caller's key. uploads: media that are streamed; each attempt sends them from the beginning. limit: for the whole answer.
        resume_s: seconds to look for a router that goes on after a loss; 0: do not look. is_whole: the caller gets no event before all have
        come; until then the answer may begin anew."""
        self._connection = connection
        self._key = key
        self._asked = request
        self._uploads = uploads
        self._asked.request_id = request.request_id or uuid.uuid4().hex
        self._asked.batches = True
        self._limit = limit
        self._resume_s = resume_s
        self._retries = retries
        self._reader = self._new_reader()
        self._held: list[Event] | None = [] if is_whole else None
        """If `is_whole`: the events so far, which the caller gets when all have come. None: events are yielded at once."""
        self._has_output = False
        """Whether the caller has got a part of the answer, so that the answer must not begin anew."""
        self._has_begun = False
        """Whether the private stack was asked to start the pipeline. If its router still refuses, the call only pauses."""
        self._patience: Limit | None = None
        """The time limit of the wait for a pipeline that is starting; it runs from the first refusal on. None: no refusal yet."""
        self._search: Limit | None = None
        """The time limit of the search for a router that goes on; it runs from the loss of the first router on. None: no loss."""
        self._lost = ""
        """HOST:PORT of the router that was lost last; empty: none was lost."""
        self._wait_s = FIRST_WAIT_S  # the next pause in the search

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yields every event of the answer; `Done` is the last. Raises OmniError."""
        while True:
            router = await self._connect()
            if not self._reader.is_lost:
                self._reader = self._new_reader()
            try:
                async with aclosing(self._read(router)) as events:
                    async for event in events:
                        if self._held is None:
                            self._has_output = self._has_output or not isinstance(event, NO_OUTPUT)
                            yield event
                        else:
                            self._held.append(event)
                for event in self._held or ():
                    yield event
                return
            except grpc.aio.AioRpcError as error:
                ready = self._ready_again(router, error)
            await ready

    def _ready_again(self, router: Router, error: grpc.aio.AioRpcError) -> Awaitable[None]:
        """Return a wait until a router can be asked again. error: of the last attempt; if it is final, its exception is raised."""
        if is_broken(error):
            return self._ready_to_go_on(router, error)
        refusal = self._limit.explain(error)
        if self._reader.is_lost and refusal.reason in NOT_YET and (pause := self._pause_in_search(refusal)) is not None:
            return pause
        if not self._reader.is_lost and isinstance(refusal, StartingError):
            ready = self._ready_pipeline(refusal)
        else:
            ready = self._pause_for_retry(router, refusal) if says_when(error) else None
        if ready is None:
            if self._retries.made:
                refusal.say_more(f"asked {self._retries.made + 1} times")
            raise refusal from error
        return ready

    # The connection broke ------------------------------------------------------------------------------------------------------------

    def _ready_to_go_on(self, router: Router, error: grpc.aio.AioRpcError) -> Awaitable[None]:
        """Note the loss of the router, and return the pause (an awaitable) before a router is asked for the rest. Raises RouterLostError
        for a second loss in the middle of the answer, and if no time is left for the search; DeadlineError if the time limit has passed."""
        if self._search is None:
            if self._limit.is_over:
                raise self._limit.passed() from error
            self._lose(router, error)
            if not self._resume_s:
                raise self._router_lost(router, error) from error
            self._search = Limit(self._resume_s)
            return self._connection.pause(0.0)
        is_second = not self._reader.is_lost
        wait_s, self._wait_s = self._wait_s, min(2 * self._wait_s, LONGEST_WAIT_S)
        if is_second or self._search.ends_within(wait_s):
            raise self._router_lost(router, error) from error
        self._lose(router, error)
        return self._connection.pause(min(wait_s, self._left_s))

    def _pause_in_search(self, refusal: OmniError) -> Awaitable[None] | None:
        """The pause (an awaitable) after a router refused for now to go on with the answer. None: do not try again, because the refusal
        gave no delay, or the search would end within it."""
        delay_s = refusal.retry_delay_s if isinstance(refusal, UnavailableError) else None
        if self._search is None or delay_s is None or self._search.ends_within(delay_s):
            return None
        return self._connection.pause(min(delay_s, self._left_s))

    def _lose(self, router: Router, error: grpc.aio.AioRpcError) -> None:
        """Note that the connection to the router broke: the next connection goes to the next address, and the reader expects the rest of
        the answer."""
        self._lost = self._lost or router.address
        self._connection.lost(router.address)
        self._reader.lose(router.address, error.details() or error.code().name)

    def _router_lost(self, router: Router, error: grpc.aio.AioRpcError) -> RouterLostError:
        details = error.details() or error.code().name
        return RouterLostError(f"the connection to the router at {router.address} broke: {details}", code=error.code())

    # The pipeline starts -------------------------------------------------------------------------------------------------------------

    def _ready_pipeline(self, refusal: StartingError) -> Awaitable[None] | None:
        """The wait (an awaitable) for a pipeline that is starting: until the private stack has started it, or a pause before the router is
        asked again. None: do not wait, because the pause would be longer than START_PATIENCE_S or the time limit allows."""
        if self._connection.is_private and not self._has_begun:
            self._has_begun = True
            return self._connection.begin(refusal.pipeline, self._limit)
        is_first, patience_s = self._patience is None, self._connection.start_patience_s
        self._patience = self._patience or Limit(patience_s)
        delay_s = refusal.retry_delay_s or LONGEST_WAIT_S
        if self._patience.ends_within(delay_s) or self._limit.ends_within(delay_s):
            return None
        if is_first:
            self._connection.tell(f"{refusal.pipeline} is still starting; waiting up to {min(patience_s, self._limit.left_s):.0f} s")
        return self._connection.pause(delay_s)

    # The router says when ------------------------------------------------------------------------------------------------------------

    def _pause_for_retry(self, router: Router, refusal: OmniError) -> Awaitable[None] | None:
        """Get ready to begin the answer anew, and return the pause (an awaitable) before that. None: it may not begin anew, no retry is
        left, or the time limit would end within the pause."""
        if not isinstance(refusal, UnavailableError) or refusal.retry_delay_s is None or self._has_output:
            return None
        pause_s = self._retries.pause_s(refusal.retry_delay_s)
        if self._retries.made == self._retries.most or self._limit.ends_within(pause_s):
            return None
        if refusal.reason == "DRAINING":
            self._connection.lost(router.address)  # The router is ending, so the next attempt goes to another one, if there is one.
        self._reader = self._new_reader()
        if self._held is not None:
            self._held.clear()
        self._connection.tell(self._retries.count(refusal, pause_s))
        return self._connection.pause(pause_s)

    # Asking --------------------------------------------------------------------------------------------------------------------------

    def _new_reader(self) -> Reader:
        return Reader(time.perf_counter(), due(self._asked))

    async def _connect(self) -> Router:
        """Return the first router that can be connected, to begin the answer or to go on with it. Raises UnavailableError, RouterLostError
        or DeadlineError."""
        search = self._search if self._reader.is_lost else None
        left_s = self._left_s
        patience_s = self._connection.connect_timeout_s if search is None else search.seconds - search.spent_s
        try:
            return await self._connection.connect(min(left_s, patience_s), self._key)
        except UnavailableError as error:
            if search is None and self._limit.is_over:
                raise self._limit.passed(error.message) from error
            if search is None:
                raise
            if left_s < patience_s:
                raise self._limit.passed(ROUTER_LOST) from error
            message = f"the connection to the router at {self._lost} broke, and none was there to go on within {self._resume_s:g} s"
            raise RouterLostError(message, code=error.code) from error

    async def _read(self, router: Router) -> AsyncGenerator[Event, None]:
        """Ask a router for the answer, or for the rest of it, and yield the events that come."""
        call: GenerateCall | Conversing
        request = self._reader.request(self._asked)
        if self._uploads:
            conversing = router.stub.Converse(timeout=self._left_s, metadata=router.metadata)
            fork.leave_to_parent(conversing)
            call = Conversing(conversing, request, self._uploads)
        else:
            call = router.stub.Generate(request, timeout=self._left_s, metadata=router.metadata)
            fork.leave_to_parent(call)
        try:
            async with aclosing(self._reader.read(call, router.address)) as events:
                async for event in events:
                    yield event
        finally:
            if not fork.is_child_of_user():
                call.cancel()

    @property
    def _left_s(self) -> float:
        """The seconds that are left of the time limit. Raises DeadlineError when none are."""
        if self._limit.is_over and self._reader.is_lost:
            raise self._limit.passed(ROUTER_LOST)
        return self._limit.left_s
