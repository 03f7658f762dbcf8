"""The arena: shared memory of one producer process, handed out in blocks. Neighbouring free ranges are joined, so memory that was cut into
small blocks becomes whole again when they are free."""

from __future__ import annotations

import logging
import os
import time
import weakref
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from omnistage.connector.liveness import Liveness, Peer, sweep
from omnistage.connector.shm import BLOCK_HEADER, MOUNT, PAGE, ProducerSegment, reservation
from omnistage.connector.tensors import ArenaFull, ConnectorError

logger = logging.getLogger(__name__)


class Extents:
    """The free ranges of all segments. A range is found by its size in O(log n) and by its start or end in O(1). All are in bytes."""

    def __init__(self) -> None:
        self._by_size: list[tuple[int, int, int]] = []  # size, segment, start
        self._end_of: dict[tuple[int, int], int] = {}  # by segment and start
        self._start_of: dict[tuple[int, int], int] = {}  # by segment and end

    def add(self, segment: int, start: int, end: int) -> tuple[int, int]:
        """Add a free range, which overlaps none that is here, and join it with its neighbours. Return start and end of the joined range."""
        before = self._start_of.get((segment, start))
        if before is not None:
            self.remove(segment, before)
            start = before
        after = self._end_of.get((segment, end))
        if after is not None:
            self.remove(segment, end)
            end = after
        self._end_of[segment, start] = end
        self._start_of[segment, end] = start
        insort(self._by_size, (end - start, segment, start))
        return start, end

    def take(self, size: int) -> tuple[int, int] | None:
        """Take `size` bytes from the smallest range that has them. Return their segment and start; None if there is no such range."""
        place = bisect_left(self._by_size, (size, 0, 0))
        if place == len(self._by_size):
            return None
        _, segment, start = self._by_size[place]
        end = self.remove(segment, start)
        if end - start > size:
            self.add(segment, start + size, end)
        return segment, start

    def remove(self, segment: int, start: int) -> int:
        """Remove the range that begins at `start`. Return its end."""
        end = self._end_of.pop((segment, start))
        del self._start_of[segment, end]
        del self._by_size[bisect_left(self._by_size, (end - start, segment, start))]
        return end

    def forget(self, segment: int) -> None:
        """Remove all ranges of a segment."""
        for owner, start in [key for key in self._end_of if key[0] == segment]:
            self.remove(owner, start)


SEGMENT_BYTES = 64 << 20
SMALLEST_CLASS = 4096
_DEFAULT_CAP = 1 << 30
_SHARE = 8  # one process takes at most an eighth of the free memory, so the four stages of a chain leave half of it to others
_SPARE_DEDICATED = 2
_GROWTH_PAUSE_S = 1.0
_STREAMS = 4
_LOOK_PAUSE_S = 0.2
_SWEEP_PAUSE_S = 10.0
_SWEEP_LIMIT_S = 0.02  # the caller is an event loop

_Taken = TypeVar("_Taken")


def class_bytes(length: int) -> int:
    """Payload bytes of the smallest block that holds `length`: 4 sizes per power of two from 4 KiB, so at most 25 % is unused."""
    if length <= SMALLEST_CLASS:
        return SMALLEST_CLASS
    step = (1 << ((length - 1).bit_length() - 1)) // 4  # a quarter of the largest power of two below `length`
    return -(-length // step) * step


@dataclass(slots=True, eq=False)
class Share:
    """Limits the bytes of an arena that one stream takes, so that a slow reader or a long log does not force all other streams inline."""

    limit: int
    used: int = 0
    """Bytes of the stream's blocks that are not free, for any reason."""

    def allows(self, length: int) -> bool:
        """Whether the stream may take a block for `length` bytes. The first block is always allowed, however large it is."""
        return not self.used or self.used + class_bytes(length) <= self.limit


@dataclass(slots=True, eq=False)
class Block:
    """A piece of the arena. `generation` is 0 while the block is free, and unique in the arena while it is handed out.

    offset: of its header in the segment, in bytes. capacity, length: payload bytes that it can hold, and that it holds. holders: how many
    must still give it back before it is free: one for every stream whose reader may look at it, and one for the log that may send it again.
    doomed: how many of these holders are gone without giving it back; they count until their grace ends. share: the share that counts its
    bytes; None: no share."""

    segment: ProducerSegment
    offset: int
    capacity: int
    generation: int = 0
    length: int = 0
    holders: int = 0
    doomed: int = 0
    share: Share | None = None

    @property
    def payload_offset(self) -> int:
        """Byte of the segment's map at which the payload begins."""
        return self.offset + BLOCK_HEADER


class Arena:
    """Blocks of shared memory, one arena per process, used from one thread.

    Free blocks are kept per size class and taken last in, first out, because the block given back last is still in the processor's cache.
    If a class has none, free blocks of all classes are joined with their free neighbours and cut anew. Nothing here waits: a full arena
    raises ArenaFull. Other threads may read `bytes_used` and `leases` alone.
    """

    @classmethod
    def create(
        cls,
        *,
        max_bytes: int | None = None,
        segment_bytes: int = SEGMENT_BYTES,
        grace_s: float = 30.0,
        poison: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> Arena | None:
        """Make the arena of this process. Return None if tensors must go inline; then the reason is logged once.

        max_bytes: limit of the memory; by default an eighth of the free memory on the mount, at most 1 GiB; 0: no arena, and no log line.
        segment_bytes: size of a segment, a multiple of 4096, at least 64 KiB. Memory is taken as it is needed, not per segment. grace_s:
        seconds for which blocks of a broken stream are not used again. poison: overwrite every freed block with 0xFF (NaN in every float
        type), to find readers that come too late."""
        if segment_bytes % PAGE or segment_bytes < 16 * PAGE:
            raise ConnectorError("segment_bytes must be a multiple of 4096 and at least 65536")
        if max_bytes == 0:
            return None
        try:
            mount = os.statvfs(MOUNT)
        except OSError as error:
            _announce(f"there is no shared-memory mount: {error.strerror}")
            return None
        free = mount.f_bavail * mount.f_frsize
        budget = min(free // _SHARE, _DEFAULT_CAP) if max_bytes is None else min(max_bytes, free)
        if budget < 2 * segment_bytes:
            _announce(f"{budget} bytes of shared memory may be used ({free} are free), two segments need {2 * segment_bytes}")
            return None
        try:
            return cls(budget, segment_bytes, grace_s, poison, clock)
        except OSError as error:
            _announce(f"shared memory cannot be created: {error.strerror or error}")
            return None

    def __init__(self, max_bytes: int, segment_bytes: int, grace_s: float, poison: bool, clock: Callable[[], float]) -> None:
        """Call `create` instead. Raises OSError if the mount refuses the first files."""
        liveness = Liveness()
        self.uuid = liveness.arena
        self.max_bytes = max_bytes
        self._segment_bytes = segment_bytes
        self._grace_s = grace_s
        self._poison = poison
        self._clock = clock
        self._segments: dict[int, ProducerSegment] = {}
        self._free: dict[int, list[Block]] = {}  # by payload bytes of the class
        self._extents = Extents()
        self._quarantine: dict[Peer | None, deque[tuple[float, Block]]] = {}  # reader -> (end of the grace, block), oldest first
        self._next_look = self._next_sweep = clock()  # when readers are looked at again, and when a sweep may begin again
        self._next_segment = 0
        self._next_generation = 1
        self._bytes_used = 0
        self._leases = 0
        self._refused_bytes = 0  # bytes that the mount refused last; as many are not tried before `_refused_until`
        self._refused_until = clock()
        # Runs at close, when the arena is collected, and at exit of the interpreter; a forked child leaves its parent's names alone.
        self._removal = weakref.finalize(self, _remove, self._segments, liveness, os.getpid())

    @property
    def bytes_used(self) -> int:
        """Bytes of payload space in blocks that are not free, as of the last call."""
        return self._bytes_used

    @property
    def bytes_total(self) -> int:
        """Bytes taken from the mount; at most `max_bytes`."""
        return sum(segment.reserved for segment in self._segments.values())

    @property
    def leases(self) -> int:
        """Blocks handed out and not free yet, as of the last call; those in quarantine included."""
        return self._leases

    def settle(self) -> None:
        """Free the blocks in quarantine whose grace has ended or whose reader is dead. `allocate` does so too: call this for an arena that
        may be idle."""
        if self._quarantine:
            self._end_quarantine()

    def share(self) -> Share:
        """A share for one more stream: a quarter of the arena."""
        return Share(self.max_bytes // _STREAMS)

    def allocate(self, length: int, share: Share | None = None) -> Block:
        """Hand out a block for `length` bytes; no reader can see it before `publish`. share: the share that counts it. Raises ArenaFull."""
        if not self._removal.alive:
            raise ArenaFull("the arena is closed")
        if self._quarantine:
            self._end_quarantine()
        capacity = class_bytes(length)
        free = self._free.get(capacity)
        block = free.pop() if free else self._find(capacity)
        block.generation = self._next_generation
        block.length = length
        block.holders, block.doomed = 1, 0
        block.share = share
        if share is not None:
            share.used += block.capacity
        self._next_generation += 1
        block.segment.live_blocks += 1
        self._bytes_used += block.capacity
        self._leases += 1
        return block

    def publish(self, block: Block) -> None:
        """Let readers in. Call it once the payload is written."""
        block.segment.publish(block.offset, block.generation, block.length)

    def hold(self, block: Block) -> None:
        """Add a holder, which will `free` the block too. Raises ConnectorError for a block that is free."""
        if block.generation == 0:
            raise ConnectorError("a free block cannot be held")
        block.holders += 1

    def free(self, block: Block) -> None:
        """Give the block back for one of its holders; with the last holder it becomes free. Raises ConnectorError for a block that is free
        already."""
        if block.generation == 0:
            raise ConnectorError("the block is free already")
        if not self._removal.alive:
            return
        block.holders -= 1
        if block.holders:
            self._retract_doomed(block)
            return
        segment = block.segment
        segment.retract(block.offset)
        if self._poison:
            start = block.payload_offset
            segment.map[start : start + block.length] = b"\xff" * block.length
        block.generation = 0
        segment.live_blocks -= 1
        self._bytes_used -= block.capacity
        self._leases -= 1
        if block.share is not None:
            block.share.used -= block.capacity
            block.share = None
        self._free.setdefault(block.capacity, []).append(block)
        if segment.dedicated:
            self._trim_dedicated()

    def quarantine(self, block: Block, reader: Peer | None = None) -> None:
        """Give a block back for a holder that vanished and did not give it back. That happens after the grace, because the reader may still
        read, or as soon as the reader is found dead. reader: None if it is not known. A block whose holders all vanished takes no new
        reader."""
        if not self._removal.alive:
            return
        block.doomed += 1
        self._retract_doomed(block)
        self._quarantine.setdefault(reader, deque()).append((self._clock() + self._grace_s, block))

    def _retract_doomed(self, block: Block) -> None:
        if block.doomed == block.holders:
            block.segment.retract(block.offset)

    def close(self) -> None:
        """Unlink every name and drop the memory; readers keep what they have mapped. Idempotent."""
        if not self._removal.alive:
            return
        self._removal()
        self._segments.clear()
        self._free.clear()
        self._extents = Extents()
        self._quarantine.clear()
        self._bytes_used = self._leases = 0

    def _end_quarantine(self) -> None:
        """Give back the blocks in quarantine whose grace has ended or whose reader is dead. Readers are looked at a few times a second."""
        now_s = self._clock()
        is_time = now_s >= self._next_look
        if is_time:
            self._next_look = now_s + _LOOK_PAUSE_S
        for reader, waiting in list(self._quarantine.items()):
            is_dead = is_time and reader is not None and reader.is_dead()
            while waiting and (is_dead or waiting[0][0] <= now_s):  # The first of the pair is the end of the grace.
                _, block = waiting.popleft()
                block.doomed -= 1
                self.free(block)
            if not waiting:
                del self._quarantine[reader]

    def _find(self, capacity: int) -> Block:
        """Find or make a block of a size class without free blocks; cheap ways are tried first. Raises ArenaFull if no way helps."""
        dedicated = self._is_dedicated(capacity)
        block = None if dedicated else (self._cut_extent(capacity) or self._carve(capacity) or self._recut(capacity))
        block = block or self._grow(capacity, dedicated)
        if block is None and not dedicated:
            block = self._join(capacity)
        while block is None:
            block = self._replace_idle(capacity, dedicated)
        return block

    def _carve(self, capacity: int) -> Block | None:
        """Cut a block off the first segment that has room; None: no segment has."""
        for segment in self._segments.values():
            if not segment.dedicated and (block := self._cut_block(segment, capacity)) is not None:
                return block
        return None

    def _recut(self, capacity: int) -> Block | None:
        """Cut a block off the start of a segment that has no block in use, and forget its old blocks. None: there is no such segment."""
        for segment in self._segments.values():
            if not segment.dedicated and segment.live_blocks == 0:
                self._forget_free(segment)
                segment.carved = PAGE
                return self._cut_block(segment, capacity)
        return None

    def _grow(self, capacity: int, dedicated: bool) -> Block | None:
        """Make a new segment and cut a block off it; None if the limit does not allow that, or the mount refuses. dedicated: the segment is
        for this block alone."""
        size = self._segment_size(capacity, dedicated)
        reserved_bytes = reservation(PAGE + BLOCK_HEADER + capacity, size)
        if not self._may_take(reserved_bytes):
            return None
        segment = self._take(reserved_bytes, lambda: ProducerSegment(self.uuid, self._next_segment, size))
        if segment is None:
            return None
        segment.dedicated = dedicated
        self._next_segment += 1
        self._segments[segment.number] = segment
        block = self._cut_block(segment, capacity)
        if block is None:
            self._drop(segment)
        return block

    def _replace_idle(self, capacity: int, dedicated: bool) -> Block | None:
        """Give one segment with no block in use back to the mount, and try to grow; None: that was not enough, call it again. Raises
        ArenaFull if it cannot help."""
        idle = [segment for segment in self._segments.values() if segment.live_blocks == 0]
        busy_bytes = self.bytes_total - sum(segment.reserved for segment in idle)
        new_bytes = reservation(PAGE + BLOCK_HEADER + capacity, self._segment_size(capacity, dedicated))
        if not idle or busy_bytes + new_bytes > self.max_bytes:
            raise ArenaFull(f"no block of {capacity} bytes is free: {self._bytes_used} of {self.max_bytes} bytes are in use")
        self._drop(idle[0])
        self._refused_until = self._clock()  # The mount has more room than when it refused.
        return self._grow(capacity, dedicated)

    def _is_dedicated(self, capacity: int) -> bool:
        """Whether a block of this class has a segment of its own."""
        return BLOCK_HEADER + capacity > self._segment_bytes // 2

    def _segment_size(self, capacity: int, dedicated: bool) -> int:
        return -(-(PAGE + BLOCK_HEADER + capacity) // PAGE) * PAGE if dedicated else self._segment_bytes

    def _cut_extent(self, capacity: int) -> Block | None:
        """Cut a block off the smallest range of joined blocks that is large enough; None: no range is."""
        extent = self._extents.take(BLOCK_HEADER + capacity)
        return Block(self._segments[extent[0]], extent[1], capacity) if extent else None

    def _join(self, capacity: int) -> Block | None:
        """Join free blocks of all classes with their free neighbours until a block can be cut. Each free block is joined at most once, so
        this costs no more than the calls of `free` before it. None: no range became large enough."""
        for size, free in self._free.items():
            while free and not self._is_dedicated(size):
                block = free.pop()
                end = block.offset + BLOCK_HEADER + block.capacity
                if self._give_extent(block.segment, block.offset, end) >= BLOCK_HEADER + capacity:
                    found_block = self._cut_extent(capacity) or self._carve(capacity)
                    if found_block is not None:
                        return found_block
        return None

    def _give_extent(self, segment: ProducerSegment, start: int, end: int) -> int:
        """Note that the bytes from `start` to `end` are free. Return the size of the free range that they are part of now. A range at the
        end of the carved part becomes part of the uncarved rest again."""
        start, end = self._extents.add(segment.number, start, end)
        if end < segment.carved:
            return end - start
        self._extents.remove(segment.number, start)
        segment.carved = start
        return segment.size - start

    def _cut_block(self, segment: ProducerSegment, capacity: int) -> Block | None:
        """Cut a block off the uncarved rest of a segment; None if the rest is too small, or the mount gives no memory for it."""
        end = segment.carved + BLOCK_HEADER + capacity
        cost_bytes = segment.reserve_cost(end)
        if end > segment.size or (cost_bytes and not self._may_take(cost_bytes)):
            return None
        if self._take(cost_bytes, lambda: segment.reserve(end)) is None:
            return None
        block = Block(segment, segment.carved, capacity)
        segment.carved = end
        return block

    def _may_take(self, size: int) -> bool:
        """Whether the arena may grow by `size` bytes: its limit allows that, and the mount has not just refused as much."""
        if self.bytes_total + size > self.max_bytes:
            return False
        return size < self._refused_bytes or self._clock() >= self._refused_until

    def _take(self, size: int, take: Callable[[], _Taken]) -> _Taken | None:
        """Call `take`, which takes `size` bytes from the mount, and return its result. If the mount refuses, remove what dead processes
        left there and call it once more. None if that does not help."""
        try:
            return take()
        except OSError as error:
            refusal = error
        if self._clock() >= self._next_sweep:
            self._next_sweep = self._clock() + _SWEEP_PAUSE_S
            if sweep(limit_s=_SWEEP_LIMIT_S):
                try:
                    return take()
                except OSError as error:
                    refusal = error
        self._hold_growth(refusal, size)
        return None

    def _hold_growth(self, error: OSError, size: int) -> None:
        """Do not try to take `size` bytes again for a while: a reservation that fails is slow, and each tensor would try it anew."""
        self._refused_bytes = size
        self._refused_until = self._clock() + _GROWTH_PAUSE_S
        logger.warning("connector.mount_full: %s; tensors go inline until there is room", error.strerror)

    def _trim_dedicated(self) -> None:
        """Keep a few free dedicated segments for the next large tensors, and give the oldest back."""
        spare = [segment for segment in self._segments.values() if segment.dedicated and segment.live_blocks == 0]
        if len(spare) > _SPARE_DEDICATED:
            self._drop(spare[0])

    def _drop(self, segment: ProducerSegment) -> None:
        self._forget_free(segment)
        del self._segments[segment.number]
        segment.close()

    def _forget_free(self, segment: ProducerSegment) -> None:
        self._extents.forget(segment.number)
        for capacity, free in self._free.items():
            self._free[capacity] = [block for block in free if block.segment is not segment]


def _announce(reason: str) -> None:
    logger.warning("connector.inline_only: %s; tensors go inline", reason)


def _remove(segments: dict[int, ProducerSegment], liveness: Liveness, owner: int) -> None:
    """Give back all memory of an arena, if this is the process that made it. owner: id of that process."""
    if os.getpid() != owner:
        return
    for segment in segments.values():
        segment.close()
    liveness.close()
