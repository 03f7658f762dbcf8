"""The end of a request's time, and the error of a stream that ends: lost, or out of time."""

from __future__ import annotations

import time

from omnistage.wire.errors import LOST_HERE, Reason, StageError

LAST_S = 0.5
"""Seconds before the end of the request's time at which a silent replica without an alternative is given up, so that the caller learns
which stage was silent."""


class StreamLost(StageError):
    """The replica is gone, as this end of the stream saw: no Ended came and none will."""

    def __init__(self, stage: str, message: str) -> None:
        super().__init__("STAGE_LOST", message, metadata={"stage": stage})

    @property
    def meaning(self) -> Reason:
        return LOST_HERE


class Deadline:
    """The end of a request's time. It makes the error for a stream that ends, because a stream that ends at the deadline was not lost."""

    def __init__(self, at: float) -> None:
        """at: in time.monotonic() seconds."""
        self._at = at

    @property
    def remaining_s(self) -> float:
        return max(self._at - time.monotonic(), 0.0)

    @property
    def is_near(self) -> bool:
        """Whether so little time is left that the caller must now learn which stage the request waits for."""
        return self.remaining_s <= LAST_S

    def silence(self, stage: str, message: str) -> StageError:
        """The error of a stream whose replica was given up because it was silent: DEADLINE near the end of the time, else StreamLost."""
        if self.is_near:
            return StageError("DEADLINE", f"{message}, until the time of the request was over", metadata={"stage": stage})
        return self.loss(stage, message)

    def loss(self, stage: str, message: str) -> StageError:
        """The error of a stream that ended without Ended: DEADLINE at the end of the time, else StreamLost."""
        if self.remaining_s <= 0.01:
            return StageError("DEADLINE", "the deadline of the request has passed", metadata={"stage": stage})
        return StreamLost(stage, message)
