"""What a kind of stage is to its shell: a function from chunks to chunks that knows no neighbour."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from omnistage.host.watchdog import Watched
from omnistage.models.interface import Load, PortSpec
from omnistage.v1 import chunk_pb2, stage_pb2
from omnistage.wire.ports import Output

__all__ = ["Input", "InputPayload", "Kept", "Output", "StageLogic", "Start", "Timing", "Work"]

InputPayload = (
    chunk_pb2.TextChunk
    | chunk_pb2.CodeChunk
    | chunk_pb2.AudioChunk
    | chunk_pb2.ImageChunk
    | chunk_pb2.VideoChunk
    | chunk_pb2.MediaChunk
    | NDArray[np.generic]
)


@dataclass(frozen=True, slots=True)
class Input:
    """One piece of one input port. An array is a view into the sender's memory: valid until the next input is asked for."""

    port: str
    first: int
    count: int
    last: bool
    payload: InputPayload | None


MOST_UNSPOKEN, MOST_NOTES, NOTE_CHARACTERS = 64, 4, 200
"""Of characters that are told, of notes, and of characters of each; stated in stage.proto."""


@dataclass(slots=True)
class Timing:
    """What only the logic knows of a session. queued_s: waited before its first step. cached_tokens: found in the prefix cache.
    prompt_tokens: of the whole prompt; None: not known. audio_underruns, audio_starved_s: how often, and for how long in all, who plays the
    sound would have had nothing to play. unspoken, unspoken_runs: how many characters were not spoken, and the first of them. notes: for
    whoever asked. drew: whether another seed could have given another output; None: not known."""

    queued_s: float = 0.0
    cached_tokens: int = 0
    prompt_tokens: int | None = None
    audio_underruns: int = 0
    audio_starved_s: float = 0.0
    unspoken: int = 0
    unspoken_runs: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    drew: bool | None = None

    def not_spoken(self, runs: Iterable[str]) -> None:
        """These characters of the text have no sound."""
        for run in runs:
            if told := run[: max(MOST_UNSPOKEN - self.unspoken, 0)]:
                self.unspoken_runs.append(told)
            self.unspoken += len(run)

    def note(self, text: str) -> None:
        """Whoever asked may want to know this."""
        if len(self.notes) < MOST_NOTES and text[:NOTE_CHARACTERS] not in self.notes:
            self.notes.append(text[:NOTE_CHARACTERS])


@dataclass(frozen=True, slots=True)
class Kept:
    """Said by a logic among its outputs: after those before it, no replica of this revision needs items of input `port` before `first`."""

    port: str
    first: int


@dataclass(frozen=True, slots=True)
class Start:
    """Where the outputs of a session go on; all empty for a new one.

    first: item of each output port that is to come first, 0 for a port that is not named. ended: ports that ended already, or that nobody
    takes; nothing may come on them. history: all earlier output of the checkpoint ports of this stage, each port's as one chunk from 0 to
    where the port goes on; `Resumption` has seen to that.
    """

    first: Mapping[str, int] = field(default_factory=dict)
    ended: frozenset[str] = frozenset()
    history: Mapping[str, chunk_pb2.Chunk] = field(default_factory=dict)

    def wanted(self, ports: Iterable[PortSpec]) -> Mapping[str, int]:
        """The output ports that are still to come, and the first item of each."""
        return {port.name: self.first.get(port.name, 0) for port in ports if port.name not in self.ended}


Transform = Callable[[AsyncIterator[Input], Timing, Start], AsyncGenerator[Output | Kept, None]]


@dataclass(frozen=True, slots=True)
class Work:
    """A session that was checked and can begin.

    run: from its inputs to its outputs, which go on exactly where Start says. Closing the generator frees everything it holds.
    needs: first item needed of each input port, 0 for a port that is not named.
    """

    run: Transform
    needs: Mapping[str, int] = field(default_factory=dict)


class StageLogic(Protocol):
    """What a kind of stage does."""

    @property
    def description(self) -> stage_pb2.DescribeResponse:
        """Kind, model, revision, ports, voices and max_sessions; the shell fills the rest."""

    @property
    def threads(self) -> Sequence[Watched]:
        """Threads that compute; the process ends when one of them hangs, and others take over."""

    def load(self) -> Load: ...

    async def prepare(self, request: stage_pb2.Open, start: Start) -> Work:
        """Check `params`, and what `start` says of the ports that go to the caller, once and for all; raise StageError(BAD_REQUEST) with
        the field that is bad. What takes long is not done on the event loop.

        start: as in `Work.run`, but without the ports that go to the next hop only: it has not said yet where it needs them."""

    async def warm_up(self) -> None: ...

    async def close(self) -> None: ...
