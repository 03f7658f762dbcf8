"""The overhead of the chain: toy stages, which compute nothing, and a router in four processes; 120-byte audio chunks, one token a message.
A token gives one row and two frames and so, with one frame a chunk, two audio messages. Time stamps of emission travel in the rows, codes
and samples themselves; every process reads the same monotonic clock."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field

import numpy as np

from benchmarks.bare_grpc import RELAYS, floor
from benchmarks.figures import CpuMeter, Figure, Report, median, percentile, run
from omnistage.cli.stack.layout import Layout, PipelineLayout, ServerOptions, StageLayout
from omnistage.cli.stack.stack import Stack
from omnistage.client.routers import INSECURE
from omnistage.models.toy import formulas
from omnistage.v1 import omni_pb2, omni_pb2_grpc, stage_pb2

INTERVAL_S = 0.02
RELAY_INTERVAL_S = 0.005
CHUNK_SAMPLES = 60
IDLE_TOKENS = 500


@dataclass
class Latencies:
    """Seconds from the stamp of Code2Wav or the Thinker to the client's read, for each audio message."""

    code2wav: list[float] = field(default_factory=list)
    thinker: list[float] = field(default_factory=list)


def layout() -> Layout:
    thinker = {"stamp": True, "max_chunk": 1, "interval_s": INTERVAL_S}
    others = {"stamp": True, "max_chunk": 1}
    stages = [
        StageLayout("thinker", "toy", options=thinker),
        StageLayout("talker", "toy", options=others),
        StageLayout("code2wav", "toy", options=others),
    ]
    return Layout([PipelineLayout("toy", "toy", stages)], ServerOptions(max_sessions=1024, client_share=1))


async def ask(stub: omni_pb2_grpc.OmniServiceAsyncStub, tokens: int, into: Latencies, *, stamped: bool = True) -> None:
    """Ask for an answer of `tokens` tokens and add its messages to `into`. stamped: whether the samples hold time stamps."""
    message = stage_pb2.Message(role="user", parts=[stage_pb2.Part(text="count")])
    thinker = stage_pb2.ThinkerParams(messages=[message], max_tokens=tokens, ignore_eos=True)
    async for event in stub.Generate(omni_pb2.GenerateRequest(seed=1, thinker=thinker), timeout=120):
        now_s = time.monotonic()
        if not event.HasField("chunk"):
            continue
        if stamped and event.chunk.HasField("audio") and event.chunk.count:
            limbs = np.frombuffer(event.chunk.audio.data, "<i2", 2 * formulas.LIMBS)
            into.thinker.append(now_s - formulas.stamped_at(limbs[: formulas.LIMBS]))
            into.code2wav.append(now_s - formulas.stamped_at(limbs[formulas.LIMBS :]))


async def measure(report: Report) -> None:
    """Measure the chain of toys with one session."""
    stack = Stack(layout())
    await stack.start()
    try:
        async with INSECURE.channel(stack.address) as channel:
            stub = omni_pb2_grpc.OmniServiceStub(channel)
            await ask(stub, 50, Latencies())  # warm-up
            report.add(*await _idle(stub))
    finally:
        await stack.stop()


async def _idle(stub: omni_pb2_grpc.OmniServiceAsyncStub) -> list[Figure]:
    """The latencies of one session, and their ratio to bare gRPC."""
    latencies = Latencies()
    await ask(stub, IDLE_TOKENS, latencies)
    note = f"one session, {IDLE_TOKENS} tokens at {1 / INTERVAL_S:.0f} a second"
    # A token is two audio messages.
    bare = await floor(2 * IDLE_TOKENS, burst=2, interval_s=INTERVAL_S)
    over_bare = median(latencies.code2wav) / bare.latency_s
    return [
        Figure("code2wav_emit_to_client_p50", 1e3 * median(latencies.code2wav), "ms", "<= 1.5", note),
        Figure("code2wav_emit_to_client_p99", 1e3 * percentile(latencies.code2wav, 99), "ms", "", note),
        Figure("bare_grpc_to_client_p50", 1e3 * bare.latency_s, "ms", "", f"{RELAYS} relays of bytes, nothing but gRPC, paced alike"),
        Figure("code2wav_emit_to_client_over_bare_grpc", over_bare, "x", "", "medians of the same run"),
        Figure("thinker_emit_to_client_p50", 1e3 * median(latencies.thinker), "ms", "<= 3", note),
        Figure("thinker_emit_to_client_p99", 1e3 * percentile(latencies.thinker, 99), "ms", "", note),
    ]


async def relaying(report: Report) -> None:
    """Measure the CPU time that a process spends to pass one message on: Talker, Thinker and router only relay the chunks of one token."""
    for name, interval_s, chunks in (("paced", RELAY_INTERVAL_S, 1000), ("streaming", 0.0, 10000)):
        sound = {"samples_per_frame": CHUNK_SAMPLES * chunks // formulas.FRAMES_PER_ROW, "chunk_samples": CHUNK_SAMPLES, "max_chunk": 1}
        stages = [StageLayout(kind, "toy", options=sound) for kind in ("thinker", "talker")]
        stages.append(StageLayout("code2wav", "toy", options={**sound, "interval_s": interval_s}))
        stack = Stack(Layout([PipelineLayout("toy", "toy", stages)]))
        await stack.start()
        try:
            async with INSECURE.channel(stack.address) as channel:
                stub = omni_pb2_grpc.OmniServiceStub(channel)
                meter = CpuMeter([child.pid for child in stack.children])
                await ask(stub, 1, Latencies(), stamped=False)
                cpu_s = dict(zip((child.name for child in stack.children), meter.measure_s(), strict=True))
        finally:
            await stack.stop()
        bare = await floor(chunks, burst=1, interval_s=interval_s)
        cost = median([1e6 * cpu_s[process] / chunks for process in ("thinker", "talker", "router")])
        note = ", ".join(f"{process} {1e6 * cpu_s[process] / chunks:.0f}" for process in ("thinker", "talker", "router"))
        note = f"one receive and one send; {chunks} audio chunks of 120 bytes; {note}"
        report.add(Figure(f"cpu_per_relay_{name}", cost, "us", "<= 120", note))
        report.add(Figure(f"cpu_per_relay_{name}_bare_grpc", 1e6 * bare.relay_cpu_s, "us", "", "bytes, nothing but gRPC"))
        report.add(Figure(f"cpu_per_relay_{name}_over_bare_grpc", cost / (1e6 * bare.relay_cpu_s), "x", "", "medians of the same run"))


if __name__ == "__main__":
    sys.exit(run("relay", __doc__, {"chain of toys": measure, "relays": relaying}))
