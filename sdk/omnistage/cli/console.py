"""The console of the command: rich's, but texts from others cannot control the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO, Any

import rich.console
from rich.errors import MarkupError
from rich.segment import Segment
from rich.text import Text

from omnistage.host.terminal import Guarded, escape_text, stream_below


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

    def _clean(self, text: str) -> str:
        """Make a text harmless for a terminal; a pipe or a file gets every character unchanged."""
        return escape_text(text) if self.is_terminal or isinstance(super().file, Guarded) else text
