"""Whatever a caller writes on a `Run` stream, in whatever order: a typed end, in time, and the next session is not harmed."""

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
from helpers.mistreated import Mistreated, end_of, mistreated
from helpers.mutation import changed
from helpers.run import params, tensor_of
from helpers.servers import KINDS
from helpers.stage import ROWS
from omnistage.models.toy import formulas
from omnistage.v1 import chunk_pb2, stage_pb2, tensor_pb2

WORDS = ["text", "hidden", "codes", "audio", "image", "progress"]
NEW_EVENT = b"\xf2\x06\x03new"  # field 110, length-delimited
FRAMES = formulas.frames(ROWS)


@pytest.fixture(scope="module")
def house() -> Iterator[Mistreated]:
    with mistreated() as opened:
        yield opened


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
            credit = draw(changed(stage_pb2.Credit(port="codes", total=9), WORDS))
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
            message = draw(changed(piece(kind, seq, first, 2, False), WORDS))
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


def hop(house: Mistreated, kind: str, port: str) -> stage_pb2.Hop:
    stage = house.stages[kind]
    return stage_pb2.Hop(
        kind=stage.description.kind, model=stage.description.model, addresses=[stage.address], params=params(kind), takes=[port]
    )


def openings(house: Mistreated, kind: str) -> dict[str, stage_pb2.Open]:
    """The openings of a stage: alone, with little credit, going on, and with the rest of the chain behind it."""
    stage = house.stages[kind]
    opens = {"alone": stage.open(), "no credit": stage.open(credits={}), "again": stage.open(resume=stage_pb2.Resume())}
    if kind in ("thinker", "talker"):
        route = [hop(house, "talker", "hidden"), hop(house, "code2wav", "codes")][kind == "talker" :]
        opens["chain"] = stage.open(route=route, credits={"text": 1 << 20, "codes": 1 << 20, "audio": 1 << 20})
        opens["chain without credit"] = stage.open(route=route, credits={})
    return opens


@lengths.rounds(200, 875)
@lengths.drawn_cells(1, "kind", KINDS)
def test_any_order_of_messages(house: Mistreated, kind: str, rounds: int) -> None:
    reasons: Counter[str] = Counter()
    opens = openings(house, kind)

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
