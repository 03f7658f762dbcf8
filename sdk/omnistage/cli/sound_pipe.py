"""Writes sound to standard output while it is made, as a WAV file for the program that reads it: `omnistage say "Hello." --out - |
aplay`."""

from __future__ import annotations

import asyncio
import os
import queue
import select
import sys
import threading
from contextlib import suppress

from omnistage.client.errors import RequestError
from omnistage.client.events import AudioChunk
from omnistage.client.files import SoundEncoder, channels_of


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
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when all sound is in the pipe, after `end`, or fails with OSError if the reader is gone."""
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._write_all, name="omnistage-sound-pipe", daemon=True).start()

    def write(self, chunk: AudioChunk) -> None:
        """Write the next piece. Raises BrokenPipeError, or another OSError, if the reader is gone."""
        if self._over.done():
            self._over.result()
        if self._encoder is None:
            self._encoder = SoundEncoder(".wav", chunk.sample_rate_hz, chunk.encoding, channels_of(chunk.samples))
        self._waiting.put(self._encoder.encode(chunk.samples))

    def end(self) -> None:
        """Note that no more sound comes."""
        self._waiting.put(None)

    async def taken(self) -> None:
        """Wait, after `end`, until everything has been written to the pipe. Raises OSError if the reader is gone."""
        await self._over

    def _write_all(self) -> None:
        """The thread's work: write the sound that waits, until `end` or an error."""
        fd = sys.stdout.fileno()
        error: OSError | None = None
        try:
            while (data := self._waiting.get()) is not None:
                view = memoryview(data)
                while view:
                    try:
                        view = view[os.write(fd, view) :]
                    except BlockingIOError:  # Another process with this pipe made it non-blocking.
                        select.select([], [fd], [])
        except OSError as failure:
            error = failure
        with suppress(RuntimeError):  # The loop has ended, so nothing waits for the thread.
            self._loop.call_soon_threadsafe(self._end, error)

    def _end(self, error: OSError | None) -> None:
        """Called on the loop when the thread has ended. error: of the pipe; None: everything is written."""
        if self._over.done():
            return
        if error is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(error)
            self._over.exception()  # Read, so that asyncio does not log it: the next `write` or `taken` raises it.
