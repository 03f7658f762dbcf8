"""A stage without another replica is lost. Answers wait while the launcher starts it again, without a launcher for `--lone-patience`."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio
import pytest
from structlog.testing import capture_logs

from helpers.ask import TIMEOUT_S, WholeAnswer, ask, refusal, refused, request
from helpers.chain import RouterAndStages, addresses_of, router_and_stages, toy_chain
from helpers.disturbed import DisturbanceStep, ask_through, audio_chunks
from helpers.servers import CHAIN, local_router, local_stage, omni_stub, toy_logic
from helpers.waiting import until
from omnistage.host.notes import NoteSocket
from omnistage.router import placement
from omnistage.v1 import omni_pb2

OPTIONS = {"interval_s": 0.02, "max_chunk": 1}
SHORT_S = 0.3
"""The patience of these tests."""

ASKED = request("lost", 5)


@dataclass
class Awaiting:
    """A chain with one replica of each stage, and its launcher."""

    stack: RouterAndStages
    launcher: NoteSocket
    again: AsyncExitStack

    def keeps(self, *addresses: str) -> None:
        self.launcher.send("kept", {"kept": addresses, "unloaded": []})

    async def lose(self, kind: str) -> None:
        await self.stack.replicas[kind][0].end()

    async def start_again(self, kind: str) -> None:
        logic = toy_logic(kind, OPTIONS)
        await self.again.enter_async_context(local_stage(logic, address=self.stack.stages[kind].address))

    def inflight(self) -> float | None:
        return self.stack.router.registry.get_sample_value("omnistage_router_inflight")


@asynccontextmanager
async def awaiting(**settings: Any) -> AsyncIterator[Awaiting]:
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    launcher = NoteSocket(ours, lambda note: None)
    launcher.send("kept", {"kept": [], "unloaded": []})
    async with (
        AsyncExitStack() as again,
        router_and_stages(toy_chain(OPTIONS), launcher_fd=theirs.detach(), **settings) as stack,
    ):
        place = Awaiting(stack, launcher, again)
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
    return asyncio.create_task(ask(place.stack.stub, ASKED, timeout_s=timeout_s))


@pytest.mark.parametrize("kind", CHAIN)
async def test_answers_and_new_questions_wait_until_the_stage_is_back(kind: str) -> None:
    async with awaiting(lone_patience=0.0) as place:
        lost = asyncio.Event()

        async def lose() -> None:
            await place.lose(kind)
            lost.set()

        strike = DisturbanceStep(audio_chunks(3), lose)
        with capture_logs() as lines:
            struck = asyncio.create_task(ask_through(place.stack.stub, ASKED, strike))
            beside = asking(place)
            await lost.wait()
            later = asking(place)
            await check_waits(struck, beside, later)
            replicas = (await place.stack.stub.ListReplicas(omni_pb2.ListReplicasRequest(), timeout=10)).replicas
            states = [replica.state for replica in replicas]
            assert sorted(states) == [1, 1, omni_pb2.REPLICA_STATE_STARTING]
            await place.start_again(kind)
            for answer in (struck, beside, later):
                (await answer).check_toy(5, "lost")
        assert (await struck).failovers and not (await later).failovers
        assert {line["stage"] for line in lines if line["event"] == "link.waits"} == {kind}
        waited = [line for line in lines if line["event"] == "link.waited"]
        assert len(waited) >= 3 and all(line["answers"] and line["waited_s"] > 4 * SHORT_S for line in waited)


@dataclass
class Hopeless:
    """What ends a wait, and the reason and the text of the error."""

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
            assert (await refused(stub, ASKED)).reason == "STAGE_LOST"
            return
        answer = asyncio.create_task(ask(stub, ASKED))
        await check_waits(answer)
        async with local_stage(toy_logic("code2wav", OPTIONS), address=address):
            (await answer).check_toy(5, "lost")
