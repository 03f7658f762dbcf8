"""The errors of a medium, and of the process that decodes it."""

from __future__ import annotations


class BadMedia(ValueError):
    """The medium cannot be used. The text says what is wrong with it and what to do, and names no field: the caller knows that."""


class NoRoom(BadMedia):
    """A medium has more tokens than its conversation has room for; another conversation may take it."""


class UnknownFormat(BadMedia):
    """A medium is in none of the formats that are known for its kind."""


class DecoderFull(RuntimeError):
    """As many media wait as may wait: ask again later or elsewhere."""


class DecoderFailed(RuntimeError):
    """No process that decodes could be started, or nothing given to it, or the machine was short of something. The text says why; the
    medium is not to blame: ask again later or elsewhere."""


class DecoderBroken(RuntimeError):
    """The process that decodes was not let do what this medium needs. The medium is not to blame, and asking again is of no use."""


class NotTaken(DecoderFailed):
    """The process that was to decode a medium did not take it: it was stopped or killed before, maybe while it started. Another one can."""
