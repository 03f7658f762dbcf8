"""Keeps the texts of the sounds of the last hour, because in a conversation a client may send the id of a sound in place of its text."""

from __future__ import annotations

from omnistage.gateway.door import Visitor
from omnistage.gateway.kept import ExpiringCache

TRANSCRIPTS_BYTES = 16 << 20
"""The most bytes of all texts."""

ENTRY_BYTES = 512
"""Bytes that an entry counts for in addition to its text: they bound the number of empty texts too."""


class Transcripts:
    """Keeps each text for the client that heard it."""

    def __init__(self) -> None:
        self._kept: ExpiringCache[tuple[str, str]] = ExpiringCache(TRANSCRIPTS_BYTES)

    def put(self, visitor: Visitor, text: str, name: str = "") -> tuple[str, int]:
        """Keep a text for a client. Returns (its name, Unix time until which it is kept). name: its name if the client has it
        already; empty: make a new one."""
        return self._kept.put(visitor.host, (visitor.who, text), len(text.encode()) + ENTRY_BYTES, "audio_", name)

    def get(self, client: str, name: str) -> str | None:
        """The text of this name; None if it is gone, or was not kept for this client."""
        entry = self._kept.get(name)
        return entry[1] if entry is not None and entry[0] == client else None
