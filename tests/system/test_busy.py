"""Busy is not dead: many questions in one moment, and a machine that has other things to do."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path

import grpc.aio
import pytest

from helpers import lengths
from helpers.ask import ask, refusal, request
from helpers.disturbed import disturbed
from helpers.fleet import fleet
from helpers.processes import busy_cores
from helpers.servers import all_free, omni_stub, stack
from omnistage.v1 import omni_pb2_grpc

pytestmark = [
    pytest.mark.serial,
    lengths.long_form(
        "router/test_sharing.py::test_a_router_whose_places_are_taken_says_so_at_once_and_when_to_come_again",
        "link/test_pulse.py::test_a_slow_peer_shows_it_before_it_can_be_taken_for_dead",
        "host/test_watchdog.py::test_on_a_full_machine_neither_a_long_step_nor_one_that_waits_for_a_thread_hangs",
        unkept="A hundred questions of one moment are all answered, and no process of a machine whose cores are all busy is given up.",
    ),
]

SHORT = {"max_tokens": 8, "ignore_eos": True}
ROOM = ["--max-sessions", "2000"]
PATIENCE_S = 100.0

SESSIONS = 8
TOKENS = 100


async def question(stub: omni_pb2_grpc.OmniServiceAsyncStub, number: int) -> str:
    """The result of a question: answered, refused with a delay, or something that must not be."""
    try:
        answer = await ask(stub, request(f"question {number}", number, thinker=SHORT), timeout_s=PATIENCE_S)
    except grpc.aio.AioRpcError as error:
        if "grpc-status-details-bin" not in dict(error.trailing_metadata() or ()):
            return f"{error.code().name}: {error.details()}"
        told = refusal(error)
        return "refused" if told.reason == "OVERLOADED" and told.retry_delay_s else f"{told.reason}: {told.message}"
    answer.check_toy(number, f"question {number}", SHORT["max_tokens"])
    return "answered"


@pytest.mark.timeout(600)
@lengths.rounds(150, 1500)
async def test_every_question_of_one_moment_is_answered(tmp_path: Path, rounds: int) -> None:
    with stack(tmp_path, stage_args=ROOM, router_args=ROOM) as running:
        async with omni_stub(running.address) as stub:
            (await ask(stub, request("hello", 1))).check_toy(1, "hello")
            begun = time.monotonic()
            async with asyncio.TaskGroup() as group:
                asked = [group.create_task(question(stub, number)) for number in range(rounds)]
            ends = Counter(task.result() for task in asked)
            print(f"{dict(ends)} in {time.monotonic() - begun:.1f} s")
            assert ends == {"answered": rounds}, "there is room for all of them"
        await all_free(list(running.addresses.values()))


async def test_who_finds_all_places_taken_is_refused_at_once(tmp_path: Path) -> None:
    """One client, which may take all places, asks more questions than there are: those that have none hear when to ask again, the others
    are answered."""
    with stack(tmp_path, stage_args=ROOM, router_args=["--max-sessions", "50", "--client-share", "1"]) as running:
        async with omni_stub(running.address) as stub:
            async with asyncio.TaskGroup() as group:
                asked = [group.create_task(question(stub, number)) for number in range(150)]
            ends = Counter(task.result() for task in asked)
            print(dict(ends))
            assert set(ends) == {"answered", "refused"}, "some found no place, and each of them was told a delay"
            assert ends["answered"] >= 50
        await all_free(list(running.addresses.values()))


@pytest.mark.timeout(600)
@lengths.rounds(5, 60)
async def test_nobody_is_given_up_on_a_machine_whose_cores_are_all_busy(tmp_path: Path, seed: int, rounds: int) -> None:
    """rounds: seconds that it is asked for."""
    with fleet(tmp_path, replicas=2, options={"interval_s": 0.02}) as toys:
        async with disturbed(toys) as stub:
            failovers = 0

            async def speak(client: int) -> int:
                nonlocal failovers
                number = 0
                while time.monotonic() < end:
                    prompt, own = f"client {client}, question {number}", seed + 1000 * client + number
                    answer = await ask(stub, request(prompt, own, thinker={"max_tokens": TOKENS, "ignore_eos": True}))
                    answer.check_toy(own, prompt, TOKENS)
                    failovers += len(answer.failovers)
                    number += 1
                return number

            with busy_cores():
                end = time.monotonic() + rounds
                async with asyncio.TaskGroup() as group:
                    clients = [group.create_task(speak(client)) for client in range(SESSIONS)]
            print(f"{sum(client.result() for client in clients)} answers, {failovers} failovers")
            assert failovers == 0 and "replica.lost" not in toys.logs() and "link.lost" not in toys.logs()
