"""The number of codes of a speech that are sent at once."""

from __future__ import annotations

from collections.abc import Sequence

from omnistage.engine.types import Item


class Blocks:
    """The codes of a speech as they are sent: the first one at once, then all codes up to the end of a block, and at the end the rest.

    Sound is made of whole blocks, so it waits for no code that is held back here; and for every process that passes a message on, the
    message costs more than the code in it. size: codes of a block. count: codes that were sent before, as in a resume."""

    def __init__(self, size: int, count: int) -> None:
        self._size, self._count = size, count
        self._waiting: list[Item] = []

    def take(self, codes: Sequence[Item], *, end: bool) -> Sequence[Item]:
        """The codes to send now that these came. end: no more come."""
        begins = self._count == 0
        self._count += len(codes)
        codes = [*self._waiting, *codes]
        kept = 0 if end or begins else min(self._count % self._size, len(codes))
        self._waiting = codes[len(codes) - kept :]
        return codes[: len(codes) - kept]
