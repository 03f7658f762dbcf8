"""Carries out the orders of `ask`, `say`, `draw`, `film` and `sound`: checks one, opens its files, connects, shows and keeps what comes,
and writes and reports it at the end. Also reads what - stands for: words and media from standard input, before anything is started."""

from __future__ import annotations

import os
import select
import stat
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import typer

from omnistage.cli import interrupt
from omnistage.cli.console import Notices
from omnistage.cli.make.listening import Listening
from omnistage.cli.make.screen import Screen, follow
from omnistage.cli.report import Interruptible, errors_reported
from omnistage.cli.stack.layout import Layout
from omnistage.cli.targets import Need, Where, connect_client, target_for
from omnistage.client.async_omni import AsyncOmni
from omnistage.client.errors import RequestError
from omnistage.client.events import Done, Event
from omnistage.client.media import FIRST_BYTE_LIMIT_S, KINDS
from omnistage.client.request import MAX_TEXT_CHARACTERS, Options, time_limit_s
from omnistage.models.media.terms import MediaLimits


class TypedOrder(ABC):
    """The typed arguments of one command, and its product so far. `carry_out` calls the methods in the order in which they stand here.

    out: the file of the product; -: standard output; None: no file was typed. options: for the call of the client. as_json: print one JSON
    object. play: whether to play sound while it comes; None: only if a person sits at a terminal. hearing: passes the sound on.
    """

    out: Path | None
    options: Options
    as_json: bool
    play: bool | None = False
    hearing: Listening

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

    @abstractmethod
    def check(self) -> None:
        """Read the words and the media, also from standard input. Raises RequestError for an impossible order, before anything is fetched,
        started or asked."""

    @property
    @abstractmethod
    def need(self) -> Need:
        """The abilities that a stack must have; called after `check`."""

    @abstractmethod
    def inability(self, layout: Layout) -> RequestError:
        """The error for a stack that lacks the first stage of `need`."""

    @abstractmethod
    def open_files(self, files: ExitStack) -> None:
        """Open the files of the product until `files` ends. Raises RequestError."""

    @abstractmethod
    def ask(self, omni: AsyncOmni, options: Options) -> AsyncGenerator[Event, None]:
        """Ask for the product; returns its events. options: those of this order, with the pipeline."""

    @property
    @abstractmethod
    def screen(self) -> Screen:
        """A new screen that shows the product while it comes."""

    @asynccontextmanager
    async def refusals(self, omni: AsyncOmni, pipeline: str) -> AsyncIterator[None]:
        """A context that rewords refusals, or gives them a hint. pipeline: the one that is asked; empty: the router chooses."""
        yield

    @abstractmethod
    def take(self, event: Event) -> None:
        """Keep what has come. Called with every event but the last one."""

    @abstractmethod
    def finish(self, done: Done) -> None:
        """Write the files, and print the figures for people or the JSON object. done: the last event."""


def carry_out(order: TypedOrder, context: typer.Context, devices: Mapping[str, str] | None = None) -> None:
    """Check an order, and make its product, until it is done or interrupted. context: of a command with the options of a call. devices: as
    in `target_for`."""
    address, pipeline, api_key, verbose = (context.params[name] for name in ("address", "pipeline", "api_key", "verbose"))
    with errors_reported(verbose):
        order.check()
        target = target_for(order.need, address, pipeline, api_key, devices=devices, is_quiet=order.as_json)
        Interruptible().run(lambda work: _make(work, order, target, verbose))


async def _make(work: Interruptible, order: TypedOrder, target: Where, verbose: bool) -> None:
    """Make the product of a checked order; a private stack ends after that. Text, the JSON object or a piped sound goes to stdout and
    everything else to stderr."""
    if isinstance(target.at, Layout) and order.need.kind not in target.at.kinds:
        raise order.inability(target.at)
    with ExitStack() as files:
        # Opened before anything is started or asked: a product that cannot be kept would be lost.
        order.hearing = await Listening.open(files, is_piped=order.is_sound_piped, is_played=order.is_to_be_heard)
        order.open_files(files)
        async with connect_client(target, time_limit_s(order.options), verbose, is_quiet=order.as_json) as omni:
            events, screen = order.ask(omni, target.options(order.options)), order.screen
            async with order.refusals(omni, target.pipeline):
                done = await follow(events, screen, order.take)
            work.complete()
            order.finish(done)
            await order.hearing.finish(work)
            if screen.failure is not None:
                raise screen.failure


MAX_TEXT_BYTES = 4 * MAX_TEXT_CHARACTERS
"""The most bytes of a text: a character has at most four in UTF-8."""


def words(argument: str, example: str = "What is a kite?") -> str:
    """The text of a command; - stands for standard input, which is read to its end. example: a text to type, for the error. Raises
    RequestError if the text is empty, not UTF-8, or too long."""
    if argument == STDIN and sys.stdin is None:
        raise RequestError("- reads standard input, and there is none", hint="Give the words themselves, or a file: < words.txt")
    data = sys.stdin.buffer.read(MAX_TEXT_BYTES + 1) if argument == STDIN else argument.encode(errors="surrogateescape")
    if len(data) > MAX_TEXT_BYTES or len(text := _decode(data)) > MAX_TEXT_CHARACTERS:
        raise RequestError(f"the text is longer than {MAX_TEXT_CHARACTERS} characters", hint="Give less of it.")
    if not text.strip():
        raise RequestError("the text is empty", hint=f'Give the words, such as "{example}", or - for those of standard input.')
    return text


def _decode(data: bytes) -> str:
    """The text of these bytes. Raises RequestError if they are not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        fault = f"the text is not UTF-8: byte {error.start} is {data[error.start]:#04x}"
        raise RequestError(fault, hint="Convert it first: iconv -t UTF-8.") from None


STDIN = "-"

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
    if not (sys.stderr.isatty() and stat.S_ISFIFO(os.fstat(sys.stdin.fileno()).st_mode)):
        return _read_medium(kind)
    with interrupt.first_one_kept() as interrupts:
        Notices().tell(f"[dim]reading a {medium_name} from standard input; Ctrl-C ends a recording[/]")
        data = _read_medium(kind)
    if interrupts and not data:
        raise KeyboardInterrupt
    if interrupts:
        Notices().say("")  # Ends the line on which the terminal shows ^C.
    return data


def _read_medium(kind: str) -> bytes:
    """The bytes of a medium, read to the end of standard input. Raises RequestError."""
    option, (max_bytes, _) = f"--{kind} {STDIN}", MediaLimits().of(kind)
    waiting = select.poll()
    waiting.register(sys.stdin.fileno(), select.POLLIN)
    if not waiting.poll(FIRST_BYTE_LIMIT_S * 1000):
        fault = f"for {FIRST_BYTE_LIMIT_S:g} s nothing came through standard input"
        raise RequestError(f"{option}: {fault}", hint="Look at what is before the pipe.")
    data = sys.stdin.buffer.read(max_bytes + 1)
    if len(data) > max_bytes:
        fault = f"this is more than {max_bytes >> 20} MiB, the most that a {KINDS[kind]} may have"
        raise RequestError(f"{option}: {fault}", hint="Give a shorter or smaller one.")
    return data
