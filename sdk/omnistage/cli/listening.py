"""Plays an answer while it is made, if there is a loudspeaker and a person at a terminal."""

from __future__ import annotations

import asyncio
import sys

from rich.markup import escape
from rich.text import Text

from omnistage.cli.interruptible import Interruptible
from omnistage.cli.notices import Notices
from omnistage.cli.screen import Below
from omnistage.client.errors import PlayerLostError
from omnistage.client.events import AudioChunk
from omnistage.client.loudspeaker import find_loudspeaker, is_silenced
from omnistage.client.player import Player

STEP_S = 0.25
"""Pause between two looks at how much is still to be heard."""


class Listening:
    """Plays the sound of one answer. player: None: there is no loudspeaker, or the sound is not wanted, and nothing is played."""

    def __init__(self, player: Player | None) -> None:
        self._player = player
        self._came = False

    @property
    def is_silent(self) -> bool:
        """Whether nothing plays the sound."""
        return self._player is None

    @property
    def lacks_loudspeaker(self) -> bool:
        """Whether sound came and nothing plays it, although the user has not turned sound off."""
        return self._came and self._player is None and not is_silenced()

    def write(self, chunk: AudioChunk) -> None:
        """Take the next piece; never waits."""
        self._came = True
        if self._player is not None:
            self._player.write(chunk)

    def stop(self) -> None:
        """Silence the player, at once and for good."""
        if self._player is not None:
            self._player.stop()

    async def finish(self, work: Interruptible) -> None:
        """Wait until everything has been played; an interrupt stops the sound. Raises Interrupted."""
        if self._player is None:
            return
        if not self._came:
            self._player.stop()
            return
        try:
            await work.unless_interrupted(_shown(self._player))
        except PlayerLostError as error:
            Notices().tell(f"[yellow]{escape(error.message)}[/]")
        finally:
            self._player.stop()


async def listening(is_wanted: bool) -> Listening:
    """The player for one answer. is_wanted: False for an answer that is not to be played. Raises the errors of `find_loudspeaker`, for a
    variable that names no player."""
    loudspeaker = await asyncio.to_thread(find_loudspeaker) if is_wanted else None
    return Listening(Player(loudspeaker) if loudspeaker is not None else None)


async def _shown(player: Player) -> None:
    """Wait until everything has been played, with a line that shows the seconds left."""
    finishing = asyncio.create_task(player.afinish())
    below = Below(sys.stderr) if sys.stderr.isatty() else None
    try:
        while not finishing.done():
            heard = player.heard
            left_s = (heard.of - heard.samples) / heard.sample_rate_hz
            if below is not None:
                below.erase()
                below.draw("", Text(f"playing, {left_s:.0f} s left (Ctrl-C stops it)", style="dim"))
            await asyncio.wait({finishing}, timeout=STEP_S)
        finishing.result()
    finally:
        finishing.cancel()
        if below is not None:
            below.erase()
