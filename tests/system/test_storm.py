"""The storm: processes of every kind are killed all the time, and every answer is right.

The rule of the killer: a process may be killed when another one of its kind has served for two seconds, so that everyone has a connection
to it. Then no answer is ever without a replica, and none may fail. Whoever is killed is started again at once.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from helpers import lengths
from helpers.ask import ask, request
from helpers.disturbed import disturbed
from helpers.fleet import Fleet, fleet
from helpers.servers import CHAIN

pytestmark = lengths.long_form(
    "system/test_resume.py::test_a_stage_is_killed",
    "system/test_resume.py::test_a_second_kill_hits_the_resume",
    unkept="Many answers at once are right while their processes are killed all the time.",
)

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
