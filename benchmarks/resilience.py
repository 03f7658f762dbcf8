"""`python -m benchmarks.resilience`: how much a listener notices of a lost stage. It uses two replicas of every stage of the default model
and one router. In the middle of answers, stages are killed, stopped or hung. The part `lone` kills the only replica of a toy that takes
long to load, behind `omnistage serve`. It needs the folder of the tests on the path, for their processes that can be killed."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from itertools import cycle, islice
from typing import TYPE_CHECKING

from benchmarks.figures import QUESTIONS, Benchmark, Figure, arguments, median, run
from helpers.disturbed import found, holder, restore
from helpers.fleet import Fleet, fleet
from helpers.hanging import HANG, WAKE
from helpers.lone_stage import slow_chain, struck_answer
from helpers.servers import CHAIN, omni_stub
from helpers.serving import ServeProcess
from helpers.waiting import until
from omnistage.client import Omni
from omnistage.client.errors import OmniError
from omnistage.client.events import AudioArrival, play
from omnistage.v1 import chunk_pb2, omni_pb2, stage_pb2

if TYPE_CHECKING:
    from omnistage.v1.omni_pb2_grpc import OmniServiceAsyncStub as Stub

KILLS = 10
STOPS = 5
LONE_KILLS = 20
LOAD_S = 30.0
TOKENS = 40
MOMENTS = {"text": 20, "audio": 4}
"""How many chunks of this port have come when a stage is lost."""
START_BUFFER_S = 0.5
WAYS = {"frozen": (signal.SIGSTOP, signal.SIGCONT), "hung": (HANG, WAKE)}
"""Ways in which a process lives and does nothing: all of it, or only the thread of its event loop; the signals that stop and wake it."""
DEPENDENT_PORTS = {"thinker": ("text", "audio"), "talker": ("audio",), "code2wav": ("audio",)}
"""The ports whose output depends on a stage, by its kind."""
SETTLED = '"memory.huge_pages"'
"""In the log of a server, some seconds after its start."""


class NothingLost(RuntimeError):
    """The answer, or its port, was over before the loss could happen, or it did not need the replica any more."""


@dataclass
class Hearing:
    """An answer: its chunks, each with its arrival in time.monotonic() seconds. undisturbed: how many of them came before the router told
    of a loss."""

    chunks: list[tuple[float, chunk_pb2.Chunk]] = field(default_factory=list)
    undisturbed: int | None = None

    def take(self, event: omni_pb2.GenerateResponse) -> None:
        """Note an event that has just come."""
        if event.HasField("chunk"):
            self.chunks.append((time.monotonic(), event.chunk))
        elif event.HasField("failover") and self.undisturbed is None:
            self.undisturbed = len(self.chunks)

    def count(self, port: str) -> int:
        return sum(chunk.port == port for _, chunk in self.chunks)

    @property
    def content(self) -> tuple[str, bytes]:
        """The whole text, and the bytes of all samples."""
        chunks = [chunk for _, chunk in self.chunks]
        return "".join(chunk.text.text for chunk in chunks), b"".join(chunk.audio.data for chunk in chunks)

    @property
    def sound(self) -> list[AudioArrival]:
        """When each piece of sound came, for a simulated player."""
        pieces = [(at, chunk) for at, chunk in self.chunks if chunk.HasField("audio") and chunk.count]
        return [AudioArrival(at, chunk.first, chunk.count, chunk.audio.sample_rate_hz, True) for at, chunk in pieces]

    @property
    def gap_s(self) -> float:
        """Seconds of silence of a player that starts with START_BUFFER_S of sound."""
        return sum(chunk.gap_s for chunk in play(self.sound, START_BUFFER_S))

    def held_s(self, at: float) -> float:
        """Seconds of sound that had come at the moment `at` and were not played yet."""
        chunk_count = sum(chunk.arrival_s <= at for chunk in self.sound)
        if not chunk_count:
            return 0.0
        played = play(self.sound, START_BUFFER_S)
        if at < played[0].start_s:
            return sum(chunk.duration_s for chunk in played[:chunk_count])
        return max(played[chunk_count - 1].end_s - at, 0.0)

    def resumed_at(self, *ports: str) -> float:
        """The moment at which the first chunk of these ports came that was made after the loss. Raises NothingLost."""
        for at, chunk in self.chunks[self.undisturbed :] if self.undisturbed is not None else ():
            if chunk.port in ports and chunk.count:
                return at
        raise NothingLost(f"nothing of {' and '.join(ports)} came after the loss")


@dataclass(frozen=True, slots=True)
class MeasuredLoss:
    """The loss of a replica. Seconds from the signal: noticed_s: until the caller's link saw the loss. resumed_s: until the client read the
    first chunk made after it. gap_s: silence that a listener hears. is_covered: the sound that the player held at the signal lasted until
    more came."""

    noticed_s: float
    resumed_s: float
    gap_s: float
    is_covered: bool


def request(number: int) -> omni_pb2.GenerateRequest:
    message = stage_pb2.Message(role="user", parts=[stage_pb2.Part(text=QUESTIONS[number % len(QUESTIONS)])])
    thinker = stage_pb2.ThinkerParams(messages=[message], max_tokens=TOKENS, ignore_eos=True)
    return omni_pb2.GenerateRequest(seed=number, thinker=thinker)


async def hear(stub: Stub, number: int) -> Hearing:
    """The whole answer to the request with this number, without a loss."""
    hearing = Hearing()
    async for event in stub.Generate(request(number), timeout=120):
        hearing.take(event)
    return hearing


async def lose(
    house: Fleet, stub: Stub, kind: str, stop_signal: int, port: str, wake_signal: int | None = None, *, number: int
) -> MeasuredLoss:
    """Send `stop_signal` to the replica of `kind` that has the session, as soon as enough chunks of `port` have come, and measure the loss.
    wake_signal: sent to it at the end. Raises NothingLost, and RuntimeError if the answer differs from the same without a loss. Afterwards
    all replicas run again."""
    # A replica that began a moment ago dies more slowly than others: its memory is not yet in huge pages.
    await until(lambda: all(SETTLED in house.server(name).log() for name in house.of(kind)))
    undisturbed, hearing = await hear(stub, number), Hearing()
    signalling: asyncio.Task[tuple[str, float]] | None = None
    try:
        async for event in stub.Generate(request(number), timeout=120):
            hearing.take(event)
            if signalling is None and hearing.count(port) >= MOMENTS[port]:
                # In a task, so that the reading of the answer does not wait for the search of the replica.
                signalling = asyncio.create_task(_strike(house, kind, stop_signal))
        if signalling is None:
            raise NothingLost(f"only {hearing.count(port)} chunks of {port} came")
        victim, at = await signalling
        if wake_signal is not None:
            house.signal(victim, wake_signal)
        noticed_s = _noticed_s(house, house.address(victim), time.time() - (time.monotonic() - at))
    finally:
        await restore(house, stub)
    if hearing.content != undisturbed.content:
        raise RuntimeError(f"another answer than without the loss of {victim}, seed {number}")
    resumed_s, sound_s = hearing.resumed_at(*DEPENDENT_PORTS[kind]) - at, hearing.resumed_at("audio") - at
    loss = MeasuredLoss(noticed_s, resumed_s, hearing.gap_s, hearing.held_s(at) >= sound_s)
    print(f"{signal.Signals(stop_signal).name} {victim} in {port}: {loss}", flush=True)
    return loss


async def _strike(house: Fleet, kind: str, stop_signal: int) -> tuple[str, float]:
    """Send the signal to the replica that has the session; returns its name and the moment. Raises NothingLost."""
    try:
        victim = await holder(house, kind)
    except AssertionError as error:
        raise NothingLost(str(error)) from None
    at = time.monotonic()
    house.signal(victim, stop_signal)
    return victim, at


def _noticed_s(house: Fleet, address: str, since: float) -> float:
    """Seconds from `since`, in time.time(), to the first line in a log that tells of the loss. Raises NothingLost."""
    moments = [at for name in house.names for at in _losses_in(house.server(name).log(), address) if at >= since]
    if not moments:
        raise NothingLost(f"no link wrote of the loss of {address}")
    return min(moments) - since


def _losses_in(log: str, address: str) -> Iterator[float]:
    """Yield the moments, in time.time(), at which a log tells of the loss of `address`."""
    entries = (json.loads(line) for line in log.splitlines() if '"link.lost"' in line)
    return (datetime.fromisoformat(entry["timestamp"]).timestamp() for entry in entries if entry["address"] == address)


async def measure(kind: str, benchmark: Benchmark) -> None:
    """Measure losses of one kind of stage: kills in mid text and in mid speech, and processes that live and do nothing."""
    kills, stops = benchmark.size((KILLS, STOPS), (1, 1))
    (logs := benchmark.folder / kind).mkdir()
    with fleet(logs, pipeline="smol", family="smol", stage_args=("--log-level", "debug"), can_hang=True) as house:
        async with omni_stub(house.address("router")) as stub:
            await found(house, stub)
            for number in range(4):  # warm-up
                await hear(stub, number)
            noticed_ms = list[float]()
            for port in MOMENTS:
                with benchmark.part(f"{kind} killed in {port}"):
                    losses = [await lose(house, stub, kind, signal.SIGKILL, port, number=n) for n in range(kills)]
                    benchmark.add(*_kill_figures(f"smol_{kind}_killed_in_mid_{'text' if port == 'text' else 'speech'}", losses))
                    noticed_ms += [1e3 * loss.noticed_s for loss in losses]
            with benchmark.part(f"{kind} noticed"):
                note = f"{len(noticed_ms)} kills; to the caller's log line; longest {max(noticed_ms):.0f}"
                benchmark.add(Figure(f"smol_{kind}_killed_to_noticed_p50", median(noticed_ms), "ms", "<= 50", note))
            for way, (stop, wake) in WAYS.items():
                with benchmark.part(f"{kind} {way}"):
                    ports = list(islice(cycle(MOMENTS), stops))
                    losses = [await lose(house, stub, kind, stop, port, wake, number=n) for n, port in enumerate(ports)]
                    benchmark.add(*_freeze_figures(f"smol_{kind}_{way}", losses))


def _kill_figures(name: str, losses: Sequence[MeasuredLoss]) -> Iterator[Figure]:
    """Yield the figures of kills of one kind at one moment: the wait for the next chunk, and the silence."""
    resumed_ms, gaps_ms = (
        [1e3 * seconds for seconds in times] for times in zip(*((one.resumed_s, one.gap_s) for one in losses), strict=True)
    )
    note = f"{len(losses)} kills; longest {max(resumed_ms):.0f}"
    gap_note = f"largest of {len(gaps_ms)}, {sum(gap > 0 for gap in gaps_ms)} above 0; a player that starts with 0.5 s of sound"
    yield Figure(f"{name}_first_resumed_chunk_p50", median(resumed_ms), "ms", "<= 300", note)
    yield Figure(f"{name}_audible_gap", max(gaps_ms), "ms", "<= 0", gap_note)


def _freeze_figures(name: str, losses: Sequence[MeasuredLoss]) -> Iterator[Figure]:
    """Yield the figures of processes of one kind that lived and did nothing."""
    noticed_s = [loss.noticed_s for loss in losses]
    note = f"{len(losses)} times; median {median(noticed_s):.2f}"
    covered = 100 * sum(loss.is_covered for loss in losses) / len(losses)
    yield Figure(f"{name}_to_left_max", max(noticed_s), "s", "<= 1.5", note)
    yield Figure(f"{name}_covered", covered, "%", "", "of them, by the sound that was held")


async def measure_lone(benchmark: Benchmark) -> None:
    """Count the answers that are whole although the only process of one of their stages was killed and took LOAD_S to load again."""
    kills, load_s = benchmark.size((LONE_KILLS, LOAD_S), (1, 0.0))
    whole_count, waits_s = 0, list[float]()
    with ServeProcess(slow_chain(benchmark.folder, load_s), "--no-http") as server, Omni(address=server.address()) as omni:
        for number, kind in enumerate(islice(cycle(CHAIN), kills)):
            try:
                answer = struck_answer(omni, kind, number)
            except OmniError as error:
                print(f"{kind} killed: {type(error).__name__}: {error}", flush=True)
            else:
                whole_count += answer.is_whole
                waits_s += [failover.pause_s for failover in answer.failovers]
            server.report("restarted ")
        server.terminate()
    note = f"of {kills} kills of the only process of a stage; it loads {load_s:g} s; longest wait {max(waits_s, default=0.0):.1f} s"
    benchmark.add(Figure("toy_lone_stage_killed_whole", 100 * whole_count / kills, "%", ">= 100", note))


if __name__ == "__main__":
    parts = {kind: partial(measure, kind) for kind in CHAIN}
    sys.exit(run("resilience", arguments(__doc__).parse_args(), {**parts, "lone": measure_lone}))
