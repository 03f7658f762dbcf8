"""Memory for what clients stream: bounded for a turn."""

from __future__ import annotations

import asyncio
import weakref

from helpers.link import link_by, opening, route_to
from helpers.waiting import until_collected
from omnistage.router.conversation import WINDOW, Intake
from omnistage.v1 import stage_pb2


def test_ports_share_the_window_of_a_turn() -> None:
    async def tell(credit: stage_pb2.Credit) -> None:
        raise AssertionError("no answer runs yet")

    for count, each in ((0, WINDOW), (1, WINDOW), (3, WINDOW // 3), (8, WINDOW // 8), (9, 2)):
        ports = [stage_pb2.Port(name=f"media{n}", payload=stage_pb2.PAYLOAD_MEDIA) for n in range(count)]
        intake = Intake(ports, tell, stall_s=1, replay_bytes=0)
        assert intake.window == each
        assert intake.waits_for == [port.name for port in ports]


async def test_a_client_that_leaves_while_it_is_given_room_is_no_error_that_nobody_looks_at() -> None:
    """The write goes on when its turn is over, and fails with the call."""
    complaints = list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _, complaint: complaints.append(complaint))
    writing, gone = asyncio.Event(), asyncio.Event()

    async def tell(credit: stage_pb2.Credit) -> None:
        writing.set()
        await gone.wait()
        raise ConnectionError("the call is over")

    intake = Intake([stage_pb2.Port(name="media0", payload=stage_pb2.PAYLOAD_MEDIA)], tell, stall_s=1, replay_bytes=0)
    async with link_by(route_to("127.0.0.1:1"), opening()) as link:
        async with intake.passed_on(link):
            await writing.wait()
            tasks = [weakref.ref(task) for task in asyncio.all_tasks() - {asyncio.current_task()}]
        gone.set()
        # asyncio complains when it forgets a task.
        await until_collected(lambda: complaints or not any(task() for task in tasks))
    assert tasks and not complaints
