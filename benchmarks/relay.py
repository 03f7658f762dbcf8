"""The overhead of the chain: toy stages, which compute nothing, and a router in four processes; 120-byte audio chunks, one token a message.
A token gives one row and two frames and so, with one frame a chunk, two audio messages. Time stamps of emission travel in the rows, codes
and samples themselves; every process reads the same monotonic clock."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from benchmarks.bare_grpc import RELAYS, floor
from benchmarks.figures import Benchmark, CpuMeter, Figure, median, serving, toys
from omnistage.client.routers import INSECURE
from omnistage.models.toy import formulas
from omnistage.v1 import omni_pb2, omni_pb2_grpc, stage_pb2

INTERVAL_S = 0.02
RELAY_INTERVAL_S = 0.005
CHUNK_SAMPLES = 60
TOKENS = 500


@dataclass
class Latencies:
    """Seconds from the stamp of Code2Wav or the Thinker to the client's read, for each audio message."""

    code2wav: list[float] = field(default_factory=list)
    thinker: list[float] = field(default_factory=list)


async def ask(stub: omni_pb2_grpc.OmniServiceAsyncStub, tokens: int, into: Latencies | None = None) -> None:
    """Ask for an answer of `tokens` tokens. into: gets the latencies of its messages, if the samples hold time stamps."""
    message = stage_pb2.Message(role="user", parts=[stage_pb2.Part(text="count")])
    thinker = stage_pb2.ThinkerParams(messages=[message], max_tokens=tokens, ignore_eos=True)
    async for event in stub.Generate(omni_pb2.GenerateRequest(seed=1, thinker=thinker), timeout=120):
        now_s = time.monotonic()
        if into and event.HasField("chunk") and event.chunk.HasField("audio") and event.chunk.count:
            limbs = np.frombuffer(event.chunk.audio.data, "<i2", 2 * formulas.LIMBS)
            into.thinker.append(now_s - formulas.stamped_at(limbs[: formulas.LIMBS]))
            into.code2wav.append(now_s - formulas.stamped_at(limbs[formulas.LIMBS :]))


async def latency(benchmark: Benchmark) -> None:
    """Measure the latencies of one session of the chain of toys, and their ratio to bare gRPC."""
    latencies, tokens = Latencies(), benchmark.size(TOKENS, 20)
    layout = toys({"stamp": True, "max_chunk": 1}, thinker={"interval_s": INTERVAL_S})
    async with serving(layout) as stack, INSECURE.channel(stack.address) as channel:
        stub = omni_pb2_grpc.OmniServiceStub(channel)
        await ask(stub, 50)  # warm-up
        await ask(stub, tokens, latencies)
    # A token is two audio messages.
    bare = await floor(2 * tokens, burst=2, interval_s=INTERVAL_S)
    note = f"one session, {tokens} tokens at {1 / INTERVAL_S:.0f} a second"
    benchmark.add(
        Figure("code2wav_emit_to_client_p50", 1e3 * median(latencies.code2wav), "ms", "<= 1.5", note),
        Figure("bare_grpc_to_client_p50", 1e3 * bare.latency_s, "ms", "", f"{RELAYS} relays of bytes, nothing but gRPC, paced alike"),
        Figure("thinker_emit_to_client_p50", 1e3 * median(latencies.thinker), "ms", "<= 3", note),
    )


async def relays(benchmark: Benchmark) -> None:
    """Measure the CPU time that a process spends to pass one message on: Talker, Thinker and router only relay the chunks of one token."""
    for name, interval_s, count in (("paced", RELAY_INTERVAL_S, 1000), ("streaming", 0.0, 10000)):
        chunks = benchmark.size(count, 1000)
        sound = {"samples_per_frame": CHUNK_SAMPLES * chunks // formulas.FRAMES_PER_ROW, "chunk_samples": CHUNK_SAMPLES, "max_chunk": 1}
        async with serving(toys(sound, code2wav={"interval_s": interval_s})) as stack, INSECURE.channel(stack.address) as channel:
            meter = CpuMeter([child.pid for child in stack.children])
            await ask(omni_pb2_grpc.OmniServiceStub(channel), 1)
            cpu_us = {child.name: 1e6 * cpu_s / chunks for child, cpu_s in zip(stack.children, meter.measure_s(), strict=True)}
        bare_us = 1e6 * (await floor(chunks, burst=1, interval_s=interval_s)).relay_cpu_s
        costs_us = [cpu_us[process] for process in ("thinker", "talker", "router")]
        note = f"one receive and one send; {chunks} audio chunks of 120 bytes; Thinker, Talker, router {costs_us[0]:.0f}"
        note = f"{note}, {costs_us[1]:.0f}, {costs_us[2]:.0f}"
        benchmark.add(
            Figure(f"cpu_per_relay_{name}", median(costs_us), "us", "<= 120", note),
            Figure(f"cpu_per_relay_{name}_bare_grpc", bare_us, "us", "", "bytes, nothing but gRPC"),
            Figure(f"cpu_per_relay_{name}_over_bare_grpc", median(costs_us) / bare_us, "x", "<= 1.2", "medians of the same run"),
        )
