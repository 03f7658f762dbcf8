"""How a session of `Run` ends: half-close, credit, deadline, interruption, all places taken, and the handshake. While it is prepared it has
its place and holds nobody up."""

from __future__ import annotations

import asyncio
import gc
import random
from contextlib import suppress

import grpc
import grpc.aio
import numpy as np
import pytest

from helpers import lengths
from helpers.link import Context, bare_peer, listen
from helpers.run import code_chunks, params
from helpers.servers import all_free, local_stage, stage_stub, toy_logic, watch_until
from helpers.stage import EXHAUSTED, INVALID, PRECONDITION, ROWS, Stage, chunk, hop_to, stage_of, stage_with
from omnistage.models.interface import TextRequest
from omnistage.models.toy import formulas
from omnistage.models.toy.stages import ToyOptions, ToyThinker
from omnistage.stage.telemetry import Meter
from omnistage.thinker.stage import ThinkerStage
from omnistage.v1 import chunk_pb2, stage_pb2, tensor_pb2
from omnistage.wire.errors import StageError

# Half-close and credit -----------------------------------------------------------------------------------------------------------------


async def test_half_close_before_the_input_ended():
    async with stage_of("talker") as stage:
        caller = await stage.opened()
        await caller.send(chunk=chunk())
        await caller.call.done_writing()
        ended = await caller.expect("HALF_CLOSED", PRECONDITION)
        assert "hidden" in ended.message


async def test_half_close_with_enough_credit():
    async with stage_of("talker", {"max_chunk": 1}) as stage:
        caller = await stage.opened(credits={"codes": 17})
        await caller.send(chunk=chunk(rows=8, last=True))
        await caller.call.done_writing()
        heard = await caller.finish()
        heard.check_whole(["codes"])
        np.testing.assert_array_equal(heard.codes(), formulas.frames(ROWS))


async def test_half_close_at_once_of_a_stage_without_input():
    async with stage_of("thinker", {"interval_s": 0.002}) as stage:
        caller = await stage.begin()
        await caller.call.done_writing()
        (await caller.finish()).check_whole(["text", "hidden"])


async def test_nothing_is_sent_without_credit():
    async with stage_of("talker", {"max_chunk": 1}) as stage:
        caller = await stage.opened(credits={})
        await caller.send(chunk=chunk(rows=8, last=True))
        for total in (1, 2, 5, 17):
            await caller.send(credit=stage_pb2.Credit(port="codes", total=total))
            await caller.until(lambda heard, total=total: len(heard.of("codes")) == total)  # type: ignore[misc]
        heard = await caller.finish()
        heard.check_whole(["codes"])


async def test_credit_is_absolute_and_never_falls():
    async with stage_of("talker", {"max_chunk": 1}) as stage:
        caller = await stage.opened(credits={"codes": 4})
        for total in (4, 1, 0, 4):
            await caller.send(credit=stage_pb2.Credit(port="codes", total=total))
        await caller.send(chunk=chunk(rows=8, last=True))
        await caller.call.done_writing()
        await caller.expect("HALF_CLOSED", PRECONDITION)
        assert len(caller.heard.of("codes")) == 4


async def test_credit_and_release_after_the_last_chunk_are_accepted():
    async with stage_of("talker") as stage:
        caller = await stage.opened()
        await caller.send(chunk=chunk(last=True))
        await caller.until(lambda heard: any(c.last for c in heard.of("codes")))
        await caller.send(credit=stage_pb2.Credit(port="codes", total=1 << 30))
        await caller.send(credit=stage_pb2.Credit(port="of nobody", total=1))
        await caller.send(release=tensor_pb2.Release(slots=[tensor_pb2.Slot(segment=9, offset=64, generation=3)]))
        (await caller.finish()).check_whole(["codes"])


# Time, interruption, all places taken ------------------------------------------------------------------------------------------------


async def test_the_callers_deadline_ends_the_session():
    async with stage_of("talker") as stage:
        caller = await stage.opened(timeout_s=1.0)
        with suppress(grpc.aio.AioRpcError):  # Without Ended the status comes as an exception, with it as a value.
            await caller.finish()
        assert await caller.call.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await all_free([stage.address])


async def test_a_deadline_is_no_lost_stage_behind():
    """The server has one of its own. The hop behind ends at the same one; the stage must not call that a loss."""
    async with stage_of("code2wav") as behind, stage_of("talker", session_limit=1.0) as stage:
        caller = await stage.opened(timeout_s=None, route=[hop_to(behind.address)])
        await caller.expect("DEADLINE", grpc.StatusCode.DEADLINE_EXCEEDED)
        await all_free([behind.address])


@pytest.mark.parametrize("kind", ["thinker", "talker", "code2wav"])
async def test_interrupt_ends_every_port_and_the_session_well(kind: str):
    async with stage_of(kind, {"interval_s": 0.005}) as stage:
        limit = {"params": params("thinker", max_tokens=2000, ignore_eos=True)} if kind == "thinker" else {}
        caller = await stage.opened(**limit)
        if kind == "talker":
            await caller.send(chunk=chunk())
        if kind == "code2wav":
            await caller.send(chunk=code_chunks(formulas.frames(ROWS), [16])[0])
        await caller.until(lambda heard: bool(heard.chunks))
        await caller.send(interrupt=stage_pb2.Interrupt(heard_samples=1))
        heard = await caller.finish()
        heard.check_whole([port.name for port in stage.description.produces])
        if kind == "thinker":
            assert heard.of("text")[-1].text.finish_reason == chunk_pb2.FINISH_REASON_INTERRUPTED
            assert sum(c.count for c in heard.of("text")) < 2000


async def test_interrupt_goes_through_a_chain():
    async with stage_of("code2wav") as code2wav, stage_of("talker") as talker, stage_of("thinker", {"interval_s": 0.005}) as thinker:
        endless, credits = params("thinker", max_tokens=20_000, ignore_eos=True), {"text": 1 << 20, "audio": 1 << 20}
        route = [hop_to(talker.address, kind="talker"), hop_to(code2wav.address)]
        caller = await thinker.opened(params=endless, credits=credits, route=route)
        await caller.until(lambda heard: len(heard.of("audio")) > 3)
        await caller.send(interrupt=stage_pb2.Interrupt())
        heard = await caller.finish()
        heard.check_whole(["text", "audio"])
        assert {report.kind for report in heard.reports} == {1, 2, 3}
        await all_free([thinker.address, talker.address, code2wav.address])


async def test_a_full_stage_says_so_at_once_and_takes_the_next_when_there_is_room():
    async with stage_of("talker", max_sessions=2) as stage:
        running = [await stage.opened(), await stage.opened()]
        ended = await stage.refuse("OVERLOADED", EXHAUSTED)
        assert ended.retry_delay.ToTimedelta().total_seconds() > 0
        for caller in running:
            await caller.send(chunk=chunk(last=True))
            (await caller.finish()).check_whole(["codes"])


async def test_a_draining_stage_finishes_its_sessions_and_refuses_new_ones():
    async with local_stage(toy_logic("talker")) as server, stage_stub(server.address) as stub:
        stage = Stage(server.address, stub, await stub.Describe(stage_pb2.DescribeRequest(), timeout=10))
        running = await stage.opened()
        draining = asyncio.create_task(server.service.drain(30))
        assert (await watch_until(server.address, lambda report: report.draining)).sessions == 1
        ended = await stage.refuse("DRAINING", grpc.StatusCode.UNAVAILABLE)
        assert ended.HasField("retry_delay"), "where no other replica is there, this reaches the client"
        assert not draining.done()
        await running.send(chunk=chunk(last=True))
        (await running.finish()).check_whole(["codes"])
        async with asyncio.timeout(10):
            await draining


# The handshake -------------------------------------------------------------------------------------------------------------------------


@lengths.drawn_cells(1, "good", [True, False], ids=["ends well", "ends with an error"])
async def test_a_slow_reader_gets_every_message_and_the_right_status(good: bool):
    """200 answers read slowly while the caller goes on writing credit: none ends INTERNAL, none loses a message."""
    async with stage_of("talker", {"max_chunk": 1}) as stage:
        await asyncio.gather(*[_read_slowly(stage, good) for _ in range(200)])


async def _read_slowly(stage: Stage, good: bool) -> None:
    caller = await stage.opened()
    await caller.send(chunk=chunk(rows=8, last=good))
    if not good:
        await caller.send(chunk=chunk(seq=7))
    total = 1 << 20

    async def grant_and_wait() -> None:
        nonlocal total
        total += 1
        await caller.send(credit=stage_pb2.Credit(port="codes", total=total))
        await asyncio.sleep(random.uniform(0, 0.02))

    heard = await caller.finish(grant_and_wait)
    if good:
        heard.check_whole(["codes"])
        np.testing.assert_array_equal(heard.codes(), formulas.frames(ROWS))
    else:
        assert heard.ended is not None and heard.ended.reason == "PROTOCOL"
        assert (heard.code, heard.details) == (INVALID, heard.ended.message)


async def test_a_caller_that_never_reads_holds_nothing_for_longer_than_the_handshake(monkeypatch: pytest.MonkeyPatch):
    """It grants plenty and takes nothing: a write waits in gRPC when the session's deadline comes, and Ended cannot be said any more."""
    monkeypatch.setattr("omnistage.stage.caller.HANDSHAKE_TIMEOUT_S", 0.3)
    async with stage_of("code2wav", {"samples_per_frame": 100_000, "max_chunk": 1}, session_limit=1.0) as stage:
        caller = await stage.opened()
        codes = np.ones((100, formulas.CODEBOOKS), np.uint32)
        await caller.send(chunk=code_chunks(codes, [100])[0])
        await watch_until(stage.address, lambda report: report.sessions == 0)
        with suppress(grpc.aio.AioRpcError):  # Without Ended the status comes as an exception, with it as a value.
            await caller.finish()
        assert await caller.call.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert 0 < len(caller.heard.of("audio")) < 76


async def test_an_error_that_was_told_and_what_it_came_through_are_freed_at_once():
    """The cases: bad params, a bad message, and an input that ends too early. All is freed although the collector rests, as it does in a
    server for hundreds of requests."""
    async with stage_of("talker") as stage:
        gc.collect()
        before = _errors()  # such as the parameters of tests
        gc.disable()
        try:
            for _ in range(3):
                await stage.refuse("BAD_REQUEST", params=params("thinker"))
                wrong = await stage.opened()
                await wrong.send(chunk=chunk(seq=7))
                await wrong.expect("PROTOCOL", INVALID)
                short = await stage.opened()
                await short.call.done_writing()
                await short.expect("HALF_CLOSED", PRECONDITION)
            await all_free([stage.address])
            assert not [error for error in _errors() if not any(error is other for other in before)]
        finally:
            gc.enable()


def _errors() -> list[StageError]:
    """Those that there are in this process."""
    return [one for one in gc.get_objects() if type(one) is StageError]


# While it is prepared -------------------------------------------------------------------------------------------------------------------


class Slow(ToyThinker):
    """Prepares no request before it is let go."""

    def __init__(self, options: ToyOptions) -> None:
        super().__init__(options)
        self.asked, self.go = asyncio.Event(), asyncio.Event()

    async def prepare(self, request: TextRequest) -> TextRequest:
        self.asked.set()
        await self.go.wait()
        return await super().prepare(request)


async def test_a_session_has_its_place_while_it_is_prepared():
    model = Slow(ToyOptions())
    async with stage_with(ThinkerStage(model), max_sessions=1) as stage, asyncio.timeout(60):
        caller = await stage.begin(session_id="first")
        await model.asked.wait()
        await stage.refuse("OVERLOADED", EXHAUSTED, session_id="second")
        model.go.set()
        (await caller.finish()).check_whole(["text", "hidden"])


async def test_a_session_that_is_never_prepared_ends_with_its_deadline():
    async with stage_with(ThinkerStage(Slow(ToyOptions())), session_limit=0.5) as stage:
        await stage.refuse("DEADLINE", grpc.StatusCode.DEADLINE_EXCEEDED)


async def test_a_session_that_is_prepared_and_opened_again_gives_its_place_to_the_newer_one():
    model = Slow(ToyOptions())
    async with stage_with(ThinkerStage(model)) as stage, asyncio.timeout(60):
        older = await stage.begin(session_id="same", attempts=[0])
        await model.asked.wait()
        newer = await stage.begin(session_id="same", attempts=[1])
        await older.expect("SUPERSEDED", grpc.StatusCode.ABORTED)
        await watch_until(stage.address, lambda report: report.sessions == 1)
        model.go.set()
        (await newer.finish()).check_whole(["text", "hidden"])


async def test_a_session_whose_stage_behind_does_not_answer_and_that_is_opened_again_ends():
    silent = asyncio.Event()

    async def behind(opened: stage_pb2.Open, context: Context) -> None:
        silent.set()
        await listen(context)

    async with bare_peer(behind) as address, stage_of("thinker") as stage, asyncio.timeout(60):
        older = await stage.begin(session_id="same", attempts=[0], route=[hop_to(address, kind="talker")])
        await silent.wait()
        newer = await stage.begin(session_id="same", attempts=[1])
        await older.expect("SUPERSEDED", grpc.StatusCode.ABORTED)
        (await newer.finish()).check_whole(["text", "hidden"])


def test_a_session_without_output_took_no_time_to_its_first_one() -> None:
    meter = Meter(["text"], lambda port, count: None)
    meter.opened()
    report = meter.report(stage_pb2.STAGE_KIND_THINKER, "127.0.0.1:1", {}, 0)
    assert report.first_output.ToNanoseconds() == report.total.ToNanoseconds() == 0
