"""Every field of a tensor, of an offer, an answer and a release, as a real stage meets them in a session: the right rows or a typed end."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers import lengths
from helpers.mistreated import Call, Mistreated, end_of
from helpers.mutation import changed
from helpers.servers import ServerProcess, stage_flags, stage_stub
from helpers.stage import ROWS, Stage
from omnistage.connector.arena import Arena
from omnistage.connector.liveness import sweep
from omnistage.connector.transport import Receiver, Sender
from omnistage.models.toy import formulas
from omnistage.v1 import chunk_pb2, stage_pb2, tensor_pb2

CASES = 750
CODES = formulas.frames(ROWS).ravel().tolist()


def fuzz(examples: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return settings(max_examples=examples, suppress_health_check=list(HealthCheck), database=None)


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    arena = Arena.create(max_bytes=1 << 22, segment_bytes=1 << 18, poison=True)
    assert arena is not None
    yield arena
    assert arena.leases == 0
    arena.close()


@asynccontextmanager
async def session(house: Mistreated, kind: str, arena: Arena | None = None) -> AsyncIterator[tuple[Call, Sender]]:
    """A call and the memory that its tensors lie in, both given up in the end, however a case ends."""
    sender, call = Sender(arena, inline_limit=0), house.run(kind)
    try:
        yield call, sender
    finally:
        call.cancel()
        sender.close(clean=True)


async def opened(call: Call, opening: stage_pb2.Open) -> stage_pb2.Opened:
    await call.write(stage_pb2.RunRequest(open=opening).SerializeToString())
    message = await call.read()
    assert isinstance(message, bytes)
    answer = stage_pb2.RunResponse.FromString(message)
    assert answer.HasField("opened"), answer
    return answer.opened


def rows_chunk(tensor: tensor_pb2.Tensor) -> bytes:
    return stage_pb2.RunRequest(chunk=chunk_pb2.Chunk(port="hidden", count=len(ROWS), last=True, tensor=tensor)).SerializeToString()


@lengths.drawn_cells(1, "shared", [True, False], ids=["shared memory", "inline"])
def test_any_field_of_a_tensor(house: Mistreated, arena: Arena, shared: bool) -> None:
    """In a session of a Talker that reads our memory: its codes are those of our rows, or it ends with PROTOCOL or STALE_REFERENCE."""
    reasons: Counter[str] = Counter()

    async def send(change: Callable[[tensor_pb2.Tensor], tensor_pb2.Tensor]) -> None:
        async with session(house, "talker", arena if shared else None) as (call, sender):
            sender.accept((await opened(call, house.stages["talker"].open(offers=sender.offers()))).answer)
            (tensor,) = sender.pack(ROWS)
            assert tensor.HasField("shared_memory") == shared
            heard: list[stage_pb2.RunResponse] = []
            reason = await end_of(call, [rows_chunk(change(tensor))], heard)
            assert reason in ("", "PROTOCOL", "STALE_REFERENCE")
            if not reason and shared:
                assert [code for message in heard for code in message.chunk.codes.codes] == CODES
            reasons[reason or "OK"] += 1

    @fuzz(CASES // 5)
    @given(data=st.data())
    def play(data: st.DataObject) -> None:
        house.play(send(lambda tensor: data.draw(changed(tensor, most=2))))

    play()
    house.play(house.still_well())
    print(dict(reasons))
    assert reasons["PROTOCOL"], "nothing was changed"


def test_any_field_of_an_offer(house: Mistreated, arena: Arena) -> None:
    """An offer that cannot be proven is not used."""

    async def offer(change: Callable[[tensor_pb2.Offer], tensor_pb2.Offer]) -> None:
        async with session(house, "talker", arena) as (call, sender):
            offers = [change(offer) for offer in sender.offers()]
            sender.accept((await opened(call, house.stages["talker"].open(offers=offers))).answer)
            (tensor,) = sender.pack(ROWS)
            heard: list[stage_pb2.RunResponse] = []
            assert await end_of(call, [rows_chunk(tensor)], heard) == ""
            assert [code for message in heard for code in message.chunk.codes.codes] == CODES

    @fuzz(CASES // 5)
    @given(data=st.data())
    def play(data: st.DataObject) -> None:
        house.play(offer(lambda given: data.draw(changed(given, most=2))))

    play()
    house.play(house.still_well())


def test_any_field_of_an_answer_and_of_a_release(house: Mistreated) -> None:
    """To a Thinker whose rows lie in its memory: it goes on with what it has not been proven, inline, and holds nothing in the end."""

    async def answer(data: st.DataObject) -> None:
        async with session(house, "thinker") as (call, _):
            offered = await opened(call, house.stages["thinker"].open())
            receiver = Receiver()
            good = receiver.answer(offered.offers)
            assert good.kind == tensor_pb2.TRANSPORT_KIND_SHARED_MEMORY
            given = data.draw(st.one_of(st.just(good), changed(good)))
            releases = data.draw(st.lists(changed(tensor_pb2.Release(slots=[tensor_pb2.Slot(offset=64, generation=1)])), max_size=3))
            steps = [stage_pb2.RunRequest(answer=given), *[stage_pb2.RunRequest(release=release) for release in releases]]
            heard: list[stage_pb2.RunResponse] = []
            assert await end_of(call, [step.SerializeToString() for step in steps], heard) == ""
            assert sum(message.chunk.count for message in heard if message.chunk.port == "hidden") == formulas.NATURAL_LENGTH
            receiver.close()

    @fuzz(CASES // 5)
    @given(data=st.data())
    def play(data: st.DataObject) -> None:
        house.play(answer(data))

    play()
    house.play(house.still_well())


def test_any_parts_of_a_tensor(house: Mistreated) -> None:
    """Pieces of one inline tensor, each of them changed."""
    data = np.ascontiguousarray(ROWS, "<f4").tobytes()

    def part(seq: int, begin: int, end: int) -> chunk_pb2.Chunk:
        inline = tensor_pb2.InlinePart(data=data[begin:end], offset=begin, total_bytes=len(data))
        tensor = tensor_pb2.Tensor(element_type=tensor_pb2.ELEMENT_TYPE_FLOAT32, shape=ROWS.shape, inline=inline)
        last = end == len(data)
        return chunk_pb2.Chunk(port="hidden", seq=seq, count=len(ROWS) if last else 0, last=last, tensor=tensor)

    good = [part(0, 0, 300), part(1, 300, 700), part(2, 700, len(data))]

    @fuzz(CASES // 5)
    @given(
        parts=st.lists(
            st.one_of(st.sampled_from(good), st.sampled_from(good).flatmap(lambda one: changed(one, most=2))), min_size=1, max_size=5
        )
    )
    def play(parts: list[chunk_pb2.Chunk]) -> None:
        steps = [stage_pb2.RunRequest(open=house.stages["talker"].open()), *[stage_pb2.RunRequest(chunk=each) for each in parts]]
        reason = house.play(end_of(house.run("talker"), [step.SerializeToString() for step in steps]))
        assert reason in ("", "PROTOCOL", "HALF_CLOSED")

    play()
    house.play(house.still_well())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user for a while")
async def test_another_user_cannot_kill_a_stage(tmp_path: Path) -> None:
    """He offers memory of his own, which is not mapped, cuts it short, and refers to it all the same: that is PROTOCOL, and no signal."""
    with ServerProcess("omnistage.talker", *stage_flags(), log_folder=tmp_path) as server:
        await asyncio.to_thread(server.wait_ready)
        command = [sys.executable, "-m", "helpers.stranger", server.address]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60, env=environment)
        sweep()
        assert server.alive, "the stage is dead"
        answered, ended = done.stdout.splitlines()
        assert answered.startswith("TRANSPORT_KIND_INLINE|") and "another user" in answered, done.stderr
        assert ended == "PROTOCOL"
        async with stage_stub(server.address) as stub:
            description = await stub.Describe(stage_pb2.DescribeRequest(), timeout=10)
            await Stage(server.address, stub, description).still_works()
