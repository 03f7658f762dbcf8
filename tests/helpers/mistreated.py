"""Servers that are treated badly, and what must hold all the same: every call ends typed and in time, nothing is logged as a bug, nothing
is held, and the next good request works."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from typing import Any, TypeVar

import grpc
import grpc.aio
import structlog

from helpers.ask import ask, request
from helpers.servers import CHAIN, CLIENT_OPTIONS, KINDS, all_free, local_router, local_stage, toy_logic
from helpers.stage import Stage
from omnistage.client.threads import is_of_another_loop
from omnistage.host.logs import somebody_is_there
from omnistage.v1 import omni_pb2_grpc, stage_pb2, stage_pb2_grpc
from omnistage.wire.errors import REASONS

RUN = "/omnistage.v1.StageService/Run"
LIMIT_S = 60.0
"""Longest session: no call waits for something that never comes, and a busy machine needs 6 s for the thirty clients of one test. A session
that ends at this limit leaves its shared memory in quarantine for 30 s, which fails the tests after it too."""
BUGS = frozenset({"session.bug", "request.bug"})
TYPED = frozenset(REASONS) - {"DEADLINE", "CLIENT_STALLED", "OVERLOADED", "DRAINING", "STARTING"}
"""How a call may end that somebody made badly in a house that is not full: never at a time limit, because nothing waits for ever."""

Result = TypeVar("Result")
Call = grpc.aio.StreamStreamCall[bytes, bytes]


class Mistreated:
    """One stage of every kind and a router before a chain of them, in an event loop of their own."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner
        self._stack = AsyncExitStack()
        self.problems: list[object] = []
        self.stages: dict[str, Stage] = {}
        self.channels: dict[str, grpc.aio.Channel] = {}
        self.router = ""
        self.omni: omni_pb2_grpc.OmniServiceAsyncStub

    def play(self, case: Coroutine[Any, Any, Result]) -> Result:
        """Run a case. Raises AssertionError if any server found a bug of its own in it."""
        self.problems.clear()
        result = self._runner.run(case)
        problems = list(self.problems)
        assert not problems, problems
        return result

    def _note(self, context: dict[str, Any]) -> None:
        if not is_of_another_loop(context):  # Servers and callers of an earlier test were in this process too.
            self.problems.append(context)

    async def open(self) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: self._note(context))
        for kind in KINDS:
            local = await self._stack.enter_async_context(
                local_stage(toy_logic(kind), arena_bytes=1 << 28, inline_limit=0, session_limit=LIMIT_S)
            )
            channel = await self._stack.enter_async_context(grpc.aio.insecure_channel(local.address, options=CLIENT_OPTIONS))
            stub = stage_pb2_grpc.StageServiceStub(channel)
            self.stages[kind] = Stage(local.address, stub, await stub.Describe(stage_pb2.DescribeRequest(), timeout=10))
            self.channels[kind] = channel
        addresses = {kind: self.stages[kind].address for kind in CHAIN}
        router = await self._stack.enter_async_context(local_router(addresses, session_limit=LIMIT_S))
        self.router = router.address
        channel = await self._stack.enter_async_context(grpc.aio.insecure_channel(router.address, options=CLIENT_OPTIONS))
        self.omni = omni_pb2_grpc.OmniServiceStub(channel)

    async def close(self) -> None:
        await self._stack.aclose()

    def run(self, kind: str) -> Call:
        """A session in bytes. Its own limit is above the servers': whoever reaches that has waited for ever."""
        multi: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = self.channels[kind].stream_stream(RUN)
        return multi(timeout=2 * LIMIT_S)

    async def still_well(self) -> None:
        """Good requests of every kind get good answers, and nothing is held anywhere."""
        for stage in self.stages.values():
            await stage.still_works()
        (await ask(self.omni, request("good", 5))).check_toy(5, "good")
        await all_free([stage.address for stage in self.stages.values()])


@contextmanager
def mistreated() -> Iterator[Mistreated]:
    """All of it open; in the end it must still be well."""
    with asyncio.Runner() as runner:
        opened = Mistreated(runner)
        watching = _Errors(opened.problems)
        logging.getLogger().addHandler(watching)
        before = structlog.get_config()
        structlog.configure(
            processors=[_keep(opened.problems)],
            wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
            cache_logger_on_first_use=False,
        )
        try:
            opened.play(opened.open())
            yield opened
            opened.play(opened.still_well())
        finally:
            runner.run(opened.close())
            structlog.configure(**before)
            logging.getLogger().removeHandler(watching)


class _Errors(logging.Handler):
    """The complaints of the libraries: an exception that a handler let through, a task whose error nobody looked at."""

    def __init__(self, problems: list[object]) -> None:
        super().__init__(logging.ERROR)
        self.addFilter(somebody_is_there)
        self._problems = problems

    def emit(self, record: logging.LogRecord) -> None:
        self._problems.append(self.format(record))


def _keep(problems: list[object]) -> structlog.typing.Processor:
    def look(logger: object, name: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        if event["event"] in BUGS:
            problems.append({**event, "exception": structlog.processors.format_exc_info(logger, name, dict(event)).get("exception")})
        raise structlog.DropEvent

    return look


async def end_of(call: Call, steps: Sequence[bytes | None], heard: list[stage_pb2.RunResponse] | None = None) -> str:
    """Send all of it (None is the half-close, which also comes last), read to the end, and check it. The reason; "" for a good end."""
    messages = heard if heard is not None else []
    reading = asyncio.create_task(_read(call, messages))
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.InternalError):
        for step in steps:
            await (call.done_writing() if step is None else call.write(step))
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.InternalError):
        await call.done_writing()
    await reading
    code, details = await call.code(), await call.details()
    assert messages and messages[-1].HasField("ended"), (code, details)
    ended = messages[-1].ended
    assert (ended.code, ended.message) == (code.value[0], details)
    assert ended.reason in TYPED if ended.code else not ended.reason, ended
    return ended.reason


async def _read(call: Call, messages: list[stage_pb2.RunResponse]) -> None:
    with suppress(grpc.aio.AioRpcError):
        while (message := await call.read()) is not grpc.aio.EOF:
            assert isinstance(message, bytes)
            messages.append(stage_pb2.RunResponse.FromString(message))
