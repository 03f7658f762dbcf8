"""All stages are restarted, one after the other, while clients ask: nobody notices."""

from __future__ import annotations

import asyncio
from itertools import count
from pathlib import Path

from helpers import lengths
from helpers.ask import ask, request
from helpers.disturbed import disturbed, found
from helpers.fleet import fleet
from omnistage.v1 import omni_pb2_grpc

pytestmark = lengths.long_form(
    "system/test_host.py::test_sigterm_lets_a_running_session_end_and_refuses_a_new_one",
    "system/test_host.py::test_a_session_that_outlasts_the_grace_is_cut",
    "link/test_link.py::test_the_next_replica_is_asked_when_one_is_full_draining_or_not_there",
    "router/test_placement.py::test_replicas_come_and_go",
    unkept="No request fails while all stages are restarted under load.",
)

CLIENTS = 4
SHORT, LONG = 40, 300
"""Tokens of an answer. The long ones take longer than a stage that is told to end waits for its sessions."""

GRACE_S = 1.0


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
