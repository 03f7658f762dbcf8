"""Losses that the link next to them cannot mend by itself: the replay log was cut, the replacement says something else, nobody is left."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import grpc.aio
import numpy as np
import pytest

from helpers import lengths
from helpers.ask import ask, read, read_all, refusal, request
from helpers.disturbed import ask_through, disturbed, found, kill_when, killed_holder, nothing_left, opening, text_chunks
from helpers.fleet import Fleet, fleet
from helpers.run import RunAnswer, RunStream
from helpers.servers import CHAIN, stage_stub
from omnistage.models.toy import formulas
from omnistage.models.toy.stages import DIFFERENCE
from omnistage.v1 import omni_pb2, stage_pb2
from omnistage.wire.proto_values import kind_name

TOKENS = 150
LONG = {"max_tokens": TOKENS, "ignore_eos": True}
SLOW = {"interval_s": 0.02}

INLINE_LIMITS = {"shared memory": "0", "inline": str(1 << 20)}
"""By the way that tensors travel with them."""

TEN_CHUNKS = 10 * 128 * 5 // 2
"""Bytes: a row of a toy Thinker has 32 float32, and a chunk two and a half rows on average."""


@lengths.long_form("link/test_chain.py::test_a_log_that_was_cut_makes_the_caller_open_the_stage_before_again")
@lengths.one_or_all("way", INLINE_LIMITS)
async def test_a_talker_is_lost_whose_input_was_forgotten(tmp_path: Path, way: str, seed: int) -> None:
    """Its replacement needs the rows from the first one on. Only a new Thinker session can make them again; the samples are the same."""
    arguments = ["--replay-limit", str(TEN_CHUNKS), "--inline-limit", INLINE_LIMITS[lengths.draw(way, INLINE_LIMITS, seed)]]
    with fleet(tmp_path, replicas=2, options=SLOW, stage_args=arguments) as running:
        async with disturbed(running) as stub:
            answer = await ask_through(stub, request("hello", seed, thinker=LONG), kill_when(text_chunks(40), running, "talker"))
            answer.check_toy(seed, "hello", TOKENS)
            (failover,) = answer.failovers
            assert failover.kind == stage_pb2.STAGE_KIND_THINKER
            assert "is needed from item 0 and kept from item" in failover.reason


@lengths.long_form(
    "models/contract/test_contract.py::test_a_talker_that_differs_leaves_one_splice",
    "link/test_chain.py::test_a_talker_is_killed_and_the_next_one_says_the_rest",
)
async def test_a_talker_that_samples_differently_leaves_one_splice(tmp_path: Path, seed: int) -> None:
    """Frames before it are of one Talker, those after it of the other, none is missing or there twice, and the sound is of these frames."""
    options_of = {"talker-1": {"differs": True}}
    with fleet(tmp_path, replicas={"talker": 2}, options=SLOW, options_of=options_of) as running:
        async with disturbed(running, alike=False), stage_stub(running.address("thinker-0")) as stub:
            caller = RunStream(stub)
            await caller.send(open=opening(running, seed, TOKENS))
            await caller.until(lambda heard: len(heard.of("audio")) >= 40)
            lost = await killed_holder(running, "talker")
            heard = await caller.finish()
            heard.check_whole(["text", "codes", "audio"])
            _check_splice(heard, seed, begins_different=lost == "talker-1")


def _check_splice(heard: RunAnswer, seed: int, *, begins_different: bool) -> None:
    rows = np.stack([formulas.row(formulas.token(seed, "hello", n)) for n in range(TOKENS)])
    same = formulas.frames(rows)
    parts = [same, (same + np.uint32(DIFFERENCE)) % np.uint32(1024)]
    before, after = reversed(parts) if begins_different else parts
    codes = heard.codes()
    splice = int((codes == before).all(axis=1).sum())
    print(f"the splice is at frame {splice} of {len(codes)}")
    assert 0 < splice < len(codes)
    np.testing.assert_array_equal(codes, np.concatenate([before[:splice], after[splice:]]))
    np.testing.assert_array_equal(heard.samples(), formulas.samples(codes)[:, 0] * 32768)
    assert heard.text() == formulas.text(seed, "hello", TOKENS)


# Nobody is left ------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One of each kind."""
    with fleet(tmp_path_factory.mktemp("logs"), replicas=1, options=SLOW, stage_args=["--inline-limit", "0"]) as running:
        yield running


@lengths.drawn_cells(1, "kind", CHAIN)
async def test_the_only_replica_is_killed_and_comes_back(alone: Fleet, kind: str, seed: int) -> None:
    """The answer ends with an error that names the stage and says to ask again, and so does the next one; `status` says which stage is
    lost. Whoever asks again when the stage is back is answered."""
    async with disturbed(alone) as stub:
        call = stub.Generate(request("hello", seed, thinker=LONG), timeout=60)
        for _ in range(20):
            await read(call)
        await killed_holder(alone, kind)
        at = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            async for _ in read_all(call):
                pass
        print(f"{kind}: told after {time.monotonic() - at:.3f} s")
        told = refusal(failed.value)
        assert (told.code, told.reason, told.metadata) == (grpc.StatusCode.UNAVAILABLE, "STAGE_LOST", {"stage": kind})
        assert told.retry_delay_s
        await nothing_left(alone)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await ask(stub, request())
        assert refusal(failed.value).reason == "STAGE_LOST"
        listed = await stub.ListReplicas(omni_pb2.ListReplicasRequest(), timeout=10)
        states = {kind_name(replica.kind): replica.state for replica in listed.replicas}
        assert states.pop(kind) == omni_pb2.REPLICA_STATE_LOST
        assert set(states.values()) == {omni_pb2.REPLICA_STATE_SERVING}

        alone.begin(f"{kind}-0")
        await asyncio.to_thread(alone.ready, f"{kind}-0")
        at = time.monotonic()
        await found(alone, stub)
        print(f"{kind}: found again after {time.monotonic() - at:.3f} s")
        (await ask(stub, request("again", seed))).check_toy(seed, "again")
