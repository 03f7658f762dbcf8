"""Who gets a session, and what a router says that has nobody yet."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from helpers.ask import ask, refusal, request
from helpers.servers import local_stage, omni_stub, toy_logic
from omnistage.link.channel import Channels
from omnistage.router.admission import Admission
from omnistage.router.front import Front
from omnistage.router.metrics import RouterMetrics
from omnistage.router.placement import Placement
from omnistage.v1 import omni_pb2, omni_pb2_grpc


async def test_a_replica_with_other_ports_gets_no_session() -> None:
    async with (
        local_stage(toy_logic("thinker")) as fitting,
        local_stage(toy_logic("thinker", {"width": 64})) as other,
        Channels() as channels,
    ):
        placement = Placement(channels, {"thinker": [other.address, fitting.address]})
        watching = asyncio.create_task(placement.watch())
        async with asyncio.timeout(20):
            while not all(replica.state == omni_pb2.REPLICA_STATE_SERVING for replica in placement.all()):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        by_address = {replica.address: replica for replica in placement.all()}
        description = by_address[fitting.address].description
        assert description is not None
        assert set(placement.place("thinker")) == {fitting.address, other.address}
        placement.pin({"thinker": description})
        assert placement.place("thinker") == [fitting.address]
        watching.cancel()
        await asyncio.wait({watching})


async def test_a_router_without_stages_says_come_again() -> None:
    server = grpc.aio.server()
    channels = Channels()
    front = Front(channels, Admission(4), RouterMetrics(), stall_limit_s=1, session_limit_s=5)
    omni_pb2_grpc.add_OmniServiceServicer_to_server(front, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with omni_stub(f"127.0.0.1:{port}") as stub:
            for model in ("", "toy"):
                with pytest.raises(grpc.aio.AioRpcError) as failed:
                    await ask(stub, request("hello", model=model))
                told = refusal(failed.value)
                assert (told.code, told.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
                assert told.retry_delay_s is not None
    finally:
        await server.stop(0)
        await channels.close()
