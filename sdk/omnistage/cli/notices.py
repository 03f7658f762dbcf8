"""Lines on stderr for people who watch a stack. The stack goes on if they cannot be written."""

from __future__ import annotations

import re
from contextlib import suppress

from rich.cells import cell_len
from rich.text import Text

from omnistage.cli.console import Console


class Notices(Console):
    """Prints to stderr, one line a call, as long as the lines can be written.

    A stack goes on after the terminal from which it was started, or the program that reads its output, such as `head`, has ended.
    """

    def __init__(self) -> None:
        super().__init__(stderr=True, highlight=False, soft_wrap=True)

    def say(self, markup: str) -> None:
        """Print a line; it is lost if it cannot be written."""
        with suppress(OSError):
            self.print(markup)

    def tell(self, markup: str) -> None:
        """Print a sentence. On a terminal it is broken between words; a word that is longer than a line, such as a path, stays whole. For a
        command that is to be copied, use `say`."""
        with suppress(OSError):
            self.print(_break_text(self.render_str(markup), self.width) if self.is_terminal else markup)

    def on_broken_pipe(self) -> None:
        """Do nothing: rich itself would end the process."""


def _break_text(text: Text, columns: int) -> Text:
    """The text with line breaks between words. rich itself would also break a long word."""
    at, offsets = 0, []
    for word in re.finditer(r"\S+\s*", text.plain):
        if at and at + cell_len(word[0].rstrip()) > columns:
            offsets.append(word.start())
            at = 0
        at = 0 if word[0].endswith("\n") else at + cell_len(word[0])
    lines = text.divide(offsets)
    for line in lines:
        line.rstrip()
    return Text("\n").join(lines)
