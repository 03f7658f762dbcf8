"""Pipelines become ready one by one: a request for one that is not is refused, with when to ask again. Replicas that are found under a name
come and go with its addresses."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection
from pathlib import Path

import grpc
import pytest
from pydantic import ValidationError

from helpers import waiting
from helpers.ask import ask, refused, request
from helpers.chain import addresses_of, good
from helpers.converse import ConverseStream, TurnFailed
from helpers.ports import take_address
from helpers.servers import Local, family_logic, local_chain, local_router, local_stage, omni_stub, stage_stub, toy_logic
from helpers.waiting import LIMIT_S, LOOK_S
from helpers.watching import SETTLE_S, thinker, until, waiting_session, watched
from omnistage.host.addresses import Name, SystemResolver, check_replica_address, name_of
from omnistage.router.pipeline import load_pipeline
from omnistage.router.placement import Placement
from omnistage.router.replica import DRAINING, SERVING
from omnistage.router.server import serve_router
from omnistage.router.settings import RouterSettings
from omnistage.v1 import omni_pb2, omni_pb2_grpc
from omnistage.wire.channel import Credentials

TOY = load_pipeline("toy")
PICTURE = load_pipeline("toy-picture").with_names(["Owner/Picture"]).model_copy(update={"outputs_vary": True})
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
    for model in ("", "toy-picture", "owner/picture"):
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
            assert value("omnistage_router_requests_total", {"pipeline": "toy-picture", "reason": "STARTING"}) == 3
            assert value("omnistage_router_queue_seconds_count", {"pipeline": "toy-picture"}) is None, "it asked for no place"
            (picture,) = (await stub.ListModels(omni_pb2.ListModelsRequest(), timeout=10)).starting
            assert ([*picture.names], [*picture.unsure_outputs]) == (["Owner/Picture"], ["image", "progress"])
            async with local_stage(family_logic("toy", "diffusion"), address=late):
                await check_draws_soon(stub)
                _, picture = (await stub.ListModels(omni_pb2.ListModelsRequest(), timeout=10)).models
                assert ([*picture.names], [*picture.unsure_outputs]) == (["Owner/Picture", "toy-diffusion"], [])
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


class ZoneOfNames:
    """The addresses of every name, as a test sets them; None: no answer. asked: set at every lookup."""

    def __init__(self) -> None:
        self.addresses: Collection[str] | None = None
        self.asked = asyncio.Event()

    async def __call__(self, name: Name) -> Collection[str]:
        self.asked.set()
        if self.addresses is None:
            raise OSError("no such name")
        return self.addresses

    async def looked_up(self) -> None:
        """Return when what is set now was answered and taken in: at the start of the second lookup from now."""
        async with asyncio.timeout(SETTLE_S):
            for _ in range(2):
                self.asked.clear()
                await self.asked.wait()


async def next_report(placement: Placement, address: str) -> None:
    """Return when a replica has reported its load once more."""
    (replica,) = [replica for replica in placement.all() if replica.address == address]
    load = replica.load
    await waiting.until(lambda: replica.load is not load)


def test_an_address_is_plain_or_a_name():
    assert name_of(check_replica_address("dns:///talker:50051")) == Name("talker", 50051)
    assert str(Name("talker", 50051)) == "dns:///talker:50051"
    for plain in ("127.0.0.1:1", "talker:50051", "[::1]:50051"):
        assert name_of(check_replica_address(plain)) is None
    wrong_forms = ("", "talker", "dns:///talker", "dns://zone/talker:50051", "unix:socket", "a:b:1", "dns:///a..b:1", "dns:///a:1/x")
    for wrong in (*wrong_forms, "talker:99999999"):
        with pytest.raises(ValueError, match="dns:///NAME:PORT stands for all addresses"):
            check_replica_address(wrong)
    for wrong in ("dns:///talker:65536", "dns:///talker:99999"):
        with pytest.raises(ValueError, match="no possible port"):
            check_replica_address(wrong)


def test_the_router_refuses_other_addresses():
    assert RouterSettings(stages="talker=dns:///talker:50051").stages == (("talker", "dns:///talker:50051"),)
    with pytest.raises(ValidationError, match="dns:///NAME:PORT stands for all addresses"):
        RouterSettings(stages="talker=unix:socket")


async def test_the_system_knows_this_host():
    assert await SystemResolver()(Name("localhost", 50051)) in (["127.0.0.1:50051"], ["[::1]:50051"])


async def test_a_name_that_does_not_exist_is_an_error():
    with pytest.raises(OSError):  # Its text is the system's.
        await SystemResolver()(Name("name.invalid", 50051))


async def test_replicas_come_and_go_with_the_addresses_of_their_name(tmp_path: Path):
    """DNS decides which replica gets a session; a session runs on where it is; silence of DNS changes nothing."""
    zone = ZoneOfNames()
    with thinker(tmp_path) as one, thinker(tmp_path) as other:
        one.wait_ready()
        other.wait_ready()
        async with watched({"thinker": ["dns:///thinker:50051"]}, zone) as placement:
            await zone.looked_up()
            assert placement.all() == []

            zone.addresses = [one.address]
            await until(placement, {one.address: SERVING})
            zone.addresses = [one.address, other.address]
            await until(placement, {one.address: SERVING, other.address: SERVING})
            assert set(placement.place("thinker")) == {one.address, other.address}

            for silence in (None, ()):
                zone.addresses = silence
                await zone.looked_up()
                await until(placement, {one.address: SERVING, other.address: SERVING})

            async with stage_stub(one.address) as stub:
                caller = await waiting_session(stub)
                zone.addresses = [other.address]
                await until(placement, {one.address: DRAINING, other.address: SERVING})
                changed = placement.changed
                await next_report(placement, one.address)
                assert not changed.is_set()
                assert placement.place("thinker") == [other.address]
                caller.call.cancel()

            zone.addresses = [one.address, other.address]  # it was only slow to get ready
            await until(placement, {one.address: SERVING, other.address: SERVING})

            zone.addresses = [other.address]
            await zone.looked_up()
            one.process.kill()
            await until(placement, {other.address: SERVING})


async def test_a_router_finds_its_stages_under_a_name():
    async with local_chain() as stages:
        names = {kind: f"dns:///localhost:{stage.address.rpartition(':')[2]}" for kind, stage in stages.items()}
        async with local_router(names) as router, omni_stub(router.address) as stub:
            (await ask(stub, request("hello", 1))).check_toy(1, "hello")
