"""What is said in `omnistage chat`, a message at a time: typed at a prompt, or the lines of a pipe."""

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
from omnistage.client.beside import beside

BLOCK = '"""'
"""Before and behind several lines that are one message."""


def is_typed() -> bool:
    """Whether a person types, and no pipe or file is read."""
    return os.isatty(0)


async def typed(ahead: Callable[[], str], silence: Callable[[], bool]) -> AsyncGenerator[str, None]:
    """What a person types, a message at a time: a line, several that were pasted or have Alt-Enter between, or a block. ahead: what was
    typed already. silence: stops what is heard; whether something was. Ctrl-C does that first, then it clears the line."""
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
            yield await prompt.prompt_async("> ", default=ahead(), handle_sigint=False)
        except KeyboardInterrupt:
            if not silence():
                Notices().tell("[dim]Ctrl-D or /quit ends[/]")
        except EOFError:
            return


def _keys() -> KeyBindings:
    """Enter ends a message, but not an open block; Alt-Enter is a new line. In a search Enter means what it always does."""
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
    """Whether a block has begun and not ended."""
    text = text.strip()
    return text.startswith(BLOCK) and (len(text) < 2 * len(BLOCK) or not text.endswith(BLOCK))


def block(text: str) -> str | None:
    """The words of a message that is a block; None for any other."""
    return text.removeprefix(BLOCK).removesuffix(BLOCK).strip() if text.startswith(BLOCK) else None


async def read() -> AsyncGenerator[str, None]:
    """The messages of a pipe or a file: lines, and blocks."""
    begun = ""
    async with aclosing(_lines()) as lines:
        async for line in lines:
            begun += line
            if is_open(begun):
                begun += "\n"
            else:
                yield begun
                begun = ""
    if begun:
        yield begun


async def _lines() -> AsyncGenerator[str, None]:
    """Its thread is left alone where the chat is over before the pipe is, and holds nothing of Python's: a thread in `sys.stdin` could
    not."""
    rest = b""
    while piece := await beside(lambda: os.read(0, 65536), "omnistage-chat-lines"):
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace")
    yield rest.decode(errors="replace")


class _Lines(FileHistory):
    """What was typed, as far as there is room for it."""

    def store_string(self, string: str) -> None:
        with suppress(OSError):
            super().store_string(string)
