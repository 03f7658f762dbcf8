"""Runs steps of an engine on the calling thread, to measure them without the engine's own thread, which is not started."""

from __future__ import annotations

from collections.abc import Sequence as Many

from omnistage.engine.engine import Engine
from omnistage.engine.memory import pages_for
from omnistage.engine.request import SequenceRequest
from omnistage.engine.scheduler import Run
from omnistage.engine.sequence import Sequence


def begin(engine: Engine, request: SequenceRequest, rows: int) -> Sequence:
    """Make a sequence with pages for `rows` rows; `end` gives the pages back."""
    sequence = Sequence(request)
    sequence.pages = [engine._pool.take() for _ in range(pages_for(rows))]
    engine._runner.follow(*engine._pool.changes())
    return sequence


def end(engine: Engine, sequence: Sequence) -> None:
    engine._pool.give_back(sequence.pages)


def run(engine: Engine, runs: Many[Run]) -> None:
    """Run one step; the caller is in inference mode."""
    engine._runner.run(runs)
