"""A thread of an engine that hangs or ends by an error, and a task of a router that does, take their process along: whoever has a session
there sees a loss, and goes on elsewhere."""

from __future__ import annotations

import json
import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from helpers.ask import ask, read, request
from helpers.breaking import BREAK, FAIL
from helpers.link import chunks_of, failovers_of, hear, link_by, opening, route_to
from helpers.run import RunStream, open_of, params
from helpers.servers import CLIENT_OPTIONS, ServerProcess, all_free, omni_stub, stack, stage_stub, watch_until
from omnistage.host.process import BROKEN
from omnistage.v1 import stage_pb2

ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])}


def breakable(folder: Path, *flags: str) -> ServerProcess:
    """A Thinker that can be told to break."""
    return ServerProcess("helpers.breaking", "--family", "breaking", *flags, log_folder=folder, environment=ENVIRONMENT)


def lines_of(server: ServerProcess) -> list[dict[str, Any]]:
    """The lines of its log that are JSON."""
    return [json.loads(line) for line in server.log().splitlines() if line.startswith("{")]


def events_of(server: ServerProcess) -> set[str]:
    return {line["event"] for line in lines_of(server)}


async def test_a_broken_engine_ends_its_process_and_no_session_ends_as_if_it_were_its_own_fault(tmp_path: Path):
    with breakable(tmp_path, "--grace", "30") as server:
        server.wait_ready()
        async with stage_stub(server.address) as stub, grpc.aio.insecure_channel(server.address, options=CLIENT_OPTIONS) as channel:
            described = await stub.Describe(stage_pb2.DescribeRequest(), timeout=30)
            health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)
            assert (await health.read()).status == health_pb2.HealthCheckResponse.SERVING

            under_way = RunStream(stub)
            await under_way.send(open=open_of(described, credits={"text": 1}))
            await under_way.until(lambda heard: bool(heard.of("text")))
            breaking = RunStream(stub)
            await breaking.send(open=open_of(described, session_id="other", params=params("thinker", BREAK)))

            for caller in (breaking, under_way):
                with pytest.raises(grpc.aio.AioRpcError):
                    await caller.finish()
                assert caller.heard.ended is None, "a session of a broken replica is lost, it does not end"
        assert server.wait() == BROKEN
        assert {"thread.broken", "server.broken", "server.stopped"} <= events_of(server)
        assert "told to break" in server.log()


async def test_a_request_whose_step_fails_leaves_the_process_alone(tmp_path: Path):
    """Only what nobody foresaw breaks a process."""
    with breakable(tmp_path) as server:
        server.wait_ready()
        async with stage_stub(server.address) as stub:
            described = await stub.Describe(stage_pb2.DescribeRequest(), timeout=30)
            caller = RunStream(stub)
            await caller.send(open=open_of(described, params=params("thinker", FAIL)))
            heard = await caller.finish()
            assert heard.ended is not None
            assert heard.ended.code == grpc.StatusCode.INTERNAL.value[0]
        await watch_until(server.address, lambda report: not report.draining and not report.sessions)


LONG = {"max_tokens": 20_000, "ignore_eos": True}


async def test_a_watcher_that_ends_by_an_error_ends_its_router(tmp_path: Path):
    """A router whose view of the replicas stands still is worse than none: it ends, and says why."""
    with stack(tmp_path, router_args=None) as stages:
        port = stages.addresses["thinker"].rpartition(":")[2]
        addresses = {**stages.addresses, "thinker": f"dns:///localhost:{port}"}
        flags = ["--pipeline", "toy", "--stages", ",".join(f"{kind}={address}" for kind, address in addresses.items())]
        with ServerProcess("helpers.misled", *flags, log_folder=tmp_path, environment=ENVIRONMENT) as router:
            router.wait_ready()
            async with omni_stub(router.address) as stub:
                (await ask(stub, request("hm", 3))).check_toy(3, "hm")
                call = stub.Generate(request(thinker=LONG), timeout=60)
                assert (await read(call)).HasField("started")
                os.kill(router.pid, signal.SIGUSR1)
                with pytest.raises(grpc.aio.AioRpcError):
                    while await call.read() is not grpc.aio.EOF:
                        pass
            assert router.wait() == BROKEN
            assert {"task.broken", "server.broken"} <= events_of(router)
            assert "told to fail" in router.log() and "watch toy" in router.log()


# A thread that hangs -------------------------------------------------------------------------------------------------------------------


TOKENS = 60


async def answer(*addresses: str) -> list[stage_pb2.RunResponse]:
    """All events of one answer, asked of the first address that works."""
    request = opening("thinker", {}, model="breaking", checkpoints=["text"], params=params("thinker", max_tokens=TOKENS, ignore_eos=True))
    async with link_by(route_to(*addresses, kind="thinker"), request) as link:
        await link.open()
        return await hear(link)


def tokens_of(events: list[stage_pb2.RunResponse]) -> list[int]:
    return [token for chunk in chunks_of(events, "text") for token in chunk.text.token_ids]


async def test_an_engine_that_hangs_ends_its_process_and_the_answer_goes_on_elsewhere(tmp_path: Path):
    with ExitStack() as running:
        hanging = running.enter_context(breakable(tmp_path, "--options", json.dumps({"hangs_at": 20})))
        hanging.wait_ready()
        sound = running.enter_context(breakable(tmp_path))
        sound.wait_ready()
        expected = tokens_of(await answer(sound.address))
        events = await answer(hanging.address, sound.address)
        assert tokens_of(events) == expected
        assert len(expected) == TOKENS
        (failover,) = failovers_of(events)
        assert (failover.lost, failover.replica) == (hanging.address, sound.address)
        assert hanging.wait() == BROKEN
        (wedged,) = [line for line in lines_of(hanging) if line["event"] == "thread.wedged"]
        # The prompt and 17 tokens were computed before.
        assert (wedged["thread"], wedged["step"]) == ("omnistage-engine", 18) and "no CPU" in wedged["reason"]
        assert {"server.stopped", "server.broken"} <= events_of(hanging)
        await all_free([sound.address])
