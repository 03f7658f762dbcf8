"""What sounds of the last hour said: a client names them by id in place of the words."""

from __future__ import annotations

from omnistage.gateway.kept import Kept

TRANSCRIPTS_BYTES = 16 << 20
"""Of all of them."""

ENTRY_BYTES = 512
"""Of one, beside its text: also those that said nothing are so many at most."""


class Transcripts:
    """Each is kept for him to whom it was said."""

    def __init__(self) -> None:
        self._kept: Kept[tuple[str, str]] = Kept(TRANSCRIPTS_BYTES)

    def put(self, who: str, text: str, name: str = "") -> tuple[str, int]:
        """Keep it; its name, and until when, as Unix time. name: where it had to be known before."""
        return self._kept.put((who, text), len(text.encode()) + ENTRY_BYTES, "audio_", name)

    def get(self, who: str, name: str) -> str | None:
        found = self._kept.get(name)
        return found[1] if found is not None and found[0] == who else None
