"""Callers of a stage that flood it, read nothing, say nothing, or vanish: bounded in time and memory, and others do not notice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import grpc
import grpc.aio
import numpy as np
import pytest

from helpers import lengths
from helpers.run import RunStream, code_chunks, row_chunks, run_once
from helpers.servers import CLIENT_OPTIONS, all_free, watch_until
from helpers.stage import INVALID, ROWS, Stage, chunk, stage_of
from omnistage.models.toy import formulas
from omnistage.stage.inputs import WINDOW
from omnistage.v1 import chunk_pb2, stage_pb2, stage_pb2_grpc, tensor_pb2

FLOOD = 5000

FLOODS: dict[str, Callable[[int], stage_pb2.RunRequest]] = {
    "credit": lambda n: stage_pb2.RunRequest(credit=stage_pb2.Credit(port="codes", total=n)),
    "credit of no port": lambda n: stage_pb2.RunRequest(credit=stage_pb2.Credit(port=f"p{n}", total=n)),
    "release": lambda n: stage_pb2.RunRequest(release=tensor_pb2.Release(slots=[tensor_pb2.Slot(segment=n, offset=64)])),
    "answer": lambda n: stage_pb2.RunRequest(answer=tensor_pb2.Answer()),
    "nothing": lambda n: stage_pb2.RunRequest(),
}


@lengths.drawn_cells(2, "what", sorted(FLOODS))
async def test_a_flood_that_the_rules_allow_changes_nothing(what: str):
    """Thousands of messages from a caller that reads nothing meanwhile; then it goes on as if nothing had been."""
    async with stage_of("talker") as stage:
        caller = await stage.opened()
        async with asyncio.timeout(60):
            for n in range(FLOOD):
                await caller.call.write(FLOODS[what](n))
        await caller.send(chunk=chunk(rows=8, last=True))
        heard = await caller.finish()
        heard.check_whole(["codes"])
        np.testing.assert_array_equal(heard.codes(), formulas.frames(ROWS))


@pytest.mark.parametrize("what", ["credit of no port", "interrupt"])
async def test_a_flood_at_a_stage_with_another_behind_ends_typed(what: str):
    """Room for ports is passed on, so the number of ports is bounded; interrupting often is interrupting once."""
    async with stage_of("code2wav") as behind, stage_of("talker") as stage:
        hop = stage_pb2.Hop(kind=stage_pb2.STAGE_KIND_CODE2WAV, model="toy-code2wav", addresses=[behind.address], takes=["codes"])
        caller = await stage.opened(route=[hop], credits={"audio": 1 << 20}, checkpoints=["codes"])
        for n in range(FLOOD):
            message = stage_pb2.RunRequest(interrupt=stage_pb2.Interrupt()) if what == "interrupt" else FLOODS[what](n)
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await caller.call.write(message)
        if what == "interrupt":
            (await caller.finish()).check_whole(["codes", "audio"])
        else:
            await caller.expect("PROTOCOL", INVALID)
        await all_free([behind.address])


async def test_input_that_nobody_takes_is_bounded_by_the_window():
    async with stage_of("talker") as stage:
        caller = await stage.opened(credits={})
        sent = 0
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for n in range(FLOOD):
                await caller.send(chunk=chunk(seq=n, first=n))
                sent += 1
        assert sent > WINDOW
        await caller.expect("CREDIT_EXCEEDED", grpc.StatusCode.RESOURCE_EXHAUSTED)


async def test_a_flood_after_the_end_is_read_and_dropped():
    """The caller does not see Ended for a long time; what it sends meanwhile must not block it, or keep anything."""
    async with stage_of("talker") as stage:
        caller = await stage.opened()
        await caller.send(chunk=chunk(seq=7))
        for n in range(FLOOD):
            await caller.call.write(stage_pb2.RunRequest(chunk=chunk(seq=n, first=n)))
        await watch_until(stage.address, lambda report: report.sessions == 0)
        await caller.expect("PROTOCOL", INVALID)


async def test_callers_that_open_a_stream_and_say_nothing_are_left(monkeypatch: pytest.MonkeyPatch):
    """They take no place of the router meanwhile."""
    monkeypatch.setattr("omnistage.stage.caller.FIRST_MESSAGE_TIMEOUT_S", 1.0)
    async with stage_of("talker", max_sessions=1) as stage:
        silent = [stage.caller() for _ in range(50)]
        heard = await run_once(stage.stub, stage.open(), row_chunks("hidden", ROWS, [8]))
        heard.check_whole(["codes"])
        await asyncio.gather(*[caller.expect("PROTOCOL", INVALID) for caller in silent])


async def test_callers_that_never_half_close_are_left_after_the_handshake(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("omnistage.stage.caller.HANDSHAKE_TIMEOUT_S", 0.3)
    async with stage_of("talker") as stage:
        callers = [await stage.opened() for _ in range(20)]
        for caller in callers:
            await caller.send(chunk=chunk(last=True))
            await caller.until(lambda heard: heard.ended is not None)
        async with asyncio.timeout(30):
            assert {await caller.call.code() for caller in callers} == {grpc.StatusCode.OK}


PHASES = ["nothing", "open", "opened", "half an input", "output", "unread output", "ended", "half-closed"]


async def go_to(phase: str, caller: RunStream, stage: Stage) -> None:
    """Do what a caller does before this phase."""
    if phase == "nothing":
        return
    await caller.send(open=stage.open())
    if phase == "open":
        return
    await caller.opened()
    match phase:
        case "half an input":
            data = ROWS.astype("<f4").tobytes()
            inline = tensor_pb2.InlinePart(data=data[:100], offset=0, total_bytes=len(data))
            tensor = tensor_pb2.Tensor(element_type=tensor_pb2.ELEMENT_TYPE_FLOAT32, shape=ROWS.shape, inline=inline)
            await caller.send(chunk=chunk_pb2.Chunk(port="hidden", tensor=tensor))
        case "output":
            await caller.send(chunk=chunk())
            await caller.until(lambda heard: bool(heard.of("codes")))
        case "unread output":
            for n in range(WINDOW):
                await caller.send(chunk=chunk(seq=n, first=8 * n, rows=8))
        case "ended":
            await caller.send(chunk=chunk(last=True))
            await caller.until(lambda heard: heard.ended is not None)
        case "half-closed":
            await caller.send(chunk=chunk(last=True))
            await caller.call.done_writing()


@lengths.drawn_cells(3, "phase", PHASES)
async def test_callers_whose_connection_is_gone_leave_nothing(phase: str):
    async with stage_of("talker", arena_bytes=1 << 28) as stage:

        async def vanish() -> None:
            channel = grpc.aio.insecure_channel(stage.address, options=CLIENT_OPTIONS)
            await go_to(phase, RunStream(stage_pb2_grpc.StageServiceStub(channel)), stage)
            await channel.close()

        await asyncio.gather(*[vanish() for _ in range(20)])
        await all_free([stage.address])


async def test_a_caller_that_reads_nothing_does_not_slow_the_others(monkeypatch: pytest.MonkeyPatch):
    """Its answer fills the buffers of its connection and waits there."""
    monkeypatch.setattr("omnistage.stage.caller.HANDSHAKE_TIMEOUT_S", 0.3)
    async with stage_of("code2wav", {"samples_per_frame": 100_000, "max_chunk": 1}) as stage:
        codes = np.ones((100, formulas.CODEBOOKS), np.uint32)
        channel = grpc.aio.insecure_channel(stage.address, options=CLIENT_OPTIONS)
        deaf = RunStream(stage_pb2_grpc.StageServiceStub(channel))
        await deaf.send(open=stage.open())
        await deaf.opened()
        await deaf.send(chunk=code_chunks(codes, [100])[0])
        for _ in range(5):
            heard = await run_once(stage.stub, stage.open(), code_chunks(codes[:2], [2]))
            heard.check_whole(["audio"])
        assert (await watch_until(stage.address, lambda report: True)).sessions == 1
        await channel.close()
