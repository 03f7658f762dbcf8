"""Answers in the middle of which a stage is killed, stopped or hung, and the times of all that a listener hears. Stages are also killed
late in long answers, while other clients talk: does the gap grow with the length?"""

from __future__ import annotations

import asyncio
import json
import math
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING

from benchmarks.figures import Figure, median, percentile
from helpers.disturbed import holder, nothing_left, restore
from helpers.fleet import Fleet
from helpers.hanging import HANG, WAKE
from omnistage.client.events import AudioArrival, play
from omnistage.v1 import chunk_pb2, omni_pb2, omni_pb2_grpc

if TYPE_CHECKING:
    from omnistage.v1.omni_pb2_grpc import OmniServiceAsyncStub as Stub


START_BUFFER_S = 0.5
FREEZES = {signal.SIGSTOP: signal.SIGCONT, HANG: WAKE}
"""Signals that stop a process, or only its event loop, and for each the signal that wakes it."""
DEPENDENT_PORTS = {"thinker": ("text", "audio"), "talker": ("audio",), "code2wav": ("audio",)}
"""The ports whose output depends on a stage, by its kind."""


@dataclass(frozen=True, slots=True)
class LossCase:
    """A loss: `stop_signal` goes to the replica of `kind` that has the session, when `chunks` chunks of `port` have come."""

    kind: str
    stop_signal: signal.Signals
    port: str
    chunks: int


@dataclass(slots=True)
class MeasuredLoss:
    """A loss of the replica `victim` by a signal, with its times in seconds.

    From the signal until an event: closed_s: the kernel closed the connections of the process; infinite if the process is frozen.
    noticed_s: the caller's link saw the loss. reopened_s: the next replica was open and had all that it needs. resumed_s: the client read
    the first chunk made after that. sound_s: the first sound came that was made after the loss; if it exceeds held_s, a listener hears a
    gap.

    Durations: delay_s: by how much that first chunk came later than in the undisturbed answer. gap_s: silence of a player that starts with
    half a second of sound. held_s: sound that the player had not played yet at the signal."""

    case: LossCase
    victim: str
    closed_s: float
    noticed_s: float
    reopened_s: float
    resumed_s: float
    delay_s: float
    gap_s: float
    held_s: float
    sound_s: float

    @property
    def is_covered(self) -> bool:
        """Whether the sound held at the signal lasts until more comes."""
        return self.held_s >= self.sound_s


class NothingLost(RuntimeError):
    """The answer, or its port, was over before the loss could happen, or it did not need the replica any more."""


@dataclass
class Hearing:
    """An answer: its events, each with its arrival in time.monotonic() seconds."""

    events: list[tuple[float, omni_pb2.GenerateResponse]] = field(default_factory=list)

    def chunks(self, port: str) -> int:
        return sum(event.chunk.port == port for _, event in self.events if event.HasField("chunk"))

    @property
    def tokens(self) -> int:
        """How many tokens of text have come."""
        return sum(event.chunk.count for _, event in self.events if event.HasField("chunk") and event.chunk.port == "text")

    @property
    def sound(self) -> list[AudioArrival]:
        """When each piece of sound came, for a simulated player."""
        return [
            AudioArrival(at, event.chunk.first, event.chunk.count, event.chunk.audio.sample_rate_hz, True)
            for at, event in self.events
            if event.HasField("chunk") and event.chunk.HasField("audio") and event.chunk.count
        ]

    @property
    def content(self) -> tuple[str, bytes]:
        """The whole text, and the bytes of all samples."""
        chunks = [event.chunk for _, event in self.events if event.HasField("chunk")]
        return "".join(chunk.text.text for chunk in chunks), b"".join(chunk.audio.data for chunk in chunks)

    @property
    def gap_s(self) -> float:
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

    def sound_resumed(self) -> float:
        """The moment at which the first sound came that was made after the loss. Raises NothingLost."""
        went_on = False
        for at, event in self.events:
            went_on = went_on or event.HasField("failover")
            if went_on and event.HasField("chunk") and event.chunk.HasField("audio") and event.chunk.count:
                return at
        raise NothingLost("the sound was over before the loss was noticed")

    def resumed(self, kind: str) -> tuple[float, chunk_pb2.Chunk]:
        """The moment at which the first chunk came that was made after the loss of a stage, and the chunk. Raises NothingLost."""
        went_on = False
        for at, event in self.events:
            went_on = went_on or event.HasField("failover")
            if went_on and event.HasField("chunk") and event.chunk.port in DEPENDENT_PORTS[kind] and event.chunk.count:
                return at, event.chunk
        raise NothingLost(f"nothing came after the {kind} was lost")

    def arrival(self, port: str, *, item: int) -> float:
        """The moment at which an item of a port came."""
        chunks = ((at, event.chunk) for at, event in self.events if event.HasField("chunk") and event.chunk.port == port)
        return next(at for at, chunk in chunks if chunk.first <= item < chunk.first + chunk.count)


async def hear(stub: omni_pb2_grpc.OmniServiceAsyncStub, request: omni_pb2.GenerateRequest) -> Hearing:
    """Ask and return the whole answer, without a loss."""
    hearing = Hearing()
    async for event in stub.Generate(request, timeout=120):
        hearing.events.append((time.monotonic(), event))
    return hearing


async def lose(
    fleet: Fleet, stub: omni_pb2_grpc.OmniServiceAsyncStub, request: omni_pb2.GenerateRequest, case: LossCase, undisturbed: Hearing
) -> tuple[MeasuredLoss, Hearing]:
    """Ask, and cause the loss in the middle of the answer; returns its times and the answer. A stopped replica is woken at the end. Raises
    NothingLost. undisturbed: the same answer without a loss."""
    hearing = Hearing()
    signalling: asyncio.Task[tuple[str, float, float]] | None = None
    async for event in stub.Generate(request, timeout=120):
        hearing.events.append((time.monotonic(), event))
        if signalling is None and hearing.chunks(case.port) >= case.chunks:
            # In a task, so that the reading of the answer does not wait for the search of the replica.
            signalling = asyncio.create_task(_signal(fleet, case))
    if signalling is None:
        raise NothingLost(f"only {hearing.chunks(case.port)} chunks of {case.port} came")
    victim, at, closed_s = await signalling
    if case.stop_signal in FREEZES:
        fleet.signal(victim, FREEZES[case.stop_signal])
    resumed_at, chunk = hearing.resumed(case.kind)
    undisturbed_s = undisturbed.arrival(chunk.port, item=chunk.first) - undisturbed.events[0][0]
    delay_s = resumed_at - hearing.events[0][0] - undisturbed_s
    noticed_s, reopened_s = _logged_s(fleet, fleet.address(victim), time.time() - (time.monotonic() - at))
    loss = MeasuredLoss(
        case,
        victim,
        closed_s,
        noticed_s,
        reopened_s,
        resumed_at - at,
        delay_s,
        hearing.gap_s,
        hearing.held_s(at),
        hearing.sound_resumed() - at,
    )
    return loss, hearing


async def _signal(fleet: Fleet, case: LossCase) -> tuple[str, float, float]:
    """Send the signal to the replica that has the session; returns its name and the results of `strike`. Raises NothingLost."""
    try:
        victim = await holder(fleet, case.kind)
    except AssertionError as error:
        raise NothingLost(str(error)) from None
    return victim, *await strike(fleet, victim, case.stop_signal)


async def strike(fleet: Fleet, victim: str, stop_signal: signal.Signals) -> tuple[float, float]:
    """Send a signal to a replica; returns the moment of the signal (time.monotonic()) and the seconds until the connections of the replica
    closed, inf if the signal freezes it."""
    host, _, port = fleet.address(victim).rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        at = time.monotonic()
        fleet.signal(victim, stop_signal)
        if stop_signal in FREEZES:
            return at, math.inf
        with suppress(ConnectionError):
            while await reader.read(4096):
                pass
        return at, time.monotonic() - at
    finally:
        writer.close()


def _logged_s(fleet: Fleet, address: str, since: float) -> tuple[float, float]:
    """Seconds from `since`, in time.time(), to the first notice of the loss and to the first replacement. Raises NothingLost."""
    lost_s = min((at for at, entry in _entries(fleet, "link.lost") if at >= since and entry["address"] == address), default=math.nan)
    replaced_s = min((at for at, entry in _entries(fleet, "link.replaced") if at >= since and entry["lost"] == address), default=math.nan)
    if math.isnan(lost_s) or math.isnan(replaced_s):
        raise NothingLost(f"no link wrote of the loss of {address}")
    return lost_s - since, replaced_s - since


def _entries(fleet: Fleet, event: str) -> Iterator[tuple[float, dict[str, str]]]:
    """Yield the entries of an event in the logs of all servers, each with its time.time()."""
    for name in fleet.names:
        for line in fleet.server(name).log().splitlines():
            if f'"{event}"' in line:
                entry = json.loads(line)
                yield datetime.fromisoformat(entry["timestamp"]).timestamp(), entry


BYSTANDERS = 8
KILL_SHARE = 0.8
"""The share of the tokens that has come when the stage is killed."""

TIMEOUT_S = 300.0
ATTEMPTS = 3
"""How often to try to kill a stage before the answer is over; on a busy machine a try can be too late."""

Request = Callable[[int], omni_pb2.GenerateRequest]
"""Makes the request that has this number."""


async def measure(house: Fleet, stub: Stub, request: Request, kind: str, tokens: int, kills: int) -> Figure:
    """Measure how long a listener waits for the first chunk that was made after the loss of a stage. tokens: length of the answer."""
    undisturbed = await hear(stub, request(0))
    resumed = [1e3 * await _loss(house, stub, request, kind, tokens, undisturbed) for _ in range(kills)]
    note = f"{kills} kills, with {BYSTANDERS} others; p90 {percentile(resumed, 90):.0f}, longest {max(resumed):.0f}"
    return Figure(f"toy_{kind}_killed_in_{tokens}_tokens_first_resumed_chunk_p50", median(resumed), "ms", "<= 300", note)


async def _loss(house: Fleet, stub: Stub, request: Request, kind: str, tokens: int, undisturbed: Hearing) -> float:
    """Seconds from a kill to the first chunk made after it; tries again if the answer was over before."""
    for _ in range(ATTEMPTS - 1):
        try:
            return await _try(house, stub, request, kind, tokens, undisturbed)
        except NothingLost as error:
            print(f"once more: {error}", flush=True)
    return await _try(house, stub, request, kind, tokens, undisturbed)


async def _try(house: Fleet, stub: Stub, request: Request, kind: str, tokens: int, undisturbed: Hearing) -> float:
    """Try `_loss` once. Raises NothingLost if the answer was over before the kill."""
    try:
        hearing, at = await _ask_disturbed(house, stub, request, kind, tokens)
    finally:
        await restore(house, stub)
        await nothing_left(house)
    if hearing.content != undisturbed.content:
        raise RuntimeError(f"another answer of {tokens} tokens than without the loss of a {kind}")
    resumed_at, _ = hearing.resumed(kind)
    print(f"SIGKILL {kind} late in {tokens} tokens, ms: first chunk {1e3 * (resumed_at - at):.0f}", flush=True)
    return resumed_at - at


async def _ask_disturbed(house: Fleet, stub: Stub, request: Request, kind: str, tokens: int) -> tuple[Hearing, float]:
    """The answer, and the moment at which its stage was killed, in time.monotonic() seconds. Raises NothingLost."""
    hearing = Hearing()
    striking: asyncio.Task[tuple[float, float]] | None = None
    events = aiter(stub.Generate(request(0), timeout=TIMEOUT_S))
    hearing.events.append((time.monotonic(), await anext(events)))
    victim = await holder(house, kind)
    async with _company(stub, request) as talking:
        async for event in events:
            hearing.events.append((time.monotonic(), event))
            if striking is None and hearing.tokens >= KILL_SHARE * tokens and talking():
                # In a task, so that the reading of the answer goes on meanwhile.
                striking = asyncio.create_task(strike(house, victim, signal.SIGKILL))
    if striking is None:
        raise NothingLost(f"the answer of {tokens} tokens was over before the {kind} was killed")
    at, _ = await striking
    return hearing, at


@asynccontextmanager
async def _company(stub: Stub, request: Request) -> AsyncIterator[Callable[[], bool]]:
    """Let BYSTANDERS clients ask one question each, again and again; yields a function that says whether each has got an event."""
    hearing: set[int] = set()

    async def ask(number: int) -> None:
        before: tuple[str, bytes] | None = None
        while True:
            answer = Hearing()
            async for event in stub.Generate(request(number), timeout=TIMEOUT_S):
                answer.events.append((time.monotonic(), event))
                hearing.add(number)
            if before is not None and answer.content != before:
                raise RuntimeError(f"bystander {number} got another answer than before")
            before = answer.content

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(number)) for number in range(1, 1 + BYSTANDERS)]
        yield lambda: len(hearing) == BYSTANDERS
        for task in tasks:
            task.cancel()
