"""The whole chain as real processes: the same samples however its tensors travel, and text that runs ahead of sound. Clients that go away
at any moment, or read nothing, leave nothing behind; leases of shared memory end with their reader."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path

import grpc
import grpc.aio
import numpy as np
import pytest

from helpers import lengths
from helpers.ask import ask, read, read_all, refusal, request
from helpers.memory import files_of, left_of
from helpers.metrics import fetched, value
from helpers.processes import open_files
from helpers.run import PLENTY, RunAnswer, RunStream, code_chunks, open_of, params
from helpers.servers import (
    ServerProcess,
    ServerProcesses,
    all_free,
    is_free,
    local_stage,
    omni_stub,
    stack,
    stage_flags,
    stage_stub,
    toy_logic,
    watch_until,
)
from omnistage.link.replay import MAX_UNSENT, MAX_UNSENT_CODES
from omnistage.models.interface import Piece, TensorRows, TextPiece, TextRequest, Wanted
from omnistage.models.toy import formulas
from omnistage.models.toy.stages import ToyOptions, ToyThinker
from omnistage.router.answer import WINDOW as CLIENT_WINDOW
from omnistage.stage import server as stage_server
from omnistage.stage.inputs import CODES_WINDOW, WINDOW
from omnistage.thinker.stage import ThinkerStage
from omnistage.v1 import omni_pb2, omni_pb2_grpc, stage_pb2, stage_pb2_grpc, tensor_pb2

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


@lengths.rounds(24, 60)
async def test_cancels_at_random_moments(tmp_path: Path, seed: int, rounds: int) -> None:
    """Every tensor goes through shared memory, and half of the clients hold a session of their own at the Thinker."""
    chance = random.Random(seed)
    with stack(tmp_path, options={"interval_s": 0.002}, stage_args=["--inline-limit", "0"]) as running:
        addresses = list(running.addresses.values())
        async with omni_stub(running.address) as stub, stage_stub(running.addresses["thinker"]) as thinker:
            begun = [_generate(stub), _run(thinker, running)]

            async def begin_and_cancel() -> None:
                call = begun[chance.randrange(2)]()
                moment = chance.choice([0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3])
                reading = asyncio.ensure_future(_read(call))
                await asyncio.wait({reading}, timeout=chance.uniform(0, moment))
                call.cancel()
                await asyncio.wait({reading})
                assert reading.cancelled() or isinstance(reading.exception(), grpc.aio.AioRpcError)

            for _ in range(rounds // 6):
                await asyncio.gather(*[begin_and_cancel() for _ in range(6)])
            for address in addresses:
                await watch_until(address, lambda report: is_free(report) and report.arena_bytes_used == 0)
            answers = await asyncio.gather(*[ask(stub, request("still well", n)) for n in range(8)])
            for n, answer in enumerate(answers):
                answer.check_toy(n, "still well")

            await all_free(addresses)
            files = {server.pid: files_of(server.pid) for server in running.stages.values()}
            assert all(files.values()), "no process uses shared memory: this test would show nothing"
            named = set().union(*files.values())
            assert left_of(named) == named
    assert left_of(named) == set()
    assert [server.process.returncode for server in running.processes()] == [0] * 4


Call = (
    grpc.aio.UnaryStreamCall[omni_pb2.GenerateRequest, omni_pb2.GenerateResponse]
    | grpc.aio.StreamStreamCall[stage_pb2.RunRequest, stage_pb2.RunResponse]
)
Begin = Callable[[], Call]


def _generate(stub: omni_pb2_grpc.OmniServiceAsyncStub) -> Begin:
    asked = request(thinker={"max_tokens": 20_000, "ignore_eos": True})
    return lambda: stub.Generate(asked, timeout=60)


def _run(stub: stage_pb2_grpc.StageServiceAsyncStub, running: ServerProcesses) -> Begin:
    """A session straight at the Thinker, with no room for sound: its rows stay leased until it is cancelled."""
    route = [
        stage_pb2.Hop(kind=kind, model=f"toy-{name}", addresses=[running.addresses[name]], takes=[port], params=params(name))
        for name, kind, port in (("talker", stage_pb2.STAGE_KIND_TALKER, "hidden"), ("code2wav", stage_pb2.STAGE_KIND_CODE2WAV, "codes"))
    ]
    opening = stage_pb2.Open(
        session_id="cancelled",
        model="toy-thinker",
        params=params("thinker", max_tokens=20_000, ignore_eos=True),
        credits=[stage_pb2.Credit(port="text", total=PLENTY)],
        route=route,
    )

    async def requests() -> AsyncIterator[stage_pb2.RunRequest]:
        yield stage_pb2.RunRequest(open=opening)
        await asyncio.Event().wait()

    return lambda: stub.Run(requests(), timeout=60)


async def _read(call: Call) -> None:
    async for _ in call:
        pass


@pytest.mark.parametrize("pause_s", [0.1, 0.5])
async def test_a_caller_that_breaks_the_rules_and_goes_leaves_no_task_that_nobody_looks_at(tmp_path: Path, pause_s: float) -> None:
    """It reads nothing: its output fills the stream, so that the stage waits for a write, and it is cancelled within that wait."""
    rows = np.stack([formulas.row(token) for token in range(100)])
    with ServerProcess("omnistage.code2wav", *stage_flags({"samples_per_frame": 24000}), log_folder=tmp_path) as server:
        await asyncio.to_thread(server.wait_ready)
        async with stage_stub(server.address) as stub:
            opening = open_of(await stub.Describe(stage_pb2.DescribeRequest(), timeout=10))
            call = stub.Run(timeout=60)
            await call.write(stage_pb2.RunRequest(open=opening))
            for chunk in code_chunks(formulas.frames(rows), [20] * 10):
                await call.write(stage_pb2.RunRequest(chunk=chunk))
            await asyncio.sleep(0.5)  # Nobody tells when the stream is full.
            await call.write(stage_pb2.RunRequest(open=opening))
            await asyncio.sleep(pause_s)
            call.cancel()
            await all_free([server.address])
        assert server.stop() == 0
        assert "never retrieved" not in server.log()


# A client that does not read -----------------------------------------------------------------------------------------------------------


SAMPLES = 24_000
"""Samples of one frame: 48,000 bytes, so that a token is 96,000."""

TOKENS = 1_100
OPTIONS = {"samples_per_frame": SAMPLES, "max_chunk": 1}
STALL_S = 1


class EndlessThinker(ToyThinker):
    """The toy Thinker, and how many tokens of its endless answers were ever made."""

    made = 0

    async def generate(
        self, prepared: TextRequest, inputs: AsyncIterator[Piece], ports: Wanted
    ) -> AsyncGenerator[TextPiece | TensorRows, None]:
        async with aclosing(super().generate(prepared, inputs, ports)) as pieces:
            async for piece in pieces:
                if prepared.ignore_eos and isinstance(piece, TextPiece):
                    self.made += len(piece.token_ids)
                yield piece


@asynccontextmanager
async def house(folder: Path) -> AsyncIterator[tuple[EndlessThinker, str, list[str]]]:
    """Talker, Code2Wav and router as processes, the Thinker here, where it can be counted: the Thinker, the router, all stages."""
    thinker = EndlessThinker(ToyOptions.from_settings(OPTIONS))
    with stack(folder, kinds=("talker", "code2wav"), options=OPTIONS, router_args=None) as running:
        async with local_stage(ThinkerStage(thinker)) as local:
            addresses = {"thinker": local.address, **running.addresses}
            stages = ",".join(f"{kind}={address}" for kind, address in addresses.items())
            flags = ["--pipeline", "toy", "--stages", stages, "--stall-limit", str(STALL_S), "--grace", "5"]
            with ServerProcess("omnistage.router", *flags, log_folder=folder) as router:
                await asyncio.to_thread(router.wait_ready)
                yield thinker, router.address, list(addresses.values())


async def test_the_thinker_stops_the_client_is_cancelled_and_the_others_do_not_notice(tmp_path: Path):
    """The client asks for 100 MB of sound and does not read it."""
    async with house(tmp_path) as (thinker, address, stages), omni_stub(address) as stub, omni_stub(address) as others:
        call = stub.Generate(request("all of it", 1, thinker={"max_tokens": TOKENS, "ignore_eos": True}), timeout=100)
        assert (await read(call)).HasField("started")
        assert (await read(call)).HasField("chunk")

        for seed in range(3):  # The same connection and another one; while the first client stalls and after it was cut off.
            answers = await asyncio.gather(*[ask(own, request(f"other {seed}", seed)) for own in (stub, others)])
            for answer in answers:
                answer.check_toy(seed, f"other {seed}", samples_per_frame=SAMPLES)
        await all_free(stages)
        made = thinker.made

        sound = 1  # The one chunk above was text or sound; counting it as sound only widens the bound.
        try:
            async for event in read_all(call):
                sound += event.chunk.port == "audio"
            raise AssertionError("the answer came to its end")
        except grpc.aio.AioRpcError as error:
            told = refusal(error)
        assert (told.code, told.reason) == (grpc.StatusCode.CANCELLED, "CLIENT_STALLED")

        frames = sound + CLIENT_WINDOW + 1 + CODES_WINDOW + MAX_UNSENT_CODES + 2
        bound = frames // formulas.FRAMES_PER_ROW + 1 + WINDOW + MAX_UNSENT + 2
        print(f"{made} of {TOKENS} tokens were made, the bound is {bound}; {sound * SAMPLES * 2} bytes of sound were under way")
        assert made == thinker.made <= bound < TOKENS

        (await ask(stub, request("next", 9))).check_toy(9, "next", samples_per_frame=SAMPLES)
        await all_free(stages)


LEASE_OPTIONS = {"max_chunk": 1, "width": 4096, "interval_s": 0.005}
ENDLESS = {"max_tokens": 20000, "ignore_eos": True}
SHARED = ["--inline-limit", "0"]


async def test_a_killed_stage_gives_its_leases_back_long_before_the_grace(tmp_path: Path) -> None:
    """The Talker is stopped, so that it holds rows, and killed then. The wait for a free Thinker is shorter than the grace of 30 s."""
    with stack(tmp_path, options=LEASE_OPTIONS, stage_args=SHARED) as running:
        thinker, talker = running.stages["thinker"], running.stages["talker"]
        async with omni_stub(running.address) as stub:
            call = stub.Generate(request("hello", 1, thinker=ENDLESS), timeout=60)
            await read(call)
            await read(call)
            os.kill(talker.pid, signal.SIGSTOP)
            await watch_until(thinker.address, lambda report: report.leases > 20)
            os.kill(talker.pid, signal.SIGKILL)
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                async for _ in read_all(call):
                    pass
            assert refusal(failed.value).reason == "STAGE_LOST"
            await all_free([thinker.address, running.addresses["code2wav"]])


@pytest.mark.serial
def test_a_stage_removes_at_its_start_what_a_killed_one_left(tmp_path: Path) -> None:
    with ServerProcess("omnistage.thinker", *stage_flags(), log_folder=tmp_path) as first:
        first.wait_ready()
        (live,) = [Path(target) for _, target in open_files(first.pid) if target.endswith("-live")]
        first.process.kill()
        first.process.wait()
    assert live.exists()
    os.utime(live, (1, 1))  # a sweep leaves files of the last seconds alone
    with ServerProcess("omnistage.thinker", *stage_flags(), log_folder=tmp_path) as second:
        second.wait_ready()
        assert not list(live.parent.glob(f"{live.name.removesuffix('live')}*"))


def orphan_is_swept() -> bool:
    """Leave what a killed producer leaves, and wait for its end, a bounded time."""
    orphan = Path(f"/dev/shm/omnistage-{os.urandom(16).hex()}-live")
    orphan.touch(mode=0o600)
    os.utime(orphan, (1, 1))
    deadline = time.monotonic() + 30.0
    while orphan.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return not orphan.exists()


@pytest.mark.serial
async def test_a_stage_that_runs_sweeps_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_server, "SWEEP_PERIOD_S", 0.02)
    async with local_stage(toy_logic("thinker")):
        assert await asyncio.to_thread(orphan_is_swept)
