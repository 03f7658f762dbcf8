"""The plan of a run, a function of the seed alone, and the processes under attack: replicas of every toy stage and a router, what is done
to them, and when they were disturbed."""

from __future__ import annotations

import asyncio
import math
import os
import random
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from chaos.questions import SAMPLES_PER_FRAME
from helpers.fleet import Fleet
from helpers.hanging import ENVIRONMENT, HANG, TRIM, WAKE
from helpers.servers import CLIENT_OPTIONS, NotReady, stage_flags

MEAN_PAUSE_S = 2.5
PAIRS = 0.2
"""Share of the disturbances that follow the one before within 50 ms: into the middle of a resume."""

SPARED_AFTER = 0.5
"""After this share of the time the first replica of every kind, and the router, are only stopped and continued, or hang: to say whether
memory grows, a process must live for long."""

FILL_S = 1.0
FILLED_AT = 0.3


class Action(Enum):
    """The disturbance of a victim."""

    KILL = "SIGKILL"
    TERMINATE = "SIGTERM"
    STOP = "SIGSTOP, then SIGCONT"
    HANG = "blocked event loop"
    FILL = "full shared memory"


WEIGHTS = {Action.KILL: 5, Action.TERMINATE: 3, Action.STOP: 3, Action.HANG: 3, Action.FILL: 1}
ENDS = (Action.KILL, Action.TERMINATE)


@dataclass(frozen=True, slots=True)
class Disturbance:
    """at_s: seconds after the begin. victim: name of a process; empty where there is none. lasts_s: of a stop, a hang or a full mount."""

    at_s: float
    action: Action
    victim: str
    lasts_s: float


def plan(seed: int, seconds: float, victims: Sequence[str], *, can_fill: bool) -> list[Disturbance]:
    """All that will happen, in order of time. Where the mount can be filled it is, however short the time."""
    disturbances = list(_disturbances(random.Random(seed), seconds, victims, can_fill))
    if can_fill:
        disturbances.append(Disturbance(FILLED_AT * seconds, Action.FILL, "", FILL_S))
    return sorted(disturbances, key=lambda disturbance: disturbance.at_s)


def _disturbances(rng: random.Random, seconds: float, victims: Sequence[str], can_fill: bool) -> Iterator[Disturbance]:
    at_s = 1.0
    while at_s < seconds:
        action = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        victim = rng.choice(victims)
        lasts_s = rng.uniform(0.2, 4.0)
        if action is Action.FILL:
            victim, lasts_s = "", FILL_S
        elif action in ENDS and at_s > SPARED_AFTER * seconds and is_spared(victim):
            action = Action.STOP
        if action is not Action.FILL or can_fill:
            yield Disturbance(at_s, action, victim, lasts_s)
        at_s += rng.uniform(0.001, 0.05) if rng.random() < PAIRS else rng.expovariate(1 / MEAN_PAUSE_S)


def is_spared(name: str) -> bool:
    """Whether the process ends no more in the second part."""
    return name == "router" or name.endswith("-0")


MOUNT = Path("/dev/shm")
MOUNT_BYTES = 256 << 20
REPLICAS = 2
OPTIONS = {"interval_s": 0.02, "width": 4096, "samples_per_frame": SAMPLES_PER_FRAME}
"""Rows of 16 KiB: a piece of four is above the limit for inline tensors."""


@dataclass(frozen=True, slots=True)
class HouseStage:
    """One stage of a pipeline, of which there are REPLICAS."""

    pipeline: str
    kind: str
    family: str = "toy"
    options: Mapping[str, object] = field(default_factory=lambda: OPTIONS)


STAGES = {
    "thinker": HouseStage("toy", "thinker"),
    "talker": HouseStage("toy", "talker"),
    "code2wav": HouseStage("toy", "code2wav"),
    "diffusion": HouseStage("toy-picture", "diffusion"),
    "looker": HouseStage("toy-media", "thinker", "toy-omni", {"interval_s": 0.02, "films": True, "microphone": True}),
}
"""By the name of their processes, which a number follows."""

PIPELINES = ("toy", "toy-picture", str(Path(__file__).with_name("toy-media.yaml")))

ARENA_BYTES = 128 << 20
STALL_LIMIT_S = 3.0

AFTERMATH_S = 3.0
"""Trouble lasts so much longer than the disturbance: keepalive finds a loss, a channel that was refused waits before it tries again."""


@dataclass
class Trouble:
    """begun, ended: time.monotonic() of the signal, and of the moment when the process served again."""

    begun: float
    ended: float = math.inf


@dataclass
class House:
    """All processes by name, and what was done to them."""

    fleet: Fleet
    troubles: dict[str, list[Trouble]] = field(default_factory=dict)
    done: dict[Action, int] = field(default_factory=lambda: dict.fromkeys(Action, 0))
    skipped: int = 0
    """Disturbances of a process that was down or stopped at the time, and those of a mount that was full."""
    most_segments: int = 0
    faults: list[str] = field(default_factory=list)
    """Processes that did not do what they must: end when told to, come back, or live."""

    @property
    def names(self) -> list[str]:
        return self.fleet.names

    @property
    def router(self) -> str:
        return self.fleet.address("router")

    def in_trouble(self, name: str, begun: float, ended: float) -> int:
        """How many troubles of the process touched this time."""
        return sum(one.begun <= ended and one.ended + AFTERMATH_S >= begun for one in self.troubles.get(name, []))

    def was_full(self, begun: float, ended: float) -> bool:
        """Whether the mount was, at any time of this."""
        return self.in_trouble("", begun, ended) > 0

    def any_stage_in_trouble(self, begun: float, ended: float) -> bool:
        return any(self.in_trouble(name, begun, ended) for name in self.names if name != "router")

    def is_up(self, name: str) -> bool:
        known = self.troubles.get(name)
        return not known or known[-1].ended < math.inf

    def pids(self) -> dict[str, int]:
        """The ids of the processes that are up now."""
        return {name: self.fleet.server(name).pid for name in self.names if self.is_up(name)}

    async def trim(self) -> None:
        """Have all of them give back what they have freed: how many large films they held at once is luck, and no growth."""
        for name in self.pids():
            self.fleet.signal(name, TRIM)
            async with grpc.aio.insecure_channel(self.fleet.address(name), options=CLIENT_OPTIONS) as channel:
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)

    async def disturb(self, what: Disturbance) -> None:
        """Do it, and mend it at once: a process that ended is started again at the same address."""
        if not self.is_up(what.victim):
            self.skipped += 1
            return
        trouble = Trouble(time.monotonic())
        self.troubles.setdefault(what.victim, []).append(trouble)
        self.done[what.action] += 1
        is_back = True
        match what.action:
            case Action.FILL:
                await self._fill(what.lasts_s)
            case Action.STOP:
                self.fleet.signal(what.victim, signal.SIGSTOP)
                await asyncio.sleep(what.lasts_s)
                self.fleet.signal(what.victim, signal.SIGCONT)
            case Action.HANG:
                self.fleet.signal(what.victim, HANG)
                await asyncio.sleep(what.lasts_s)
                self.fleet.signal(what.victim, WAKE)
            case Action.KILL:
                self.fleet.signal(what.victim, signal.SIGKILL)
                is_back = await asyncio.to_thread(self._start_again, what.victim, -signal.SIGKILL)
            case Action.TERMINATE:
                self.fleet.server(what.victim).terminate()
                is_back = await asyncio.to_thread(self._start_again, what.victim, 0)
        if is_back:
            trouble.ended = time.monotonic()

    async def _fill(self, lasts_s: float) -> None:
        path = MOUNT / "filler"
        try:
            await asyncio.to_thread(fill, path)
            await asyncio.sleep(lasts_s)
        finally:
            path.unlink(missing_ok=True)

    def _start_again(self, name: str, expected: int) -> bool:
        """Wait for the end of a process and start it again; whether it serves."""
        server = self.fleet.server(name)
        code = server.stop()
        if code != expected:
            self.faults.append(f"{name} ({server.pid}) ended with {code}, not {expected}")
        self.fleet.begin(name)
        try:
            self.fleet.ready(name)
        except NotReady as error:
            self.faults.append(f"{name} did not come back: {error}")
            return False
        return True

    def watch_lives(self) -> None:
        """Note processes that ended although nobody ended them."""
        for name, pid in self.pids().items():
            code = self.fleet.server(name).process.poll()
            if code is not None:
                self.faults.append(f"{name} ({pid}) ended by itself with {code}")
                self.troubles.setdefault(name, []).append(Trouble(time.monotonic()))


def fill(path: Path) -> None:
    """Take all that is left of a file system."""
    with path.open("wb") as filler:
        size, step = 0, MOUNT_BYTES
        while step >= 4096:
            try:
                os.posix_fallocate(filler.fileno(), size, step)
                size += step
            except OSError:
                step //= 2


@contextmanager
def house(log_folder: Path, spool: Path) -> Iterator[House]:
    """All of them serving. spool: where media are put aside that clients stream."""
    environment = {**ENVIRONMENT, "TMPDIR": str(spool)}
    with Fleet(log_folder) as fleet:
        for name, stage in STAGES.items():
            for number in range(REPLICAS):
                # One of two sends every tensor through shared memory, the other one large ones only.
                limit = ("--inline-limit", "0") if number % 2 == 0 else ()
                flags = [*stage_flags(stage.options, stage.family), "--arena-bytes", str(ARENA_BYTES), *limit]
                fleet.add(f"{name}-{number}", "helpers.hanging", f"omnistage.{stage.kind}", *flags, environment=environment)
        fleet.ready()
        kept = {name: STAGES[name.partition("-")[0]] for name in fleet.stages}
        stages = ",".join(f"{stage.pipeline}/{stage.kind}={fleet.address(name)}" for name, stage in kept.items())
        flags = ["--pipeline", ",".join(PIPELINES), "--stages", stages, "--grace", "3", "--stall-limit", str(STALL_LIMIT_S)]
        fleet.add("router", "helpers.hanging", "omnistage.router", *flags, environment=ENVIRONMENT)
        fleet.ready("router")
        yield House(fleet)
