"""Types that the engine and its callers share: items, sampling parameters, reasons of an end, and the present work of a computing thread,
for the watchdog that looks for threads that hang. No torch here: the toy models use them too."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

SEEDS = 1 << 64
"""Number of seeds: each is from 0 to SEEDS - 1."""

Item = tuple[int, ...]
"""An element of a sequence: one token id, or the codes of one frame."""


class FinishReason(enum.Enum):
    """Why a run of tokens or codes ended."""

    STOP = "stop"
    LENGTH = "length"
    INTERRUPTED = "interrupted"
    REPETITION = "repetition"


class Unfit(ValueError):
    """The engine can never run this request. field: the bad field of SequenceRequest, or of a part of it, such as sampling.logit_bias.
    description: what is wrong with it."""

    def __init__(self, field: str, description: str) -> None:
        super().__init__(f"{field}: {description}")
        self.field = field
        self.description = description


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. The caller has checked the ranges of `omnistage.v1.Sampling`. temperature: 0: always the likeliest token.
    top_k: 0: off. The penalties are defined as in Transformers (repetition) and by OpenAI (presence, frequency)."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)


STEP_LIMIT_S = 60.0
"""Seconds that a step may take, without waits for a CPU, if a family sets no other limit: many times the longest step on a slow CPU."""


class Activity:
    """The present state of one computing thread: whether it has work (`busy`), and how many steps it has done (`steps`).

    name: of the thread, for the log. step_limit_s: a step of more seconds counts as hanging, without the time for which the thread waits
    for a CPU. thread_id: of the operating system; None before `enter`. helped: whether other threads, such as torch's pool, may compute for
    it while it sleeps. processes: ids of processes whose threads may compute for it too. `begin` and `rest` are called under the lock that
    guards the thread's queue; reading needs no lock."""

    helped = True

    def __init__(self, name: str, step_limit_s: float = STEP_LIMIT_S, processes: Sequence[int] = ()) -> None:
        self.name = name
        self.processes = processes
        self.step_limit_s = step_limit_s
        self.thread_id: int | None = None
        self.steps = 0
        self.busy = False
        self._tell: Callable[[], None] | None = None

    def on_busy(self, tell: Callable[[], None]) -> None:
        """Set the function that `begin` calls when the thread was without work. `tell` must not wait."""
        self._tell = tell

    def enter(self) -> None:
        """Called once by the thread itself: sets `thread_id`."""
        self.thread_id = threading.get_native_id()

    def begin(self) -> None:
        """Note that there is work; if there was none before, call the function of `on_busy`."""
        if not self.busy:
            self.busy = True
            if self._tell is not None:
                self._tell()

    def step(self) -> None:
        """Note that a step was done."""
        self.steps += 1

    def rest(self) -> None:
        """Note that there is no work."""
        self.busy = False
