"""Orders: the typed arguments of `ask`, `say`, `draw`, `film` and `sound`, with what - stands for: words and media are read from standard
input before anything is fetched, started or asked."""

from __future__ import annotations

import os
import select
import stat
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self, TypeVar

from omnistage.cli import interrupt
from omnistage.cli.console import Notices
from omnistage.cli.report import Interruptible, errors_reported
from omnistage.cli.targets import Need, Where, target_for
from omnistage.client.errors import RequestError
from omnistage.client.media import FIRST_BYTE_LIMIT_S, KINDS
from omnistage.client.request import MAX_TEXT_CHARACTERS, Options
from omnistage.models.media.terms import MediaLimits


class TypedOrder(ABC):
    """The typed arguments of one command. options: for the call of the client. as_json: print one JSON object. need: the abilities that a
    stack must have; read it only from the result of `checked`."""

    __slots__ = ()
    options: Options
    as_json: bool

    @property
    @abstractmethod
    def need(self) -> Need: ...

    @abstractmethod
    def checked(self) -> Self:
        """The order with its words and media read, also from standard input. Raises RequestError for an impossible order, before anything
        is fetched, started or asked."""


class HeardOrder(TypedOrder):
    """An order whose result is sound. out: the file of the sound; -: standard output; None: no file. play: whether to play it while it
    comes; None: only if a person sits at a terminal."""

    __slots__ = ()
    out: Path | None
    play: bool | None

    @property
    def is_sound_piped(self) -> bool:
        """Whether standard output is for the sound."""
        return self.out is not None and str(self.out) == "-"

    @property
    def is_to_be_heard(self) -> bool:
        """Whether to play the sound while it comes."""
        if self.play is not None:
            return self.play
        # Unless outputs are named, sound may come.
        return self.out is None and not self.as_json and sys.stderr.isatty() and "audio" in self.options.get("outputs", ("audio",))


T = TypeVar("T", bound=TypedOrder)


def carry_out(
    order: T,
    make: Callable[[Interruptible, T, Where, bool], Awaitable[None]],
    address: str | None,
    pipeline: str,
    api_key: str | None,
    verbose: bool,
    devices: Mapping[str, str] | None = None,
) -> None:
    """Check an order, and run `make`, which carries it out, until it is done or interrupted. The other arguments: as in `target_for`."""
    with errors_reported(verbose):
        complete = order.checked()
        target = target_for(complete.need, address, pipeline, api_key, devices=devices, is_quiet=complete.as_json)
        Interruptible().run(lambda work: make(work, complete, target, verbose))


MAX_TEXT_BYTES = 4 * MAX_TEXT_CHARACTERS
"""The most bytes of a text: a character has at most four in UTF-8."""


def words(argument: str, example: str = "What is a kite?") -> str:
    """The text of a command; - stands for standard input, which is read to its end. example: a text to type, for the error. Raises
    RequestError if the text is empty, not UTF-8, or too long."""
    data = _read_words() if argument == "-" else argument.encode(errors="surrogateescape")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise RequestError(
            f"the text is not UTF-8: byte {error.start} is {data[error.start]:#04x}", hint="Convert it first: iconv -t UTF-8."
        ) from None
    if len(text) > MAX_TEXT_CHARACTERS:
        raise _too_long()
    if not text.strip():
        raise RequestError("the text is empty", hint=f'Give the words, such as "{example}", or - for those of standard input.')
    return text


def _read_words() -> bytes:
    """All bytes of standard input. Raises RequestError if there is none, or too much."""
    if sys.stdin is None:
        raise RequestError("- reads standard input, and there is none", hint="Give the words themselves, or a file: < words.txt")
    data = sys.stdin.buffer.read(MAX_TEXT_BYTES + 1)
    if len(data) > MAX_TEXT_BYTES:
        raise _too_long()
    return data


def _too_long() -> RequestError:
    return RequestError(f"the text is longer than {MAX_TEXT_CHARACTERS} characters", hint="Give less of it.")


STDIN = "-"

PIECE_BYTES = 1 << 20

EXAMPLES = {
    "image": "omnistage ask --image - < cat.png",
    "audio": "arecord -f cd | omnistage ask --audio -",
    "video": "omnistage ask --video - < clip.mp4",
}


def medium(kind: str) -> bytes:
    """Read a picture, a sound or a film from standard input, to its end. kind: image, audio or video, from the name of the option.

    On a terminal Ctrl-C ends a recording and not the command: the program that records into the pipe gets the signal too, and its output up
    to then is read. Raises RequestError if nothing comes, or more than a model takes.
    """
    option, medium_name = f"--{kind} {STDIN}", KINDS[kind]
    if sys.stdin is None or sys.stdin.isatty():
        raise RequestError(f"{option} reads standard input, and nothing is there to read", hint=f"Give a file or a pipe: {EXAMPLES[kind]}")
    file = sys.stdin.fileno()
    if not (sys.stderr.isatty() and stat.S_ISFIFO(os.fstat(file).st_mode)):
        return _read_medium(file, kind)
    with interrupt.first_one_kept() as interrupts:
        Notices().tell(f"[dim]reading a {medium_name} from standard input; Ctrl-C ends a recording[/]")
        data = _read_medium(file, kind)
    if interrupts and not data:
        raise KeyboardInterrupt
    if interrupts:
        Notices().say("")  # Ends the line on which the terminal shows ^C.
    return data


def _read_medium(file: int, kind: str) -> bytes:
    """The bytes of a medium, read to the end of the file. Raises RequestError."""
    _await_first_byte(file, f"--{kind} {STDIN}")
    max_bytes, _ = MediaLimits().of(kind)
    pieces, size = list[bytes](), 0
    while size <= max_bytes:
        piece = os.read(file, PIECE_BYTES)
        if not piece:
            return b"".join(pieces)
        pieces.append(piece)
        size += len(piece)
    text = f"--{kind} {STDIN}: this is more than {max_bytes >> 20} MiB, the most that a {KINDS[kind]} may have"
    raise RequestError(text, hint="Give a shorter or smaller one.")


def _await_first_byte(file: int, option: str) -> None:
    """Wait until a byte, or the end of the file, can be read. Raises RequestError if neither comes in time."""
    waiting = select.poll()
    with suppress(PermissionError):  # The system cannot wait for a file of this kind.
        waiting.register(file, select.POLLIN)
    if not waiting.poll(FIRST_BYTE_LIMIT_S * 1000):
        raise RequestError(
            f"{option}: for {FIRST_BYTE_LIMIT_S:g} s nothing came through standard input", hint="Look at what is before the pipe."
        )
