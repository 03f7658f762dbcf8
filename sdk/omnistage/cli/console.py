"""The consoles of the command: rich's, with colours of ours and without a way for the words of others to steer the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO, Any

import rich.console
from rich.errors import MarkupError
from rich.segment import Segment
from rich.text import Text

from omnistage.host.terminal import Guarded, shown, steered


class Console(rich.console.Console):
    """Shows control characters in whatever it prints as escapes. It draws on the stream below a guarded one: its own colours, and lines
    that are drawn anew, are what a terminal is to obey."""

    @property
    def file(self) -> IO[str]:
        """Where it writes."""
        return steered(super().file)  # type: ignore[arg-type]

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        self._file = new_file

    def render_str(self, text: str, **options: Any) -> Text:
        """Text with its markup. What others said is escaped before it gets here; where it still reads as markup that cannot be, because
        it ends with several backslashes, it is shown as it is."""
        text = self._clean(text)
        try:
            return super().render_str(text, **options)
        except MarkupError:
            return super().render_str(text, **{**options, "markup": False})

    def render(self, renderable: rich.console.RenderableType, options: rich.console.ConsoleOptions | None = None) -> Iterable[Segment]:
        """Also texts that were made elsewhere."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=self._clean(segment.text))

    def _clean(self, text: str) -> str:
        """Raw for a pipe or a file: whoever reads that wants what was said."""
        return shown(text) if self.is_terminal or isinstance(super().file, Guarded) else text
