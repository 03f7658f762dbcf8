"""Shows the progress of work that takes long."""

from __future__ import annotations

from typing import Literal, Protocol

Unit = Literal["share", "bytes"]


class ShowProgress(Protocol):
    """Called again and again with the progress, from the thread that does the work."""

    def __call__(self, label: str, done: float, total: float | None = 1.0, unit: Unit = "share") -> None:
        """label: the work, in the same words each time. done: how much of `total` is done, both in `unit`. total: 1 for "share"; None: not
        known."""


def show_nothing(label: str, done: float, total: float | None = 1.0, unit: Unit = "share") -> None:
    """Shows nothing: for a caller that wants no progress."""
