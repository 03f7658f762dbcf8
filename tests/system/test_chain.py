"""The whole chain as real processes: the same samples however its tensors travel, and text that runs ahead of sound as far as is said."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc
import grpc.aio
import numpy as np
import pytest

from helpers import lengths
from helpers.ask import ask, read_all, request
from helpers.metrics import fetched, value
from helpers.run import PLENTY, RunAnswer, RunStream, params
from helpers.servers import ServerProcesses, all_free, omni_stub, stack, stage_stub, watch_until
from omnistage.link.replay import MAX_UNSENT, MAX_UNSENT_CODES
from omnistage.models.toy import formulas
from omnistage.stage.inputs import CODES_WINDOW, WINDOW
from omnistage.v1 import stage_pb2, tensor_pb2

AHEAD = MAX_UNSENT + WINDOW
"""Rows between the Thinker and a sound that nobody takes, with one row to a chunk: what the link to the Talker keeps, and the Talker's
window. The rows that become codes at the next edge are fewer than the half of that window, at which credit is renewed. Each stage works on
one more."""

LONG = AHEAD + 100
"""Tokens: more than may run ahead."""

assert (MAX_UNSENT_CODES + CODES_WINDOW) / formulas.FRAMES_PER_ROW < WINDOW / 2

SLACK = 4
WIDE = 65536


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def chain(folder: Path) -> Iterator[ServerProcesses]:
    """Three stages and a router; one token, row or frame to a chunk."""
    with stack(folder, options={"max_chunk": 1}) as running:
        yield running


@contextmanager
def variant(folder: Path, stage_args: Sequence[str] = (), options: Mapping[str, object] | None = None) -> Iterator[ServerProcesses]:
    with stack(folder, options={"max_chunk": 1, **(options or {})}, stage_args=stage_args) as running:
        yield running


async def _describe(address: str) -> stage_pb2.DescribeResponse:
    async with stage_stub(address) as stub:
        return await stub.Describe(stage_pb2.DescribeRequest(), timeout=10)


def opening(running: ServerProcesses, seed: int, prompt: str, tokens: int, *, audio: int, text: int = PLENTY) -> stage_pb2.Open:
    """A session at the Thinker with the other two as its route."""
    hops = [("talker", stage_pb2.STAGE_KIND_TALKER, "hidden"), ("code2wav", stage_pb2.STAGE_KIND_CODE2WAV, "codes")]
    return stage_pb2.Open(
        session_id="direct",
        model="toy-thinker",
        seed=seed,
        params=params("thinker", prompt, max_tokens=tokens, ignore_eos=True),
        credits=[stage_pb2.Credit(port="text", total=text), stage_pb2.Credit(port="audio", total=audio)],
        route=[
            stage_pb2.Hop(kind=kind, model=f"toy-{name}", addresses=[running.addresses[name]], takes=[port], params=params(name))
            for name, kind, port in hops
        ],
    )


async def held_back(running: ServerProcesses, caller: RunStream, seed: int, prompt: str, tokens: int) -> None:
    """Open with no room for sound, and read until the text stands still: the Thinker's next hop takes no more."""
    await caller.send(open=opening(running, seed, prompt, tokens, audio=0))
    await caller.opened()
    await caller.until_silent()


def whole(heard: RunAnswer, seed: int, prompt: str, tokens: int) -> None:
    heard.check_whole(["text", "audio"])
    assert heard.text() == formulas.text(seed, prompt, tokens)
    np.testing.assert_array_equal(heard.samples(), formulas.audio(seed, prompt, tokens)[:, 0] * 32768)


# The same samples ----------------------------------------------------------------------------------------------------------------------


async def test_many_at_once_each_hear_their_own_answer(chain: ServerProcesses, seed: int):
    async with omni_stub(chain.address) as stub:
        answers = await asyncio.gather(*[ask(stub, request(f"prompt {n}", seed + n)) for n in range(16)])
        for n, answer in enumerate(answers):
            answer.check_toy(seed + n, f"prompt {n}")
    await all_free(list(chain.addresses.values()))


async def test_every_tensor_through_shared_memory_gives_the_same_samples(folder: Path, seed: int):
    """With the inline limit at 0 even a row of 128 bytes is a reference into the Thinker's memory."""
    with variant(folder, ["--inline-limit", "0"]) as running:
        addresses = running.addresses
        for address in addresses.values():
            assert list((await _describe(address)).transports) == [
                tensor_pb2.TRANSPORT_KIND_SHARED_MEMORY,
                tensor_pb2.TRANSPORT_KIND_INLINE,
            ]
        async with omni_stub(running.address) as stub:
            answers = await asyncio.gather(*[ask(stub, request("shared", seed + n)) for n in range(8)])
            for n, answer in enumerate(answers):
                answer.check_toy(seed + n, "shared")
        await _rows_are_leased(running, seed)


async def _rows_are_leased(running: ServerProcesses, seed: int) -> None:
    """While sound is held back, the rows on their way are leased blocks of the Thinker; they came to the Talker by shared memory."""
    thinker = running.stages["thinker"]
    async with stage_stub(thinker.address) as stub:
        caller = RunStream(stub)
        await held_back(running, caller, seed, "lease", LONG)
        report = await watch_until(thinker.address, lambda report: report.leases >= MAX_UNSENT)
        assert report.arena_bytes_used > 0 and report.arena_bytes_total > report.arena_bytes_used
        talker = await watch_until(running.addresses["talker"], lambda report: report.sessions == 1)
        assert dict(talker.transports) == {"shared_memory": 1}
        page = await asyncio.to_thread(fetched, thinker.metrics_address)
        assert value(page, "omnistage_connector_leases") >= MAX_UNSENT and value(page, "omnistage_connector_arena_used_bytes") > 0
        await caller.send(credit=stage_pb2.Credit(port="audio", total=PLENTY))
        whole(await caller.finish(), seed, "lease", LONG)
    await all_free(list(running.addresses.values()))


@lengths.long_form(
    "system/test_chain.py::test_every_tensor_through_shared_memory_gives_the_same_samples",
    "connector/test_transport_contract.py::test_sizes_around_every_limit",
    unkept="A chain that is told nothing sends its large rows through shared memory.",
)
async def test_large_rows_go_through_shared_memory_by_default(folder: Path, seed: int):
    """256 KiB a row, far above the limit below which a tensor travels in the message."""
    with variant(folder, options={"width": WIDE}) as running:
        async with omni_stub(running.address) as stub:
            (await ask(stub, request("wide", seed))).check_toy(seed, "wide")
            call = stub.Generate(request("wide", seed, thinker={"max_tokens": 200, "ignore_eos": True}), timeout=60)
            await call.read()
            talker = await watch_until(running.addresses["talker"], lambda report: report.sessions == 1)
            assert dict(talker.transports) == {"shared_memory": 1}
            async for _ in read_all(call):
                pass
        await all_free(list(running.addresses.values()))


# Credit --------------------------------------------------------------------------------------------------------------------------------


async def test_text_runs_ahead_of_sound_that_nobody_takes_up_to_the_stated_bound(chain: ServerProcesses, seed: int):
    async with stage_stub(chain.addresses["thinker"]) as stub:
        caller = RunStream(stub)
        await held_back(chain, caller, seed, "ahead", LONG)
        ahead = sum(chunk.count for chunk in caller.heard.of("text"))
        print(f"text ran {ahead} tokens ahead; the bound is {AHEAD}")
        assert AHEAD - SLACK <= ahead <= AHEAD + SLACK
        assert not caller.heard.of("audio")
        await caller.send(credit=stage_pb2.Credit(port="audio", total=7))
        await caller.until(lambda heard: len(heard.of("audio")) == 7)
        await caller.send(credit=stage_pb2.Credit(port="audio", total=PLENTY))
        whole(await caller.finish(), seed, "ahead", LONG)
    await all_free(list(chain.addresses.values()))


async def test_a_short_text_is_whole_before_the_first_sound_is_taken(chain: ServerProcesses, seed: int):
    async with stage_stub(chain.addresses["thinker"]) as stub:
        caller = RunStream(stub)
        await caller.send(open=opening(chain, seed, "short", 150, audio=0))
        await caller.until(lambda heard: any(chunk.last for chunk in heard.of("text")))
        assert caller.heard.text() == formulas.text(seed, "short", 150)
        await caller.send(credit=stage_pb2.Credit(port="audio", total=PLENTY))
        whole(await caller.finish(), seed, "short", 150)


async def test_text_that_nobody_takes_holds_the_session_back_and_it_goes_on(chain: ServerProcesses, seed: int):
    async with stage_stub(chain.addresses["thinker"]) as stub:
        caller = RunStream(stub)
        await caller.send(open=opening(chain, seed, "mute", 100, audio=PLENTY, text=3))
        await caller.until(lambda heard: len(heard.of("text")) == 3 and len(heard.of("audio")) == 6)
        await caller.send(credit=stage_pb2.Credit(port="text", total=PLENTY))
        whole(await caller.finish(), seed, "mute", 100)


async def test_half_close_with_no_room_for_sound_ends_every_stage(chain: ServerProcesses):
    async with stage_stub(chain.addresses["thinker"]) as stub:
        caller = RunStream(stub)
        await caller.send(open=opening(chain, 1, "half", LONG, audio=0))
        await caller.opened()
        await caller.call.done_writing()
        await caller.expect("HALF_CLOSED", grpc.StatusCode.FAILED_PRECONDITION)
    await all_free(list(chain.addresses.values()))
