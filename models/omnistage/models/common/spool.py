"""Media that come in pieces on ports, put aside in files until they are whole: decoders read files, and memory is not for them.

The files have no name, so that nothing of them is left when the process is gone. They are in the folder for temporary files (TMPDIR);
where that is in memory, as a tmpfs is, they count there.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from omnistage.models.conversation import Streamed
from omnistage.models.interface import BadRequest, Content, Full, Piece, PortSpec

MEDIA_PORTS = tuple(PortSpec(f"media{number}", Content.MEDIA) for number in range(8))
"""Of every model that takes encoded media on ports: a client knows them by name."""

SPOOL_BYTES = 4 << 30
"""Of all media of a process together."""

FIELD = "thinker.messages.parts"


@dataclass(frozen=True, slots=True)
class Spooled:
    """A medium that is whole. file: descriptor of it, valid until the files are closed. size: in bytes. digest: SHA-256 of the bytes."""

    streamed: Streamed
    file: int
    size: int
    digest: bytes


class Spool:
    """Of one process. Its files are made, written and closed in threads."""

    def __init__(self, most_bytes: int = SPOOL_BYTES) -> None:
        """most_bytes: of all media that are held at once. The folder is chosen now: of one that is full Python would say another."""
        self._most_bytes = most_bytes
        self._folder = tempfile.gettempdir()
        self.held_bytes = 0

    def files(self, streamed: Iterable[Streamed], most_bytes: Callable[[Streamed], int]) -> Files:
        """Files for these media. most_bytes: that one of them may have. Raises BadRequest for one that says of itself that it has more."""
        return Files(self, self._folder, {one.port: (one, most_bytes(one)) for one in streamed})

    def hold(self, size: int) -> None:
        """Count bytes that are about to be written. Raises Full."""
        if self.held_bytes + size > self._most_bytes:
            raise Full(f"{self._most_bytes} bytes of streamed media are held, which is all that may be")
        self.held_bytes += size

    def free(self, size: int) -> None:
        self.held_bytes -= size


class Files:
    """Media of one request. Use it as a context manager, around the work on `whole` too: at its end the files are gone."""

    def __init__(self, spool: Spool, folder: str, media: Mapping[str, tuple[Streamed, int]]) -> None:
        """Use Spool.files."""
        for streamed, most in media.values():
            if streamed.total_bytes > most:
                raise _too_large(streamed, most)
        self._spool = spool
        self._files = {port: _File(streamed, most, folder) for port, (streamed, most) in media.items()}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        held = [file for file in self._files.values() if file.size]
        try:
            if held:  # Shielded: who is cancelled here leaves the files to the thread.
                await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, _close, held))
        finally:
            self._spool.free(sum(file.size for file in held))

    @property
    def are_whole(self) -> bool:
        """Whether all of the media have come."""
        return all(file.digest for file in self._files.values())

    @property
    def whole(self) -> Mapping[str, Spooled]:
        """By port; of those that have come."""
        return {port: Spooled(file.streamed, file.descriptor, file.size, file.digest) for port, file in self._files.items() if file.digest}

    async def take(self, piece: Piece) -> bool:
        """Write a piece; whether it is of one of these media. Raises BadRequest for a medium that is larger than it may be or said to be,
        before more of it is written, or that ends too early; Full."""
        file = self._files.get(piece.port)
        if file is None:
            return False
        assert isinstance(piece.content, bytes)
        file.check(len(piece.content), last=piece.last)
        self._spool.hold(len(piece.content))
        file.size += len(piece.content)
        await asyncio.to_thread(file.write, piece.content, last=piece.last)
        return True

    async def take_all(self, inputs: AsyncIterator[Piece]) -> None:
        """Take pieces until all media are whole; what other ports carry is lost. Raises as `take` and `next_piece`."""
        while not self.are_whole:
            await self.take(await next_piece(inputs))


async def next_piece(inputs: AsyncIterator[Piece]) -> Piece:
    """The next one, which is still to come. Raises BadRequest where the inputs were cut short."""
    piece = await anext(inputs, None)
    if piece is None:
        raise BadRequest(f"{FIELD}.port", "the input ended before its media did")
    return piece


class _File:
    """One medium. size: bytes that were counted for it. `write` and `close` are called in threads: a write whose caller was cancelled may
    still run when the file is closed."""

    def __init__(self, streamed: Streamed, most: int, folder: str) -> None:
        self.streamed = streamed
        self.size = 0
        self.descriptor = -1
        self.digest = b""
        self._most = most
        self._folder = folder
        self._hash = hashlib.sha256()
        self._lock = threading.Lock()
        self._closed = False

    def check(self, more: int, *, last: bool) -> None:
        """Whether so many bytes may come. Raises BadRequest."""
        size, total = self.size + more, self.streamed.total_bytes
        if size > self._most:
            raise _too_large(self.streamed, self._most)
        if total and (size > total or (last and size < total)):
            raise BadRequest(f"{FIELD}.total_bytes", f"said {total} bytes, {size} came", port=self.streamed.port)
        if last and not size:
            raise BadRequest(f"{FIELD}.port", "has no bytes: send the file itself", port=self.streamed.port)

    def write(self, data: bytes, *, last: bool) -> None:
        """The next bytes. Raises Full where the disk is."""
        with self._lock:
            if self._closed:
                return
            try:
                if self.descriptor < 0:
                    with tempfile.TemporaryFile(buffering=0, dir=self._folder) as made:
                        self.descriptor = os.dup(made.fileno())
                self._hash.update(data)
                while data:
                    data = data[os.write(self.descriptor, data) :]
            except OSError as error:
                what = "free some of it, or give this stage another TMPDIR"
                raise Full(f"no more media can be put aside in {self._folder} ({error.strerror}): {what}") from error
            if last:
                self.digest = self._hash.digest()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self.descriptor >= 0:
                os.close(self.descriptor)
                self.descriptor = -1


def _close(files: Iterable[_File]) -> None:
    for file in files:
        file.close()


def _too_large(streamed: Streamed, most: int) -> BadRequest:
    return BadRequest(
        f"{FIELD}.port",
        f"has more than {most} bytes, the most of {streamed.media_type or 'its kind'}: send a part of it, or a smaller one",
        port=streamed.port,
    )
