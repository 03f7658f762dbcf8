"""The interface between a kind of stage and the server around it (the shell): it makes outputs from inputs and knows no other stage."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from omnistage.host.watchdog import Watched
from omnistage.models.interface import Load, PortSpec
from omnistage.v1 import chunk_pb2, stage_pb2
from omnistage.wire.chunks import Output

__all__ = ["Input", "InputPayload", "Kept", "Output", "SessionTiming", "StageLogic", "Start", "Work"]

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
    """One piece of one input port. first: number of its first item. count: how many items. last: the port ends with it. An array in
    `payload` is a view of the sender's memory: valid until the next input is requested."""

    port: str
    first: int
    count: int
    last: bool
    payload: InputPayload | None


MAX_UNSPOKEN_CHARACTERS, MAX_NOTES, NOTE_CHARACTERS = 64, 4, 200
"""How many unspoken characters a report may quote, how many notes it may have, and how many characters a note; see stage.proto."""


@dataclass(slots=True)
class SessionTiming:
    """Figures that only the logic knows of a session. queued_s: time that it waited before its first step. cached_tokens: tokens found in
    the prefix cache. prompt_tokens: tokens of the whole prompt; None: not known. audio_underruns: how often a listener had nothing to play.
    audio_starved_s: how long that lasted in all. unspoken: number of characters that were not spoken. unspoken_runs: the first of these
    characters. notes: texts for the client. drew: whether another seed could have given another output; None: not known."""

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
        """Count the characters of `runs`, which have no sound, and keep the first of them. A run is a text of neighbouring characters."""
        for run in runs:
            text = run[: max(MAX_UNSPOKEN_CHARACTERS - self.unspoken, 0)]
            if text:
                self.unspoken_runs.append(text)
            self.unspoken += len(run)

    def note(self, text: str) -> None:
        """Add a note that the client may want to know."""
        if len(self.notes) < MAX_NOTES and text[:NOTE_CHARACTERS] not in self.notes:
            self.notes.append(text[:NOTE_CHARACTERS])


@dataclass(frozen=True, slots=True)
class Kept:
    """Yielded by a logic among its outputs: once the outputs before it are sent, no replica of this revision needs items of input `port`
    with a number below `first`."""

    port: str
    first: int


@dataclass(frozen=True, slots=True)
class Start:
    """Where the outputs of a session go on; all fields are empty for a new session.

    first: number of the first item to come, by output port; 0 for a port that is not listed. ended_ports: ports that ended already or that
    nobody takes; nothing may come on them. history: all earlier output of this stage's checkpoint ports, one chunk for each port from item
    0 to where the port goes on; `Resumption` checks that.
    """

    first: Mapping[str, int] = field(default_factory=dict)
    ended_ports: frozenset[str] = frozenset()
    history: Mapping[str, chunk_pb2.Chunk] = field(default_factory=dict)

    def find_open_ports(self, ports: Iterable[PortSpec]) -> Mapping[str, int]:
        """The output ports that are still to come, and the first item of each."""
        return {port.name: self.first.get(port.name, 0) for port in ports if port.name not in self.ended_ports}


Transform = Callable[[AsyncIterator[Input], SessionTiming, Start], AsyncGenerator[Output | Kept, None]]


@dataclass(frozen=True, slots=True)
class Work:
    """A session that was checked and can begin.

    run: makes the outputs from the inputs; the outputs go on exactly where Start says. Closing the generator frees everything that it
    holds. needs: number of the first input item that the work needs, by port; 0 for a port that is not listed.
    """

    run: Transform
    needs: Mapping[str, int] = field(default_factory=dict)


class StageLogic(Protocol):
    """The work of a kind of stage."""

    @property
    def description(self) -> stage_pb2.DescribeResponse:
        """Kind, model, revision, ports, voices and max_sessions; the shell adds the other fields."""

    @property
    def threads(self) -> Sequence[Watched]:
        """Threads that compute; the process ends when one of them hangs, and other replicas take over."""

    def load(self) -> Load: ...

    async def prepare(self, request: stage_pb2.Open, start: Start) -> Work:
        """Check `params`, and the part of `start` for ports that go to the caller; nothing checks them later. Return the work. Raises
        StageError(BAD_REQUEST) with the bad field. Does long work on threads, not on the event loop.

        start: as in `Work.run`, but without the ports that go to the next hop alone, which has not said yet from which item it needs
        them."""

    async def warm_up(self) -> None: ...

    async def close(self) -> None: ...
