"""Clients that go away at any moment leave nothing behind: no session, no lease, no file."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc.aio

from helpers import lengths
from helpers.ask import ask, request
from helpers.memory import files_of, left_of
from helpers.run import PLENTY, params
from helpers.servers import ServerProcesses, all_free, is_free, omni_stub, stack, stage_stub, watch_until
from omnistage.v1 import omni_pb2, omni_pb2_grpc, stage_pb2, stage_pb2_grpc


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
