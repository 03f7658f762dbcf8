"""The plan of a run: which disturbance hits which process, and when. It is a function of the seed alone."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

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
