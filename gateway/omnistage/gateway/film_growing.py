"""Writes a film piece by piece while it is made, and lets clients read it before it is whole."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from importlib.util import find_spec
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

from omnistage.client import AsyncOmni
from omnistage.client.events import Done, Event, Progress, VideoDelta
from omnistage.gateway.answering import BrokenOff, Pieces
from omnistage.gateway.failure import ApiError
from omnistage.gateway.film_store import FilmJob, open_private, write_all

T = TypeVar("T")

PIECE_BYTES = 1 << 18
"""The most bytes of a piece that is read."""

MOST_PROGRESS = 99
"""Percent that a film shows at most before it is whole."""


async def beside(call: Callable[..., T], *arguments: Any) -> T:
    """Return the result of `call(*given)`, run on a thread. A caller that is cancelled still waits for the end of the call, so that no
    later write overtakes this one."""
    work = asyncio.ensure_future(asyncio.to_thread(call, *arguments))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait({work})
        raise


def ask_for_film(omni: AsyncOmni, prompt: str, picture: bytes | None, options: Mapping[str, Any]) -> AsyncGenerator[Event, None]:
    """The events of a film; the router is asked when the first of them is read. picture: bytes of the file of the first frame; None: there
    is none. Raises OmniError if the client library refuses the options."""
    media: dict[str, Any] = {} if picture is None else {"image": picture}
    return omni.stream_film(prompt, outputs=["video", "progress"], **media, **options)


async def make_film(omni: AsyncOmni, job: FilmJob, picture: bytes | None, limit_s: float) -> AsyncGenerator[bytes, None]:
    """Yield the bytes of a film's file as they come, and note progress and frames in the job. Raises OmniError."""
    events = ask_for_film(omni, job.prompt, picture, {**job.options, "timeout_s": limit_s})
    async with aclosing(events):
        async for event in events:
            match event:
                case Progress() if event.total:
                    job.progress = min(MOST_PROGRESS, 100 * event.done // event.total)
                case VideoDelta():
                    # Added, because a browser shows a film in pieces only if it knows the codecs.
                    job.media_type = f'{event.media_type}; codecs="{event.codecs}"' if event.codecs else event.media_type
                    job.frames += event.frames
                    yield event.data
                case Done():
                    job.model, job.notes = event.pipeline, list(event.notes)
                case _:
                    pass


class Growing:
    """A film's file at `path` while it is written. written: number of its bytes so far. readers: how many clients read it now."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._changed = asyncio.Event()
        self._attempt = 0  # number of the present try
        self._is_whole = self._is_over = False
        self.written = self.readers = 0

    async def write(self, data: bytes) -> None:
        """Append bytes. Raises OSError."""
        if self._file is None:
            self._file = await beside(open_private, self._path, "w+b")
        await beside(write_all, self._file, data)
        self.written += len(data)
        self._tell()

    async def reset(self, *, is_whole: bool) -> None:
        """End one try to make the film. If the film is not whole, delete the file and break off its readers, because the next try may give
        other bytes."""
        self._is_whole = is_whole
        if not is_whole:
            self._attempt, self.written = self._attempt + 1, 0
            await beside(self._path.unlink, True)  # Before anything that can fail: a full disk gets its room back.
            self._close()
        self._tell()

    def end(self) -> None:
        """End the film: no other try comes."""
        self._is_over = True
        self._close()
        self._tell()

    async def read(self) -> Pieces:
        """Yield the whole file from its beginning to its end, as it grows. If the film fails, raises ApiError before the first byte, and
        BrokenOff later."""
        self.readers += 1
        descriptor = -1
        try:
            while not self.written and not self._is_over:
                await self._changed.wait()
            if self._file is None:
                raise ApiError(409, "this video has ended meanwhile", code="not_ready", hint="GET /v1/videos/{id} says how it is.")
            # Each reader has a descriptor of its own, because the file may be renamed, and the writer's descriptor closed, at any moment.
            descriptor, attempt, place = os.dup(self._file.fileno()), self._attempt, 0
            while True:
                while place < self.written and attempt == self._attempt:
                    piece = await beside(os.pread, descriptor, min(PIECE_BYTES, self.written - place), place)
                    if not piece:  # Another program has made the file shorter.
                        raise BrokenOff
                    place += len(piece)
                    yield piece
                if self._is_whole:
                    return
                if self._is_over or attempt != self._attempt:
                    raise BrokenOff
                await self._changed.wait()
        finally:
            self.readers -= 1
            if descriptor >= 0:
                os.close(descriptor)

    def _tell(self) -> None:
        """Wake the readers."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


def facts_of(path: Path) -> tuple[int, int, float] | None:
    """Returns (width, height, frames a second) of a film's file; None: this machine cannot read such files. Blocks."""
    if find_spec("av") is None:
        return None
    import av

    try:
        with av.open(str(path)) as file:
            stream = file.streams.video[0]
            return stream.width, stream.height, float(stream.average_rate or stream.guessed_rate or 0)
    except (av.FFmpegError, IndexError):
        return None
