"""The consoles of the command. Both are rich's, but texts from others cannot control the terminal. `Notices` writes lines to stderr for
people, and whoever writes them goes on if they cannot be written."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import IO, Any

import rich.console
from rich.cells import cell_len
from rich.errors import MarkupError
from rich.segment import Segment
from rich.text import Text

from omnistage.host.terminal import Guarded, escape_text, stream_below

GAP = "   "
"""Stands between two parts of a line."""

INDENT = "  "
"""Begins the lines of a part that has no room beside the part before it."""


class Console(rich.console.Console):
    """Prints control characters in texts as escapes. It writes to the stream inside the guarded stdout or stderr, because the terminal must
    obey the sequences of rich itself: colours, and the cursor of lines that are drawn anew."""

    @property
    def file(self) -> IO[str]:
        """The stream that it writes to."""
        return stream_below(super().file)  # type: ignore[arg-type]

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        self._file = new_file

    def render_str(self, text: str, **options: Any) -> Text:
        """A text with its markup. Texts of others are escaped before they get here, but backslashes at their end can undo that. A text that
        is no valid markup is shown unchanged."""
        text = self._clean(text)
        try:
            return super().render_str(text, **options)
        except MarkupError:
            return super().render_str(text, **{**options, "markup": False})

    def render(self, renderable: rich.console.RenderableType, options: rich.console.ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render, and make all texts harmless, also those that did not come through `render_str`."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=self._clean(segment.text))

    def tell(self, *parts: str) -> None:
        """Print a sentence in markup, or the parts of a line, with GAP between them. On a terminal a part that has no room beside the part
        before it gets a line of its own, and a longer one is broken between words. A word that is longer than a line, such as a path, and
        what stands in backticks stay whole."""
        if not self.is_terminal:
            self.print(GAP.join(parts), soft_wrap=True, highlight=False)
            return
        first, *others = map(self.render_str, parts)
        lines = _break_text(first, self.width)
        for part in others:
            if cell_len(lines[-1].plain) + len(GAP) + cell_len(part.plain) <= self.width:
                lines[-1] = Text(GAP).join([lines[-1], part])
            else:
                lines += [Text(INDENT) + line for line in _break_text(part, self.width - len(INDENT))]
        self.print(Text("\n").join(lines), soft_wrap=True)

    def _clean(self, text: str) -> str:
        """Make a text harmless for a terminal; a pipe or a file gets every character unchanged."""
        return escape_text(text) if self.is_terminal or isinstance(super().file, Guarded) else text


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

    def tell(self, *parts: str) -> None:
        """As `Console.tell`; what cannot be written is lost."""
        with suppress(OSError):
            super().tell(*parts)

    def report(self, markup: str) -> None:
        """Print what happened, with the time: of the clock on a terminal, else with the date and in UTC, as the logs of servers have it."""
        clock = time.strftime("%H:%M:%S") if self.is_terminal else time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.tell(f"[dim]{clock}[/] {markup}")

    def on_broken_pipe(self) -> None:
        """Do nothing: rich itself would end the process."""


def _break_text(text: Text, columns: int) -> list[Text]:
    """The lines of a text, which is broken between words; what stands in backticks, such as a command, is one. rich itself would also break
    a long word."""
    column, line_begins = 0, []
    for word in re.finditer(r"(?:`[^`\n]*`|\S)+\s*", text.plain):
        if column and column + cell_len(word[0].rstrip()) > columns:
            line_begins.append(word.start())
            column = 0
        column = 0 if word[0].endswith("\n") else column + cell_len(word[0])
    lines = list(text.divide(line_begins))
    for line in lines:
        line.rstrip()
    return lines
