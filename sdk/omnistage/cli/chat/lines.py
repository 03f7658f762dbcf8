"""Reads the messages of `omnistage chat`, one at a time: typed at a prompt, or the lines of a pipe. Finds the pictures, sounds and films
that a message names: dropped onto the terminal, pasted, or typed after /image."""

from __future__ import annotations

import mimetypes
import os
import re
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.history import FileHistory, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from omnistage.cli.chat.talk import LINES, WORDS
from omnistage.cli.console import Notices
from omnistage.cli.places import state_folder
from omnistage.client.media import KINDS, LOOK_BYTES, media_types, to_medium
from omnistage.client.threads import run_on_thread

BLOCK = '"""'
"""Stands before and after several lines that are one message, a block."""


def is_typed() -> bool:
    """Whether a person types; False for a pipe or a file."""
    return os.isatty(0)


async def read_typed(take_ahead: Callable[[], str], silence: Callable[[], bool]) -> AsyncGenerator[str, None]:
    """Yield what a person types, a message at a time: one line, several lines that were pasted or have Alt-Enter between, or a block.
    take_ahead: returns text that was typed during an answer; the line begins with it. silence: stops the sound, and returns whether any was
    playing. Ctrl-C clears the line and stops the sound."""
    try:
        lines = state_folder() / LINES
        lines.touch(mode=0o600)
        lines.chmod(0o600)
        history: FileHistory | InMemoryHistory = _Lines(str(lines))
    except OSError:
        history = InMemoryHistory()
    prompt: PromptSession[str] = PromptSession(
        history=history,
        completer=WordCompleter(list(WORDS), sentence=True),
        complete_while_typing=False,
        multiline=True,
        prompt_continuation="  ",
        key_bindings=_keys(),
    )
    while True:
        try:
            yield await prompt.prompt_async("> ", default=take_ahead(), handle_sigint=False)
        except KeyboardInterrupt:
            if not silence():
                Notices().tell("[dim]Ctrl-D or /quit ends[/]")
        except EOFError:
            return


def _keys() -> KeyBindings:
    """The keys of the prompt: Enter ends a message, unless a block is open; Alt-Enter begins a new line. In a search Enter keeps its usual
    meaning."""
    keys = KeyBindings()

    @keys.add("enter", filter=has_focus(DEFAULT_BUFFER))
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if is_open(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=has_focus(DEFAULT_BUFFER))
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def is_open(text: str) -> bool:
    """Whether a text begins a block and does not end it yet."""
    text = text.strip()
    # The marks of the beginning and the end must not be the same characters.
    return text.startswith(BLOCK) and (len(text) < 2 * len(BLOCK) or not text.endswith(BLOCK))


def block(text: str) -> str | None:
    """The words inside a message that is a block (see BLOCK); None for any other message."""
    return text.removeprefix(BLOCK).removesuffix(BLOCK).strip() if text.startswith(BLOCK) else None


async def read() -> AsyncGenerator[str, None]:
    """Yield the messages of a pipe or a file: lines, and blocks."""
    message = ""
    async with aclosing(_lines()) as lines:
        async for line in lines:
            message += line
            if is_open(message):
                message += "\n"
            else:
                yield message
                message = ""
    if message:
        yield message


async def _lines() -> AsyncGenerator[str, None]:
    """Yield the lines of standard input, which a thread reads. If the chat ends before the pipe, the thread goes on; unlike a thread that
    reads `sys.stdin` it holds no lock that Python's end would wait for."""
    rest = b""
    while piece := await run_on_thread(lambda: os.read(0, 65536), "omnistage-chat-lines"):
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace")
    yield rest.decode(errors="replace")


class _Lines(FileHistory):
    """The file of the typed lines. A line that cannot be stored is lost without an error."""

    def store_string(self, string: str) -> None:
        with suppress(OSError):
            super().store_string(string)


WORD = re.compile(r"""'[^']*'|"[^"]*"|(?:\\.|\S)+""")
"""A word as a shell reads it: a path that is dropped onto a terminal comes in quotes, or with a backslash before each space."""

BEGINNINGS = ("/", "./", "../", "~/")
"""Beginnings of a path that stands among words. A line that is only a path may begin in any way."""

STOPS = "?!.,;:)"
"""Characters of a sentence that may follow a path."""


@dataclass(frozen=True, slots=True)
class MentionedFile:
    """A file that goes with a question. kind: image, audio or video. path: absolute."""

    kind: str
    path: str

    @property
    def part(self) -> dict[str, str]:
        """The file as a part of a turn, in the client's form."""
        return {"type": self.kind, self.kind: self.path}

    def __str__(self) -> str:
        return f"{Path(self.path).name} ({KINDS[self.kind]})"


def find_named_file(kind: str, text: str) -> tuple[MentionedFile, str]:
    """Returns (the file that was typed after /image, /audio or /video, the words after its path). kind: the command without its slash.
    text: the rest of the line. Raises BadRequestError if there is no file of that kind."""
    first_word = WORD.match(text)
    first_end = 0 if first_word is None else first_word.end()
    # A path in quotes ends with its word. Any other may have spaces, so the longest path that exists is taken.
    space_starts = reversed([space.start() for space in re.finditer(r"\s+", text)])
    ends = [first_end] if first_end and text[0] in "'\"" else [len(text), *space_starts]
    end = next((end for end in ends if os.path.isfile(_path(text[:end]))), first_end)  # noqa: PTH113
    path = _path(text[:end])
    to_medium(path, kind, f"/{kind}")
    return MentionedFile(kind, str(path.absolute())), text[end:].strip()


def find_files(text: str) -> tuple[list[MentionedFile], str]:
    """Returns (the files that a message names, its words). The words lack paths at the beginning and the end of the message. In place of
    each other path they have the name of its file."""
    if (file := _media_file(text)) is not None:
        return [file], ""
    files, words = list[MentionedFile](), list[str]()
    last_end = 0
    for file, begin, end in _find_each(text):
        files.append(file)
        is_at_edge = not text[:begin].strip() or not text[end:].strip()
        words += [text[last_end:begin].rstrip()] if is_at_edge else [text[last_end:begin], Path(file.path).name]
        last_end = end
    return files, "".join([*words, text[last_end:]]).strip()


def _find_each(text: str) -> Iterator[tuple[MentionedFile, int, int]]:
    """Yields (the file, begin of its path, end of its path) for each file that a text names. begin, end: indices in the text."""
    for match in WORD.finditer(text):
        word = match[0]
        for length in (len(word), len(word.rstrip(STOPS))):
            if _unquote(word[:length]).startswith(BEGINNINGS) and (file := _media_file(word[:length])) is not None:
                yield file, match.start(), match.start() + length
                break


def _media_file(path_text: str) -> MentionedFile | None:
    """The file that was typed; None if its content is no picture, sound or film. If the content may be of several kinds, the file's name
    decides."""
    try:
        path = _path(path_text)
        if not S_ISREG(path.stat().st_mode):
            return None
        with path.open("rb") as file:
            types = media_types(file.read(LOOK_BYTES))
        absolute = str(path.absolute())
    except (OSError, ValueError):
        return None
    by_name = mimetypes.guess_type(path.name)[0]
    media_type = by_name if by_name in types else next(iter(types), "")
    kind = media_type.partition("/")[0]
    return MentionedFile(kind, absolute) if kind in KINDS else None


def _path(path_text: str) -> Path:
    """The path that was typed; a ~ is replaced unless a file has it in its name."""
    name = _unquote(path_text)
    return Path(name if os.path.exists(name) else os.path.expanduser(name))  # noqa: PTH110, PTH111  # They take any text, pathlib does not.


def _unquote(path_text: str) -> str:
    """A typed path without its quotes or backslashes."""
    path_text = path_text.strip()
    if len(path_text) > 1 and path_text[0] in "'\"" and path_text[-1] == path_text[0]:
        return path_text[1:-1]
    return re.sub(r"\\(.)", r"\1", path_text)
