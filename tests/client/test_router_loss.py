"""A real router that is killed in the middle of an answer: started again or not, the client ends with the whole answer or a typed error."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, aclosing
from pathlib import Path

import numpy as np
import pytest

from helpers import lengths
from helpers.hanging import ENDING, HANG
from helpers.processes import ProcessFamily, wait_end
from helpers.servers import ServerProcess, ServerProcesses, all_free, stack
from helpers.toy_pipeline import toy_pipeline
from omnistage.client import AsyncOmni, AudioChunk, Done, Event, Failover, Omni, RouterLostError, TextDelta
from omnistage.host.process import BROKEN
from omnistage.models.toy import formulas

LENGTH = 150
INTERVAL_S = 0.02
"""Between pieces of text, and of sound: an answer goes on for two seconds after every kill here, so that it comes in the middle."""
PATIENCE_S = 60.0
MOMENTS: dict[str, tuple[type[Event], int]] = {
    "first text": (TextDelta, 1),
    "mid text": (TextDelta, 20),
    "first sound": (AudioChunk, 1),
    "mid sound": (AudioChunk, 20),
}
ENDS = {"killed": signal.SIGKILL, "drained": signal.SIGTERM, "stopped": signal.SIGSTOP, "hung": HANG}


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcesses]:
    options = {"interval_s": INTERVAL_S, "length": LENGTH}
    with stack(tmp_path_factory.mktemp("stages"), options=options, router_args=None) as running:
        yield running


class LosableRouters:
    """Router processes in front of the same stages."""

    def __init__(self, stages: ServerProcesses, folder: Path, exits: ExitStack) -> None:
        self._stages = ",".join(f"{kind}={address}" for kind, address in stages.addresses.items())
        self._folder = folder
        self._exits = exits
        self.started: list[ServerProcess] = []

    def start(self, address: str = "127.0.0.1:0", *, grace_s: float = 5.0) -> ServerProcess:
        flags = ["--pipeline", "toy", "--stages", self._stages, "--address", address, "--grace", str(grace_s)]
        started = ServerProcess("helpers.hanging", "omnistage.router", *flags, log_folder=self._folder, environment=ENDING)
        self.started.append(self._exits.enter_context(started))
        started.wait_ready()
        return started

    def restart(self) -> None:
        """Kill the last one, and start another one at its address."""
        kill(self.started[-1])
        self.start(self.started[-1].address)


def patient(router: ServerProcess) -> AsyncOmni:
    return AsyncOmni(address=router.address, resume_timeout_s=PATIENCE_S)


@pytest.fixture
def routers(stages: ServerProcesses, tmp_path: Path) -> Iterator[LosableRouters]:
    with ExitStack() as exits:
        yield LosableRouters(stages, tmp_path, exits)


def kill(server: ServerProcess, number: signal.Signals = signal.SIGKILL) -> None:
    os.kill(server.pid, number)
    if number not in (signal.SIGSTOP, HANG):
        assert wait_end(server.pid, 30.0)


async def hear(events: AsyncIterator[Event], what: type[Event], count: int, act: Callable[[], object]) -> list[Event]:
    """All events; `act` is called, on a thread, when `count` of a kind have come. Nothing is read meanwhile."""
    heard: list[Event] = []
    async for event in events:
        heard.append(event)
        if isinstance(event, what) and sum(isinstance(event, what) for event in heard) == count:
            await asyncio.to_thread(act)
    return heard


def assert_whole(events: list[Event], seed: int) -> Done:
    text = "".join(event.text for event in events if isinstance(event, TextDelta))
    sounds = [event for event in events if isinstance(event, AudioChunk)]
    assert text == formulas.text(seed, "Hi", LENGTH)
    assert [sound.first_sample for sound in sounds] == [0, *np.cumsum([len(sound.samples) for sound in sounds])[:-1]]
    assert np.array_equal(np.concatenate([sound.samples for sound in sounds]), formulas.audio(seed, "Hi", LENGTH)[:, 0])
    assert isinstance(events[-1], Done)
    return events[-1]


@lengths.one_or_all("moment", MOMENTS)
async def test_a_router_that_is_killed_and_started_again(stages: ServerProcesses, routers: LosableRouters, moment: str, seed: int) -> None:
    what, count = MOMENTS[lengths.draw(moment, MOMENTS, seed)]
    router = routers.start()
    async with patient(router) as omni:
        done = assert_whole(await hear(omni.stream("Hi", seed=5), what, count, routers.restart), 5)
        assert [(one.stage, one.lost, one.replica) for one in done.failovers] == [("router", router.address, router.address)]
        assert [report.stage for report in done.usage.stages] == ["thinker", "talker", "code2wav"]
        assert (done.seed, done.finish_reason) == (5, "stop")
        await all_free(list(stages.addresses.values()))


async def test_an_answer_without_a_seed_goes_on_with_its_own(routers: LosableRouters) -> None:
    async with patient(routers.start()) as omni:
        events = await hear(omni.stream("Hi"), AudioChunk, 5, routers.restart)
    assert isinstance(events[-1], Done)
    assert_whole(events, events[-1].seed)


async def test_text_alone_and_sound_alone(routers: LosableRouters) -> None:
    async with patient(routers.start()) as omni:
        stream = omni.stream("Hi", seed=5, outputs=["text"], max_tokens=300, ignore_eos=True)
        events = await hear(stream, TextDelta, 20, routers.restart)
        assert "".join(event.text for event in events if isinstance(event, TextDelta)) == formulas.text(5, "Hi", 300)
        events = await hear(omni.stream("Hi", seed=5, outputs=["audio"]), AudioChunk, 20, routers.restart)
    samples = np.concatenate([event.samples for event in events if isinstance(event, AudioChunk)])
    assert np.array_equal(samples, formulas.audio(5, "Hi", LENGTH)[:, 0])


@lengths.one_or_all("end", ENDS)
async def test_the_other_router_goes_on(routers: LosableRouters, end: str, seed: int) -> None:
    """Drained: the grace is over before the answer is. Hung: gRPC's threads answer the client's pings, until the process ends itself."""
    number = ENDS[lengths.draw(end, ENDS, seed)]
    one, two = routers.start(grace_s=0.05), routers.start()
    async with AsyncOmni(address=f"{one.address},{two.address}", resume_timeout_s=PATIENCE_S) as omni:
        done = assert_whole(await hear(omni.stream("Hi", seed=5), AudioChunk, 5, lambda: kill(one, number)), 5)
        assert [(failover.lost, failover.replica) for failover in done.failovers] == [(one.address, two.address)]
    if number == signal.SIGSTOP:
        os.kill(one.pid, signal.SIGCONT)
    if number == HANG:
        assert one.wait() == BROKEN
        (wedged,) = [line for line in map(json.loads, one.log().splitlines()) if line["event"] == "thread.wedged"]
        assert wedged["thread"] == "event loop"


async def test_many_answers_at_once(stages: ServerProcesses, routers: LosableRouters) -> None:
    async def one(omni: AsyncOmni, seed: int) -> Done:
        return assert_whole([event async for event in omni.stream("Hi", seed=seed)], seed)

    async with patient(routers.start()) as omni:
        asking = [asyncio.create_task(one(omni, seed)) for seed in range(6)]
        await hear(omni.stream("Hi", seed=99), AudioChunk, 10, routers.restart)
        assert all(len(answer.failovers) == 1 for answer in await asyncio.gather(*asking))
        await all_free(list(stages.addresses.values()))


async def test_a_second_kill_is_an_error(stages: ServerProcesses, routers: LosableRouters) -> None:
    async with patient(routers.start()) as omni:
        async with aclosing(omni.stream("Hi", seed=5)) as events:
            with pytest.raises(RouterLostError):
                count = 0
                async for event in events:
                    count += isinstance(event, AudioChunk)
                    if isinstance(event, AudioChunk) and count in (5, 10):
                        await asyncio.to_thread(routers.restart)
        assert len(routers.started) == 3
        assert_whole([event async for event in omni.stream("Hi", seed=6)], 6)
        await all_free(list(stages.addresses.values()))


def test_the_sync_client_hears_an_answer_through(routers: LosableRouters) -> None:
    router = routers.start()
    heard: list[Event] = []
    with Omni(address=router.address, resume_timeout_s=PATIENCE_S) as omni:
        for event in omni.stream("Hi", seed=5):
            heard.append(event)
            if sum(isinstance(event, AudioChunk) for event in heard) == 10 and isinstance(event, AudioChunk):
                routers.restart()
        assert_whole(heard, 5)
        assert sum(isinstance(event, Failover) for event in heard) == 1
        assert omni.generate("Hi", seed=6).failovers == ()


async def test_without_another_router_the_error_has_a_type(stages: ServerProcesses, routers: LosableRouters) -> None:
    router = routers.start()
    async with AsyncOmni(address=router.address, resume_timeout_s=1.0) as omni:
        with pytest.raises(RouterLostError):
            await hear(omni.stream("Hi", seed=5), AudioChunk, 5, lambda: kill(router))
    await all_free(list(stages.addresses.values()))


@lengths.long_form(
    "client/test_router_loss.py::test_the_sync_client_hears_an_answer_through",
    "cli/test_serve.py::test_a_router_that_dies_is_started_again_at_its_port",
)
def test_a_private_stack_starts_its_router_again(family: ProcessFamily, tmp_path: Path) -> None:
    heard: list[Event] = []
    pipeline = toy_pipeline(tmp_path, interval_s=INTERVAL_S, length=LENGTH, samples_per_frame=formulas.SAMPLES_PER_FRAME)
    with Omni(pipeline=pipeline, resume_timeout_s=PATIENCE_S) as omni:
        for event in omni.stream("Hi", seed=5):
            heard.append(event)
            if isinstance(event, AudioChunk) and sum(isinstance(event, AudioChunk) for event in heard) == 3:
                (router,) = [pid for pid in family.pids() if "omnistage.router" in Path(f"/proc/{pid}/cmdline").read_text().split("\0")]
                os.kill(router, signal.SIGKILL)
        done = assert_whole(heard, 5)
    assert ([failover.stage for failover in done.failovers], family.pids()) == (["router"], [])
