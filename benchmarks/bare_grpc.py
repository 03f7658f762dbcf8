"""The least that a chain can cost: the same messages pass through as many processes, which only relay bytes with gRPC. There is no link,
shell or protobuf in them. The cost of a wake-up differs from machine to machine by more than all that we add to it, so each figure of the
chain is divided by a figure of this module, measured in the same run."""

from __future__ import annotations

import asyncio
import struct
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc.aio

from benchmarks.figures import CpuMeter, median
from omnistage.wire.channel import client_options, server_options

RELAYS = 3
"""Talker, Thinker and router stand between Code2Wav and the client."""

_METHOD = "/omnistage.bench.Bare/Run"
_ORDER = struct.Struct("<IId")
"""The client's order: how many messages, how many in a burst, and the seconds between two bursts."""
_STAMP = struct.Struct("<d")
_MESSAGE_BYTES = 120


@dataclass(frozen=True, slots=True)
class Floor:
    """The lowest costs. latency_s: median from the source's write to the client's read. relay_cpu_s: CPU time of a relay for a message."""

    latency_s: float
    relay_cpu_s: float


async def floor(messages: int, burst: int, interval_s: float) -> Floor:
    """Send `messages` messages from a source through RELAYS relays, `burst` at a time, every `interval_s` seconds, and measure them."""
    async with _chain() as (address, pids), grpc.aio.insecure_channel(address, options=client_options()) as channel:
        await _read_all(channel, 100, burst, interval_s)  # warm-up
        meter = CpuMeter(pids)
        latencies = await _read_all(channel, messages, burst, interval_s)
        return Floor(median(latencies), median(meter.measure_s()[1:]) / messages)  # Without the source, which is the first process.


async def _read_all(channel: grpc.aio.Channel, messages: int, burst: int, interval_s: float) -> list[float]:
    """Order the messages; returns the seconds from the sending of each to its reading."""
    call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(_METHOD)()
    await call.write(_ORDER.pack(messages, burst, interval_s))
    return [time.monotonic() - _STAMP.unpack_from(message)[0] async for message in call]


@asynccontextmanager
async def _chain() -> AsyncIterator[tuple[str, list[int]]]:
    """Start the source and the relays; yields the address of the last relay, and the process ids from the source on."""
    processes: list[asyncio.subprocess.Process] = []
    address = "source"
    try:
        for _ in range(1 + RELAYS):
            command = [sys.executable, "-m", "benchmarks.bare_grpc", address]
            process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
            processes.append(process)
            if process.stdout is None:
                raise RuntimeError("a pipe was asked for")
            address = (await asyncio.wait_for(process.stdout.readline(), 30)).decode().strip()
        yield address, [process.pid for process in processes]
    finally:
        for process in processes:
            process.terminate()
            await process.wait()


async def _source(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
    """Send the messages that the client orders, each with the time of its sending."""
    messages, burst, interval_s = _ORDER.unpack(await anext(requests))
    filler = bytes(_MESSAGE_BYTES - _STAMP.size)
    for number in range(messages):
        if interval_s and number % burst == 0:
            await asyncio.sleep(interval_s)
        await context.write(_STAMP.pack(time.monotonic()) + filler)


class _Relay:
    """Passes on the messages of the process at `address`."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=client_options())

    async def run(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        call: grpc.aio.StreamStreamCall[bytes, bytes] = self._channel.stream_stream(_METHOD)()
        await call.write(await anext(requests))
        async for message in call:
            await context.write(message)


async def _serve(upstream: str) -> None:
    """Serve as the source or as a relay of `upstream`, and print the address of this process."""
    behaviour = _source if upstream == "source" else _Relay(upstream).run
    service, method = _METHOD.strip("/").split("/")
    server = grpc.aio.server(options=server_options())
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(behaviour)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
