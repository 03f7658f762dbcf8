"""How far something is that takes a while."""

from __future__ import annotations

from typing import Literal, Protocol

Unit = Literal["share", "bytes"]


class Progress(Protocol):
    """Whoever wants to know is called again and again, from the thread that does the work."""

    def __call__(self, label: str, done: float, total: float | None = 1.0, unit: Unit = "share") -> None:
        """label: what is being done, in the same words each time. done: of `total`, both in `unit`; total None: nobody knows. Of a share
        the total is 1."""


def unseen(label: str, done: float, total: float | None = 1.0, unit: Unit = "share") -> None:
    """Progress that nobody looks at."""
