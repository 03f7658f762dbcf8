"""Whatever a caller writes on a `Run` stream, in whatever order, and every field of Open changed at random; callers that flood a stage,
read nothing, say nothing, or vanish: bounded in time and memory, and others are served."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers import lengths
from helpers.mistreated import Mistreated, end_of
from helpers.mutation import changed
from helpers.run import RunStream, code_chunks, params, row_chunks, run_once, tensor_of
from helpers.servers import CLIENT_OPTIONS, KINDS, all_free, watch_until
from helpers.stage import INVALID, ROWS, Stage, chunk, stage_of
from omnistage.connector.arena import Arena
from omnistage.connector.transport import Sender
from omnistage.models.toy import formulas
from omnistage.stage.inputs import WINDOW
from omnistage.v1 import chunk_pb2, stage_pb2, stage_pb2_grpc, tensor_pb2

FRAMES = formulas.frames(ROWS)
INPUT = {"talker": row_chunks("hidden", ROWS, [3, 5]), "code2wav": code_chunks(FRAMES, [7, 9])}


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    arena = Arena.create(max_bytes=1 << 22, segment_bytes=1 << 18)
    assert arena is not None
    yield arena
    arena.close()


def hop(house: Mistreated, kind: str, port: str) -> stage_pb2.Hop:
    stage = house.stages[kind]
    return stage_pb2.Hop(
        kind=stage.description.kind,
        model=stage.description.model,
        addresses=[stage.address],
        params=params(kind),
        takes=[port],
        checkpoints=["codes"] if kind == "talker" else [],
    )


def route_behind(house: Mistreated, kind: str) -> list[stage_pb2.Hop]:
    """The rest of the chain."""
    return [hop(house, "talker", "hidden"), hop(house, "code2wav", "codes")][kind == "talker" :]


def held(*ports: str) -> stage_pb2.Resume:
    """The items of each port that a caller may hold: about four tokens, frames and so on."""
    resume = stage_pb2.Resume()
    for port in ports:
        resume.positions.add(port=port, seq=2, first=4)
        if port == "text":
            words = chunk_pb2.TextChunk(text="a b c d ", token_ids=[1, 2, 3, 4])
            resume.history.add(port=port, count=4, text=words)
        elif port == "codes":
            resume.history.add(port=port, count=4, codes=chunk_pb2.CodeChunk(codes=FRAMES[:4].ravel().tolist(), codebook_count=4))
    return resume


def openings(house: Mistreated, kind: str, arena: Arena) -> list[stage_pb2.Open]:
    """Good ones to begin with: new, going on, with memory to offer, with a route, and with a route and going on."""
    stage = house.stages[kind]
    own = {"thinker": ("text", "hidden"), "talker": ("codes",), "code2wav": ("audio",), "diffusion": ("image", "progress")}[kind]
    sender = Sender(arena)
    opens = [stage.open(), stage.open(resume=held(*own)), stage.open(offers=sender.offers(), attempts=[1, 2], revision="1")]
    sender.close(clean=True)
    if kind in ("thinker", "talker"):
        route = route_behind(house, kind)
        checkpoints = ["text"] if kind == "thinker" else ["codes"]
        fields = {"route": route, "credits": {"text": 1 << 20, "audio": 1 << 20}, "checkpoints": checkpoints, "attempts": [0]}
        compact = ("text", "codes", "audio")[kind == "talker" :]
        opens += [stage.open(**fields), stage.open(**fields, resume=held(*compact))]
    return opens


@lengths.rounds(200, 750)
@lengths.drawn_cells(1, "kind", KINDS)
def test_any_field_of_open(house: Mistreated, arena: Arena, kind: str, rounds: int) -> None:
    """The caller then sends good input and half-closes, so the stage has no reason to wait."""
    opens = openings(house, kind, arena)
    words = ["text", "hidden", "codes", "audio", "image", "1", "session-1", f"toy-{kind}", "toy-talker", "png", "user", "balanced", "toy"]
    words += [house.stages[name].address for name in ("talker", "code2wav")] + ["10.0.0.1:1"]
    reasons: Counter[str] = Counter()

    @settings(max_examples=rounds, suppress_health_check=list(HealthCheck), database=None)
    @given(opening=st.sampled_from(opens).flatmap(lambda opening: changed(opening, words)))
    def play(opening: stage_pb2.Open) -> None:
        _keep_short(opening)
        if opening.route and not any(credit.port == "audio" for credit in opening.credits):
            del opening.credits[:]  # A stage does not know that no other one has a port "a", and waits for it to the end of its time.
        steps = [stage_pb2.RunRequest(open=opening).SerializeToString()]
        steps += [stage_pb2.RunRequest(chunk=chunk).SerializeToString() for chunk in INPUT.get(kind, [])]
        reasons[house.play(end_of(house.run(kind), steps)) or "OK"] += 1

    play()
    house.play(house.still_well())
    print(dict(reasons))
    assert reasons["OK"] and reasons["BAD_REQUEST"], "the fields are changed too little or too much"


def _keep_short(opening: stage_pb2.Open) -> None:
    """A good request for 32,000 tokens takes its time."""
    for each in [opening.params, *(hop.params for hop in opening.route)]:
        if each.HasField("thinker") and each.thinker.max_tokens > 300:
            each.thinker.ignore_eos = False
        if each.HasField("diffusion"):
            each.diffusion.steps = min(each.diffusion.steps, 20) if each.diffusion.steps <= 1000 else each.diffusion.steps
            if max(each.diffusion.width, each.diffusion.height) <= 1024:
                each.diffusion.width, each.diffusion.height = 16, 16


def test_the_input_is_good(house: Mistreated) -> None:
    """Else nothing above would come far."""
    for kind, chunks in INPUT.items():
        steps = [stage_pb2.RunRequest(open=house.stages[kind].open()), *[stage_pb2.RunRequest(chunk=chunk) for chunk in chunks]]
        heard: list[stage_pb2.RunResponse] = []
        assert house.play(end_of(house.run(kind), [step.SerializeToString() for step in steps], heard)) == ""
        if kind == "talker":
            codes = [code for message in heard for code in message.chunk.codes.codes]
            np.testing.assert_array_equal(codes, FRAMES.ravel())


# Any order of messages ----------------------------------------------------------------------------------------------------------------


PORTS = ["text", "hidden", "codes", "audio", "image", "progress"]
NEW_EVENT = b"\xf2\x06\x03new"  # field 110, length-delimited


def piece(kind: str, seq: int, first: int, count: int, last: bool) -> stage_pb2.RunRequest:
    """A good chunk for a stage of this kind, if the numbers are."""
    if kind == "code2wav":
        codes = chunk_pb2.CodeChunk(codes=FRAMES[:count].ravel().tolist(), codebook_count=formulas.CODEBOOKS) if count else None
        return stage_pb2.RunRequest(chunk=chunk_pb2.Chunk(port="codes", seq=seq, first=first, count=count, last=last, codes=codes))
    tensor = tensor_of(np.ascontiguousarray(ROWS[:count])) if count else None
    return stage_pb2.RunRequest(chunk=chunk_pb2.Chunk(port="hidden", seq=seq, first=first, count=count, last=last, tensor=tensor))


@st.composite
def a_story(draw: st.DrawFn, kind: str, opening: stage_pb2.Open) -> list[bytes | None]:
    """The messages of a caller: mostly an Open first, then anything; good chunks are numbered as they should be. With stages behind, credit
    is for ports that the chain has: a stage does not know the ports of the others and must take it for good to the end of its time."""
    steps: list[bytes | None] = []
    seq = first = 0
    if draw(st.integers(0, 9)):
        steps.append(stage_pb2.RunRequest(open=opening).SerializeToString())
    for _ in range(draw(st.integers(0, 12))):
        act = draw(
            st.sampled_from(
                ["piece"] * 14 + ["credit", "credit", "release", "answer", "interrupt", "odd", "open", "new", "empty", "close", "bytes"]
            )
        )
        message: Any = None
        if act == "piece":
            count, last = draw(st.integers(0, 8)), draw(st.integers(0, 4)) == 0
            message = piece(kind, seq, first, count, last)
            seq, first = seq + 1, first + count
        elif act == "credit":
            credit = draw(changed(stage_pb2.Credit(port="codes", total=9), PORTS))
            if opening.route:
                credit.port = draw(st.sampled_from(["codes", "audio"]))
            message = stage_pb2.RunRequest(credit=credit)
        elif act == "release":
            message = stage_pb2.RunRequest(release=draw(changed(tensor_pb2.Release(slots=[tensor_pb2.Slot(offset=64)]))))
        elif act == "answer":
            message = stage_pb2.RunRequest(answer=draw(changed(tensor_pb2.Answer())))
        elif act == "interrupt":
            message = stage_pb2.RunRequest(interrupt=draw(changed(stage_pb2.Interrupt())))
        elif act == "odd":
            message = draw(changed(piece(kind, seq, first, 2, False), PORTS))
        elif act == "open":
            message = stage_pb2.RunRequest(open=opening)
        if message is not None:
            steps.append(message.SerializeToString())
        elif act == "close":
            steps.append(None)
        elif act == "bytes":
            steps.append(draw(st.binary(min_size=1, max_size=30)))
        else:
            steps.append(NEW_EVENT if act == "new" else b"")
    return steps


def openings_of(house: Mistreated, kind: str) -> dict[str, stage_pb2.Open]:
    """The openings of a stage: alone, with little credit, going on, and with the rest of the chain behind it."""
    stage = house.stages[kind]
    opens = {"alone": stage.open(), "no credit": stage.open(credits={}), "again": stage.open(resume=stage_pb2.Resume())}
    if kind in ("thinker", "talker"):
        route = route_behind(house, kind)
        opens["chain"] = stage.open(route=route, credits={"text": 1 << 20, "codes": 1 << 20, "audio": 1 << 20})
        opens["chain without credit"] = stage.open(route=route, credits={})
    return opens


@lengths.rounds(200, 875)
@lengths.drawn_cells(1, "kind", KINDS)
def test_any_order_of_messages(house: Mistreated, kind: str, rounds: int) -> None:
    reasons: Counter[str] = Counter()
    opens = openings_of(house, kind)

    @settings(max_examples=rounds, suppress_health_check=list(HealthCheck), database=None)
    @given(name=st.sampled_from(sorted(opens)), data=st.data())
    def play(name: str, data: st.DataObject) -> None:
        steps = data.draw(a_story(kind, opens[name]))
        reasons[house.play(end_of(house.run(kind), steps)) or "OK"] += 1

    play()
    house.play(house.still_well())
    print(dict(reasons))
    assert {"OK", "PROTOCOL"} <= set(reasons), "the stories are too much alike"


def test_many_bad_callers_at_once_and_a_good_one(house: Mistreated) -> None:
    """All kinds of them, ten times over, beside a session that notices nothing."""

    async def all_at_once() -> None:
        stage = house.stages["talker"]
        good = await stage.opened()
        bad: list[list[bytes | None]] = [
            [b"\xff\xff"],
            [b""],
            [None],
            [stage_pb2.RunRequest(open=stage.open()).SerializeToString()] * 2,
            [stage_pb2.RunRequest(open=stage.open()).SerializeToString(), piece("talker", 7, 0, 1, False).SerializeToString()],
        ]
        ends = await asyncio.gather(*[end_of(house.run("talker"), steps) for steps in bad * 10])
        assert set(ends) == {"PROTOCOL"}
        await good.call.write(piece("talker", 0, 0, 8, True))
        heard = await good.finish()
        heard.check_whole(["codes"])
        np.testing.assert_array_equal(heard.codes(), FRAMES)

    house.play(all_at_once())


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
