"""Whatever a caller writes on a `Run` stream, in whatever order, and every field of Open changed at random, on a stage alone and on one
with the rest of the chain behind it: a typed end, in time, and nothing is held."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers import lengths
from helpers.mistreated import Mistreated, end_of
from helpers.mutation import changed
from helpers.run import code_chunks, params, row_chunks, tensor_of
from helpers.servers import KINDS
from helpers.stage import ROWS
from omnistage.connector.arena import Arena
from omnistage.connector.transport import Sender
from omnistage.models.toy import formulas
from omnistage.v1 import chunk_pb2, stage_pb2, tensor_pb2

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
