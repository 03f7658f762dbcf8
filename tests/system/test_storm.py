"""Stages that are killed in the middle of an answer, and processes of every kind that are killed all the time, or restarted one after the
other: every answer is right. `make chaos` in its short forms.

The rule of the storm: a process may be killed when another one of its kind has served for two seconds, so that everyone has a connection
to it. Then no answer is ever without a replica, and none may fail. Whoever is killed is started again at once.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import lengths
from helpers.ask import WholeAnswer, ask, read, request
from helpers.disturbed import (
    MOMENTS,
    SLOW,
    SLOWER_SOUND,
    DisturbanceStep,
    ask_through,
    begun,
    disturbed,
    found,
    holder,
    kill_when,
    killed_holder,
    nothing_left,
    restore,
    text_chunks,
)
from helpers.fleet import Fleet, fleet
from helpers.servers import CHAIN, omni_stub
from omnistage.models.toy import formulas
from omnistage.models.toy.files import png
from omnistage.v1 import omni_pb2, omni_pb2_grpc, stage_pb2

AT_ONCE = 20
TOKENS = 60
MEAN_PAUSE_S = 0.5
SETTLED_S = 2.0


class Killer:
    """Kills until it is told to stop. kills: how many so far."""

    def __init__(self, running: Fleet, chance: random.Random) -> None:
        self._fleet = running
        self._chance = chance
        self._serving_since = dict.fromkeys(running.stages, time.monotonic())
        self._stopping = asyncio.Event()
        self.kills = 0

    def stop(self) -> None:
        self._stopping.set()

    async def run(self) -> None:
        """Returns when everyone who was killed is back."""
        async with asyncio.TaskGroup() as restarts:
            while not await self._stops_within(self._chance.expovariate(1 / MEAN_PAUSE_S)):
                kind = self._chance.choice(CHAIN)
                victim = self._chance.choice([name for name in self._fleet.of(kind) if name in self._serving_since])
                settled = time.monotonic() - SETTLED_S
                if any(self._serving_since.get(name, settled + 1) <= settled for name in self._fleet.of(kind) if name != victim):
                    restarts.create_task(self._restart(victim))

    async def _stops_within(self, pause_s: float) -> bool:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), pause_s)
        return self._stopping.is_set()

    async def _restart(self, name: str) -> None:
        del self._serving_since[name]
        self.kills += 1
        self._fleet.signal(name, signal.SIGKILL)
        await asyncio.to_thread(self._fleet.server(name).wait)
        self._fleet.begin(name)
        await asyncio.to_thread(self._fleet.ready, name)
        self._serving_since[name] = time.monotonic()


@pytest.mark.serial
@lengths.long_form(
    "system/test_storm.py::test_a_stage_is_killed",
    "system/test_storm.py::test_a_second_kill_hits_the_resume",
    unkept="Many answers at once are right while their processes are killed all the time.",
)
@lengths.rounds(25, 100)
async def test_many_answers_in_a_storm(tmp_path: Path, seed: int, rounds: int) -> None:
    options = {"interval_s": 0.1}
    with fleet(tmp_path, replicas=3, options=options, stage_args=["--inline-limit", "0"]) as running:
        killer = Killer(running, random.Random(seed))
        async with disturbed(running) as stub:
            killing = asyncio.create_task(killer.run())
            places = asyncio.Semaphore(AT_ONCE)

            async def one(number: int) -> tuple[int, int]:
                """Failovers that it heard of, and kills during it."""
                async with places:
                    before = killer.kills
                    answer = await ask(
                        stub, request(f"question {number}", seed + number, thinker={"max_tokens": TOKENS, "ignore_eos": True})
                    )
                answer.check_toy(seed + number, f"question {number}", TOKENS)
                return len(answer.failovers), killer.kills - before

            try:
                async with asyncio.TaskGroup() as group:
                    asked = [group.create_task(one(number)) for number in range(rounds)]
            finally:
                killer.stop()
                await killing
            failovers, lived = zip(*[task.result() for task in asked], strict=True)
            print(f"{killer.kills} kills; failovers of an answer: {sorted(failovers)}; kills during it: {sorted(lived)}")
            assert sum(failovers) >= rounds // 2, "the storm was too calm"


# A rolling restart ---------------------------------------------------------------------------------------------------------------------


CLIENTS = 4
SHORT, LONG = 40, 300
"""Tokens of an answer. The long ones take longer than a stage that is told to end waits for its sessions."""

GRACE_S = 1.0


@lengths.long_form(
    "system/test_host.py::test_sigterm_lets_a_running_session_end_and_refuses_a_new_one",
    "system/test_host.py::test_a_session_that_outlasts_the_grace_is_cut",
    "link/test_link.py::test_the_next_replica_is_asked_when_one_is_full_draining_or_not_there",
    "router/test_placement.py::test_replicas_come_and_go",
    unkept="No request fails while all stages are restarted under load.",
)
async def test_a_rolling_restart_under_load_fails_no_request(tmp_path: Path, seed: int) -> None:
    numbers = count(seed)
    over = asyncio.Event()
    arguments = ["--inline-limit", "0", "--grace", str(GRACE_S)]
    with fleet(tmp_path, replicas=2, options={"interval_s": 0.02}, stage_args=arguments) as running:

        async def client(stub: omni_pb2_grpc.OmniServiceAsyncStub, tokens: int) -> list[int]:
            """Asks until all is over; the failovers of each answer, of which there is at least one."""
            failovers: list[int] = []
            while not (failovers and over.is_set()):
                number = next(numbers)
                answer = await ask(stub, request(f"question {number}", number, thinker={"max_tokens": tokens, "ignore_eos": True}))
                answer.check_toy(number, f"question {number}", tokens)
                failovers.append(len(answer.failovers))
            return failovers

        async with disturbed(running) as stub, asyncio.TaskGroup() as group:
            clients = [group.create_task(client(stub, LONG if number == 0 else SHORT)) for number in range(CLIENTS)]
            try:
                for name in running.stages:
                    running.server(name).terminate()
                    assert await asyncio.to_thread(running.server(name).wait) == 0
                    running.begin(name)
                    await asyncio.to_thread(running.ready, name)
                    await found(running, stub)
            finally:
                over.set()
        heard = [failovers for task in clients for failovers in task.result()]
        print(f"{len(heard)} answers, of which {sum(map(bool, heard))} went on at another replica")


ANSWER_TOKENS = 150
WHOLE_ANSWER = {"max_tokens": ANSWER_TOKENS, "ignore_eos": True}

MUTE_EVERY = 10
"""The Talkers tell one of so many words of an answer as not spoken."""

PAIRS = {f"{first}-{second}": (first, second) for first, second in itertools.product(CHAIN, CHAIN)}


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Three of each kind, so that one is left when two are lost at once. They cut their output at random, sound comes slower than text, and
    every tensor is a reference into memory that dies with its owner."""
    folder, arguments = tmp_path_factory.mktemp("logs"), ["--inline-limit", "0"]
    own: dict[str, dict[str, Any]] = {**SLOWER_SOUND, "talker": {"mute_every": MUTE_EVERY}}
    with fleet(folder, replicas=3, options=SLOW, options_of=own, stage_args=arguments) as running:
        yield running


@lengths.one_or_all("moment", MOMENTS)
@pytest.mark.parametrize("kind", CHAIN)
async def test_a_stage_is_killed(toys: Fleet, kind: str, moment: str, seed: int) -> None:
    moment, lost = lengths.draw(moment, MOMENTS, seed), list[str]()

    async with disturbed(toys) as stub:
        answer = await ask_through(stub, request("hello", seed, thinker=WHOLE_ANSWER), kill_when(MOMENTS[moment], toys, kind, lost))
        answer.check_toy(seed, "hello", ANSWER_TOKENS)
        answer.check_unspoken(MUTE_EVERY)
        # On a busy machine, the stage before it may not find another one in time, and is then the one that is replaced.
        assert answer.failovers and {failover.lost for failover in answer.failovers} <= {*lost, *map(toys.address, toys.of("thinker"))}
        print(f"{kind}, {moment}: replaced in {answer.failovers[0].pause.ToMilliseconds()} ms")


@lengths.one_or_all("pair", PAIRS)
async def test_a_second_kill_hits_the_resume(toys: Fleet, pair: str, seed: int) -> None:
    """Another stage that has the session, or another replica of the same kind, which may just be taking it over."""
    chance = random.Random(seed)
    first, second = PAIRS[lengths.draw(pair, PAIRS, seed)]
    moment = chance.choice(list(MOMENTS))

    async def kill_both() -> None:
        victim = await holder(toys, first)
        other = await holder(toys, second) if second != first else chance.choice([name for name in toys.of(first) if name != victim])
        toys.signal(victim, signal.SIGKILL)
        await asyncio.sleep(chance.uniform(0.001, 0.005))
        toys.signal(other, signal.SIGKILL)

    async with disturbed(toys) as stub:
        answer = await ask_through(stub, request("hello", seed, thinker=WHOLE_ANSWER), DisturbanceStep(MOMENTS[moment], kill_both))
        answer.check_toy(seed, "hello", ANSWER_TOKENS)
        assert answer.failovers
        print(moment, [(failover.lost, failover.pause.ToMilliseconds()) for failover in answer.failovers])


@lengths.long_form(
    "system/test_chain.py::test_cancels_at_random_moments",
    unkept="A client that goes away while its session is opened elsewhere leaves nothing.",
)
@lengths.rounds(1, 3)
async def test_cancels_during_a_resume_leave_nothing(toys: Fleet, seed: int, rounds: int) -> None:
    """The client goes away within milliseconds of a loss: at once, before anybody has seen it, or while the session is opened elsewhere."""
    chance = random.Random(seed)
    for _ in range(rounds):
        async with disturbed(toys) as stub:
            for kind in chance.sample(CHAIN, 3):
                call = stub.Generate(request("hello", seed, thinker=WHOLE_ANSWER), timeout=60)
                answer = WholeAnswer()
                while not MOMENTS["in mid text"](answer):
                    answer.take(await read(call))
                await killed_holder(toys, kind)
                await asyncio.sleep(chance.choice([0, chance.uniform(0, 0.02), chance.uniform(0, 0.1)]))
                call.cancel()
                await nothing_left(toys)


@lengths.one_or_all("steps_done", ["0", "2"])
async def test_a_diffusion_is_killed(tmp_path: Path, steps_done: str, seed: int) -> None:
    """The next one draws the pictures that are missing from their first step on; progress begins anew."""
    done = int(lengths.draw(steps_done, ["0", "2"], seed))
    with fleet(tmp_path, kinds=("diffusion",), pipeline="toy-picture", options={"interval_s": 0.5}) as running:
        params = stage_pb2.DiffusionParams(prompt="grey", width=8, height=8, steps=6, results=2)
        asked = omni_pb2.GenerateRequest(seed=seed, diffusion=params)
        async with omni_stub(running.address("router")) as stub:
            moment = kill_when(lambda answer: begun(answer) and len(answer.of("progress")) >= done, running, "diffusion")
            answer = await ask_through(stub, asked, moment)
            assert len(answer.failovers) == 1
            pictures = [chunk.image.data.data for chunk in answer.of("image") if chunk.count]
            shades = np.add.outer(np.arange(8), np.arange(8))
            assert pictures == [png(((seed + n + shades) % 256).astype(np.uint8)) for n in range(2)]
            for chunks in answer.chunks.values():
                assert [chunk.seq for chunk in chunks] == list(range(len(chunks))) and chunks[-1].last
            await restore(running, stub)
            await nothing_left(running)


THINKS = 60
"""Tokens of a thought."""


async def test_a_thinker_is_killed_while_it_thinks(tmp_path: Path, seed: int) -> None:
    """Thought and answer go on, and what is heard is the answer alone."""
    lost = list[str]()

    with fleet(tmp_path, replicas=2, options=SLOW, options_of={"thinker": {"thinks": THINKS}}) as thinking:
        async with disturbed(thinking, alike=False) as stub:
            asked = request("hello", seed, thinker=WHOLE_ANSWER)
            answer = await ask_through(stub, asked, kill_when(text_chunks(5), thinking, "thinker", lost))
    answer.check_whole()
    assert [failover.lost for failover in answer.failovers] == lost
    said = [chunk for chunk in answer.of("text") if not chunk.text.HasField("thought")]
    thought = [chunk for chunk in answer.of("text") if chunk.text.HasField("thought")]
    whole = formulas.text(seed, "hello", ANSWER_TOKENS)
    assert sum(chunk.count for chunk in thought) == THINKS
    assert "".join(chunk.text.thought for chunk in thought) + answer.text() == whole
    assert answer.text() == "".join(chunk.text.text for chunk in said) == whole.removeprefix(formulas.text(seed, "hello", THINKS))
    first = THINKS * formulas.FRAMES_PER_ROW * formulas.SAMPLES_PER_FRAME
    np.testing.assert_array_equal(answer.samples(), formulas.audio(seed, "hello", ANSWER_TOKENS)[first:, 0] * 32768)


CHAOS_LONG = lengths.long_form(
    "chaos/test_account.py::test_a_wrong_answer_is_seen",
    "system/test_storm.py::test_a_stage_is_killed",
    "system/test_frozen.py::test_a_frozen_replica_is_left_and_the_answer_goes_on",
    unkept="Mixed load is answered rightly while processes of every kind are killed, stopped and started again.",
)

TESTS = Path(__file__).parents[1]


@CHAOS_LONG
@pytest.mark.serial
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seconds", [15, pytest.param(120, marks=pytest.mark.long)])
def test_chaos_leaves_only_right_answers_retryable_errors_and_nothing_else(seed: int, seconds: int) -> None:
    command = [sys.executable, "-m", "chaos", "--seconds", str(seconds), "--seed", str(seed)]
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=380, check=False)
    print(done.stdout)
    assert done.returncode == 0
