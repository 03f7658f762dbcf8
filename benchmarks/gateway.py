"""`python -m benchmarks.gateway`: the cost of HTTP above gRPC, as benchmarks/out/gateway.json and as a table. It asks the same questions by
both in turn, compares the processor time of the gateway with the router's, opens many streams at once, watches an idle gateway, and
measures when the page plays its first sound.

It needs the folder of the tests on the path, for their browser."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.figures import QUESTION, SIX_SECONDS_TOKENS, CpuMeter, Figure, Report, median, peak_bytes, percentile, run, wakeups
from helpers.browser import CHROMIUM, ask, browser, opened
from omnistage.cli.stack.layout import Layout, PipelineLayout, ServerOptions, StageLayout
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

PAGE_ROUNDS = 10
PREBUFFER_S = 0.3

SETTLE_S = 30.0
IDLE_S = 30.0

BYTES_OF_SECOND = 2 * 24_000
"""Bytes of a second of raw sound over HTTP."""

SPEAKS = {"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "pcm16"}}


@dataclass
class StreamTimes:
    """One streamed answer: seconds to first text and sound, seconds of sound, whether it came to its end, and gaps between events."""

    ttft_s: float = 0.0
    ttfa_s: float = 0.0
    audio_s: float = 0.0
    text: str = ""
    is_whole: bool = False
    gaps_s: list[float] = field(default_factory=list)


class Http:
    """A client with so little work of its own that it does not disturb the figures. It has one connection and one question at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def to(cls, address: str) -> Http:
        host, _, port = address.rpartition(":")
        return cls(*await asyncio.open_connection(host, int(port), limit=1 << 24))

    async def ask(self, **fields: Any) -> StreamTimes:
        """Send a POST /v1/chat/completions with these fields and read the streamed answer. Raises RuntimeError for a refusal."""
        body = json.dumps({"stream": True, **fields}).encode()
        lines = ["POST /v1/chat/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json", f"Content-Length: {len(body)}"]
        times, begin_s = StreamTimes(), time.perf_counter()
        last = begin_s
        self._writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        status = await self._reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in status.partition(b"\r\n")[0]:
            raise RuntimeError(f"refused: {(status + await self._reader.read(1000)).decode()}")
        async for event in self._events():
            now_s = time.perf_counter()
            times.gaps_s.append(now_s - last)
            last = now_s
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
async def gateway(router: str) -> AsyncIterator[tuple[str, int]]:
    """Start a gateway in front of a router; yields its address and its process id."""
    reading, writing = os.pipe()
    words = [sys.executable, "-m", "omnistage.gateway", "--router", router, "--ready-fd", str(writing), "--log-level", "warning"]
    process = await asyncio.create_subprocess_exec(*words, pass_fds=(writing,))
    try:
        os.close(writing)
        with os.fdopen(reading) as pipe:
            line = json.loads(await asyncio.to_thread(pipe.readline) or "{}")
        if "address" not in line:
            raise RuntimeError(f"the gateway did not start: {line}")
        yield line["address"], process.pid
    finally:
        process.terminate()
        await process.wait()


@asynccontextmanager
async def serve(layout: Layout) -> AsyncIterator[tuple[Stack, str, int]]:
    """Start a stack with a gateway; yields the stack, and the gateway's address and process id."""
    stack = Stack(layout)
    await stack.start()
    try:
        async with gateway(stack.address) as (address, pid):
            yield stack, address, pid
    finally:
        await stack.stop()


async def _default_model(report: Report) -> None:
    async with serve(layout_of(Choice(["smol"]))) as (stack, address, pid):
        with report.part("processor time of sound"):
            await _sound_cpu(report, stack, address, pid)
        with report.part("idle"):
            await _idle(report, stack, pid)


async def _toy(report: Report) -> None:
    """Measure with toys: first text, first sound, many streams, and the page."""
    options = {"interval_s": STREAM_INTERVAL_S, "length": STREAM_TOKENS, "max_chunk": 1}
    async with serve(_toys({})) as (stack, address, _), AsyncOmni(address=stack.address, max_retries=0) as omni:
        http = await Http.to(address)
        with report.part("first text"):
            await _first(report, omni, http, "ttft", outputs=["text"])
        with report.part("first sound"):
            await _first(report, omni, http, "ttfa")
        await http.close()
    async with serve(_toys(options)) as (stack, address, pid):
        with report.part("many streams"):
            await _measure_streams(report, stack, address, pid)
    options_of_page = {"interval_s": 0.1, "max_chunk": 1, "samples_per_frame": 4_800, "prebuffer_s": PREBUFFER_S}
    async with serve(_toys(options_of_page)) as (_, address, _):
        with report.part("page"):
            await _page(report, address)


def _toys(options: Mapping[str, object]) -> Layout:
    stages = [StageLayout(kind, "toy", options=dict(options)) for kind in ("thinker", "talker", "code2wav")]
    return Layout([PipelineLayout("toy", "toy", stages)], ServerOptions(max_sessions=1024, client_share=1))


async def _first(report: Report, omni: AsyncOmni, http: Http, name: str, **options: Any) -> None:
    """Measure by how many ms the first text or sound (name: ttft or ttfa) comes later over HTTP than over gRPC. The two are asked in turn;
    the toy itself takes nearly no time."""
    fields = {"model": "toy", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 8, **(SPEAKS if name == "ttfa" else {})}
    times: dict[str, list[float]] = {"grpc": [], "http": []}
    for number in range(WARM_UPS + PAIRS):
        for way in ("grpc", "http") if number % 2 else ("http", "grpc"):
            if way == "grpc":
                stream_times = await by_grpc(omni, number, pipeline="toy", max_tokens=8, **options)
            else:
                stream_times = await http.ask(seed=number, **fields)
            first_s = stream_times.ttft_s if name == "ttft" else stream_times.ttfa_s
            if not first_s:
                raise RuntimeError(f"nothing came over {way}")
            if number >= WARM_UPS:
                times[way].append(1e3 * first_s)
    over = [http_ms - grpc_ms for http_ms, grpc_ms in zip(times["http"], times["grpc"], strict=True)]
    goal = "<= 5" if name == "ttft" else "<= 10"
    note = f"toy, median of {PAIRS} pairs in turn; gRPC {median(times['grpc']):.1f}, HTTP {median(times['http']):.1f}"
    report.add(Figure(f"{name}_over_grpc_ms", median(over), "ms", goal, note))


async def _sound_cpu(report: Report, stack: Stack, address: str, pid: int) -> None:
    """Measure the CPU time of the gateway for streamed sound, divided by the CPU time of the router."""
    router = next(child.pid for child in stack.children if child.name == "router")
    clients = [await Http.to(address) for _ in range(SOUNDS)]
    meter, audio_s = CpuMeter([pid, router]), 0.0
    fields = {"model": "smol", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": SIX_SECONDS_TOKENS, **SPEAKS}
    for number in range(SOUND_ROUNDS):
        for times in await asyncio.gather(*(client.ask(seed=number, **fields) for client in clients)):
            audio_s += times.audio_s
    by_gateway, by_router = meter.measure_s()
    for client in clients:
        await client.close()
    if not audio_s:
        raise RuntimeError("no sound came")
    note = f"smol, {audio_s:.0f} s of sound by {SOUNDS} at once; ms a second: gateway {1e3 * by_gateway / audio_s:.2f}, router"
    note = f"{note} {1e3 * by_router / audio_s:.2f}"
    report.add(Figure("sound_cpu_over_router", by_gateway / by_router, "x", "<= 1.5", note))


async def _idle(report: Report, stack: Stack, pid: int) -> None:
    """Count the wake-ups of the gateway without visitors. pid: its process id."""
    router = next(child.pid for child in stack.children if child.name == "router")
    await asyncio.sleep(SETTLE_S)
    before, meter = [wakeups(each) for each in (pid, router)], CpuMeter([pid])
    await asyncio.sleep(IDLE_S)
    by_gateway, by_router = [(wakeups(each) - was) / IDLE_S for each, was in zip((pid, router), before, strict=True)]
    cpu_text = f"{1e3 * meter.measure_s()[0] / IDLE_S:.1f} ms of CPU a second"
    note = f"of all threads, in {IDLE_S:g} s without a visitor; {cpu_text}; the router beside it: {by_router:.1f}"
    report.add(
        Figure("idle_wakeups", by_gateway, "a second", "", note),
        Figure("peak_memory", peak_bytes(pid) / 2**20, "MiB", "", "after all of this"),
    )


async def _measure_streams(report: Report, stack: Stack, address: str, pid: int) -> None:
    """Measure STREAMS streams at once: those that were not complete, and the gaps between pieces."""
    router = next(child.pid for child in stack.children if child.name == "router")
    clients = [await Http.to(address) for _ in range(STREAMS)]
    meter = CpuMeter([pid, router])
    question = {"model": "toy", "messages": [{"role": "user", "content": "count"}], "max_tokens": STREAM_TOKENS, "seed": 1}
    results = await asyncio.gather(*(client.ask(**question) for client in clients), return_exceptions=True)
    cpu_s = meter.measure_s()
    for client in clients:
        await client.close()
    streams = [result for result in results if isinstance(result, StreamTimes) and result.is_whole]
    text = max((stream.text for stream in streams), key=len, default="")
    dropped = STREAMS - sum(stream.text == text for stream in streams)
    pieces = STREAMS * STREAM_TOKENS
    cpu_note = f"us a piece: gateway {1e6 * cpu_s[0] / pieces:.0f}, router {1e6 * cpu_s[1] / pieces:.0f}"
    gaps = [gap for stream in streams for gap in stream.gaps_s[2:-1]]  # Without those before the pieces and before the end.
    note = f"{STREAMS} streams of the toy at once, {1 / STREAM_INTERVAL_S:g} pieces of text a second each; {cpu_note}"
    report.add(
        Figure("streams_dropped", dropped, "of 200", "<= 0", note),
        Figure(
            "streams_gap_p99",
            1e3 * percentile(gaps, 99),
            "ms",
            "",
            f"between two pieces, which are made {1e3 * STREAM_INTERVAL_S:g} ms apart",
        ),
    )


async def _page(report: Report, address: str) -> None:
    """Measure in Chromium the time from the arrival of the first sound in the page to the moment at which its worklet plays it."""
    if CHROMIUM is None:
        print("not measured: the page, which needs Debian's chromium", file=sys.stderr)
        return
    over_ms = []
    async with browser() as context:
        page = (await opened(context, f"http://{address}")).page
        for seed in range(WARM_UPS + PAGE_ROUNDS):
            await page.evaluate("delete document.querySelector('#stage').dataset.begunS")
            await ask(page, QUESTION, seed)
            dataset = await page.locator('#stage[data-begun-s]:not([data-begun-s="null"])').evaluate("(stage) => ({...stage.dataset})")
            over_ms.append(1e3 * (float(dataset["begunS"]) - float(dataset["cameS"]) - float(dataset["prebufferS"])))
            await page.keyboard.press("Escape")
            await page.locator("#send:enabled").wait_for()
    over_ms = over_ms[WARM_UPS:]
    note = f"toy, median of {PAGE_ROUNDS}, the longest {max(over_ms):.0f}; from the first sound in the page to its playing"
    report.add(Figure("page_sound_over_prebuffer_ms", median(over_ms), "ms", "<= 150", f"{note}, less {1e3 * PREBUFFER_S:g} ms as told"))


if __name__ == "__main__":
    sys.exit(run("gateway", __doc__, {"default model": _default_model, "toy": _toy}))
