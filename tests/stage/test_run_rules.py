"""The rules of `Run`: whoever breaks one gets exactly one typed end, in Ended and in the status, and the next session is not harmed."""

from __future__ import annotations

import random

import grpc
import grpc.aio
import numpy as np
import pytest

from helpers.ports import take_address
from helpers.run import params, row_chunks, run_once, tensor_of
from helpers.stage import EXHAUSTED, INVALID, PRECONDITION, ROWS, chunk, stage_of
from omnistage.models.toy import formulas
from omnistage.stage.inputs import WINDOW
from omnistage.v1 import chunk_pb2, stage_pb2, tensor_pb2
from omnistage.wire.limits import MAX_ADDRESSES, MAX_HOPS

RUN = "/omnistage.v1.StageService/Run"


# The first message ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "first",
    [
        stage_pb2.RunRequest(chunk=chunk()),
        stage_pb2.RunRequest(credit=stage_pb2.Credit(port="codes", total=1)),
        stage_pb2.RunRequest(release=tensor_pb2.Release()),
        stage_pb2.RunRequest(interrupt=stage_pb2.Interrupt()),
        stage_pb2.RunRequest(),
    ],
    ids=["chunk", "credit", "release", "interrupt", "empty"],
)
async def test_first_message_must_be_open(first: stage_pb2.RunRequest):
    async with stage_of("talker") as stage:
        caller = stage.caller()
        await caller.call.write(first)
        await caller.expect("PROTOCOL", INVALID)


async def test_half_close_without_any_message():
    async with stage_of("talker") as stage:
        caller = stage.caller()
        await caller.call.done_writing()
        await caller.expect("PROTOCOL", INVALID)


def decoded(message: object) -> stage_pb2.RunResponse:
    assert isinstance(message, bytes)
    return stage_pb2.RunResponse.FromString(message)


@pytest.mark.parametrize("after_open", [False, True], ids=["first", "later"])
async def test_bytes_that_are_no_message(after_open: bool):
    async with stage_of("talker") as stage, grpc.aio.insecure_channel(stage.address) as channel:
        run: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(RUN)
        call: grpc.aio.StreamStreamCall[bytes, bytes] = run(timeout=30)
        if after_open:
            await call.write(stage_pb2.RunRequest(open=stage.open()).SerializeToString())
            assert decoded(await call.read()).HasField("opened")
        await call.write(b"\xff" + random.randbytes(40))
        ended = decoded(await call.read()).ended
        await call.write(b"\xff\xff")
        await call.done_writing()
        assert (ended.reason, await call.code()) == ("PROTOCOL", INVALID)
        assert await call.details() == ended.message


@pytest.mark.parametrize(
    ("fields", "reason", "code", "field"),
    [
        ({"model": "other"}, "UNKNOWN_MODEL", grpc.StatusCode.NOT_FOUND, None),
        ({"model": ""}, "UNKNOWN_MODEL", grpc.StatusCode.NOT_FOUND, None),
        ({"revision": "other"}, "REVISION_MISMATCH", PRECONDITION, None),
        (
            {"resume": stage_pb2.Resume(positions=[stage_pb2.Position(port="codes", seq=1, first=2)])},
            "BAD_REQUEST",
            INVALID,
            "resume.history",
        ),
        ({"resume": stage_pb2.Resume(positions=[stage_pb2.Position(port="Codes")])}, "BAD_REQUEST", INVALID, "resume.positions"),
        ({"session_id": ""}, "BAD_REQUEST", INVALID, "open.session_id"),
        ({"session_id": "a" * 65}, "BAD_REQUEST", INVALID, "open.session_id"),
        ({"session_id": "a/b"}, "BAD_REQUEST", INVALID, "open.session_id"),
        ({"session_id": "a\n"}, "BAD_REQUEST", INVALID, "open.session_id"),
        ({"session_id": "\N{LATIN SMALL LETTER E WITH ACUTE}"}, "BAD_REQUEST", INVALID, "open.session_id"),
        ({"params": params("code2wav")}, "BAD_REQUEST", INVALID, "open.params"),
        ({"params": params("talker", voice="nobody")}, "BAD_REQUEST", INVALID, "talker.voice"),
        ({"checkpoints": ["audio"]}, "BAD_REQUEST", INVALID, "open.checkpoints"),
        ({"checkpoints": ["hidden"]}, "BAD_REQUEST", INVALID, "open.checkpoints"),
        ({"route": [stage_pb2.Hop(takes=["codes"])]}, "BAD_REQUEST", INVALID, "open.route.addresses"),
        (
            {"route": [stage_pb2.Hop(takes=["codes"], addresses=["127.0.0.1:1"] * (MAX_ADDRESSES + 1))]},
            "BAD_REQUEST",
            INVALID,
            "open.route.addresses",
        ),
        ({"route": [stage_pb2.Hop(addresses=["127.0.0.1:1"])]}, "BAD_REQUEST", INVALID, "open.route.takes"),
        ({"route": [stage_pb2.Hop(takes=["hidden"], addresses=["127.0.0.1:1"])]}, "BAD_REQUEST", INVALID, "open.route.takes"),
        (
            {"route": [stage_pb2.Hop(takes=["codes"], addresses=["127.0.0.1:1"])] * (MAX_HOPS + 1)},
            "BAD_REQUEST",
            INVALID,
            "open.route",
        ),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
async def test_open_is_checked(fields: dict[str, object], reason: str, code: grpc.StatusCode, field: str | None):
    async with stage_of("talker") as stage:
        caller = stage.caller()
        await caller.send(open=stage.open(**fields))
        ended = await caller.expect(reason, code)
        assert ended.metadata.get("field") == field
        assert caller.heard.opened is None


async def test_a_session_that_was_lost_before_its_first_output_begins_anew():
    async with stage_of("talker") as stage:
        heard = await run_once(stage.stub, stage.open(resume=stage_pb2.Resume()), row_chunks("hidden", ROWS, [3, 5]))
        heard.check_whole(["codes"])
        np.testing.assert_array_equal(heard.codes(), formulas.frames(ROWS))


async def test_a_route_that_cannot_be_reached_is_a_lost_stage():
    async with stage_of("talker") as stage:
        hop = stage_pb2.Hop(kind=stage_pb2.STAGE_KIND_CODE2WAV, model="toy-code2wav", addresses=[take_address()], takes=["codes"])
        caller = stage.caller()
        await caller.send(open=stage.open(route=[hop]))
        ended = await caller.expect("STAGE_LOST", grpc.StatusCode.UNAVAILABLE)
        assert ended.metadata["stage"] == "code2wav" and ended.HasField("retry_delay")
        assert caller.heard.opened is None


async def test_an_error_of_a_hop_behind_comes_up_as_it_is():
    async with stage_of("code2wav") as behind, stage_of("talker") as stage:
        hop = stage_pb2.Hop(
            kind=stage_pb2.STAGE_KIND_CODE2WAV,
            model="toy-code2wav",
            addresses=[behind.address],
            takes=["codes"],
            params=params("code2wav", profile="best"),
        )
        caller = stage.caller()
        await caller.send(open=stage.open(route=[hop]))
        ended = await caller.expect("BAD_REQUEST", INVALID)
        assert ended.metadata["field"] == "code2wav.profile"


# Input ---------------------------------------------------------------------------------------------------------------------------------


WRONG_PAYLOAD = chunk_pb2.Chunk(port="hidden", count=1, text=chunk_pb2.TextChunk(text="a"))
WRONG_SHAPE = chunk_pb2.Chunk(port="hidden", count=1, tensor=tensor_of(np.zeros((1, 33), np.float32)))
FEWER_ROWS = chunk_pb2.Chunk(port="hidden", count=3, tensor=tensor_of(ROWS[:2]))
FLAT = chunk_pb2.Chunk(port="hidden", count=1, tensor=tensor_of(np.zeros(32, np.float32)))
WHOLE_NUMBERS = chunk_pb2.Chunk(
    port="hidden",
    count=1,
    tensor=tensor_pb2.Tensor(
        element_type=tensor_pb2.ELEMENT_TYPE_INT16, shape=[1, 32], inline=tensor_pb2.InlinePart(data=bytes(64), total_bytes=64)
    ),
)
LYING = chunk_pb2.Chunk(
    port="hidden",
    count=1,
    tensor=tensor_pb2.Tensor(
        element_type=tensor_pb2.ELEMENT_TYPE_FLOAT32, shape=[1, 32], inline=tensor_pb2.InlinePart(data=bytes(4), total_bytes=4)
    ),
)
FOREIGN = chunk_pb2.Chunk(
    port="hidden",
    count=1,
    tensor=tensor_pb2.Tensor(
        element_type=tensor_pb2.ELEMENT_TYPE_FLOAT32,
        shape=[1, 32],
        shared_memory=tensor_pb2.SharedMemorySlot(arena=bytes(16), length=128, generation=1),
    ),
)


@pytest.mark.parametrize(
    "chunks",
    [
        [chunk(seq=1)],
        [chunk(first=1)],
        [chunk(), chunk(seq=2, first=1)],
        [chunk(), chunk(seq=1, first=2)],
        [chunk(), chunk()],
        [chunk(), chunk(seq=1, first=0)],
        [chunk(last=True), chunk(seq=1, first=1)],
        [chunk(port="codes")],
        [chunk(port="")],
        [WRONG_PAYLOAD],
        [chunk_pb2.Chunk(port="hidden", count=1)],
        [WRONG_SHAPE],
        [FEWER_ROWS],
        [FLAT],
        [WHOLE_NUMBERS],
        [LYING],
        [FOREIGN],
        [chunk_pb2.Chunk(port="hidden", count=1, tensor=tensor_pb2.Tensor())],
    ],
    ids=[
        "seq does not start at 0",
        "items do not start at 0",
        "gap in seq",
        "gap in items",
        "repeat",
        "overlap of items",
        "after last",
        "unknown port",
        "no port",
        "wrong payload",
        "items without payload",
        "wrong width",
        "fewer rows than items",
        "wrong rank",
        "wrong element type",
        "shape and bytes differ",
        "memory that was not offered",
        "empty tensor",
    ],
)
async def test_input_that_breaks_a_rule_is_protocol(chunks: list[chunk_pb2.Chunk]):
    async with stage_of("talker") as stage:
        caller = await stage.opened(credits={})  # So that it cannot end well before the wrong chunk comes.
        for wrong in chunks:
            await caller.send(chunk=wrong)
        await caller.expect("PROTOCOL", INVALID)


async def test_second_open_is_protocol():
    async with stage_of("talker") as stage:
        caller = await stage.opened()
        await caller.send(open=stage.open())
        await caller.expect("PROTOCOL", INVALID)


@pytest.mark.parametrize(
    "frame", [chunk_pb2.CodeChunk(codes=[1, 2, 3], codebook_count=3), chunk_pb2.CodeChunk(codes=[1, 2, 3], codebook_count=4)]
)
async def test_codes_of_the_wrong_size_are_protocol(frame: chunk_pb2.CodeChunk):
    async with stage_of("code2wav") as stage:
        caller = await stage.opened()
        await caller.send(chunk=chunk_pb2.Chunk(port="codes", count=1, codes=frame))
        await caller.expect("PROTOCOL", INVALID)


async def test_more_chunks_than_credit():
    """The stage makes nothing without credit for its output, so it takes one chunk at most and the window fills."""
    async with stage_of("talker") as stage:
        caller = await stage.opened(credits={})
        assert caller.heard.credits == {"hidden": WINDOW}
        for seq in range(WINDOW + 2):
            await caller.send(chunk=chunk(seq=seq, first=seq))
        await caller.expect("CREDIT_EXCEEDED", EXHAUSTED)


async def test_within_the_credit_any_number_of_chunks_is_taken():
    async with stage_of("talker") as stage:
        rows = np.stack([formulas.row(n) for n in range(10 * WINDOW)])
        heard = await run_once(stage.stub, stage.open(), row_chunks("hidden", rows, [1] * len(rows)))
        heard.check_whole(["codes"])
        np.testing.assert_array_equal(heard.codes(), formulas.frames(rows))


async def test_a_tensor_in_parts_counts_once():
    """Two inline parts of one tensor: the first has count 0, the items come with the last."""
    data = ROWS.astype("<f4").tobytes()
    parts = []
    for seq, (begin, count) in enumerate([(0, 0), (400, len(ROWS))]):
        inline = tensor_pb2.InlinePart(data=data[begin : begin + 400] if seq == 0 else data[400:], offset=begin, total_bytes=len(data))
        tensor = tensor_pb2.Tensor(element_type=tensor_pb2.ELEMENT_TYPE_FLOAT32, shape=ROWS.shape, inline=inline)
        parts.append(chunk_pb2.Chunk(port="hidden", seq=seq, first=0, count=count, last=seq == 1, tensor=tensor))
    async with stage_of("talker") as stage:
        heard = await run_once(stage.stub, stage.open(), parts)
        np.testing.assert_array_equal(heard.codes(), formulas.frames(ROWS))
