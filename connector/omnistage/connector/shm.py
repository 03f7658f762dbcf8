"""POSIX shared memory: names, the two headers, and one segment as its producer and as a reader see it. Also two facts that are equal for
all processes that see the same shared memory; only the probe of an offer (transport.py) proves it.

    segment   page 0: magic, version, number, arena uuid, size, reserved bytes | block | block | ...
    block     64 bytes: magic, generation, length | payload (offset is a multiple of 64)

A block's generation is 0 while nobody may read it, else a number that its arena never gave to another block."""

from __future__ import annotations

import errno
import fcntl
import functools
import mmap
import os
import stat
import struct
from collections.abc import Collection
from pathlib import Path

import posix_ipc

from omnistage.connector.tensors import ForeignSegment, InvalidReference, StaleReference

MOUNT = Path("/dev/shm")
"""Where the C library keeps POSIX shared memory on Linux (shm_open(3))."""


@functools.cache
def boot_id() -> str:
    """Identity of this boot of this kernel: equal on one host, also across containers."""
    return Path("/proc/sys/kernel/random/boot_id").read_bytes().decode().strip()


def mount_device() -> str:
    """st_dev of the shared-memory mount: equal for containers that share it, different for private mounts."""
    return str(MOUNT.stat().st_dev)


PAGE = 4096
BLOCK_HEADER = 64
PREFIX = "omnistage-"

_VERSION = 1
_MAGIC = b"omniseg\0"
_SEGMENT = struct.Struct("<8sII16sQQ")  # magic, version, number, arena, size, reserved
_WORD = 8
_RESERVED_AT = _SEGMENT.size - _WORD
_BLOCK_MAGIC = 0x6B636F6C42696E6D  # "mniBlock"
_BLOCK = struct.Struct("<QQQ")  # magic, generation, length
_GENERATION_AT, _LENGTH_AT = _WORD, 2 * _WORD
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
_STEP = 1 << 20  # bytes reserved at once: few enough not to delay the event loop (about 1 ms), enough that reserving is rare


def segment_name(arena: bytes, number: int) -> str:
    """Name of a segment. Both ends form it from the 16 random bytes that only they know."""
    return f"/{PREFIX}{arena.hex()}-{number}"


def liveness_name(arena: bytes) -> str:
    """Name of the file that the producer keeps locked for its life, so that a sweep can recognise the orphans of a dead one."""
    return f"/{PREFIX}{arena.hex()}-live"


def create_file(name: str) -> int:
    """Make a new empty shared-memory file, mode 0600 whatever the umask is. Return its descriptor. Raises OSError."""
    try:
        descriptor: int = posix_ipc.SharedMemory(name, flags=posix_ipc.O_CREX, mode=0o600).fd
    except posix_ipc.Error as error:
        raise OSError(str(error)) from error
    os.fchmod(descriptor, 0o600)
    os.set_inheritable(descriptor, False)
    return descriptor


def unlink(name: str) -> None:
    """Remove a name; a missing name is no error. Processes that have the memory mapped keep it."""
    try:
        posix_ipc.unlink_shared_memory(name)
    except posix_ipc.ExistentialError:
        return


def reservation(end: int, size: int) -> int:
    """Bytes of memory that a segment of `size` bytes takes from the mount when it is used up to `end`: whole steps."""
    return min(-(-end // _STEP) * _STEP, size)


class ProducerSegment:
    """A segment of this process's own arena. Address space is mapped at once, memory is reserved as blocks are carved.

    `posix_fallocate` before the first touch makes a full mount an OSError here; without it the write would kill the process (SIGBUS).
    dedicated: it holds a single large block. carved: the offset up to which it is cut into blocks. live_blocks: number of its blocks in
    use."""

    def __init__(self, arena: bytes, number: int, size: int) -> None:
        """Create the file of `size` bytes (a multiple of the page) and reserve its header page. If that raises OSError, nothing is left."""
        self.number = number
        self.size = size
        self.dedicated = False
        self.carved = PAGE
        self.live_blocks = 0
        self._reserved = 0
        self._name = segment_name(arena, number)
        self._fd = create_file(self._name)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # for a sweep that finds no liveness file
            os.ftruncate(self._fd, size)
            os.posix_fallocate(self._fd, 0, PAGE)
            self.map = mmap.mmap(self._fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError:
            os.close(self._fd)
            unlink(self._name)
            raise
        self._reserved = PAGE
        _SEGMENT.pack_into(self.map, 0, _MAGIC, _VERSION, number, arena, size, PAGE)

    @property
    def reserved(self) -> int:
        """Bytes of memory that this segment takes from the mount."""
        return self._reserved

    def reserve_cost(self, end: int) -> int:
        """Bytes that `reserve(end)` would take from the mount."""
        return max(reservation(end, self.size) - self._reserved, 0)

    def reserve(self, end: int) -> int:
        """Reserve memory for the bytes up to `end`. Return `reserved`. Raises OSError (ENOSPC) with nothing taken."""
        target = reservation(end, self.size)
        if target > self._reserved:
            os.posix_fallocate(self._fd, self._reserved, target - self._reserved)
            self._reserved = target
            _store(self.map, _RESERVED_AT, target)
        return self._reserved

    def publish(self, offset: int, generation: int, length: int) -> None:
        """Let readers in: write the header of the block at `offset`."""
        _store(self.map, offset, _BLOCK_MAGIC)
        _store(self.map, offset + _LENGTH_AT, length)
        _store(self.map, offset + _GENERATION_AT, generation)  # Written last: a reader that sees it sees the others.

    def retract(self, offset: int) -> None:
        """Let no new reader in."""
        _store(self.map, offset + _GENERATION_AT, 0)

    def close(self) -> None:
        """Unlink, unmap, close. Readers that have it mapped keep it."""
        unlink(self._name)
        self.map.close()
        os.close(self._fd)


def _store(shared: mmap.mmap, at: int, value: int) -> None:
    """Write one aligned word (8 bytes) in a single store, so that a reader in another process finds the old value or the new one. struct
    would write zeros first and then byte after byte."""
    with memoryview(shared) as view, view.cast("Q") as words:
        words[at // _WORD] = value


def _load(shared: mmap.mmap, at: int) -> int:
    """Read one aligned word (8 bytes) in a single load."""
    with memoryview(shared) as view, view.cast("Q") as words:
        return words[at // _WORD]


def _path(arena: bytes, number: int) -> Path:
    return MOUNT / segment_name(arena, number).removeprefix("/")


def _open(arena: bytes, number: int, owners: Collection[int] = ()) -> int:
    """Open a segment for reading. Return its descriptor. owners: ids of further users, apart from our own, whose segments are accepted.

    Raises StaleReference if there is no segment or no descriptor is left, ForeignSegment if it belongs to another user, InvalidReference if
    it cannot be a segment.
    """
    try:
        # The flags of shm_open, and O_NONBLOCK, because opening something that is no file might wait.
        descriptor = os.open(_path(arena, number), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise StaleReference(f"segment {number} of the sender's arena is gone") from None
    except OSError as error:
        raise _unreadable(number, "opened", error) from None
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode) or facts.st_size < PAGE:
        os.close(descriptor)
        raise InvalidReference(f"segment {number} of the sender's arena is not a segment")
    if facts.st_uid not in (os.geteuid(), *owners) or facts.st_mode & _WRITABLE_BY_OTHERS:
        os.close(descriptor)
        raise ForeignSegment(f"segment {number} of the sender's arena belongs to another user, or others may write it")
    return descriptor


def _unreadable(number: int, done: str, error: OSError) -> InvalidReference | StaleReference:
    """The error for a segment that could not be opened or mapped (`done`): StaleReference if this process has no room for it, so that the
    tensor comes inline instead; otherwise InvalidReference, a fault of the sender."""
    kind = StaleReference if error.errno in _NO_ROOM else InvalidReference
    return kind(f"segment {number} of the sender's arena cannot be {done}: {error.strerror}")


def _read_reserved(header: bytes, arena: bytes, number: int, size: int) -> int:
    """How many bytes of a segment have memory, according to its header. size: bytes of its file. Raises InvalidReference for a wrong
    header."""
    reserved: int
    magic, version, stated_number, owner, stated_size, reserved = _SEGMENT.unpack(header)
    if (magic, version, stated_number, owner, stated_size) != (_MAGIC, _VERSION, number, arena, size):
        raise InvalidReference(f"segment {number} of the sender's arena has a wrong header")
    return min(reserved, size)


def _check_place(offset: int, length: int, generation: int, end: int) -> None:
    """Raise InvalidReference unless a block of `length` payload bytes can lie at `offset` of a segment with memory up to `end`."""
    if offset % BLOCK_HEADER or offset < PAGE or generation == 0:
        raise InvalidReference("a block begins at a multiple of 64 behind the first page and has a generation above 0")
    if offset + BLOCK_HEADER + length > end:
        raise InvalidReference("a block runs over the end of its segment")


def _check_block(header: bytes, length: int, generation: int) -> None:
    """Raise StaleReference if a block's header names another generation, InvalidReference if it names another length or is no header."""
    magic, stated_generation, size = _BLOCK.unpack(header)
    if magic != _BLOCK_MAGIC:
        raise InvalidReference("there is no block at this offset")
    if stated_generation != generation:
        raise StaleReference(f"the block is of generation {stated_generation} now, not {generation}: its memory was given back")
    if size != length:
        raise InvalidReference(f"the block holds {size} bytes, not {length}")


def copy_block(arena: bytes, number: int, offset: int, length: int, generation: int, owners: Collection[int] = ()) -> bytes:
    """Copy the payload of a block by reading the file, without a mapping: a file that its producer cut short gives an error, not a signal.
    owners: ids of further users to whom the file may belong, apart from our own.

    Raises StaleReference and InvalidReference as ReaderSegment does, also if the block was given back while it was read.
    """
    descriptor = _open(arena, number, owners)
    try:

        def read(start: int, count: int) -> bytes:
            data = os.pread(descriptor, count, start)
            if len(data) != count:
                raise InvalidReference(f"segment {number} of the sender's arena was cut short")
            return data

        header = read(0, _SEGMENT.size)
        while (header_after := read(0, _SEGMENT.size)) != header:  # The producer may have reserved more after the header was read.
            header = header_after
        end = _read_reserved(header, arena, number, os.fstat(descriptor).st_size)
        _check_place(offset, length, generation, end)
        _check_block(read(offset, _BLOCK.size), length, generation)
        payload = read(offset + BLOCK_HEADER, length)
        _check_block(read(offset, _BLOCK.size), length, generation)
        return payload
    finally:
        os.close(descriptor)


class ReaderSegment:
    """A segment of another process's arena, mapped read-only: writing through a view is a segmentation fault, not a corruption.

    Only segments of our own user are mapped: a process that can cut a file short can kill those that have it mapped (SIGBUS).
    """

    def __init__(self, arena: bytes, number: int) -> None:
        """Open and check it. Raises StaleReference if it is gone or there is no room to map it, InvalidReference if it may not be used."""
        self._path = _path(arena, number)
        descriptor = _open(arena, number)
        try:
            facts = os.fstat(descriptor)
            self.size = facts.st_size
            self._inode = facts.st_ino
            self.map = mmap.mmap(descriptor, self.size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except OSError as error:
            raise _unreadable(number, "mapped", error) from None
        finally:
            os.close(descriptor)
        try:
            _read_reserved(self.map[: _SEGMENT.size], arena, number, self.size)
        except InvalidReference:
            self.map.close()
            raise

    def check(self, offset: int, length: int, generation: int) -> None:
        """Raise InvalidReference unless a block of `length` bytes can lie at `offset`, StaleReference unless it has this generation."""
        _check_place(offset, length, generation, min(_load(self.map, _RESERVED_AT), self.size))
        _check_block(self.map[offset : offset + _BLOCK.size], length, generation)

    def is_gone(self) -> bool:
        """Whether the producer unlinked it, so that no new reference into it can come."""
        try:
            return self._path.stat().st_ino != self._inode
        except FileNotFoundError:
            return True

    def close_if_unused(self) -> bool:
        """Unmap the segment unless a view of it is alive. Return whether it is unmapped."""
        try:
            self.map.close()
        except BufferError:
            return False
        return True


class ReaderCache:
    """The segments of other processes that this process has mapped. Mapping is expensive (page faults on first read), so maps are kept."""

    def __init__(self, limit: int = 256) -> None:
        self._limit = limit
        self._segments: dict[tuple[bytes, int], ReaderSegment] = {}  # least recently used first

    def __len__(self) -> int:
        return len(self._segments)

    def get(self, arena: bytes, number: int) -> ReaderSegment:
        """The mapped segment. Raises what ReaderSegment raises, and StaleReference if too many segments are in use."""
        key = (arena, number)
        segment = self._segments.pop(key, None)
        if segment is None:
            if len(self._segments) >= self._limit:
                self._make_room()
            segment = ReaderSegment(arena, number)
        self._segments[key] = segment
        return segment

    def drop_gone(self) -> None:
        """Unmap the segments that their producer has unlinked and no view uses."""
        for key, segment in list(self._segments.items()):
            if segment.is_gone() and segment.close_if_unused():
                del self._segments[key]

    def _make_room(self) -> None:
        """Unmap the least recently used segment that no view uses. Raises StaleReference if views use all of them."""
        for key, segment in self._segments.items():
            if segment.close_if_unused():
                del self._segments[key]
                return
        raise StaleReference(f"more than {self._limit} segments are in use at once, so it cannot be mapped now")


READERS = ReaderCache()
"""One cache for all receivers of this process."""
