"""Choosing a voice, and listing the voices in words for a user who named one that is not there."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from omnistage.models.interface import BadRequest


def those_there_are(voices: Sequence[str]) -> str:
    """The voices in words, without a full stop; the words begin a sentence or follow a semicolon."""
    if not voices:
        return "there are no voices to choose from"
    *others, last = voices
    return f"the voices are {', '.join(others)} and {last}" if others else f"the only voice is {last}"


def choose_voice(voices: Collection[str], name: str, field: str) -> str:
    """The name of the requested voice; capitals do not matter. name: empty: the first voice. field: for the error. Raises BadRequest."""
    if not name:
        return next(iter(voices))
    # The exact name goes first: a checkpoint may have two voices whose names differ only in capitals.
    found = name if name in voices else next((voice for voice in voices if voice.lower() == name.lower()), None)
    if found is None:
        raise BadRequest(field, f"there is no voice {name[:64]!r}; {those_there_are(list(voices))}")
    return found
