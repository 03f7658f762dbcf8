"""Whether a server process still answers. A call of native code that keeps Python's lock stops the whole process, its own watchdog too:
only another process can find that."""

from __future__ import annotations

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from omnistage.client.channel import open_channel

PERIOD_S = 5.0
"""Between two questions, and the time to answer one."""

MAX_UNANSWERED = 6
"""Questions in a row; then the process hangs. They are counted, not the seconds of a clock: however long this process itself was held up,
that is one question."""

OPTIONS = (
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
)
"""Of a channel without keepalive: the questions are enough."""

NO_ANSWER = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
"""Any other status, also a refusal, was sent by the process."""


async def no_answer(address: str) -> str:
    """Return when the server at HOST:PORT has left too many questions unanswered, with what there is to say of it."""
    question = health_pb2.HealthCheckRequest(service="liveness")
    clock = asyncio.get_running_loop().time
    unanswered = 0
    async with open_channel(address, OPTIONS) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        while unanswered < MAX_UNANSWERED:
            next_at = clock() + PERIOD_S
            try:
                await check(question, timeout=PERIOD_S, wait_for_ready=True)
                unanswered = 0
            except grpc.aio.AioRpcError as error:
                unanswered = unanswered + 1 if error.code() in NO_ANSWER else 0
            await asyncio.sleep(next_at - clock())
    return f"did not answer for {MAX_UNANSWERED * PERIOD_S:g} s"
