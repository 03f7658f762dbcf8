"""A stage without another replica is lost. Answers wait while the launcher starts it again, without a launcher for `--lone-patience`."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio
import pytest
from structlog.testing import capture_logs

from helpers.ask import TIMEOUT_S, WholeAnswer, ask, refusal, refused, request
from helpers.chain import RouterAndStages, addresses_of, router_and_stages, toy_chain
from helpers.disturbed import DisturbanceStep, ask_through, audio_chunks
from helpers.ports import take_address
from helpers.servers import CHAIN, local_router, local_stage, omni_stub, toy_logic
from helpers.waiting import LIMIT_S, LOOK_S, until
from omnistage.host.notes import Note, NoteSocket
from omnistage.router import placement
from omnistage.v1 import omni_pb2

OPTIONS = {"interval_s": 0.02, "max_chunk": 1}
SHORT_S = 0.3
"""The patience of these tests."""

QUESTION = request("lost", 5)


@dataclass
class Awaiting:
    """A chain with one replica of each stage, and its launcher."""

    stack: RouterAndStages
    launcher: NoteSocket
    wishes: asyncio.Queue[Note]
    restarts: AsyncExitStack

    def keeps(self, *addresses: str, unloaded: Sequence[str] = ()) -> None:
        self.launcher.send("kept", {"kept": addresses, "unloaded": unloaded})

    async def lose(self, kind: str) -> None:
        await self.stack.replicas[kind][0].end()

    async def start_again(self, kind: str) -> None:
        logic = toy_logic(kind, OPTIONS)
        await self.restarts.enter_async_context(local_stage(logic, address=self.stack.stages[kind].address))

    def inflight(self) -> float | None:
        return self.stack.router.registry.get_sample_value("omnistage_router_inflight")


@asynccontextmanager
async def awaiting(**settings: Any) -> AsyncIterator[Awaiting]:
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    wishes: asyncio.Queue[Note] = asyncio.Queue(100)
    launcher = NoteSocket(ours, wishes.put_nowait)
    launcher.send("kept", {"kept": [], "unloaded": []})
    async with (
        AsyncExitStack() as restarts,
        router_and_stages(toy_chain(OPTIONS), launcher_fd=theirs.detach(), **settings) as stack,
    ):
        place = Awaiting(stack, launcher, wishes, restarts)
        place.keeps(*stack.addresses)
        yield place
        launcher.close()


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "LONE_PATIENCE_S", SHORT_S)


async def check_waits(*answers: asyncio.Task[WholeAnswer]) -> None:
    """They wait for longer than without a launcher."""
    await asyncio.sleep(5 * SHORT_S)
    assert not any(answer.done() for answer in answers)


def asking(place: Awaiting, timeout_s: float = TIMEOUT_S) -> asyncio.Task[WholeAnswer]:
    return asyncio.create_task(ask(place.stack.stub, QUESTION, timeout_s=timeout_s))


@pytest.mark.parametrize("kind", CHAIN)
async def test_answers_and_new_questions_wait_until_the_stage_is_back(kind: str) -> None:
    async with awaiting(lone_patience=0.0) as place:
        loss = asyncio.Event()

        async def lose() -> None:
            await place.lose(kind)
            loss.set()

        strike = DisturbanceStep(audio_chunks(3), lose)
        with capture_logs() as lines:
            struck = asyncio.create_task(ask_through(place.stack.stub, QUESTION, strike))
            parallel = asking(place)
            await loss.wait()
            later = asking(place)
            await check_waits(struck, parallel, later)
            replicas = (await place.stack.stub.ListReplicas(omni_pb2.ListReplicasRequest(), timeout=10)).replicas
            states = [replica.state for replica in replicas]
            assert sorted(states) == [1, 1, omni_pb2.REPLICA_STATE_STARTING]
            await place.start_again(kind)
            for answer in (struck, parallel, later):
                (await answer).check_toy(5, "lost")
        assert (await struck).failovers and not (await later).failovers
        assert {line["stage"] for line in lines if line["event"] == "link.waits"} == {kind}
        waited = [line for line in lines if line["event"] == "link.waited"]
        assert len(waited) >= 3 and all(line["answers"] and line["waited_s"] > 4 * SHORT_S for line in waited)


@dataclass
class Hopeless:
    """The end of a wait, and the reason and the text of its error."""

    act: Callable[[Awaiting], object]
    reason: str
    text: str
    timeout_s: float = 60.0


ENDS: Mapping[str, Hopeless] = {
    "the stage is given up": Hopeless(lambda place: place.keeps(*place.stack.addresses[:1]), "STAGE_LOST", "no talker is reachable now"),
    "the launcher ends": Hopeless(lambda place: place.launcher.close(), "STAGE_LOST", "no talker is reachable now"),
    "the time is over": Hopeless(
        lambda place: None, "DEADLINE", "the talker was being started again until the time of the request was over", timeout_s=3.0
    ),
}


@pytest.mark.parametrize("name", ENDS)
async def test_a_wait_ends_with_a_typed_error(name: str) -> None:
    end = ENDS[name]
    async with awaiting() as place:
        await place.lose("talker")
        with capture_logs() as lines:
            waits = asking(place, timeout_s=end.timeout_s)
            await check_waits(waits)
            end.act(place)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await waits
        error = refusal(raised.value)
        assert (error.reason, error.message) == (end.reason, end.text) and error.metadata["stage"] == "talker"
        assert [line["answers"] for line in lines if line["event"] == "link.waited"] == [False]
        await until(lambda: place.inflight() == 0)


async def test_a_client_that_leaves_while_its_answer_waits_frees_the_place() -> None:
    async with awaiting() as place:
        await place.lose("code2wav")
        waits = asking(place)
        await check_waits(waits)
        assert place.inflight() == 1
        waits.cancel()
        await until(lambda: place.inflight() == 0)


@pytest.mark.parametrize(("patience_s", "waits"), [(60.0, True), (0.0, False)])
async def test_without_a_launcher_the_lone_patience_counts(patience_s: float, waits: bool) -> None:
    async with AsyncExitStack() as exits:
        chain = {kind: await exits.enter_async_context(local_stage(toy_logic(kind, OPTIONS))) for kind in CHAIN[:2]}
        address = ""
        async with local_stage(toy_logic("code2wav", OPTIONS)) as last:
            address = last.address
            stages = {**addresses_of(chain), "code2wav": address}
            router = await exits.enter_async_context(local_router(stages, lone_patience=patience_s))
            stub = await exits.enter_async_context(omni_stub(router.address))
        if not waits:
            assert (await refused(stub, QUESTION)).reason == "STAGE_LOST"
            return
        answer = asyncio.create_task(ask(stub, QUESTION))
        await check_waits(answer)
        async with local_stage(toy_logic("code2wav", OPTIONS), address=address):
            (await answer).check_toy(5, "lost")


# Pipelines that are unloaded


UNLOADS, LOADS = {"pipeline": "toy", "is_wanted": False}, {"pipeline": "toy", "is_wanted": True}


async def model_of(place: Awaiting) -> tuple[bool, bool]:
    """Whether the pipeline is listed as starting, and whether as unloaded."""
    listed = await place.stack.stub.ListModels(omni_pb2.ListModelsRequest(), timeout=10)
    [model] = [*listed.models, *listed.starting]
    return bool(listed.starting), model.unloaded


async def end_all(place: Awaiting) -> None:
    for kind in CHAIN:
        await place.lose(kind)


async def start_all(place: Awaiting) -> None:
    for kind in CHAIN:
        await place.start_again(kind)


async def test_a_pipeline_that_nobody_asks_is_unloaded_and_a_request_loads_it() -> None:
    """Requests that come while the launcher has not read yet that it is wanted wait too, however little patience there is."""
    async with awaiting(lone_patience=0.0, idle_unload=(("toy", 1.0),)) as place:
        assert await place.wishes.get() == UNLOADS
        place.keeps(unloaded=["toy"])
        await end_all(place)
        await until_unloaded(place)
        states = {"unloaded": 1, "lost": 0, "starting": 0}
        labels = {"pipeline": "toy", "stage": "talker", "model": "toy-talker"}
        value = place.stack.router.registry.get_sample_value
        assert {state: value("omnistage_router_replicas", {**labels, "state": state}) for state in states} == states
        replicas = (await place.stack.stub.ListReplicas(omni_pb2.ListReplicasRequest(), timeout=10)).replicas
        assert {replica.state for replica in replicas} == {omni_pb2.REPLICA_STATE_UNLOADED}
        answers = [asking(place) for _ in range(3)]
        assert await place.wishes.get() == LOADS
        place.keeps(unloaded=["toy"])  # A note that was on its way.
        await check_waits(*answers)
        assert await model_of(place) == (True, False)
        place.keeps(*place.stack.addresses)
        await check_waits(*answers)
        await start_all(place)
        for answer in answers:
            (await answer).check_toy(5, "lost")
        assert await place.wishes.get() == UNLOADS


async def until_unloaded(place: Awaiting) -> None:
    async with asyncio.timeout(LIMIT_S):
        while await model_of(place) != (True, True):  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)


async def test_a_pipeline_is_not_unloaded_while_an_answer_runs() -> None:
    """It takes several times the limit, which begins anew at its end."""
    async with awaiting(idle_unload=(("toy", 0.5),)) as place:
        question = request("lost", 5, thinker={"max_tokens": 100, "ignore_eos": True})
        has_begun = False
        async for event in place.stack.stub.Generate(question, timeout=TIMEOUT_S):
            while not has_begun and not place.wishes.empty():  # It may have been unloaded before the first request.
                assert place.wishes.get_nowait() in (UNLOADS, LOADS)
            has_begun = True
            assert event.HasField("usage") or place.wishes.empty()
        assert await place.wishes.get() == UNLOADS


async def test_a_router_that_starts_anew_learns_what_is_unloaded() -> None:
    """It serves before anything is loaded, and the first request loads."""
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    wishes: asyncio.Queue[Note] = asyncio.Queue(100)
    launcher = NoteSocket(ours, wishes.put_nowait)
    launcher.send("kept", {"kept": [], "unloaded": ["toy"]})
    addresses = {kind: take_address() for kind in CHAIN}
    async with AsyncExitStack() as exits:
        router = await exits.enter_async_context(local_router(addresses, launcher_fd=theirs.detach()))
        stub = await exits.enter_async_context(omni_stub(router.address))
        listed = await stub.ListModels(omni_pb2.ListModelsRequest(), timeout=10)
        assert [model.unloaded for model in listed.starting] == [True]
        assert (await refused(stub, QUESTION)).reason == "STARTING"
        assert await wishes.get() == LOADS
        for kind, address in addresses.items():
            await exits.enter_async_context(local_stage(toy_logic(kind, OPTIONS), address=address))
        async with asyncio.timeout(LIMIT_S):
            while not (await stub.ListModels(omni_pb2.ListModelsRequest(), timeout=10)).models:  # noqa: ASYNC110
                await asyncio.sleep(LOOK_S)
        (await ask(stub, QUESTION)).check_toy(5, "lost")
    launcher.close()
