"""A terminal with a command on it: what it shows, what has scrolled away, keys that are pressed, and a window that changes its size."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import termios
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pyte

from helpers.command import STARTS
from helpers.program import Program, start
from helpers.surroundings import usual_variables

CTRL_C = b"\x03"


class _Screen(pyte.HistoryScreen):
    """Answers whoever asks it where the cursor is."""

    def __init__(self, terminal: Terminal, columns: int, rows: int) -> None:
        super().__init__(columns, rows, history=100_000)
        self._terminal = terminal

    def write_process_input(self, data: str) -> None:
        self._terminal.press(data.encode())


class Terminal:
    """An emulator, and after `run` the exit code of the command that ran on it."""

    def __init__(self, columns: int = 80, rows: int = 24) -> None:
        self._screen = _Screen(self, columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        self._master = -1
        self.written = b""
        """All bytes that came."""
        self.exit_code: int | None = None

    @property
    def lines(self) -> list[str]:
        """The scrollback and the window, without the empty lines at the end and the spaces at the ends of lines."""
        shown = [*(self._text(line) for line in self._screen.history.top), *self._screen.display]
        lines = [line.rstrip() for line in shown]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def resize(self, columns: int, rows: int) -> None:
        """The window gets another size; what no longer fits into its columns is cut off, as by terminals that do not wrap lines anew."""
        self._screen.resize(rows, columns)
        self._tell_size()

    def run(
        self,
        words: Sequence[str],
        meanwhile: Callable[[Terminal], None] | None = None,
        stdin: int | None = None,
        under: Sequence[str] = (),
        **streams: int,
    ) -> int:
        """Run `omnistage` with these words to its end; `meanwhile` is called after each piece of output. stdin: a file; else the terminal.
        under: a command that runs it. streams: stdout or stderr, where they are not this terminal."""
        self._master, slave = pty.openpty()
        self._tell_size()
        # A key that interrupts would throw away what is written and not yet read here: a test could miss it.
        attributes = termios.tcgetattr(slave)
        attributes[3] |= termios.NOFLSH
        termios.tcsetattr(slave, termios.TCSANOW, attributes)
        chosen = (slave if stdin is None else stdin, streams.get("stdout", slave), streams.get("stderr", slave))
        variables = {name: value for name, value in usual_variables().items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        # Its controlling one, so that Ctrl-C reaches the command as it does for a person.
        program = Program("omnistage.cli", words, {**variables, "TERM": "xterm-256color"}, chosen, terminal=slave)
        with start(program, STARTS, under) as run:
            os.close(slave)
            try:
                while piece := os.read(self._master, 65536):
                    self.written += piece
                    self._stream.feed(piece)
                    if meanwhile is not None:
                        meanwhile(self)
            except OSError:  # Linux says EIO when the last writer is gone
                pass
            self.exit_code = run.wait(60)
        os.close(self._master)
        return self.exit_code

    def _tell_size(self) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", self._screen.lines, self._screen.columns, 0, 0))

    def _text(self, line: dict[int, Any]) -> str:
        # A wide character has an empty cell behind it.
        last = max(line, default=-1)
        return "".join(line[column].data if column in line else " " for column in range(last + 1))


def words_of(lines: Iterable[str]) -> list[str]:
    return " ".join(lines).split()


def terminal_after(
    *words: str, size: tuple[int, int] = (80, 24), meanwhile: Callable[[Terminal], None] | None = None, code: int = 0
) -> Terminal:
    """The terminal on which a command ran to its end, which had this exit code. size: columns and rows. meanwhile: of `Terminal.run`."""
    terminal = Terminal(*size)
    assert terminal.run(words, meanwhile) == code, terminal.lines
    assert b"Traceback" not in terminal.written
    return terminal
