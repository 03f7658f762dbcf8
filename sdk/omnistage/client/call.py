"""One request and its answer, over one connection to a router, or over two if the first one breaks."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any

import grpc

from omnistage.client import fork
from omnistage.client.connection import Connection
from omnistage.client.errors import OmniError, RouterLostError, StartingError, UnavailableError, is_broken
from omnistage.client.events import Event
from omnistage.client.key import ApiKey
from omnistage.client.limit import Limit
from omnistage.client.reader import Reader
from omnistage.client.request import is_to_be_heard
from omnistage.client.routers import Router
from omnistage.client.upload import Conversing, Uploads
from omnistage.v1 import omni_pb2

FIRST_WAIT_S, LONGEST_WAIT_S = 0.05, 0.4
"""Between attempts to go on, doubled each time: a router that has just come back may break the first of them."""

NOT_YET = ("DRAINING", "OVERLOADED", "STARTING")
"""Refusals of a router that is not ready or has no place yet; with a delay after which it may have."""

GenerateCall = grpc.aio.UnaryStreamCall[omni_pb2.GenerateRequest, omni_pb2.GenerateResponse]

ROUTER_LOST = "its router was lost on the way"


class Call:
    """Asks once, again while its pipeline starts. If the connection breaks, it asks once more for the rest, under the same request id, and
    the events go on as if nothing had happened; a second loss is an error."""

    def __init__(
        self,
        connection: Connection,
        key: ApiKey | None,
        request: omni_pb2.GenerateRequest,
        uploads: Uploads,
        limit: Limit,
        resume_s: float,
    ) -> None:
        """key: who asks. uploads: files that are streamed, again after a loss. limit: of the whole answer. resume_s: how long to look for a
        router that goes on after a loss; 0: never."""
        self._connection = connection
        self._key = key
        self._asked = request
        self._uploads = uploads
        self._asked.request_id = request.request_id or uuid.uuid4().hex
        self._asked.batches = True
        self._limit = limit
        self._resume_s = resume_s
        self._reader = self._new_reader()
        self._has_begun = False
        """Whether the private stack was asked to start the pipeline; its router may learn a moment later that it serves."""
        self._patience: Limit | None = None
        """For a pipeline that is starting, from the first refusal on."""

    async def events(self) -> AsyncGenerator[Event, None]:
        """Every event of the answer, `Done` last. Raises OmniError."""
        while True:
            router = await self._connect()
            self._reader = self._new_reader()
            try:
                async with aclosing(self._read(router)) as events:
                    async for event in events:
                        yield event
                return
            except grpc.aio.AioRpcError as error:
                if is_broken(error):
                    if self._limit.is_over:
                        raise self._limit.passed() from error
                    broken = error
                    break
                start = self._start_of(self._limit.explain(error))
                if start is None:
                    raise self._limit.explain(error) from error
            await start
        self._lose(router, broken)
        if not self._resume_s:
            raise self._router_lost(router, broken) from broken
        async with aclosing(self._go_on(router.address)) as events:
            async for event in events:
                yield event

    def _start_of(self, refusal: OmniError) -> Coroutine[Any, Any, None] | None:
        """What to wait for before asking again, where a pipeline is starting; None: do not ask again."""
        if not isinstance(refusal, StartingError):
            return None
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
        return asyncio.sleep(delay_s)

    async def _connect(self) -> Router:
        """The first router that answers."""
        left_s = self._limit.left_s
        try:
            return await self._connection.connect(min(left_s, self._connection.connect_timeout_s), self._key)
        except UnavailableError as error:
            if self._limit.is_over:
                raise self._limit.passed(error.message) from error
            raise

    def _new_reader(self) -> Reader:
        return Reader(time.perf_counter(), is_to_be_heard(self._asked))

    async def _go_on(self, lost: str) -> AsyncGenerator[Event, None]:
        """The rest of the answer, from whichever router has it started within the limit."""
        until = time.perf_counter() + self._resume_s
        wait_s = FIRST_WAIT_S
        while True:
            router = await self._reconnect(lost, until)
            try:
                async with aclosing(self._read(router)) as events:
                    async for event in events:
                        yield event
                return
            except grpc.aio.AioRpcError as error:
                broken = error
            refusal = self._router_lost(router, broken) if is_broken(broken) else self._limit.explain(broken)
            delay_s = self._delay_s(refusal, wait_s)
            if self._reader.is_started or delay_s is None or time.perf_counter() + delay_s > until:
                raise refusal from broken
            self._lose(router, broken)
            await asyncio.sleep(min(delay_s, self._left_s))
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    async def _read(self, router: Router) -> AsyncGenerator[Event, None]:
        """The events that one connection brings."""
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

    async def _reconnect(self, lost: str, until: float) -> Router:
        """A router that is connected, before the limits are over."""
        patience_s = until - time.perf_counter()
        left_s = self._left_s
        try:
            return await self._connection.connect(min(patience_s, left_s), self._key)
        except UnavailableError as error:
            if left_s < patience_s:
                raise self._limit.passed(ROUTER_LOST) from error
            message = f"the connection to the router at {lost} broke, and none was there to go on within {self._resume_s:g} s"
            raise RouterLostError(message, code=error.code) from error

    def _lose(self, router: Router, error: grpc.aio.AioRpcError) -> None:
        self._connection.lost(router.address)
        self._reader.lose(router.address, error.details() or error.code().name)

    def _delay_s(self, refusal: OmniError, wait_s: float) -> float | None:
        """When to try again; None: never."""
        if isinstance(refusal, RouterLostError):
            return wait_s
        return refusal.retry_delay_s if isinstance(refusal, UnavailableError) and refusal.reason in NOT_YET else None

    def _router_lost(self, router: Router, error: grpc.aio.AioRpcError) -> RouterLostError:
        said = error.details() or error.code().name
        return RouterLostError(f"the connection to the router at {router.address} broke: {said}", code=error.code())

    @property
    def _left_s(self) -> float:
        if self._limit.is_over and self._reader.is_lost:
            raise self._limit.passed(ROUTER_LOST)
        return self._limit.left_s
