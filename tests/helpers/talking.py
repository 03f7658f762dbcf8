"""A person who talks to `omnistage chat` on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from helpers.terminal import Terminal

CTRL_D, ENTER, ALT_ENTER = b"\x04", b"\r", b"\x1b\r"
PROMPT = "\x1b[?2004h"
"""A terminal is told that pasted text is welcome when the prompt is there."""
PASTE, PASTED = b"\x1b[200~", b"\x1b[201~"
"""Around what is pasted."""


def alone_here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing plays, and there was no conversation before; returns the folder where one is kept."""
    monkeypatch.setenv("OMNISTAGE_PLAYER", "none")
    monkeypatch.setenv("OMNISTAGE_STATE", str(folder / "state"))
    return folder / "state"


def entry(text: str | bytes, shown: str = "ttft") -> tuple[tuple[str, bytes], tuple[str, bytes]]:
    """Two steps: a line is typed at the prompt, and something is shown then."""
    return (PROMPT, (text.encode() if isinstance(text, str) else text) + ENTER), (shown, b"")


END = ((PROMPT, CTRL_D),)
"""The last step."""


class Person:
    """Types one thing after the other, each when what it waits for is on the terminal, behind all that was waited for before."""

    def __init__(self, *steps: tuple[str, bytes]) -> None:
        """steps: what is to be seen, and the keys that are pressed then."""
        self._steps = list(steps)
        self._seen = 0

    def __call__(self, terminal: Terminal) -> None:
        while self._steps:
            awaited, keys = self._steps[0]
            at = terminal.written.find(awaited.encode(), self._seen)
            if at < 0:
                return
            self._seen = at + len(awaited.encode())
            self._steps.pop(0)
            terminal.press(keys)

    @property
    def is_done(self) -> bool:
        return not self._steps


def talk(
    address: str, *steps: tuple[str, bytes], words: Sequence[str] = (), exit_code: int = 0, size: tuple[int, int] = (200, 60)
) -> Terminal:
    """A conversation, to its end. size: columns and rows."""
    terminal, person = Terminal(*size), Person(*steps)
    code = terminal.run(("chat", "--address", address, *words), person)
    assert person.is_done, terminal.lines
    assert (code, b"Traceback" in terminal.written) == (exit_code, False), terminal.lines
    return terminal
