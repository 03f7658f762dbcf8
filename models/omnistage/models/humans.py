"""Writes numbers for humans."""

from __future__ import annotations

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def bytes_told(size: int) -> str:
    """The text of a number of bytes, such as "1.5 GiB", with at most four digits below 10,000 GiB."""
    unit, name = next(((unit, name) for unit, name in _UNITS if size >= unit), (1, "B"))
    number = size / unit
    return f"{number:.4g} {name}" if number < 1000 else f"{number:.0f} {name}"
