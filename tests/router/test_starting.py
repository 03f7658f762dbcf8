"""Pipelines become ready one by one: a request for one that is not is refused, with when to ask again; the others answer. A router that is
started beside its stages looks for them when it is told to."""

from __future__ import annotations

import asyncio
import os

import grpc
import pytest

from helpers import waiting
from helpers.ask import ask, refused, request
from helpers.chain import addresses_of, good
from helpers.converse import ConverseStream, TurnFailed
from helpers.ports import take_address
from helpers.servers import Local, family_logic, local_chain, local_router, local_stage, omni_stub, toy_logic
from helpers.waiting import LIMIT_S, LOOK_S
from omnistage.router.pipeline import load_pipeline
from omnistage.router.server import serve_router
from omnistage.router.settings import RouterSettings
from omnistage.v1 import omni_pb2, omni_pb2_grpc
from omnistage.wire.channel import Credentials

TOY, PICTURE = load_pipeline("toy"), load_pipeline("toy-picture")
DRAWN = request("a walk", 3, outputs=["image"])
"""It names no pipeline: only the one that draws can be meant."""


def stages_with(chain: dict[str, Local], picture: str) -> dict[str, str]:
    return {**addresses_of(chain), "toy-picture/diffusion": picture}


async def listed(stub: omni_pb2_grpc.OmniServiceAsyncStub) -> tuple[list[str], list[str]]:
    """Pipelines that are ready, and those that are not."""
    told = await stub.ListModels(omni_pb2.ListModelsRequest(), timeout=10)
    return [one.name for one in told.models], [one.name for one in told.starting]


async def check_draws_soon(stub: omni_pb2_grpc.OmniServiceAsyncStub) -> None:
    async with asyncio.timeout(LIMIT_S):
        while (await listed(stub))[0] != ["toy", "toy-picture"]:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)
    assert (await ask(stub, DRAWN)).of("image")


async def check_starting(stub: omni_pb2_grpc.OmniServiceAsyncStub, why: str) -> None:
    """The one that draws is refused, named or not; the other one answers."""
    for model in ("", "toy-picture"):
        told = await refused(stub, request("a walk", 3, outputs=["image"], model=model))
        assert (told.code, told.reason) == (grpc.StatusCode.UNAVAILABLE, "STARTING")
        assert told.metadata == {"pipeline": "toy-picture"} and told.retry_delay_s
        assert told.message == why
    (await ask(stub, good())).check_toy(5, "good")


AWAITED = "toy-picture is still starting: its diffusion has not answered yet; try again"


async def test_a_pipeline_that_starts_later_and_is_lost_again() -> None:
    late = take_address()
    async with local_chain() as chain:
        stages = stages_with(chain, late)
        async with local_router(stages, TOY, PICTURE) as router, omni_stub(router.address) as stub:
            assert await listed(stub) == (["toy"], ["toy-picture"])
            await check_starting(stub, AWAITED)
            replicas = (await stub.ListReplicas(omni_pb2.ListReplicasRequest(), timeout=10)).replicas
            (replica,) = [replica for replica in replicas if replica.pipeline == "toy-picture"]
            assert (replica.address, replica.state) == (late, omni_pb2.REPLICA_STATE_STARTING)
            value = router.registry.get_sample_value
            of_picture = {"pipeline": "toy-picture", "stage": "diffusion", "model": ""}
            assert value("omnistage_router_replicas", {**of_picture, "state": "starting"}) == 1
            assert value("omnistage_router_requests_total", {"pipeline": "toy-picture", "reason": "STARTING"}) == 2
            assert value("omnistage_router_queue_seconds_count", {"pipeline": "toy-picture"}) is None, "it asked for no place"
            async with local_stage(family_logic("toy", "diffusion"), address=late):
                await check_draws_soon(stub)
                assert value("omnistage_router_replicas", {**of_picture, "state": "starting"}) is None
            assert (await refused(stub, DRAWN)).reason == "STAGE_LOST", "it is served; its stage is away"
            (await ask(stub, good())).check_toy(5, "good")
            assert await listed(stub) == (["toy"], ["toy-picture"])
            async with local_stage(family_logic("toy", "diffusion"), address=late):
                await check_draws_soon(stub)
        async with local_router(stages, TOY, PICTURE) as another, omni_stub(another.address) as stub:
            await check_starting(stub, AWAITED)


async def test_a_turn_for_a_pipeline_that_starts_fails_and_the_conversation_goes_on() -> None:
    async with (
        local_chain() as chain,
        local_router(stages_with(chain, take_address()), TOY, PICTURE) as router,
        omni_stub(router.address) as stub,
    ):
        conversation = ConverseStream(stub)
        with pytest.raises(TurnFailed) as raised:
            await conversation.turn(DRAWN)
        failed = raised.value.failed
        assert (failed.reason, failed.message, dict(failed.metadata)) == ("STARTING", AWAITED, {"pipeline": "toy-picture"})
        assert failed.HasField("retry_delay")
        (await conversation.turn(good())).check_toy(5, "good")
        assert await conversation.end() == grpc.StatusCode.OK


async def test_one_that_does_not_fit_says_why_and_is_looked_at_again() -> None:
    late = take_address()
    async with local_chain() as chain, local_router(stages_with(chain, late), TOY, PICTURE) as router, omni_stub(router.address) as stub:
        misfit = "toy-picture: the server given as diffusion is of another kind"
        async with local_stage(toy_logic("thinker"), address=late):
            async with asyncio.timeout(LIMIT_S):
                while misfit not in (await refused(stub, DRAWN)).message:  # noqa: ASYNC110
                    await asyncio.sleep(LOOK_S)
            await check_starting(stub, f"toy-picture cannot be served by its stages as they are: {misfit}; try again")
        async with local_stage(family_logic("toy", "diffusion"), address=late):
            await check_draws_soon(stub)


async def test_it_looks_for_nobody_before_the_pipe_ends() -> None:
    knocked = asyncio.Event()

    def knock(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        knocked.set()
        writer.close()

    stage = await asyncio.start_server(knock, "127.0.0.1", 0)
    host, port = stage.sockets[0].getsockname()
    wait_fd, go_fd = os.pipe()
    stages = tuple((kind, f"{host}:{port}") for kind in ("thinker", "talker", "code2wav"))
    serving = asyncio.create_task(serve_router(RouterSettings(pipeline=("toy",), stages=stages, start_fd=wait_fd), Credentials()))
    try:
        async with waiting.turning() as turns:
            await waiting.until(lambda: turns() > 1000)
        assert not knocked.is_set() and not serving.done()
        os.close(go_fd)
        async with asyncio.timeout(60):
            await knocked.wait()
    finally:
        serving.cancel()
        await asyncio.wait({serving})
        stage.close()
