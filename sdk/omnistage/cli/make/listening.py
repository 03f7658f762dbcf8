"""Passes sound on while it is made: to a loudspeaker, if there is one and a person sits at a terminal, and to the program that reads
standard output, as a WAV file: `omnistage say "Hello." --out - | aplay`."""

from __future__ import annotations

import asyncio
import os
import queue
import select
import sys
from contextlib import ExitStack

from rich.markup import escape
from rich.text import Text

from omnistage.cli.console import Notices
from omnistage.cli.make.screen import Below
from omnistage.cli.report import Interruptible
from omnistage.client.errors import PlayerLostError, RequestError
from omnistage.client.events import AudioChunk
from omnistage.client.files import SoundEncoder, channels_of
from omnistage.client.loudspeaker import find_loudspeaker, is_silenced
from omnistage.client.player import Player
from omnistage.client.threads import on_thread

STEP_S = 0.25
"""Seconds between two updates of the line that shows how much is still to be heard."""


class Listening:
    """Passes on the sound of one answer. player: plays it; None: it is not played. pipe: gets its bytes; None: it is not written."""

    def __init__(self, player: Player | None, pipe: SoundPipe | None) -> None:
        self._player = player
        self._pipe = pipe
        self._has_sound = False

    @classmethod
    async def open(cls, files: ExitStack, *, is_piped: bool, is_played: bool) -> Listening:
        """A Listening that is silenced when `files` ends. Raises the errors of `find_loudspeaker` if the variable names no player that
        works, and RequestError if the sound would be written on a terminal."""
        pipe = SoundPipe() if is_piped else None
        loudspeaker = await asyncio.to_thread(find_loudspeaker) if is_played else None
        player = None if loudspeaker is None else Player(loudspeaker)
        if player is not None:
            files.callback(player.stop)
        return cls(player, pipe)

    @property
    def is_lost(self) -> bool:
        """Whether the sound goes nowhere: nothing plays it, and no pipe gets it."""
        return self._player is None and self._pipe is None

    @property
    def lacks_loudspeaker(self) -> bool:
        """Whether sound came and nothing plays it, although the user has not turned sound off."""
        return self._has_sound and self._player is None and not is_silenced()

    def write(self, chunk: AudioChunk) -> None:
        """Pass the next piece on; never waits. Raises OSError if the reader of the pipe is gone."""
        self._has_sound = True
        if self._player is not None:
            self._player.write(chunk)
        if self._pipe is not None:
            self._pipe.write(chunk)

    async def finish(self, work: Interruptible) -> None:
        """Wait until all sound is in the pipe and the player has played everything; an interrupt silences the player. Raises Interrupted,
        and OSError if the reader of the pipe is gone."""
        if self._pipe is not None:
            await work.unless_interrupted(self._pipe.end())
        if self._player is None or not self._has_sound:
            return
        try:
            await work.unless_interrupted(_show_until_heard(self._player))
        except PlayerLostError as error:
            Notices().tell(f"[yellow]{escape(error.message)}[/]")
        finally:
            self._player.stop()


async def _show_until_heard(player: Player) -> None:
    """Wait until the player has played everything; meanwhile a line on the terminal shows the seconds left."""
    finishing = asyncio.create_task(player.afinish())
    below = Below(sys.stderr) if sys.stderr.isatty() else None
    try:
        while not finishing.done():
            progress = player.heard
            left_s = (progress.of - progress.samples) / progress.sample_rate_hz
            if below is not None:
                below.erase()
                below.draw("", Text(f"playing, {left_s:.0f} s left (Ctrl-C stops it)", style="dim"))
            await asyncio.wait({finishing}, timeout=STEP_S)
        finishing.result()
    finally:
        finishing.cancel()
        if below is not None:
            below.erase()


class SoundPipe:
    """Writes sound to standard output in a thread, so that a program that reads only as fast as it plays does not delay the answer. Sound
    that the program has not read yet waits in memory, at most the whole answer.

    Raises RequestError if standard output is a terminal.
    """

    def __init__(self) -> None:
        if sys.stdout.isatty():
            raise RequestError(
                "--out -: standard output is a terminal", hint='Pipe it to a program: omnistage say "Hello." --out - | aplay'
            )
        self._encoder: SoundEncoder | None = None
        self._waiting = queue.SimpleQueue[bytes | None]()
        self._writing = on_thread(self._write_all, "omnistage-sound-pipe")

    def write(self, chunk: AudioChunk) -> None:
        """Write the next piece. Raises BrokenPipeError, or another OSError, if the reader is gone."""
        if self._writing.done():
            self._writing.result()
        if self._encoder is None:
            self._encoder = SoundEncoder(".wav", chunk.sample_rate_hz, chunk.encoding, channels_of(chunk.samples))
        self._waiting.put(self._encoder.encode(chunk.samples))

    async def end(self) -> None:
        """Wait until everything has been written to the pipe. Raises OSError if the reader is gone."""
        self._waiting.put(None)
        await asyncio.wrap_future(self._writing)

    def _write_all(self) -> None:
        """The thread's work: write the sound that waits, until `end` or an error."""
        fd = sys.stdout.fileno()
        while (data := self._waiting.get()) is not None:
            view = memoryview(data)
            while view:
                try:
                    view = view[os.write(fd, view) :]
                except BlockingIOError:  # Another process with this pipe made it non-blocking.
                    select.select([], [fd], [])
