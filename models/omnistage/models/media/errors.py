"""The errors of a medium, and of the process that decodes it."""

from __future__ import annotations


class BadMedia(ValueError):
    """The medium cannot be used. The text says what is wrong with it and what to do, and names no field: the caller knows that."""


class NoRoom(BadMedia):
    """A medium has more tokens than its conversation has room for; another conversation may take it."""


class UnknownFormat(BadMedia):
    """A medium is in none of the formats that can be decoded for its kind."""


class DecoderFull(RuntimeError):
    """No more media may wait for a process: ask again later or elsewhere."""


class DecoderFailed(RuntimeError):
    """No process that decodes could be started or given the medium, or the machine was short of something. The text says why. The medium is
    not to blame: ask again later or elsewhere."""


class DecoderBroken(RuntimeError):
    """The system refused the decoding process something that this medium needs. The medium is not to blame; asking again is of no use."""
