"""How fetching and loading report to people: errors, progress, and sizes in words."""

from __future__ import annotations

from typing import Literal, Protocol


class LoadError(ValueError):
    """A model cannot be loaded in the requested way. The text says why and what to do."""


class FetchError(LoadError):
    """A folder could not be fetched or built. The text says why and what to do."""


Unit = Literal["share", "bytes"]


class ShowProgress(Protocol):
    """Called again and again with the progress, from the thread that does the work."""

    def __call__(self, label: str, done: float, total: float | None = 1.0, unit: Unit = "share") -> None:
        """label: the work, in the same words each time. done: how much of `total` is done, both in `unit`. total: 1 for "share"; None: not
        known."""


def show_nothing(label: str, done: float, total: float | None = 1.0, unit: Unit = "share") -> None:
    """Shows nothing: for a caller that wants no progress."""


_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def bytes_told(size: int) -> str:
    """The text of a number of bytes, such as "1.5 GiB", with at most four digits below 10,000 GiB."""
    unit, name = next(((unit, name) for unit, name in _UNITS if size >= unit), (1, "B"))
    number = size / unit
    return f"{number:.4g} {name}" if number < 1000 else f"{number:.0f} {name}"
