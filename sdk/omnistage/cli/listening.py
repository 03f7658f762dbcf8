"""Passes an answer's sound on while it is made: to a loudspeaker, if there is one and a person sits at a terminal, and to the program that
reads standard output."""

from __future__ import annotations

import asyncio
import sys
from contextlib import ExitStack

from rich.markup import escape
from rich.text import Text

from omnistage.cli.interruptible import Interruptible
from omnistage.cli.notices import Notices
from omnistage.cli.orders import HeardOrder
from omnistage.cli.screen import Below
from omnistage.cli.sound_pipe import SoundPipe
from omnistage.client.errors import PlayerLostError
from omnistage.client.events import AudioChunk
from omnistage.client.loudspeaker import find_loudspeaker, is_silenced
from omnistage.client.player import Player

STEP_S = 0.25
"""Seconds between two updates of the line that shows how much is still to be heard."""


class Listening:
    """Passes on the sound of one answer. player: plays it; None: it is not played. pipe: gets its bytes; None: it is not written."""

    def __init__(self, player: Player | None, pipe: SoundPipe | None) -> None:
        self._player = player
        self._pipe = pipe
        self._has_sound = False

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

    def stop(self) -> None:
        """Silence the player, at once and for ever."""
        if self._player is not None:
            self._player.stop()

    async def finish(self, work: Interruptible) -> None:
        """Wait until all sound is in the pipe and the player has played everything; an interrupt silences the player. Raises Interrupted,
        and OSError if the reader of the pipe is gone."""
        if self._pipe is not None:
            self._pipe.end()
            await work.unless_interrupted(self._pipe.taken())
        if self._player is None:
            return
        if not self._has_sound:
            self._player.stop()
            return
        try:
            await work.unless_interrupted(_show_until_heard(self._player))
        except PlayerLostError as error:
            Notices().tell(f"[yellow]{escape(error.message)}[/]")
        finally:
            self._player.stop()


async def listening(order: HeardOrder, files: ExitStack) -> Listening:
    """Make the Listening for an order; it is silenced when `files` ends. Raises the errors of `find_loudspeaker` if the variable names no
    player that works, and RequestError if the sound would be written on a terminal."""
    pipe = SoundPipe() if order.is_sound_piped else None
    loudspeaker = await asyncio.to_thread(find_loudspeaker) if order.is_to_be_heard else None
    hearing = Listening(Player(loudspeaker) if loudspeaker is not None else None, pipe)
    files.callback(hearing.stop)
    return hearing


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
