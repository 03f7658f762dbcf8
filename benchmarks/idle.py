"""The wake-ups of a stack's processes while it has no requests, compared with as many processes that only speak gRPC. The kernel counts a
wake-up whenever a thread goes to sleep by itself, for any reason. Each bare process has a server of grpc.aio with nothing registered and a
channel to the process before it, no option set, no call."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import grpc.aio

from benchmarks.figures import wakeups

FIRST = "first"
"""The argument in the place of an address, for the process that connects to no other."""

_STOP_S = 10


@dataclass(frozen=True, slots=True)
class Wakeups:
    """Wake-ups per second of all processes together: of the stack, and of the bare ones."""

    stack: float
    bare: float


def measure(stack: Sequence[int], settle_s: float, period_s: float) -> Wakeups:
    """Count the wake-ups of both in the same period. stack: its process ids. settle_s: seconds without requests before it."""
    with _bare_processes(len(stack)) as bare:
        time.sleep(settle_s)
        before = [_all_wakeups(side) for side in (stack, bare)]
        begin_s = time.monotonic()
        time.sleep(period_s)
        after = [_all_wakeups(side) for side in (stack, bare)]
        elapsed_s = time.monotonic() - begin_s
    ours, bares = ((count_after - count_before) / elapsed_s for count_before, count_after in zip(before, after, strict=True))
    return Wakeups(ours, bares)


def _all_wakeups(pids: Sequence[int]) -> int:
    return sum(wakeups(pid) for pid in pids)


@contextmanager
def _bare_processes(number: int) -> Iterator[list[int]]:
    """Start so many bare processes; yields their ids."""
    with ExitStack() as ending:
        upstream, pids = FIRST, []
        for _ in range(number):
            process = subprocess.Popen([sys.executable, "-m", "benchmarks.idle", upstream], stdout=subprocess.PIPE, text=True)
            ending.callback(process.wait, _STOP_S)
            ending.callback(process.terminate)
            if process.stdout is None:
                raise RuntimeError("a pipe was asked for")
            ending.enter_context(process.stdout)
            upstream = process.stdout.readline().strip()
            pids.append(process.pid)
        yield pids


async def _serve(upstream: str) -> None:
    """Serve, connect to `upstream` unless it is FIRST, and print the address of this process."""
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    if upstream != FIRST:
        channel = grpc.aio.insecure_channel(upstream)
        await channel.channel_ready()
    print(f"127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
