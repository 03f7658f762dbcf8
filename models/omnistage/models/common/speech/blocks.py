"""Decides how many codes of a speech are sent at once."""

from __future__ import annotations

from collections.abc import Sequence

from omnistage.engine.types import Item


class Blocks:
    """Groups the codes of a speech for sending: the first code goes out at once, later codes when their block is complete, and at the end
    the rest. Sound is made of whole blocks, so a code that is held back here delays no sound; and sending a message costs every process on
    the way more than the code in it. size: number of codes in a block. count: number of codes that were sent before, as in a resume."""

    def __init__(self, size: int, count: int) -> None:
        self._size, self._count = size, count
        self._waiting: list[Item] = []

    def take(self, codes: Sequence[Item], *, end: bool) -> Sequence[Item]:
        """Add codes that came, and return the codes to send now. end: no more codes come."""
        begins = self._count == 0
        self._count += len(codes)
        codes = [*self._waiting, *codes]
        rest_count = 0 if end or begins else min(self._count % self._size, len(codes))
        self._waiting = codes[len(codes) - rest_count :]
        return codes[: len(codes) - rest_count]
