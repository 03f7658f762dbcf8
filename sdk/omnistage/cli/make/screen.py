"""Shows an answer while it comes: not at all, as plain text in a pipe or file, or live on a terminal.

On a terminal, text is broken into lines between words, written once, and stays. Only the unfinished word and the line about the sound are
drawn again and again. They come after the end of the text, so they can be erased without knowing how wide they are, and never get into the
scrollback, even if the window changes its size meanwhile."""

from __future__ import annotations

import asyncio
import os
import re
import stat
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Self, TextIO

from rich.cells import cell_len, chop_cells
from rich.text import Text

from omnistage.cli.console import Console
from omnistage.client.errors import ProtocolError
from omnistage.client.events import Alignment, AudioChunk, Done, Event, Picture, SpokenWord, TextDelta, ThoughtDelta
from omnistage.host.terminal import ESCAPES, stream_below

WIDE = "\u3000-\u30ff\u3400-\u9fff\uf900-\ufaff\uff00-\uffef\U00020000-\U0003ffff"
"""Characters of scripts without spaces, as ranges of a regular expression: a line may be broken after each of them."""

TOKEN = re.compile(rf"\n|\s|[{WIDE}]|[^\s{WIDE}]+")
OPEN = re.compile(rf"[^\s{WIDE}]+")
"""A word at the end of a piece, which the next piece may continue."""

TAB = 4

UNSEEN = dict.fromkeys(ESCAPES)
"""Control characters, which are left out of an answer: a model's output must not steer a terminal."""


class Wrap:
    """Breaks a text between words. Lines stay one column short of the terminal's width: terminals differ in how they treat a cursor after
    the last column. columns: the present width of the terminal."""

    def __init__(self) -> None:
        self._column = 0
        self._gap = ""
        """Spaces that are written with the word after them, or not at all if that word begins a line."""
        self._word = ""

    @property
    def unfinished(self) -> str:
        """The last word, with the spaces before it, if the next piece may continue it; empty if the text ends after a whole word."""
        return self._gap + self._word if self._word else ""

    def add(self, text: str, columns: int) -> str:
        """Take the next piece of the text. Returns the text to write now, after all text that was written before."""
        limit = _limit(columns)
        tokens = TOKEN.findall(self._word + text.translate(UNSEEN))
        self._word = tokens.pop() if tokens and OPEN.fullmatch(tokens[-1]) else ""
        pieces = [self._place(token, limit) for token in tokens]
        pieces.append(self._make_room(limit))
        return "".join(pieces)

    def finish(self, columns: int) -> str:
        """End the text. Returns the text to write; the cursor is then at the beginning of a line."""
        word, self._word = self._word, ""
        text = self._place(word, _limit(columns)) if word else ""
        return f"{text}\n" if self._column else text

    def _place(self, token: str, limit: int) -> str:
        """The text to write for a finished token: a line break, a word with its gap, or "" for spaces, which wait. limit: columns of a
        line."""
        if token == "\n":
            self._column, self._gap = 0, ""
            return "\n"
        if token.isspace():
            self._gap += " " * TAB if token == "\t" else token
            return ""
        begin = self._begin(token, limit)
        # A word that is longer than a line fills lines of its own. A word without width has no line at all.
        *lines, last = chop_cells(token, limit - self._column) or [""]
        self._column = cell_len(last) if lines else self._column + cell_len(last)
        return begin + "".join(f"{line}\n" for line in lines) + last

    def _begin(self, word: str, limit: int) -> str:
        """The text to write before a word: the gap, or a line break if the line has no room for the word."""
        gap, self._gap = self._gap, ""
        width = cell_len(gap)
        if self._column + width + cell_len(word) <= limit:
            self._column += width
            return gap
        if self._column:
            self._column = 0
            return "\n"
        return ""

    def _make_room(self, limit: int) -> str:
        """The text to write before the unfinished word if it no longer fits on its line: a line break, and the lines that the word itself
        fills; the rest of the word stays in `_word`. Empty if the word fits."""
        width = cell_len(self._gap) + cell_len(self._word)
        if not self._word or self._column + width <= limit:
            return ""
        begin = self._begin(self._word, limit)
        *lines, self._word = chop_cells(self._word, limit)
        return begin + "".join(f"{line}\n" for line in lines)


def _limit(columns: int) -> int:
    return max(columns - 1, 2)


class Unbroken:
    """Leaves a text as it is, for a pipe or a file; used like Wrap."""

    unfinished = ""

    def __init__(self) -> None:
        self._has_text = False

    def add(self, text: str, columns: int) -> str:
        """Take the next piece of the text. Returns the text to write."""
        self._has_text = self._has_text or bool(text)
        return text

    def finish(self, columns: int) -> str:
        """End the text. Returns the end of its last line, if there is a text."""
        return "\n" * self._has_text


ERASE_BELOW = "\x1b[J"
DOWN = "\x1bD"
"""One row down; scrolls at the last one, and keeps the column."""
UP = "\x1b[A"
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
SAVE, RESTORE = "\x1b7", "\x1b8"

SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
TURNS_PER_S = 10
TOLD_FROM_S = 2.0

MIN_ROWS, MIN_COLUMNS = 3, 8
"""A smaller window has room only for the text."""


@dataclass(slots=True)
class Spoken:
    """An answer so far. keeps_sound: collect the chunks of sound in `sounds`. thought: the model's thoughts before the answer. audio_s:
    seconds of sound. pictures: number of finished pictures, if the prompt was drawn. words: filled only if captions are wanted."""

    keeps_sound: bool = False
    text: str = ""
    thought: str = ""
    audio_s: float = 0.0
    pictures: int = 0
    sounds: list[AudioChunk] = field(default_factory=list)
    words: list[SpokenWord] = field(default_factory=list)

    def take(self, event: Event) -> None:
        """Add what has come."""
        match event:
            case TextDelta():
                self.text += event.text
            case ThoughtDelta():
                self.thought += event.text
            case AudioChunk():
                self.audio_s += event.duration_s
                if self.keeps_sound:
                    self.sounds.append(event)
            case Alignment():
                self.words += event.words
            case Picture():
                self.pictures += event.preview_step is None  # A preview does not count.


class Screen:
    """The base of all screens; a screen shows a product inside its `with` block. This one shows nothing, for --json.

    failure: the error of the terminal or pipe after which nothing more was shown, and which is raised at the end; None: there is none.
    """

    failure: OSError | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def show(self, event: Event) -> None:
        """Show what has come, such as text, sound or a step of a drawing. Called with every event but the last one."""


class Plain(Screen):
    """Prints text and nothing else, each piece at once: for pipes and files. text: the stream to print to; by default stdout."""

    def __init__(self, text: TextIO | None = None) -> None:
        self._text = text or sys.stdout
        self._wrap = Unbroken()

    def __exit__(self, *error: object) -> None:
        _write(self._text, self._wrap.finish(0))

    def show(self, event: Event) -> None:
        if isinstance(event, TextDelta):
            _write(self._text, self._wrap.add(event.text, 0))


class Live(Screen):
    """Shows the growing text, and below it on the terminal a line about the sound. On a terminal the text is broken into lines, and
    thoughts stand above it; a file gets the text alone. text: the stream to print to; by default stdout."""

    def __init__(self, text: TextIO | None = None) -> None:
        self._text = text or sys.stdout
        self._is_terminal = self._text.isatty()
        self._wrap = Wrap() if self._is_terminal else Unbroken()
        self._thought: Wrap | None = None
        self._below = Below(sys.stderr)
        self._audio_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._begin_s = self._loop.time()
        self._turning: asyncio.TimerHandle

    def __enter__(self) -> Self:
        self._below.draw("", waiting_line(0.0))
        self._turning = self._loop.call_later(1 / TURNS_PER_S, self._turn)
        return self

    def __exit__(self, *error: object) -> None:
        self._turning.cancel()
        self._below.erase()
        self._end_thought()
        _write(self._text, self._wrap.finish(self._below.columns))

    def show(self, event: Event) -> None:
        match event:
            case TextDelta():
                self._show_answer(event.text)
            case AudioChunk():
                self._audio_s += event.duration_s
                self._show_answer("")
            case ThoughtDelta() if self._is_terminal:
                self._show_thought(event.text)

    def _show_answer(self, new_text: str) -> None:
        """Write the next piece of the answer, and draw the line about its sound."""
        self._turning.cancel()
        self._below.erase()
        self._end_thought()
        _write(self._text, self._wrap.add(new_text, self._below.columns))
        self._below.draw(self._wrap.unfinished, self._line)

    def _show_thought(self, new_text: str) -> None:
        """Write the next piece of the thoughts, dim. They go to stderr, because only the answer goes to stdout."""
        self._turning.cancel()
        self._thought = self._thought or Wrap()
        self._below.erase()
        self._below.write_dim(self._thought.add(new_text, self._below.columns))
        self._below.draw(f"{DIM}{self._thought.unfinished}{PLAIN}", self._line)

    @property
    def _line(self) -> Text:
        """The line about the sound."""
        return speaking_line(self._audio_s) if self._audio_s else waiting_line(0.0)

    def _end_thought(self) -> None:
        """Finish the lines of the thoughts, if there are any."""
        if self._thought is not None:
            self._below.write_dim(self._thought.finish(self._below.columns))
            self._thought = None

    def _turn(self) -> None:
        """Draw the waiting line again and again, until the first text or sound comes."""
        with suppress(OSError):  # The reader is gone; the next piece of the answer raises the error.
            self._below.erase()
            self._below.draw("", waiting_line(self._loop.time() - self._begin_s))
            self._turning = self._loop.call_later(1 / TURNS_PER_S, self._turn)


class Keeping(Screen):
    """Wraps the screen of an answer that is also written to a file, so that the answer goes on if the screen's terminal or pipe fails."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen

    def __enter__(self) -> Self:
        self._try(self._screen.__enter__)
        return self

    def __exit__(self, *error: object) -> None:
        self._try(lambda: self._screen.__exit__(*error))

    def show(self, event: Event) -> None:
        self._try(lambda: self._screen.show(event))

    def _try(self, step: Callable[[], object]) -> None:
        """Run one step of the screen, and keep its error in `failure`; after an error run nothing."""
        if self.failure is None:
            try:
                step()
            except OSError as error:
                self.failure = error


class Below:
    """A word at the cursor of a terminal and a line below it; both can be erased, and the cursor stays where it is."""

    def __init__(self, terminal: TextIO) -> None:
        self._terminal = terminal
        self._console = Console(file=terminal, highlight=False)

    @property
    def columns(self) -> int:
        """The present width of the terminal."""
        return self._size().columns or 80

    @property
    def rows(self) -> int:
        """The present height of the terminal."""
        return self._size().lines or 24

    def draw(self, word: str, line: Text) -> None:
        """Show a word at the cursor and a line below it. Nothing is drawn if the window is too small, or if this process is in the
        background, where it must not write on the terminal."""
        size = self._size()
        columns, rows = size.columns or 80, size.lines or 24
        if columns < MIN_COLUMNS or rows < MIN_ROWS or not self.is_in_foreground():
            return
        line = line.copy()
        line.truncate(columns - 1)
        with self._console.capture() as capture:
            self._console.print(line, end="", soft_wrap=True)
        # DOWN and UP first make room below, by scrolling if needed, because a saved position of the cursor does not scroll along.
        write_raw(self._terminal, f"{DOWN}{UP}{SAVE}{word}\r{DOWN}{capture.get()}{RESTORE}")

    def write_dim(self, text: str) -> None:
        """Write dim text, which `erase` does not erase. text: as `Wrap` returned it."""
        if text:
            write_raw(self._terminal, f"{DIM}{text}{PLAIN}")

    def erase(self) -> None:
        """Erase the word and the line."""
        if self.is_in_foreground():
            write_raw(self._terminal, ERASE_BELOW)

    def _size(self) -> os.terminal_size:
        return os.get_terminal_size(self._terminal.fileno())

    def is_in_foreground(self) -> bool:
        """Whether this process may write on the terminal; False for a job in the background."""
        try:
            return os.tcgetpgrp(self._terminal.fileno()) == os.getpgrp()
        except OSError:  # The stream is not the terminal of this session, so it has no foreground job.
            return True


def speaking_line(audio_s: float) -> Text:
    """The line about the sound: how many seconds have come, and musical notes, four for each second, but at most twelve."""
    notes = "".join("▂▄▆█▆▄"[i % 6] for i in range(int(audio_s * 4)))[-12:]
    return Text.assemble(("speaking ", "dim"), (f"{audio_s:.1f} s ", "dim"), (notes, "cyan"))


def waiting_line(waited_s: float) -> Text:
    """The line while nothing comes: a sign that turns, and, from TOLD_FROM_S seconds on, the number of seconds."""
    turning = SPINNER[int(waited_s * TURNS_PER_S) % len(SPINNER)]
    seconds = f" {waited_s:.0f} s" if waited_s >= TOLD_FROM_S else ""
    return Text(f"{turning} thinking{seconds}", style="dim")


def screen_for(as_json: bool, is_sound_piped: bool = False) -> Screen:
    """The screen that fits stdout and stderr. is_sound_piped: the sound goes to stdout, so the text goes to stderr."""
    if as_json:
        return Screen()
    console = Console(stderr=True)
    is_watched = console.is_terminal and not console.is_dumb_terminal and sys.stderr.isatty()
    if is_sound_piped:
        return Live(sys.stderr) if is_watched else Plain(sys.stderr)
    if not is_watched:
        return Plain()
    if sys.stdout.isatty():
        return Live() if os.ttyname(sys.stdout.fileno()) == os.ttyname(sys.stderr.fileno()) else Plain()
    # Beside a pipe nothing is drawn, because the program that reads it may itself write to this terminal.
    mode = os.fstat(sys.stdout.fileno()).st_mode
    is_file = stat.S_ISREG(mode) or stat.S_ISCHR(mode)  # A device that is no terminal: /dev/null.
    return Live() if is_file else Plain()


def write_raw(terminal: TextIO, text: str) -> None:
    """Write text with control sequences, which the terminal is to obey. Texts of models and users in it have gone through `Wrap` or a
    Console."""
    _write(stream_below(terminal), text)


def _write(stream: TextIO, text: str) -> None:
    if text:
        stream.write(text)
        stream.flush()


async def follow(events: AsyncGenerator[Event, None], screen: Screen, take: Callable[[Event], None]) -> Done:
    """Show what comes; returns the last event, `Done`. take: called with every other event before it is shown; it must not wait. Raises
    ProtocolError if `Done` does not come."""
    async with aclosing(events):
        with screen:
            async for event in events:
                if isinstance(event, Done):
                    return event
                take(event)
                screen.show(event)
    raise ProtocolError("the stream ended without its account")
