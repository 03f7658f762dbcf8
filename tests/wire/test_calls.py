"""Calls whose clients leave while the last message is written to them, their limits of time, and the ends of connections."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import Any

import grpc
import grpc.aio
import pytest
import structlog.testing

from helpers import lengths
from helpers.ask import request
from helpers.chain import addresses_of
from helpers.converse import ConverseStream
from helpers.ports import take_address
from helpers.run import RunStream, open_of, params
from helpers.servers import Local, all_free, local_chain, local_router, local_stage, omni_stub, stage_stub, toy_logic
from helpers.waiting import until
from omnistage.v1 import omni_pb2, stage_pb2
from omnistage.wire import calls
from omnistage.wire.calls import as_stream, within, write
from omnistage.wire.channel import ConnectionWatch, client_options, connect, server_options
from omnistage.wire.errors import StageError
from omnistage.wire.token import Token

Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


class Leaving(grpc.aio.ServerInterceptor):
    """From their write number `last` on, writes of calls of a method raise `error`; other calls are as they are. left: so many did."""

    def __init__(self, method: str, last: int, error: type[Exception] = grpc.aio.InternalError) -> None:
        self._method, self._last, self.error = method, last, error
        self.left = 0

    async def intercept_service(self, continuation: Continuation, details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(details)
        if not details.method.endswith(f"/{self._method}"):
            return handler

        async def serve(requests: object, context: object) -> None:
            await handler.stream_stream(requests, _Left(self, context, self._last))

        return grpc.stream_stream_rpc_method_handler(serve, handler.request_deserializer, handler.response_serializer)


class _Left:
    """The call as the server has it; everything but `write` is gRPC's own."""

    def __init__(self, leaving: Leaving, context: Any, writes: int) -> None:
        self._leaving, self._context, self._writes = leaving, context, writes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, message: object) -> None:
        self._writes -= 1
        if self._writes < 0:
            self._leaving.left += 1
            raise self._leaving.error("a write failed, says a test")
        await self._context.write(message)


async def _write(context: grpc.aio.ServicerContext[Any, Any]) -> None:
    while True:
        await context.write(b"x")
        await asyncio.sleep(0)


async def _refuse(rng: random.Random, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    remaining_s = context.time_remaining()
    assert remaining_s is not None
    await asyncio.sleep(max(0.0, remaining_s + rng.uniform(-0.002, 0.004)))
    raise StageError("DEADLINE", "the time is over")


@asynccontextmanager
async def calling(
    serve: Callable[..., Any], *interceptors: grpc.aio.ServerInterceptor
) -> AsyncIterator[grpc.aio.UnaryStreamMultiCallable[bytes, bytes]]:
    """Call a server that serves every call with this function."""
    server = grpc.aio.server(interceptors=interceptors)
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_stream_rpc_method_handler(serve)
    server.add_registered_method_handlers("a.Service", {"Call": as_stream(handler, lambda _: nullcontext(), 5.0)})
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel.unary_stream("/a.Service/Call")
    await server.stop(1)


@lengths.rounds(20, 100)
@pytest.mark.parametrize("way", ["write", "generate", "refuse"])
async def test_no_write_to_a_client_that_is_gone_is_logged_as_a_bug(
    way: str, rounds: int, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The client's time is over. The server may learn that from the write that fails, before gRPC reports it."""
    rng = random.Random(seed)

    async def serve(_: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await (_write(context) if way == "write" else _refuse(rng, context))

    async def generate(_: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[bytes]:
        while True:
            yield b"x"
            await asyncio.sleep(0)

    async with calling(generate if way == "generate" else serve) as method:

        async def hear() -> None:
            call = method(b"", timeout=rng.uniform(0.005, 0.03))
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                while await call.read() is not grpc.aio.EOF:
                    pass
            assert raised.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED

        for _ in range(rounds):
            await asyncio.gather(*(hear() for _ in range(10)))
    check_no_bug([], caplog)


async def _begin_and_give_up(context: grpc.aio.ServicerContext[Any, Any], turns: int) -> None:
    """Begin a write and cancel it after this many turns of the loop."""
    writing = asyncio.create_task(context.write(b"first"))
    for _ in range(turns):
        await asyncio.sleep(0)
    writing.cancel()
    await asyncio.wait({writing})


ENDS = {"error": grpc.StatusCode.INVALID_ARGUMENT, "bug": grpc.StatusCode.UNKNOWN, **dict.fromkeys(("return", "write"), grpc.StatusCode.OK)}


@pytest.mark.parametrize("end", ENDS)
async def test_a_call_whose_first_write_is_given_up_still_ends(end: str) -> None:
    """gRPC believes that its headers were not sent, and would send them again with the status: then the caller would never hear of an
    end."""

    async def serve(turns: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await _begin_and_give_up(context, int(turns))
        if end == "error":
            raise StageError("PROTOCOL", "of another mind")
        if end == "bug":
            raise ValueError("a bug, says a test")
        if end == "write":
            await context.write(b"second")

    async with calling(serve) as method:
        for turns in range(1, 4):
            for _ in range(20):
                call = method(str(turns).encode(), timeout=20)
                heard = []
                with suppress(grpc.aio.AioRpcError):
                    heard = [message async for message in call]
                assert await call.code() == ENDS[end] and (end != "write" or heard == [b"first", b"second"])


class _Ending(grpc.aio.ServerInterceptor):
    """Reports when the code that serves a call is done with it."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def intercept_service(self, continuation: Continuation, details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(details)

        async def serve(requests: object, context: object) -> None:
            try:
                await handler.stream_stream(requests, context)
            finally:
                self.ended.set()

        return grpc.stream_stream_rpc_method_handler(serve)


async def test_a_caller_that_reads_nothing_holds_no_call_by_a_large_first_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message is larger than what gRPC accepts before the caller reads."""
    monkeypatch.setattr(calls, "HEADERS_LIMIT_S", 0.3)
    ending, given_up = _Ending(), asyncio.Event()

    async def serve(_: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(0.3):
                await context.write(bytes(64 << 20))
        given_up.set()
        raise StageError("CLIENT_STALLED", "it reads nothing")

    async with calling(serve, ending) as method:
        call = method(b"", timeout=30)
        async with asyncio.timeout(10):
            await given_up.wait()
            assert not ending.ended.is_set()
            await ending.ended.wait()
        call.cancel()


class _Message:
    """A message; the test sees when it is gone."""


async def test_nothing_is_kept_of_a_first_message_that_could_not_be_written() -> None:
    """The message is gone at once, without the collector."""
    held = list[weakref.ref[_Message]]()

    async def serve(_: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        message = _Message()
        held.append(weakref.ref(message))
        await write(context, message)

    gc.collect()
    gc.disable()
    try:
        async with calling(serve, Leaving("Call", 0)) as method:
            call = method(b"", timeout=20)
            await until(lambda: held and held[0]() is None)
            call.cancel()
    finally:
        gc.enable()


@asynccontextmanager
async def running(stage: Local, tokens: int) -> AsyncIterator[RunStream]:
    """A session of this many tokens."""
    async with stage_stub(stage.address) as stub:
        description = await stub.Describe(stage_pb2.DescribeRequest(), timeout=10)
        caller = RunStream(stub)
        await caller.send(open=open_of(description, params=params("thinker", max_tokens=tokens, ignore_eos=True)))
        yield caller
        caller.call.cancel()


@pytest.mark.parametrize("tokens", [3, 20_000])
@pytest.mark.parametrize("last", range(4))
async def test_a_write_that_finds_no_caller_ends_a_session_and_is_no_bug(tokens: int, last: int, caplog: pytest.LogCaptureFixture) -> None:
    """The same holds for one of the last writes of a session."""
    leaving = Leaving("Run", last)
    with structlog.testing.capture_logs() as logs:
        async with local_stage(toy_logic("thinker"), interceptors=[leaving]) as stage, running(stage, tokens):
            await until(lambda: ended(stage, "omnistage_stage_sessions_total"))
            assert (ended(stage, "omnistage_stage_sessions_total"), leaving.left) == ({"CANCELLED": 1}, 1)
    check_no_bug(logs, caplog)


@pytest.mark.parametrize("tokens", [3, 20_000])
@pytest.mark.parametrize("last", range(4))
async def test_a_write_that_fails_otherwise_is_a_bug_and_told_as_one(tokens: int, last: int, caplog: pytest.LogCaptureFixture) -> None:
    leaving = Leaving("Run", last, ValueError)
    with structlog.testing.capture_logs() as logs:
        async with local_stage(toy_logic("thinker"), interceptors=[leaving]) as stage, running(stage, tokens) as caller:
            await caller.call.done_writing()
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                while await caller.call.read() is not grpc.aio.EOF:
                    pass
            assert raised.value.code() == grpc.StatusCode.INTERNAL
            assert ended(stage, "omnistage_stage_sessions_total") == {"INTERNAL": 1}
    assert [entry["event"] for entry in logs if entry["log_level"] == "error"] == ["outbox.bug"]
    check_no_bug([], caplog)


async def test_a_caller_that_is_refused_and_gone_is_no_bug(caplog: pytest.LogCaptureFixture) -> None:
    """The same holds for a call that asks for the stage's description."""
    with structlog.testing.capture_logs() as logs:
        for method, token in (("Run", Token("a" * 32)), ("Describe", Token("a" * 32)), ("Describe", None)):
            leaving = Leaving(method, 0)
            async with local_stage(toy_logic("thinker"), interceptors=[leaving], token=token) as stage, stage_stub(stage.address) as stub:
                call = stub.Run(timeout=1) if method == "Run" else stub.Describe(stage_pb2.DescribeRequest(), timeout=1)
                assert await call.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAUTHENTICATED)
    check_no_bug(logs, caplog)


@pytest.mark.parametrize("last", range(6))
@pytest.mark.parametrize("method", ["Generate", "Converse"])
async def test_a_write_that_finds_no_client_ends_an_answer_and_is_no_bug(method: str, last: int, caplog: pytest.LogCaptureFixture) -> None:
    leaving = Leaving(method, last)
    endless = request(thinker={"max_tokens": 20_000, "ignore_eos": True})
    with structlog.testing.capture_logs() as logs:
        async with (
            local_chain() as stages,
            local_router(addresses_of(stages), interceptors=[leaving]) as router,
            omni_stub(router.address) as stub,
        ):
            call = ConverseStream(stub).call if method == "Converse" else stub.Generate(endless, timeout=60)
            if isinstance(call, grpc.aio.StreamStreamCall):
                await call.write(omni_pb2.ConverseRequest(turn=endless))
            for _ in range(last):
                await call.read()
            await until(lambda: ended(router, "omnistage_router_requests_total") == {"CANCELLED": 1})
            await all_free([stage.address for stage in stages.values()])
            assert leaving.left == 1
            call.cancel()
    check_no_bug(logs, caplog)


def check_no_bug(logs: Sequence[MutableMapping[str, Any]], caplog: pytest.LogCaptureFixture) -> None:
    """Neither our log nor gRPC's has a bug. gRPC may also report that the loop of an earlier test is closed."""
    assert [entry for entry in logs if entry["log_level"] != "info"] == []
    assert [each.getMessage() for each in caplog.records if each.name.startswith("grpc") and each.levelno >= logging.WARNING] == []


def ended(server: Local, metric: str) -> dict[str, float]:
    """Number of sessions or requests that ended, by their reasons."""
    found = server.registry.collect()
    return {sample.labels["reason"]: sample.value for each in found for sample in each.samples if sample.name == metric and sample.value}


class HeldRequest:
    """An object that may be large."""


def late() -> StageError:
    return StageError("DEADLINE", "too late")


async def test_what_takes_longer_ends_with_the_error_that_it_was_given() -> None:
    with pytest.raises(StageError, match="too late"):
        async with within(0.01, late):
            await asyncio.Event().wait()
    async with within(60, late):
        await asyncio.sleep(0)


async def test_time_in_which_the_loop_was_held_up_is_not_the_other_sides() -> None:
    came = asyncio.Event()
    async with within(0.4, late):
        asyncio.get_running_loop().call_soon(time.sleep, 0.6)
        asyncio.get_running_loop().call_later(0.7, came.set)
        await came.wait()
    with pytest.raises(StageError, match="too late"):
        async with within(0.4, late):
            asyncio.get_running_loop().call_soon(time.sleep, 0.6)
            await asyncio.Event().wait()


async def test_a_moment_that_was_agreed_on_stays_where_it_is() -> None:
    came = asyncio.Event()
    with pytest.raises(StageError, match="too late"):
        async with within(0.4, late, counts_all=True):
            asyncio.get_running_loop().call_soon(time.sleep, 0.6)
            asyncio.get_running_loop().call_later(0.7, came.set)
            await came.wait()


async def test_a_timeout_of_something_within_is_not_taken_for_its_own() -> None:
    with pytest.raises(TimeoutError, match="another"):
        async with within(60, late):
            raise TimeoutError("another")


async def test_a_cancelled_task_stays_cancelled() -> None:
    async def wait() -> None:
        async with within(60, late):
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.usefixtures("collected_by_hand")
async def test_a_task_that_ends_with_its_error_keeps_no_request() -> None:
    async def serve(request: HeldRequest) -> None:
        async with within(0.01, late):
            await asyncio.Event().wait()

    kept = weakref.ref(request := HeldRequest())
    task = asyncio.create_task(serve(request))
    del request
    await asyncio.wait({task})
    assert kept() is not None, "the error leads to it"
    assert isinstance(task.exception(), StageError)
    del task
    assert kept() is None


async def test_it_is_lost_when_the_server_ends_and_not_before() -> None:
    server = grpc.aio.server(options=server_options())
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=client_options()) as channel:
        await connect(channel, 30.0)
        with ConnectionWatch(channel) as connection:
            lost = connection.loss
            assert connection.loss is lost and not connection.is_lost
            await server.stop(0)
            async with asyncio.timeout(30):
                await lost
            assert connection.is_lost


async def test_where_there_is_none_it_is_lost() -> None:
    async with grpc.aio.insecure_channel(take_address(), options=client_options()) as channel:
        with ConnectionWatch(channel) as connection:
            async with asyncio.timeout(30):
                await connection.loss
            assert connection.is_lost


async def test_a_new_channel_does_not_wait_out_the_backoff_of_an_older_one() -> None:
    """If an address was forgotten and is asked again, it is tried at once, whatever happened to an earlier channel there."""
    address = take_address()
    before, after = (grpc.aio.insecure_channel(address, options=client_options()) for _ in range(2))
    async with before, after:
        state = before.get_state(try_to_connect=True)
        while state is not grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            await before.wait_for_state_change(state)
            state = before.get_state()
        server = grpc.aio.server(options=server_options())
        server.add_insecure_port(address)
        await server.start()
        try:
            await connect(after, 10.0)
        finally:
            await server.stop(0)
