"""An engine whose thread ends by an error takes its process along: whoever has a session there sees a loss, and goes on elsewhere."""

from __future__ import annotations

import json
import os
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from helpers.breaking import BREAK, FAIL
from helpers.run import RunStream, open_of, params
from helpers.servers import CLIENT_OPTIONS, ServerProcess, stage_stub, watch_until
from omnistage.host.process import BROKEN
from omnistage.v1 import stage_pb2

ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])}


async def test_a_broken_engine_ends_its_process_and_no_session_ends_as_if_it_were_its_own_fault(tmp_path: Path):
    flags = ["--family", "breaking", "--grace", "30"]
    with ServerProcess("helpers.breaking", *flags, log_folder=tmp_path, environment=ENVIRONMENT) as server:
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
        events = {line["event"] for line in map(json.loads, filter(lambda line: line.startswith("{"), server.log().splitlines()))}
        assert {"thread.broken", "server.broken", "server.stopped"} <= events
        assert "told to break" in server.log()


async def test_a_request_whose_step_fails_leaves_the_process_alone(tmp_path: Path):
    """Only what nobody foresaw breaks a process."""
    flags = ["--family", "breaking"]
    with ServerProcess("helpers.breaking", *flags, log_folder=tmp_path, environment=ENVIRONMENT) as server:
        server.wait_ready()
        async with stage_stub(server.address) as stub:
            described = await stub.Describe(stage_pb2.DescribeRequest(), timeout=30)
            caller = RunStream(stub)
            await caller.send(open=open_of(described, params=params("thinker", FAIL)))
            heard = await caller.finish()
            assert heard.ended is not None
            assert heard.ended.code == grpc.StatusCode.INTERNAL.value[0]
        await watch_until(server.address, lambda report: not report.draining and not report.sessions)
