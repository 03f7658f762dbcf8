"""The connection of one client, or of several that share it: to a named router, to a running one that was found, or to a private stack."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from omnistage.client import fork
from omnistage.client.channel import INSECURE, ClientCredentials
from omnistage.client.errors import ClosedError, OmniError, WrongLoopError
from omnistage.client.found import Found, advise, find_router, is_ours
from omnistage.client.key import ApiKey
from omnistage.client.limit import Limit
from omnistage.client.log import logger
from omnistage.client.private_stack import PrivateStack, StackPlan
from omnistage.client.routers import Router, Routers, warn
from omnistage.v1 import omni_pb2

log = logger(__name__)

CONNECT_TIMEOUT_S = 5.0

START_PATIENCE_S = 30.0
"""Seconds that a call waits for a pipeline that is starting, unless this client started it."""


def tell(message: str) -> None:
    """Log a sentence that says what a call waits for."""
    log.info("%s", message)


class Connection:
    """A connection to a router: opened by the first call, on one event loop, and closed once."""

    def __init__(
        self,
        target: Found | StackPlan,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        *,
        start_patience_s: float = START_PATIENCE_S,
        credentials: ClientCredentials = INSECURE,
        warn: Callable[[str], None] = warn,
        tell: Callable[[str], None] = tell,
    ) -> None:
        """target: a router, or the plan of a stack to start. If the plan has only defaults and a router runs, that router is asked instead.
        start_patience_s: seconds that a call waits for a pipeline that is starting, unless this client started it. warn: as in `Routers`.
        tell: called with a sentence that says what a call waits for. Raises BadRequestError for a text that is no address."""
        self._plan = target if isinstance(target, StackPlan) else StackPlan()
        self._stack = PrivateStack(self._plan) if isinstance(target, StackPlan) else None
        self._found = None if isinstance(target, StackPlan) else target
        self._may_find = self._stack is not None and self._plan.says_nothing
        """Whether to look for a running router before the stack is started; False once that was done."""
        self._credentials, self._warn = credentials, warn
        self._routers = None if self._found is None else self._routers_at(self._found)
        self._starting = asyncio.Lock()  # held during `start`
        self._loop: asyncio.AbstractEventLoop | None = None  # the one that opened the channels
        self._is_closed = False
        self._waits: set[asyncio.Timeout] = set()  # one for each block in `waiting`; `disconnect` lets them end
        self.connect_timeout_s = connect_timeout_s
        self.start_patience_s = start_patience_s
        self.tell = tell

    @property
    def address(self) -> str:
        """HOST:PORT of the router in use; empty until a private stack has started."""
        return "" if self._routers is None else self._routers.address

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def whereabouts(self) -> str:
        """A text for people: the address, whether the stack is private, and whether it can be used."""
        kind = ", private stack" if self.is_private else ""
        return f"{self.address or 'not started'}{kind}, {'closed' if self._is_closed else 'open'}"

    @property
    def is_private(self) -> bool:
        """Whether the router belongs to a stack that this connection started."""
        return self._stack is not None and self._found is None

    @property
    def places(self) -> int | None:
        """How many answers the private stack can give at the same time; None: no setting says it."""
        return self._plan.settings.get("max_sessions") if self.is_private else None

    @property
    def start_limit_s(self) -> float:
        """The most seconds that `start` and a first connection take together."""
        return self.connect_timeout_s + (0.0 if self._stack is None else self._stack.start_limit_s)

    async def start(self, key: ApiKey | None) -> None:
        """Find the router, or start the private stack, within the time limit in its settings. key: the caller's key, sent when a running
        router is looked for. Raises ClosedError and StackError."""
        fork.check()
        self._stay_on_loop()
        async with self._starting:
            self._check_open()
            if self._may_find:
                self._found, self._may_find = await find_router(key, self._credentials), False
                if self._found is not None:
                    self._routers = self._routers_at(self._found)
                    log.info("asking the router at %s, which runs already", self._found.address)
            if self._routers is None:
                assert self._stack is not None
                self._routers = Routers(await self._stack.started(), credentials=self._credentials, warn=self._warn)

    async def connect(self, timeout_s: float, key: ApiKey | None) -> Router:
        """The first router that can be connected. key: of the caller. timeout_s: for connecting, without the start of a stack. Raises the
        errors of `start` and `Routers.connect`."""
        await self.start(key)
        assert self._routers is not None
        return await self._routers.connect(timeout_s, key)

    def lost(self, address: str) -> None:
        """Note that the router at this address was lost: from now on the next one is connected, if there are several."""
        assert self._routers is not None
        self._routers.lost(address)

    async def begin(self, pipeline: str, limit: Limit) -> None:
        """Have the private stack start one of its pipelines, and wait until it serves. Raises StackError if it cannot start, and
        DeadlineError when the limit passes; the start then goes on."""
        assert self._stack is not None
        with suppress(TimeoutError):
            async with asyncio.timeout(limit.left_s), self.waiting():
                await self._stack.begun(pipeline)
                return
        raise limit.passed(f"{pipeline} was still starting, and goes on with it")

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """A context for a wait that uses no channel: closing this connection ends the wait with ClosedError, as it ends calls."""
        fork.check()
        self._stay_on_loop()
        self._check_open()
        try:
            async with asyncio.timeout(None) as wait:
                self._waits.add(wait)
                try:
                    yield
                finally:
                    self._waits.discard(wait)
        except TimeoutError:
            if wait.expired():
                raise ClosedError("the client was closed while it answered") from None
            raise

    async def pause(self, seconds: float) -> None:
        """Wait. Raises ClosedError if the connection is closed meanwhile."""
        async with self.waiting():
            await asyncio.sleep(seconds)

    def advise(self, error: OmniError, request: omni_pb2.GenerateRequest) -> None:
        """Give an error a hint that fits the router and the request, as `found.advise` does."""
        advise(self._found, error, request)

    async def disconnect(self) -> None:
        """The first half of closing: cancel all calls and waits, and close the channels."""
        if self._loop is not None and self._loop.is_closed():
            self._is_closed = True  # with the loop all calls and waits on it have ended
            return
        self._stay_on_loop()
        self._is_closed = True
        waits, self._waits = self._waits, set()
        for wait in waits:
            wait.reschedule(0.0)
        if self._stack is not None:
            self._stack.give_up()
        async with self._starting:
            if self._routers is not None:
                await self._routers.close()

    def stop_stack(self) -> None:
        """The second half of closing: end the private stack. Blocks; needs no event loop, so that it also works while Python shuts down."""
        if self._stack is not None:
            self._stack.stop()

    def _routers_at(self, router: Found) -> Routers:
        """The routers at the address of `router`. A router that no person named must belong to this user or to root."""
        return Routers(router.address, None if router.is_named else is_ours, credentials=self._credentials, warn=self._warn)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("this client is closed")

    def _stay_on_loop(self) -> None:
        """Raises WrongLoopError on another event loop than the one that opened the channels."""
        running = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = running
        if self._loop is not running:
            raise WrongLoopError("this AsyncOmni was first used on another event loop")
