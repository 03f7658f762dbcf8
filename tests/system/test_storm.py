"""Processes of every kind are killed all the time, or restarted one after the other, and every answer is right.

The rule of the storm: a process may be killed when another one of its kind has served for two seconds, so that everyone has a connection
to it. Then no answer is ever without a replica, and none may fail. Whoever is killed is started again at once.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest

from helpers import lengths
from helpers.ask import ask, request
from helpers.disturbed import disturbed, found
from helpers.fleet import Fleet, fleet
from helpers.servers import CHAIN
from omnistage.v1 import omni_pb2_grpc

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
    "system/test_resume.py::test_a_stage_is_killed",
    "system/test_resume.py::test_a_second_kill_hits_the_resume",
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
