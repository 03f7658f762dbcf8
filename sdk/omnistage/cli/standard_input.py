"""Reads media from standard input, if - is typed in place of a file."""

from __future__ import annotations

import os
import select
import stat
import sys
from contextlib import suppress

from omnistage.cli import interrupt
from omnistage.cli.notices import Notices
from omnistage.client.errors import RequestError
from omnistage.client.media import FIRST_BYTE_LIMIT_S, KINDS
from omnistage.models.media.terms import MediaLimits

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
        return _read(file, kind)
    with interrupt.first_one_kept() as interrupts:
        Notices().tell(f"[dim]reading a {medium_name} from standard input; Ctrl-C ends a recording[/]")
        data = _read(file, kind)
    if interrupts and not data:
        raise KeyboardInterrupt
    if interrupts:
        Notices().say("")  # Ends the line on which the terminal shows ^C.
    return data


def _read(file: int, kind: str) -> bytes:
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
