"""The texts of the sounds of the last hour: a client names a sound by its id in place of the words."""

from __future__ import annotations

from omnistage.gateway.kept import ExpiringCache

TRANSCRIPTS_BYTES = 16 << 20
"""Most bytes of all texts."""

ENTRY_BYTES = 512
"""Bytes that an entry counts for beside its text: they bound the number of empty ones too."""


class Transcripts:
    """Keeps each text for the client that heard it."""

    def __init__(self) -> None:
        self._kept: ExpiringCache[tuple[str, str]] = ExpiringCache(TRANSCRIPTS_BYTES)

    def put(self, who: str, text: str, name: str = "") -> tuple[str, int]:
        """Keep a text. Returns its name, and until when it is kept, as Unix time. name: where the name had to be known before."""
        return self._kept.put((who, text), len(text.encode()) + ENTRY_BYTES, "audio_", name)

    def get(self, who: str, name: str) -> str | None:
        found = self._kept.get(name)
        return found[1] if found is not None and found[0] == who else None
