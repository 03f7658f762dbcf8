"""Times and counts of one session, for its report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from omnistage.stage.logic import SessionTiming
from omnistage.v1 import stage_pb2
from omnistage.wire.durations import duration
from omnistage.wire.ports import Output


class Meter:
    """Measures one session from `opened` on. timing: figures from the logic."""

    def __init__(self, ports: Iterable[str], on_made: Callable[[str, int], None]) -> None:
        """ports: output ports of the stage. on_made: see SessionEnvironment."""
        self._opened_at = 0.0
        self._first_output_at = 0.0
        self._last_output_at = 0.0
        self._items = dict.fromkeys(ports, 0)
        self._on_made = on_made
        self.timing = SessionTiming()

    def opened(self) -> None:
        """Note that the session begins: Opened is about to be sent."""
        self._opened_at = self._last_output_at = time.monotonic()

    def made(self, output: Output) -> None:
        """Note that the logic made a piece of output."""
        self._last_output_at = time.monotonic()
        if not self._first_output_at:
            self._first_output_at = self._last_output_at
        self._items[output.port] += output.count
        self._on_made(output.port, output.count)

    @property
    def times(self) -> tuple[float, float, float]:
        """The times of Opened, of the first output and of the last one, in time.monotonic() seconds; 0 for a moment that has not come.
        Before the first output the third value is the time of Opened."""
        return self._opened_at, self._first_output_at, self._last_output_at

    @property
    def first_output_s(self) -> float | None:
        """Seconds from Opened to the first output; None if there was none."""
        return self._first_output_at - self._opened_at if self._first_output_at else None

    def report(self, kind: stage_pb2.StageKind, replica: str, input_items: Mapping[str, int], failovers: int) -> stage_pb2.Report:
        """The report of the session as of now. replica: address of this replica. failovers: how often the next hop was replaced."""
        first = self._first_output_at or self._last_output_at
        report = stage_pb2.Report(
            kind=kind,
            replica=replica,
            queued=duration(self.timing.queued_s),
            first_output=duration(first - self._opened_at),
            total=duration(self._last_output_at - self._opened_at),
            input_items=input_items,
            output_items=self._items,
            cached_tokens=self.timing.cached_tokens,
            prompt_tokens=self.timing.prompt_tokens,
            audio_underruns=self.timing.audio_underruns,
            audio_starved=duration(self.timing.audio_starved_s),
            failovers=failovers,
            unspoken=self.timing.unspoken,
            unspoken_words=" ".join(self.timing.unspoken_runs),
            notes=self.timing.notes,
        )
        if self.timing.drew is not None:
            report.drew = self.timing.drew
        return report
