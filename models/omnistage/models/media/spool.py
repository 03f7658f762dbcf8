"""Writes media that come in pieces on ports to files, because decoders read files, and media are too large for memory.

The files have no name, so the system removes them when the process ends. They lie in the folder for temporary files (TMPDIR), and take
memory if that folder is in memory (tmpfs).
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import tempfile
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from omnistage.models.conversation import Streamed
from omnistage.models.interface import BadRequest, Content, Full, Piece, PortSpec
from omnistage.models.turns import has_room, host_of

MEDIA_PORTS = tuple(PortSpec(f"media{number}", Content.MEDIA) for number in range(8))
"""The ports of every model that takes encoded media on ports; clients use these names."""

SPOOL_BYTES = 4 << 30
"""Largest number of bytes of all media of a process together."""

FIELD = "thinker.messages.parts"


@dataclass(frozen=True, slots=True)
class Spooled:
    """A complete medium. file: descriptor of the file, valid until `Files` is closed. size: bytes of the medium. digest: their SHA-256."""

    streamed: Streamed
    file: int
    size: int
    digest: bytes


class Spool:
    """Makes the files of streamed media of one process, and bounds their bytes. held_bytes: bytes in all files now."""

    def __init__(self, most_bytes: int = SPOOL_BYTES) -> None:
        """most_bytes: largest number of bytes of all media together. The folder is chosen now, because Python would choose another folder
        once this one is full."""
        self._most_bytes = most_bytes
        self._folder = tempfile.gettempdir()
        self._of_host_bytes = Counter[str]()

    @property
    def held_bytes(self) -> int:
        return self._of_host_bytes.total()

    def files(self, streamed: Iterable[Streamed], most_bytes: Callable[[Streamed], int], client: str = "") -> Files:
        """Files for media of a client. most_bytes: returns the largest number of bytes of a medium. Raises BadRequest for a medium that
        declares more."""
        return Files(self, self._folder, host_of(client), {one.port: (one, most_bytes(one)) for one in streamed})

    def hold(self, host: str, size: int) -> None:
        """Count `size` bytes of a host before they are written. Raises Full if all media would have too many, or those of the host."""
        if not has_room(size, self.held_bytes, self._of_host_bytes[host], self._most_bytes):
            raise Full(f"{self.held_bytes} bytes of streamed media are held, of {self._most_bytes}: ask again later")
        self._of_host_bytes[host] += size

    def free(self, host: str, size: int) -> None:
        self._of_host_bytes[host] -= size
        if not self._of_host_bytes[host]:
            del self._of_host_bytes[host]


class Files:
    """The files of the media of one request. Use it as a context manager around work on `complete_media`: its end closes the files."""

    def __init__(self, spool: Spool, folder: str, host: str, media: Mapping[str, tuple[Streamed, int]]) -> None:
        """Call Spool.files instead."""
        for streamed, max_bytes in media.values():
            if streamed.total_bytes > max_bytes:
                raise _too_large(streamed, max_bytes)
        self._spool, self._host = spool, host
        self._files = {port: _File(streamed, max_bytes, folder) for port, (streamed, max_bytes) in media.items()}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the files on a thread, and stop counting their bytes."""
        files = [file for file in self._files.values() if file.size]
        try:
            if files:  # Shielded, so that the thread closes the files even if the caller is cancelled.
                await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, _close, files))
        finally:
            self._spool.free(self._host, sum(file.size for file in files))

    @property
    def are_whole(self) -> bool:
        """Whether all media are complete."""
        return all(file.digest for file in self._files.values())

    @property
    def complete_media(self) -> Mapping[str, Spooled]:
        """The complete media, by port."""
        return {port: Spooled(file.streamed, file.descriptor, file.size, file.digest) for port, file in self._files.items() if file.digest}

    async def take(self, piece: Piece) -> bool:
        """Write a piece if it belongs to one of these media, and return whether it does. Raises, before it is written, BadRequest for a
        medium that is larger than its limit or its declared size, or that ends too early; and Full."""
        file = self._files.get(piece.port)
        if file is None:
            return False
        assert isinstance(piece.content, bytes)
        file.check(len(piece.content), last=piece.last)
        self._spool.hold(self._host, len(piece.content))
        file.size += len(piece.content)
        await asyncio.to_thread(file.write, piece.content, last=piece.last)
        return True

    async def take_all(self, inputs: AsyncIterator[Piece]) -> None:
        """Take pieces until all media are complete; pieces of other ports are dropped. Raises as `take` and `next_piece`."""
        while not self.are_whole:
            await self.take(await next_piece(inputs))


async def next_piece(inputs: AsyncIterator[Piece]) -> Piece:
    """The next piece of the inputs. Raises BadRequest if they have ended already."""
    piece = await anext(inputs, None)
    if piece is None:
        raise BadRequest(f"{FIELD}.port", "the input ended before its media did")
    return piece


class _File:
    """The file of one medium. size: bytes that the spool counts for it. descriptor: -1: no file yet. digest: b"": not complete. max_bytes:
    of the medium. `write` and `close` run in threads: a write whose caller was cancelled may still run when the file is closed, and is
    dropped then."""

    def __init__(self, streamed: Streamed, max_bytes: int, folder: str) -> None:
        self.streamed = streamed
        self.size = 0
        self.descriptor = -1
        self.digest = b""
        self._max_bytes = max_bytes
        self._folder = folder
        self._hash = hashlib.sha256()
        self._lock = threading.Lock()
        self._closed = False

    def check(self, byte_count: int, *, last: bool) -> None:
        """Check that `byte_count` further bytes may come. last: they are the last bytes of the medium. Raises BadRequest."""
        size, total = self.size + byte_count, self.streamed.total_bytes
        if size > self._max_bytes:
            raise _too_large(self.streamed, self._max_bytes)
        if total and (size > total or (last and size < total)):
            raise BadRequest(f"{FIELD}.total_bytes", f"said {total} bytes, {size} came", port=self.streamed.port)
        if last and not size:
            raise BadRequest(f"{FIELD}.port", "has no bytes: send the file itself", port=self.streamed.port)

    def write(self, data: bytes, *, last: bool) -> None:
        """Write the next bytes. last: the medium is complete with them. Raises Full if the disk is full."""
        with self._lock:
            if self._closed:
                return
            try:
                if self.descriptor < 0:
                    with tempfile.TemporaryFile(buffering=0, dir=self._folder) as file:
                        self.descriptor = os.dup(file.fileno())
                self._hash.update(data)
                while data:
                    data = data[os.write(self.descriptor, data) :]
            except OSError as error:
                advice = "free some of it, or give this stage another TMPDIR"
                raise Full(f"no more media can be put aside in {self._folder} ({error.strerror}): {advice}") from error
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


def _too_large(streamed: Streamed, max_bytes: int) -> BadRequest:
    """The refusal of a medium that has more than `max_bytes`."""
    return BadRequest(
        f"{FIELD}.port",
        f"has more than {max_bytes} bytes, the most of {streamed.media_type or 'its kind'}: send a part of it, or a smaller one",
        port=streamed.port,
    )
