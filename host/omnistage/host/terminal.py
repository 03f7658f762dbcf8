"""Keeps text from others from steering a terminal: the words of a router, a model, a checkpoint, a file's name.

A process guards its standard streams once, when it begins. From then on printed control characters show on a terminal as escapes, such as
\x1b, so that a name can still be read and copied. Code that draws on the terminal asks for the stream below the guarded one, and writes
only its own sequences to it. Pipes and files get every character unchanged.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping
from typing import TextIO

ESCAPES: Mapping[int, str] = {
    **{code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"},
    # They reverse the direction of a line, also of our own words in it.
    **{code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))},
    # Bytes of a name that is not UTF-8. With some settings Python writes them unchanged.
    **{0xDC00 + byte: f"\\x{byte:02x}" for byte in range(0x80, 0x100)},
}
"""Characters that steer a terminal or reverse the direction of a line, with their replacements."""


def escape_text(text: str) -> str:
    """The text in the form that a terminal may get."""
    return text.translate(ESCAPES)


class Guarded(io.TextIOWrapper):
    """A stream to a terminal that shows control characters as escapes.

    below: the stream to the terminal without this guard. Texts written to the two streams come out in the order of writing.
    """

    def __init__(self, below: io.TextIOWrapper) -> None:
        below.reconfigure(write_through=True)
        super().__init__(below.buffer, below.encoding, below.errors, line_buffering=below.line_buffering, write_through=True)
        self.below = below

    def write(self, text: str) -> int:
        super().write(escape_text(text))
        return len(text)


def guard_standard_streams() -> None:
    """Guard each of stdout and stderr that is a terminal."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and not isinstance(stream, Guarded) and stream.isatty():
            setattr(sys, name, Guarded(stream))
            os.environ["PYTHON_COLORS"] = "0"  # From 3.13 on Python would colour tracebacks, and the colours would be shown as escapes.


def stream_below(stream: TextIO) -> TextIO:
    """The stream below a guarded one, for code that draws: its control sequences steer the terminal. Such code must pass text from others
    through `escape_text`. Any other stream is returned itself."""
    return stream.below if isinstance(stream, Guarded) else stream
