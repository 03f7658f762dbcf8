"""The choice of the replica that gets a session, the places of a router, its log of a silent replica, and what links further behind say of
it."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from structlog.testing import capture_logs

from helpers import hanging, waiting
from helpers.ask import request
from helpers.hanging import BURN
from helpers.link import ENDED, Behaviour, bare_peer, says
from helpers.servers import ServerProcess, local_stage, stage_flags, stage_stub, toy_logic
from helpers.watching import thinker, until, waiting_session, watched
from omnistage.connector import shm
from omnistage.host.places import Client
from omnistage.link.liveness import Channels
from omnistage.router import placement as placing
from omnistage.router.admission import Admission
from omnistage.router.answer import AnswerLimits, Generation
from omnistage.router.pipeline import load_pipeline
from omnistage.router.placement import Placement, capacity
from omnistage.router.process import ReplicaProcess
from omnistage.router.replica import DRAINING, LOST, SERVING, STARTING
from omnistage.router.request import validate
from omnistage.router.telemetry import Tally
from omnistage.v1 import chunk_pb2, omni_pb2, stage_pb2
from omnistage.wire.channel import Credentials
from omnistage.wire.errors import StageError


@asynccontextmanager
async def replicas_on(*hosts: str) -> AsyncIterator[tuple[Placement, list[str]]]:
    """A watched placement of toy Thinkers, one on each of these hosts, and their addresses."""
    async with AsyncExitStack() as exits:
        stages = [await exits.enter_async_context(local_stage(toy_logic("thinker"))) for _ in hosts]
        addresses = [stage.address for stage in stages]
        placement = await exits.enter_async_context(watched({"thinker": addresses}))
        await until(placement, dict.fromkeys(addresses, SERVING))
        for replica, host in zip(placement.all(), hosts, strict=True):
            assert replica.description is not None
            replica.description.boot_id = host
        yield placement, addresses


async def test_a_replica_with_other_ports_gets_no_session() -> None:
    async with AsyncExitStack() as exits:
        fitting = await exits.enter_async_context(local_stage(toy_logic("thinker")))
        other = await exits.enter_async_context(local_stage(toy_logic("thinker", {"width": 64})))
        placement = await exits.enter_async_context(watched({"thinker": [other.address, fitting.address]}))
        await until(placement, {other.address: SERVING, fitting.address: SERVING})
        by_address = {replica.address: replica for replica in placement.all()}
        description = by_address[fitting.address].description
        assert description is not None
        assert set(placement.place("thinker")) == {fitting.address, other.address}
        placement.pin({"thinker": description})
        assert placement.place("thinker") == [fitting.address]


async def test_a_replica_that_puts_out_more_gets_sessions_and_one_that_puts_out_less_gets_none() -> None:
    async with replicas_on("here", "here") as (placement, _):
        description = placement.all()[0].description
        assert description is not None
        older, newer = stage_pb2.DescribeResponse(), stage_pb2.DescribeResponse()
        older.CopyFrom(description)
        del older.produces[-1]
        placement.pin({"thinker": older})
        assert len(placement.place("thinker")) == 2
        newer.CopyFrom(description)
        newer.produces.add(name="more", payload=stage_pb2.PAYLOAD_ALIGNMENT)
        placement.pin({"thinker": newer})
        with pytest.raises(StageError, match="no thinker is reachable now"):
            placement.place("thinker")


async def test_a_burst_between_two_reports_is_spread() -> None:
    async with replicas_on("here", "here", "here") as (placement, addresses):
        first = [placement.place("thinker")[0] for _ in range(3)]
        assert sorted(first) == sorted(addresses)


async def test_a_placed_session_that_never_came_is_forgotten_with_the_next_report() -> None:
    async with replicas_on("here") as (placement, _):
        placement.place("thinker")
        (replica,) = placement.all()
        assert replica.busy == 1
        await waiting.until(lambda: not replica.busy)


async def test_the_least_loaded_is_first() -> None:
    async with replicas_on("here", "here") as (placement, addresses), stage_stub(addresses[0]) as stub:
        caller = await waiting_session(stub)
        busy = next(replica for replica in placement.all() if replica.address == addresses[0])
        await waiting.until(lambda: busy.load.sessions)
        assert placement.place("thinker") == [addresses[1], addresses[0]]
        caller.call.cancel()


async def test_a_neighbour_comes_first_while_its_load_is_close() -> None:
    async with replicas_on("here", "there", "there") as (placement, (here, *there)):
        assert placement.place("thinker")[0] == here  # of the router
        assert placement.place("thinker")[0] == here  # one more than the others is close
        assert placement.place("thinker")[0] in there
        assert placement.place("thinker", boot_id="there")[0] in there
        assert placement.boot_id("thinker", here) == "here"
        assert placement.boot_id("thinker", "127.0.0.1:1") == ""


async def test_a_replica_that_a_link_lost_is_asked_last_until_it_reports() -> None:
    async with replicas_on("here", "here") as (placement, _):
        lost = placement.place("thinker")[0]
        placement.suspect([lost, "127.0.0.1:1"])
        assert [placement.place("thinker")[1] for _ in range(4)] == [lost] * 4
        await waiting.until(lambda: placement.place("thinker")[0] == lost)


async def test_a_session_that_goes_on_stays_with_its_revision() -> None:
    changed = toy_logic("thinker")
    changed.description.revision = "other"
    async with AsyncExitStack() as exits:
        old = await exits.enter_async_context(local_stage(toy_logic("thinker")))
        new_one = AsyncExitStack()
        new = await new_one.enter_async_context(local_stage(changed))
        placement = await exits.enter_async_context(watched({"thinker": [old.address, new.address]}))
        await until(placement, {old.address: SERVING, new.address: SERVING})
        assert placement.place("thinker", revision="other") == [new.address]
        assert set(placement.place("thinker", revision="of nobody")) == {old.address, new.address}
        await new_one.aclose()
        await until(placement, {old.address: SERVING, new.address: LOST})
        with pytest.raises(StageError, match="STAGE_LOST"):
            placement.place("thinker", revision="other")
        assert placement.place("thinker") == [old.address]


# Coming and going --------------------------------------------------------------------------------------------------------------------


async def test_replicas_come_and_go(tmp_path: Path, free_port: int) -> None:
    """One that comes takes sessions, one that drains or is killed takes none, and it is found again at its address."""
    late = f"127.0.0.1:{free_port}"
    with thinker(tmp_path) as first:
        first.wait_ready()
        async with watched({"thinker": [first.address, late]}) as placement:
            await until(placement, {first.address: SERVING, late: STARTING})
            assert placement.place("thinker") == [first.address]
            with thinker(tmp_path, late):
                await until(placement, {first.address: SERVING, late: SERVING})
                async with stage_stub(first.address) as stub:
                    caller = await waiting_session(stub)
                    first.terminate()
                    await until(placement, {first.address: DRAINING, late: SERVING})
                    assert placement.place("thinker") == [late]
                    caller.call.cancel()
                await until(placement, {first.address: LOST, late: SERVING})
            await until(placement, {first.address: LOST, late: LOST})
            with pytest.raises(StageError, match="no thinker is reachable") as told:
                placement.place("thinker")
            assert (told.value.reason, told.value.retry_delay_s) == ("STAGE_LOST", 1.0)
            with thinker(tmp_path, late) as again:
                await until(placement, {first.address: LOST, late: SERVING})
                again.process.kill()
                await until(placement, {first.address: LOST, late: LOST})


# At rest -----------------------------------------------------------------------------------------------------------------------------


class ListenerCount(grpc.aio.ServerInterceptor):
    """Counts who listens to the reports of a stage. now: at this moment. ever: since it began."""

    def __init__(self) -> None:
        self.now = self.ever = 0

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        if not details.method.endswith("/Watch"):
            return handler

        async def counted(requests: object, context: object) -> None:
            self.now += 1
            self.ever += 1
            try:
                await handler.stream_stream(requests, context)
            finally:
                self.now -= 1

        return grpc.stream_stream_rpc_method_handler(counted, handler.request_deserializer, handler.response_serializer)


@pytest.fixture
def rests_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And looks at nobody by itself."""
    monkeypatch.setattr(placing, "RESTS_AFTER_S", 0.0)
    monkeypatch.setattr(placing, "REST_S", 3600.0)


@pytest.mark.usefixtures("rests_at_once")
async def test_unused_replicas_are_not_listened_to_until_somebody_asks() -> None:
    first, second = ListenerCount(), ListenerCount()
    async with (
        local_stage(toy_logic("thinker"), interceptors=[first]) as one,
        local_stage(toy_logic("thinker"), interceptors=[second]) as other,
        watched({"thinker": [one.address, other.address]}) as placement,
        stage_stub(one.address) as stub,
    ):
        await waiting.until(lambda: all(replica.rests for replica in placement.all()))
        await waiting.until(lambda: (first.now, second.now) == (0, 0))
        assert [replica.state for replica in placement.all()] == [SERVING, SERVING]
        caller = await waiting_session(stub)
        assert not placement.all()[0].load.sessions, "nobody has told it of that"
        placement.place("thinker")
        await waiting.until(lambda: placement.all()[0].load.sessions)
        await waiting.until(lambda: (first.now, second.now) == (1, 1))  # All of them count, as long as one has a session.
        caller.call.cancel()
        await waiting.until(lambda: all(replica.rests for replica in placement.all()))
        assert not placement.all()[0].load.sessions
        before = second.ever
        placement.use()
        await waiting.until(lambda: second.ever > before)


@pytest.mark.usefixtures("rests_at_once")
async def test_the_end_of_a_replica_at_rest_is_seen_at_once_and_its_silence_when_it_is_used(tmp_path: Path) -> None:
    with thinker(tmp_path) as one, thinker(tmp_path) as other:
        one.wait_ready()
        other.wait_ready()
        async with watched({"thinker": [one.address, other.address]}) as placement:
            await waiting.until(lambda: all(replica.rests for replica in placement.all()))
            one.process.kill()
            await until(placement, {one.address: LOST, other.address: SERVING})
            os.kill(other.pid, signal.SIGSTOP)
            try:
                assert placement.place("thinker") == [other.address]
                await until(placement, {one.address: LOST, other.address: LOST})
                assert placement.place("thinker") == [other.address], "better asked than nobody: it may be busy only"
            finally:
                os.kill(other.pid, signal.SIGCONT)
            await until(placement, {one.address: LOST, other.address: SERVING})


# Places ---------------------------------------------------------------------------------------------------------------------------------


PLACES = {"thinker1": 7, "thinker2": 5, "talker1": 2, "talker2": 3}


@pytest.mark.parametrize(
    ("pipelines", "places"),
    [
        pytest.param(["thinker1 talker1 talker2"], 5, id="the scarcest stage"),
        pytest.param(["thinker1 talker1"] * 2, 2, id="two that are the same"),
        pytest.param(["thinker1 talker1", "thinker1"], 7, id="the whole of a shared stage"),
        pytest.param(["thinker1 talker1", "thinker2 talker1 talker2"], 5, id="one replica of two is shared"),
        pytest.param(["thinker1 talker1", "thinker2 talker2"], 5, id="nothing is shared"),
        pytest.param([], 1, id="nothing at all"),
    ],
)
async def test_a_replica_counts_once_however_many_pipelines_have_it(pipelines: Sequence[str], places: int):
    """pipelines: the stages of each."""
    async with AsyncExitStack() as exits:
        addresses, placements = dict[str, str](), list[Placement]()
        for name, max_sessions in PLACES.items():
            stage = await exits.enter_async_context(local_stage(toy_logic(name[:-1]), max_sessions=max_sessions))
            addresses[name] = stage.address
        for names in map(str.split, pipelines):
            replicas: dict[str, list[str]] = {}
            for name in names:
                replicas.setdefault(name[:-1], []).append(addresses[name])
            placements.append(await exits.enter_async_context(watched(replicas)))
            await until(placements[-1], {addresses[name]: SERVING for name in names})
        assert capacity(placements) == places


# The process of a replica ---------------------------------------------------------------------------------------------------------------


MACHINE = {"load", "cpu_pressure", "io_pressure", "memory_pressure"}


async def test_one_that_was_stopped_and_wakes(tmp_path: Path) -> None:
    with thinker(tmp_path) as stage, capture_logs() as lines:
        stage.wait_ready()
        async with watched({"thinker": [stage.address]}) as placement:
            await until(placement, {stage.address: SERVING})
            os.kill(stage.pid, signal.SIGSTOP)
            try:
                await until(placement, {stage.address: LOST})
                placement.suspect([stage.address])
                placement.suspect([stage.address])
                known = placement.describe_process("thinker", stage.address)
            finally:
                os.kill(stage.pid, signal.SIGCONT)
            await until(placement, {stage.address: SERVING})
    lost, suspect = [line for line in lines if line["event"] in ("replica.lost", "replica.suspect")]
    begun, back = [line for line in lines if line["event"] == "replica.state"]
    assert "process" not in begun
    told: list[Mapping[str, Any]] = [lost, suspect, known]
    for line in told:
        assert line["process"]["state"] == "T"
        assert line["process"]["threads"] > 1 and line["process"]["since_s"] > 0
        assert {"cpu_s", "major_faults"} <= line["process"].keys()
        assert line["machine"].keys() <= MACHINE
    assert back["process"]["since_s"] > lost["process"]["since_s"], "since it was heard before it slept"


async def test_one_that_computes_with_the_lock_of_the_interpreter_held(tmp_path: Path) -> None:
    hanging_thinker = ("helpers.hanging", "omnistage.thinker", *stage_flags(), "--address", "127.0.0.1:0")
    with ServerProcess(*hanging_thinker, log_folder=tmp_path, environment=hanging.ENVIRONMENT) as stage, capture_logs() as lines:
        stage.wait_ready()
        async with watched({"thinker": [stage.address]}) as placement:
            await until(placement, {stage.address: SERVING})
            os.kill(stage.pid, BURN)
            try:
                await until(placement, {stage.address: LOST})
            finally:
                os.kill(stage.pid, signal.SIGKILL)
    (lost,) = [line for line in lines if line["event"] == "replica.lost"]
    assert lost["why"].startswith("no report")
    assert lost["process"]["cpu_s"] >= 0.1, "nothing is counted in less than a hundredth"


async def test_one_whose_connection_ended_needs_no_guess(tmp_path: Path) -> None:
    with thinker(tmp_path) as stage, capture_logs() as lines:
        stage.wait_ready()
        async with watched({"thinker": [stage.address]}) as placement:
            await until(placement, {stage.address: SERVING})
            os.kill(stage.pid, signal.SIGKILL)
            await until(placement, {stage.address: LOST})
    (lost,) = [line for line in lines if line["event"] == "replica.lost"]
    assert "process" not in lost


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::"])
def test_of_which_process_it_says_nothing(host: str) -> None:
    """A number may be that of another process, as in a container with numbers of its own."""
    here, own = shm.boot_id(), os.getpid()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listens, socket.socket(family) as bound:
        for each in (listens, bound):
            try:
                each.bind((host, 0))
            except OSError:
                pytest.skip("this machine has no such addresses")
        listens.listen()
        address, silent = (f"localhost:{each.getsockname()[1]}" for each in (listens, bound))

        def known(address: str, pid: int, boot_id: str = here) -> dict[str, object]:
            process = ReplicaProcess(address)
            process.is_at(pid, boot_id)
            process.note_sign_of_life()
            return process.describe()

        assert known(address, own)
        for other in (os.getppid(), 1, 0, 2**31 - 1, 2**32 - 1):
            assert not known(address, other)
        for port in (silent, "localhost:", "localhost", "unix:/x", "localhost:x", "localhost:-1", "localhost:99999999"):
            assert not known(port, own)
        assert not known(address, own, "another boot") and not known(address, own, "")


# Losses that only a link further behind has noticed ---------------------------------------------------------------------------------------


HUNG, WELL = "127.0.0.1:1", "127.0.0.1:2"
"""Two Talkers, of which nothing is there: only Thinkers would speak with them."""


def opened(*silent: str) -> stage_pb2.RunResponse:
    return stage_pb2.RunResponse(opened=stage_pb2.Opened(silent=silent))


def token(seq: int) -> stage_pb2.RunResponse:
    text = chunk_pb2.TextChunk(text="a", token_ids=[seq])
    return stage_pb2.RunResponse(chunk=chunk_pb2.Chunk(port="text", seq=seq, first=seq, count=1, text=text))


def placement_of(channels: Channels, thinkers: Sequence[str]) -> Placement:
    """All of them serve, and none sends another report."""
    replicas = {"thinker": thinkers, "talker": [HUNG, WELL], "code2wav": ["127.0.0.1:3"]}
    placement = Placement(channels, replicas, boot_id="here")
    for replica in placement.all():
        replica.description, replica.state = toy_logic(replica.kind).description, SERVING
    return placement


async def answer(placement: Placement, channels: Channels, heard: list[omni_pb2.GenerateResponse]) -> None:
    """Ask for sound and hear all of it."""

    async def hear(event: omni_pb2.GenerateResponse) -> None:
        heard.append(event)

    pipeline = load_pipeline("toy")
    descriptions: dict[str, stage_pb2.DescribeResponse] = {stage.kind: toy_logic(stage.kind).description for stage in pipeline.stages}
    async with Admission(lambda: 1, 1).place(Client("client")) as place:
        limits = AnswerLimits(time.monotonic() + 30, 30)
        valid = validate(request("hello", 3), {"toy": pipeline})
        await Generation(valid, descriptions, placement, channels, hear, limits, (), place, Tally()).run()


def suspects(placement: Placement) -> list[str]:
    return [replica.address for replica in placement.all() if replica.suspect]


@pytest.mark.parametrize(
    ("second", "ends_well"),
    [
        pytest.param(says(opened(HUNG), token(1), ENDED), True, id="the answer goes on"),
        pytest.param(says(opened(HUNG), stage_pb2.RunResponse(opened=stage_pb2.Opened())), False, id="and ends by an error"),
    ],
)
async def test_what_is_found_silent_when_a_stage_is_replaced_in_mid_answer(second: Behaviour, ends_well: bool):
    heard: list[omni_pb2.GenerateResponse] = []
    async with bare_peer(says(opened(), token(0))) as one, bare_peer(second) as other, Channels(Credentials()) as channels:
        placement = placement_of(channels, [one, other])
        try:
            await answer(placement, channels, heard)
        except StageError as error:
            assert not ends_well and error.reason == "PROTOCOL"
        assert [event.failover.replica for event in heard if event.HasField("failover")] == [other]
        assert suspects(placement) == [one, HUNG]
        assert placement.place("talker") == [WELL, HUNG]


async def test_what_is_found_silent_when_the_answer_opens():
    async with bare_peer(says(opened(HUNG), token(0), ENDED)) as one, Channels(Credentials()) as channels:
        placement = placement_of(channels, [one])
        await answer(placement, channels, [])
        assert suspects(placement) == [HUNG]
