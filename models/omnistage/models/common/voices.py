"""Chooses a voice, and lists the voices in words for a user who named an unknown voice."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from omnistage.models.interface import BadRequest


def those_there_are(voices: Sequence[str]) -> str:
    """The voices in words, such as "the voices are A and B", without a capital or a full stop."""
    if not voices:
        return "there are no voices to choose from"
    *others, last = voices
    return f"the voices are {', '.join(others)} and {last}" if others else f"the only voice is {last}"


def choose_voice(voices: Collection[str], name: str, field: str) -> str:
    """The name of the requested voice among `voices`. name: capitals do not matter; empty: the first voice. field: of the request, for the
    error. Raises BadRequest."""
    if not name:
        return next(iter(voices))
    # The exact name wins, because a checkpoint may have two voices whose names differ only in capitals.
    choice = name if name in voices else next((voice for voice in voices if voice.lower() == name.lower()), None)
    if choice is None:
        raise BadRequest(field, f"there is no voice {name[:64]!r}; {those_there_are(list(voices))}")
    return choice
