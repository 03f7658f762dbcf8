"""Which voices there are, in words, for whoever named another one."""

from __future__ import annotations

from collections.abc import Sequence


def those_there_are(voices: Sequence[str]) -> str:
    """Without a full stop; it begins a sentence or follows a semicolon."""
    if not voices:
        return "there are no voices to choose from"
    *others, last = voices
    return f"the voices are {', '.join(others)} and {last}" if others else f"the only voice is {last}"
