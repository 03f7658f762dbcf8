"""A router whose view of the replicas stands still is worse than none: it ends, and says why."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import grpc.aio
import pytest

from helpers.ask import ask, read, request
from helpers.servers import ServerProcess, omni_stub, stack
from omnistage.host.process import BROKEN

ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])}
LONG = {"max_tokens": 20_000, "ignore_eos": True}


async def test_a_watcher_that_ends_by_an_error_ends_its_router(tmp_path: Path):
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
            events = {line["event"] for line in map(json.loads, filter(lambda line: line.startswith("{"), router.log().splitlines()))}
            assert {"task.broken", "server.broken"} <= events
            assert "told to fail" in router.log() and "watch toy" in router.log()
