"""Reads the messages of `omnistage chat`, one at a time: typed at a prompt, or the lines of a pipe."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.history import FileHistory, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from omnistage.cli.folders import state_folder
from omnistage.cli.notices import Notices
from omnistage.cli.talk import LINES, WORDS
from omnistage.client.threads import beside

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
    while piece := await beside(lambda: os.read(0, 65536), "omnistage-chat-lines"):
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace")
    yield rest.decode(errors="replace")


class _Lines(FileHistory):
    """The file of the typed lines. A line that cannot be stored is lost without an error."""

    def store_string(self, string: str) -> None:
        with suppress(OSError):
            super().store_string(string)
