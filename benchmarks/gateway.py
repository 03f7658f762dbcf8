"""`python -m benchmarks.gateway`: the cost of HTTP above gRPC. It asks the same questions by both in turn, compares the processor time of
the gateway with the router's, and opens many streams at once."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from benchmarks.figures import (
    QUESTION,
    SIX_SECONDS_TOKENS,
    Benchmark,
    CpuMeter,
    Figure,
    arguments,
    median,
    run,
    serving,
    toys,
)
from omnistage.cli.stack.layout import ANY_PORT, GATEWAY, ROUTER, Layout
from omnistage.cli.stack.pipelines import Choice, layout_of
from omnistage.cli.stack.stack import Stack
from omnistage.client import AsyncOmni
from omnistage.client.events import AudioChunk, TextDelta

PAIRS = 100
WARM_UPS = 3
SOUNDS = 4
SOUND_ROUNDS = 3

STREAMS = 200
STREAM_TOKENS = 100
STREAM_INTERVAL_S = 0.1

BYTES_OF_SECOND = 2 * 24_000
"""Bytes of a second of raw sound over HTTP."""

SPEAKS: Mapping[str, Any] = {"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "pcm16"}}


@dataclass
class StreamTimes:
    """One streamed answer: seconds to first text and sound, seconds of sound, and whether it came to its end."""

    ttft_s: float = 0.0
    ttfa_s: float = 0.0
    audio_s: float = 0.0
    text: str = ""
    is_whole: bool = False


class Http:
    """A client with so little work of its own that it does not disturb the figures. It has one connection and one question at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def to(cls, address: str) -> Http:
        host, _, port = address.rpartition(":")
        return cls(*await asyncio.open_connection(host, int(port), limit=1 << 24))

    async def ask(self, seed: int, **fields: Any) -> StreamTimes:
        """Send a POST /v1/chat/completions with these fields and read the streamed answer. Raises RuntimeError for a refusal."""
        body = json.dumps({"stream": True, "seed": seed, **fields}).encode()
        lines = ["POST /v1/chat/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json", f"Content-Length: {len(body)}"]
        times, begin_s = StreamTimes(), time.perf_counter()
        self._writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        status = await self._reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in status.partition(b"\r\n")[0]:
            raise RuntimeError(f"refused: {(status + await self._reader.read(1000)).decode()}")
        async for event in self._events():
            now_s = time.perf_counter()
            if event == b"[DONE]":
                times.is_whole = True
                continue
            for choice in json.loads(event).get("choices", ()):
                delta = choice.get("delta", {})
                if delta.get("content"):
                    times.ttft_s = times.ttft_s or now_s - begin_s
                    times.text += delta["content"]
                if (delta.get("audio") or {}).get("data"):
                    times.ttfa_s = times.ttfa_s or now_s - begin_s
                    times.audio_s += len(delta["audio"]["data"]) * 3 / 4 / BYTES_OF_SECOND  # Four characters of base 64 are three bytes.
        return times

    async def _events(self) -> AsyncIterator[bytes]:
        """Yield the data of each server-sent event of an answer in HTTP chunks."""
        rest = b""
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            rest += (await self._reader.readexactly(size + 2))[:-2]
            *events, rest = rest.split(b"\n\n")
            for event in events:
                yield event.partition(b"data: ")[2]
        await self._reader.readexactly(2)

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


async def by_grpc(omni: AsyncOmni, seed: int, **options: Any) -> StreamTimes:
    """Ask by the Python client and read the streamed answer."""
    times, begin_s = StreamTimes(), time.perf_counter()
    async for event in omni.stream_chat([{"role": "user", "content": QUESTION}], seed=seed, **options):
        elapsed_s = time.perf_counter() - begin_s
        if isinstance(event, TextDelta):
            times.ttft_s = times.ttft_s or elapsed_s
        elif isinstance(event, AudioChunk):
            times.ttfa_s = times.ttfa_s or elapsed_s
            times.audio_s += event.duration_s
    return times


@asynccontextmanager
async def served(layout: Layout) -> AsyncIterator[tuple[Stack, CpuMeter]]:
    """Start a stack with a gateway; yields the stack, and a meter of the processor time of gateway and router."""
    async with serving(replace(layout, servers=replace(layout.servers, http=ANY_PORT))) as stack:
        pids = {child.name: child.pid for child in stack.children}
        yield stack, CpuMeter([pids[GATEWAY], pids[ROUTER]])


async def ask_all(address: str, clients: int, rounds: int, **fields: Any) -> list[StreamTimes]:
    """Ask the gateway from `clients` connections at once, `rounds` times; returns all answers. fields: of the questions."""
    https = [await Http.to(address) for _ in range(clients)]
    answers = [await asyncio.gather(*(http.ask(number, **fields) for http in https)) for number in range(rounds)]
    for http in https:
        await http.close()
    return [times for of_round in answers for times in of_round]


async def firsts(benchmark: Benchmark) -> None:
    """Measure by how many ms the first text and the first sound come later over HTTP than over gRPC; the toy itself takes nearly no
    time."""
    messages = [{"role": "user", "content": QUESTION}]
    async with served(toys({})) as (stack, _), AsyncOmni(address=stack.address, max_retries=0) as omni:
        http = await Http.to(stack.http)
        for name, goal, outputs, fields in (("ttft", 5, ["text"], {}), ("ttfa", 10, ["text", "audio"], SPEAKS)):
            grpc_ask = partial(by_grpc, omni, pipeline="toy", max_tokens=8, outputs=outputs)
            http_ask = partial(http.ask, model="toy", messages=messages, max_tokens=8, **fields)
            rounds = await benchmark.by_turns(PAIRS, grpc_ask, http_ask, warm_ups=WARM_UPS)
            grpc_ms, http_ms = [[1e3 * getattr(times, f"{name}_s") for times in of_way] for of_way in rounds]
            if not all((*grpc_ms, *http_ms)):
                raise RuntimeError(f"an answer had no {name}")
            over = median([over - under for over, under in zip(http_ms, grpc_ms, strict=True)])
            note = f"toy, median of {len(grpc_ms)} pairs in turn; gRPC {median(grpc_ms):.1f}, HTTP {median(http_ms):.1f}"
            benchmark.add(Figure(f"{name}_over_grpc_ms", over, "ms", f"<= {goal}", note))
        await http.close()


async def sound(benchmark: Benchmark) -> None:
    """Measure the CPU time of the gateway for streamed sound, divided by the CPU time of the router."""
    fields = {"model": "smol", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": SIX_SECONDS_TOKENS, **SPEAKS}
    async with served(layout_of(Choice(["smol"]))) as (stack, meter):
        answers = await ask_all(stack.http, SOUNDS, benchmark.size(SOUND_ROUNDS, 1), **fields)
        by_gateway, by_router = meter.measure_s()
    audio_s = sum(times.audio_s for times in answers)
    note = f"smol, {audio_s:.0f} s of sound by {SOUNDS} at once; ms a second: gateway {1e3 * by_gateway / audio_s:.2f}, router"
    note = f"{note} {1e3 * by_router / audio_s:.2f}"
    benchmark.add(Figure("sound_cpu_over_router", by_gateway / by_router, "x", "<= 1.5", note))


async def streams(benchmark: Benchmark) -> None:
    """Count the streams that are not complete, of many at once."""
    count, tokens = benchmark.size((STREAMS, STREAM_TOKENS), (4, 10))
    options = {"interval_s": STREAM_INTERVAL_S, "length": tokens, "max_chunk": 1}
    async with served(toys(options)) as (stack, meter):
        answers = await ask_all(stack.http, count, 1, model="toy", messages=[{"role": "user", "content": "count"}], max_tokens=tokens)
        by_gateway, by_router = (1e6 * cpu_s / (count * tokens) for cpu_s in meter.measure_s())
    text = max((times.text for times in answers), key=len)
    dropped = sum(not times.is_whole or times.text != text for times in answers)
    note = f"{count} streams of the toy at once, {1 / STREAM_INTERVAL_S:g} pieces of text a second each; us a piece: gateway"
    benchmark.add(Figure("streams_dropped", dropped, f"of {count}", "<= 0", f"{note} {by_gateway:.0f}, router {by_router:.0f}"))


if __name__ == "__main__":
    sys.exit(run("gateway", arguments(__doc__).parse_args(), {"first text and sound": firsts, "sound": sound, "streams": streams}))
