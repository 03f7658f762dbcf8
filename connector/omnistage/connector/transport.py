"""The two ends of one direction of one stream: a Sender hands tensors over, a Receiver takes them.

    sender                         receiver
    offers()        --Offer-->     answer()        once, at the start; until shared memory is proven, all goes inline
    accept()        <--Answer--
    store(), post() --Tensor-->    unpack()        the array is a view of the sender's memory, or of the message
    release()       <--Release--   take_release()  after the last use of the view
    close()                        close()         at the end of the stream

One process makes all its calls from one thread. Only the arrays may die on any thread: NumPy and torch free them where they like.
"""

import secrets
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from omnistage.connector import INLINE_LIMIT, tensors
from omnistage.connector.arena import Arena, Block, Share
from omnistage.connector.liveness import ARENA_ID_BYTES, Peer, find_peer
from omnistage.connector.shm import BLOCK_HEADER, READERS, boot_id, copy_block, mount_device
from omnistage.connector.tensors import (
    ArenaFull,
    Array,
    ConnectorError,
    ForeignSegment,
    InvalidReference,
    Raw,
    TensorLayout,
    header_of,
    layout_of,
    parse_layout,
    view_bytes,
)
from omnistage.v1 import tensor_pb2

PROBE_BYTES = 32

_Key = tuple[int, int, int]  # segment, offset, generation: no other block of the arena ever has the same


class _Lease(weakref.ref[Raw]):
    """A weak reference to the bytes of one received tensor, a view of the sender's block or a copy. It calls back when their last alias is
    gone. key: names the block. size: in bytes."""

    __slots__ = ("key", "size")
    key: _Key
    size: int


class Parcel:
    """One tensor in the memory of its producer, to be posted on any number of streams, one after the other. Its block has
    one holder until `drop`, for the code that stored the tensor, and one holder for every stream whose reader has not given it back."""

    __slots__ = ("_arena", "_block", "_layout", "_messages")

    def __init__(
        self, layout: TensorLayout, messages: list[tensor_pb2.Tensor], arena: Arena | None = None, block: Block | None = None
    ) -> None:
        """messages: a reference to `block`, or the whole tensor inline."""
        self._layout = layout
        self._messages = messages
        self._arena = arena
        self._block = block

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return self._layout.size

    @property
    def block(self) -> Block | None:
        """The block in shared memory; None for a tensor that travels inline."""
        return self._block

    def messages(self, *, shared: bool) -> list[tensor_pb2.Tensor]:
        """The messages to send. shared: the reader can see the arena; otherwise the bytes of a block are read and sent inline. Raises
        ConnectorError."""
        if not self._messages:
            raise ConnectorError("the parcel was dropped")
        if self._block is None or shared:
            return self._messages
        block = self._block
        raw = np.frombuffer(block.segment.map, np.uint8, block.length, block.payload_offset)
        return list(tensors.split(raw, self._layout))

    def drop(self) -> None:
        """Give up the block in shared memory: the tensor will not be sent again. Idempotent."""
        arena, block, self._block = self._arena, self._block, None
        self._messages = []
        if arena is not None and block is not None:
            arena.free(block)


class Sender:
    """Hands tensors over in one direction of one stream."""

    def __init__(
        self,
        arena: Arena | None,
        *,
        inline_limit: int = INLINE_LIMIT,
        share: Share | None = None,
        on_post: Callable[[str, int], None] = lambda transport, size: None,
    ) -> None:
        """arena: this process's memory, or None for inline only.
        inline_limit: tensors of fewer bytes go inline; 0 sends every tensor that has a byte through shared memory.
        share: limits the bytes of shared memory that tensors stored here take at once; more tensors go inline. By default a new share of
            the arena. A stream that replaces a broken stream and takes over its log goes on with the old share.
        on_post: called for every tensor that is posted, with the name of its transport and its size in bytes.
        """
        self._arena = arena
        self.share = share or (Share(0) if arena is None else arena.share())
        self._reader: Peer | None = None
        self._inline_limit = max(inline_limit, 1)
        self._on_post = on_post
        self._transport: tensor_pb2.TransportKind = tensor_pb2.TRANSPORT_KIND_INLINE
        self._reason = "no arena in the sending process" if arena is None else "not answered yet"
        self._probe: tuple[Block, bytes] | None = None
        self._blocks: dict[_Key, Block] = {}
        self._closed = False
        self.ignored_releases = 0
        """Number of releases of blocks that this stream does not hold: repeated, late, or invented."""
        self.inline_fallbacks = 0
        """Number of tensors that went inline because the arena was full."""
        self.over_share = 0
        """Number of tensors that went inline because this stream's share of the arena was used up."""

    @property
    def transport(self) -> tensor_pb2.TransportKind:
        """The transport of large tensors now."""
        return self._transport

    @property
    def reason(self) -> str:
        """Why large tensors do not go through shared memory; empty if they do."""
        return self._reason

    @property
    def outstanding(self) -> int:
        """Number of blocks that the other end has not given back."""
        return len(self._blocks)

    def offers(self) -> list[tensor_pb2.Offer]:
        """The offers for Open or Opened: one of shared memory, with a block of secret bytes (the probe) that the other end has to read.
        Empty without an arena, or if the arena is full."""
        if self._arena is None or self._closed:
            return []
        if self._probe is None:
            try:
                block = self._arena.allocate(PROBE_BYTES)
            except ArenaFull as error:
                self._reason = str(error)
                return []
            secret = secrets.token_bytes(PROBE_BYTES)
            start = block.payload_offset
            block.segment.map[start : start + PROBE_BYTES] = secret
            self._arena.publish(block)
            self._probe = (block, secret)
        probe = tensor_pb2.Tensor(element_type=tensor_pb2.ELEMENT_TYPE_UINT8, shape=[PROBE_BYTES])
        _refer(probe, self._arena, self._probe[0])
        return [
            tensor_pb2.Offer(
                kind=tensor_pb2.TRANSPORT_KIND_SHARED_MEMORY,
                arena=self._arena.uuid,
                boot_id=boot_id(),
                device=mount_device(),
                probe=probe,
            )
        ]

    def accept(self, answer: tensor_pb2.Answer, offers: Iterable[tensor_pb2.Offer] = ()) -> None:
        """Set the transport that the other end chose: shared memory if its answer has the bytes of the probe, otherwise inline.

        offers: the other end's offers for its own tensors. They name its arena and so its process, whose death frees its blocks at once.
        """
        probe, self._probe = self._probe, None
        self._transport = tensor_pb2.TRANSPORT_KIND_INLINE
        if probe is not None and self._arena is not None:
            self._arena.free(probe[0])
        if answer.kind == tensor_pb2.TRANSPORT_KIND_INLINE:
            # Without a probe nothing was offered, and `_reason` says why already.
            self._reason = answer.reason or (self._reason if probe is None else "the reader chose inline")
        elif answer.kind != tensor_pb2.TRANSPORT_KIND_SHARED_MEMORY or probe is None:
            self._reason = "the reader chose what was not offered"
        elif answer.probe != probe[1]:
            self._reason = "the reader could not show the bytes of the probe"
        else:
            self._transport = tensor_pb2.TRANSPORT_KIND_SHARED_MEMORY
            self._reason = ""
            # The reader saw our memory, so its own liveness file would be on the same mount.
            arenas = [offer.arena for offer in offers if offer.kind == tensor_pb2.TRANSPORT_KIND_SHARED_MEMORY]
            self._reader = find_peer(arenas[0]) if arenas else None

    def pack(self, array: Array, *, element_type: tensor_pb2.ElementType | None = None) -> list[tensor_pb2.Tensor]:
        """Messages that carry `array`, in order, to be sent once: `store` and `post` without keeping a parcel."""
        parcel = self.store(array, element_type=element_type)
        messages = self.post(parcel)
        parcel.drop()
        return messages

    def store(self, array: Array, *, element_type: tensor_pb2.ElementType | None = None) -> Parcel:
        """Copy `array` into memory from which this stream can send it; the array may be changed afterwards.

        The parcel is one reference, or one message per MiB inline if the tensor is small, the stream is inline, or the arena or the share
        is full. element_type: needed for uint16 arrays only, which travel as BFLOAT16. Raises ConnectorError for an array that the contract
        cannot carry.
        """
        layout = layout_of(array, element_type)
        if self._arena is not None and self._transport == tensor_pb2.TRANSPORT_KIND_SHARED_MEMORY and layout.size >= self._inline_limit:
            try:
                if self.share.allows(layout.size):
                    return _store_shared(array, layout, self._arena, self.share)
                self.over_share += 1
            except ArenaFull:
                self.inline_fallbacks += 1
        raw = np.ascontiguousarray(array, dtype=layout.dtype).reshape(-1).view(np.uint8)
        return Parcel(layout, list(tensors.split(raw, layout)))

    def post(self, parcel: Parcel) -> list[tensor_pb2.Tensor]:
        """Messages that carry a stored tensor on this stream, whichever stream it was stored for. A block is held for the reader until it
        is released or the stream is over. Raises ConnectorError for a dropped tensor, or for one that this stream's reader still has."""
        block = parcel.block
        shared = self._transport == tensor_pb2.TRANSPORT_KIND_SHARED_MEMORY
        messages = parcel.messages(shared=shared)
        if block is not None and shared and self._arena is not None:
            key = (block.segment.number, block.offset, block.generation)
            if key in self._blocks:
                raise ConnectorError("the tensor was posted on this stream before and not given back yet")
            self._arena.hold(block)
            self._blocks[key] = block
        kind = tensor_pb2.TRANSPORT_KIND_SHARED_MEMORY if block is not None and shared else tensor_pb2.TRANSPORT_KIND_INLINE
        self._on_post(transport_name(kind), parcel.size)
        return messages

    def release(self, release: tensor_pb2.Release) -> None:
        """Take blocks back. Blocks that this stream does not hold are ignored and counted."""
        for slot in release.slots:
            block = self._blocks.pop((slot.segment, slot.offset, slot.generation), None)
            if block is None or self._arena is None:
                self.ignored_releases += 1
            else:
                self._arena.free(block)

    def close(self, *, clean: bool) -> None:
        """End the stream. clean: the other end has confirmed that it holds no view, so the blocks are free at once. Otherwise they are
        kept from reuse for the arena's grace, or until the reader is known to be dead, because it may still be reading. Idempotent."""
        self._closed = True
        self._transport = tensor_pb2.TRANSPORT_KIND_INLINE
        self._reason = "the stream is over"
        if self._arena is None:
            return
        probe, self._probe = self._probe, None
        if probe is not None:
            self._arena.free(probe[0])  # at once, because a late reader of the probe only fails to prove the memory
        may_reuse = clean or (self._reader is not None and self._reader.is_dead())
        for block in self._blocks.values():
            if may_reuse:
                self._arena.free(block)
            else:
                self._arena.quarantine(block, self._reader)
        self._blocks.clear()


def transport_name(kind: tensor_pb2.TransportKind) -> str:
    """The name of a transport in metrics and in texts, such as shared_memory."""
    return tensor_pb2.TransportKind.Name(kind).removeprefix("TRANSPORT_KIND_").lower()


def _store_shared(array: Array, layout: TensorLayout, arena: Arena, share: Share) -> Parcel:
    """Copy `array` into a new block of the arena, which readers may read from now on. Raises ArenaFull."""
    block = arena.allocate(layout.size, share)
    copy = np.ndarray(layout.shape, layout.dtype, block.segment.map, block.payload_offset)
    np.copyto(copy, array)
    tensor = header_of(layout)
    arena.publish(block)
    _refer(tensor, arena, block)
    return Parcel(layout, [tensor], arena, block)


def _refer(tensor: tensor_pb2.Tensor, arena: Arena, block: Block) -> None:
    """Write a reference to `block` into the message `tensor`."""
    slot = tensor.shared_memory
    slot.arena = arena.uuid
    slot.segment = block.segment.number
    slot.offset = block.offset
    slot.length = block.length
    slot.generation = block.generation


class TensorView:
    """A tensor that was received. Release it after the last use; garbage collection does the same, but later."""

    def __init__(self, array: Array, element_type: tensor_pb2.ElementType) -> None:
        self._array: Array | None = array
        self.element_type = element_type
        """The meaning of the array's bits: BFLOAT16 comes as uint16."""

    @property
    def array(self) -> Array:
        """The values, read-only (torch does not know that: to write into a torch tensor made of them is a segmentation fault).

        Raises ConnectorError once released.
        """
        if self._array is None:
            raise ConnectorError("the view was released: copy the array before, or release later")
        return self._array

    def release(self) -> None:
        """Give the memory back to the sender, as soon as no other alias of the array is alive. Idempotent."""
        self._array = None


class Receiver:
    """Takes the tensors of one direction of one stream."""

    def __init__(
        self, *, byte_limit: int = 1 << 30, accept_shared_memory: bool = True, copy: bool = False, owners: Collection[int] = ()
    ) -> None:
        """byte_limit: largest number of bytes of tensors that may be held here at once: views, copies and unfinished tensors.
        copy: copy every tensor out of the sender's file and give its block back at once. If a sender cuts its file short, a reader that
            copies gets a typed error; a reader that has the file mapped is killed.
        owners: ids of further users whose memory is read, always by copies. The memory of all other users but our own is refused.
        """
        self._owners = frozenset(owners)
        self._byte_limit = byte_limit
        self._copy = copy
        self._accept_shared_memory = accept_shared_memory
        self._arena: bytes | None = None
        self._assemblies: dict[str, tensors.Assembly] = {}
        self._views: dict[_Key, _Lease] = {}
        self._copies: dict[int, _Lease] = {}  # by id of the lease: a hostile sender may refer to one block many times
        self._held_bytes = 0
        self._dropped: deque[weakref.ref[Raw]] = deque()  # leases without an alias; any thread may append one
        self._to_release: list[_Key] = []
        self._closed = False

    @property
    def view_count(self) -> int:
        """Number of views of the sender's memory that are alive."""
        self._collect()
        return len(self._views)

    def answer(self, offers: Sequence[tensor_pb2.Offer]) -> tensor_pb2.Answer:
        """Choose among the other end's offers: shared memory if it can be proven, otherwise inline, with the first reason. Never raises."""
        reason = ""
        for offer in offers:
            if offer.kind != tensor_pb2.TRANSPORT_KIND_SHARED_MEMORY:
                reason = reason or f"transport {offer.kind} is not known here"
                continue
            refusal = self._refusal(offer)
            if refusal:
                reason = reason or refusal
                continue
            try:
                probe = self._read_probe(offer)
            except ConnectorError as error:
                reason = reason or f"the probe cannot be read: {error}"
                continue
            self._arena = offer.arena
            return tensor_pb2.Answer(kind=tensor_pb2.TRANSPORT_KIND_SHARED_MEMORY, probe=probe, reason=reason)
        return tensor_pb2.Answer(kind=tensor_pb2.TRANSPORT_KIND_INLINE, reason=reason)

    def _refusal(self, offer: tensor_pb2.Offer) -> str:
        """Why an offer of shared memory cannot work; empty if it is worth trying."""
        if not self._accept_shared_memory:
            return "shared memory is switched off at the reader"
        try:
            if offer.boot_id != boot_id():
                return "sender and reader are on different hosts"
            if offer.device != mount_device():
                return "sender and reader have different shared-memory mounts"
        except OSError:
            return "the reader has no shared memory"
        return ""

    def _read_probe(self, offer: tensor_pb2.Offer) -> bytes:
        """The secret bytes of an offer's probe. If the memory belongs to another user, all tensors are copied from now on. Raises
        ForeignSegment if the memory belongs to another user and no `owners` are accepted, and ConnectorError for a wrong probe."""
        probe = offer.probe
        layout = parse_layout(probe)
        if probe.WhichOneof("place") != "shared_memory" or layout.size != PROBE_BYTES or probe.shared_memory.length != PROBE_BYTES:
            raise InvalidReference("it is not a block of 32 bytes")
        if len(offer.arena) != ARENA_ID_BYTES or probe.shared_memory.arena != offer.arena:
            raise InvalidReference("it is not in the arena that was offered")
        slot = probe.shared_memory
        if not self._copy:
            try:
                segment = READERS.get(offer.arena, slot.segment)
            except ForeignSegment:
                if not self._owners:
                    raise
                self._copy = True
        if self._copy:
            return copy_block(offer.arena, slot.segment, slot.offset, slot.length, slot.generation, self._owners)
        segment.check(slot.offset, slot.length, slot.generation)
        start = slot.offset + BLOCK_HEADER
        return segment.map[start : start + PROBE_BYTES]

    def unpack(self, tensor: tensor_pb2.Tensor, *, port: str = "") -> TensorView | None:
        """Return the tensor, or None while parts of it are still to come. Parts of one tensor follow each other on one port; name the port
        if several are in use. Raises InvalidReference; then nothing was read and nothing is held."""
        if self._closed:
            raise ConnectorError("the receiver is closed")
        self._collect()
        layout = parse_layout(tensor)
        place = tensor.WhichOneof("place")
        if place == "inline":
            raw = self._unpack_inline(tensor, layout, port)
        elif port in self._assemblies:
            raise InvalidReference("a reference came before the tensor before it was whole")
        elif place == "shared_memory":
            raw = self._unpack_shared(tensor.shared_memory, layout)
        else:
            raise InvalidReference("the tensor has no place that this stream agreed on")
        if raw is None:
            return None
        return TensorView(view_bytes(raw, layout), layout.element_type)

    def _unpack_inline(self, tensor: tensor_pb2.Tensor, layout: TensorLayout, port: str) -> Raw | None:
        """Add one part to the tensor that comes on a port. Return the tensor's bytes after its last part, otherwise None."""
        assembly = self._assemblies.pop(port, None)  # a wrong part ends its tensor
        part = tensor.inline
        data = part.data  # read once: every access copies
        tensors.check_part(layout, part.total_bytes, data)
        if assembly is None:
            self._check_limit(layout.size)
            if part.offset == 0 and len(data) == layout.size:
                return np.frombuffer(data, np.uint8)
            assembly = tensors.Assembly(layout)
        tensor_bytes = assembly.add(layout, part.offset, data)
        if tensor_bytes is None:
            self._assemblies[port] = assembly
        return tensor_bytes

    def _unpack_shared(self, slot: tensor_pb2.SharedMemorySlot, layout: TensorLayout) -> Raw:
        """The bytes of a block of the sender: a view, or a copy if this receiver copies."""
        arena = slot.arena
        if self._arena is None or arena != self._arena:
            raise InvalidReference("the reference is not into the arena that this stream agreed on")
        if slot.length != layout.size:
            raise InvalidReference(f"the shape says {layout.size} bytes and the reference says {slot.length}")
        if layout.size == 0:
            raise InvalidReference("a tensor of no bytes has no block")
        key = (slot.segment, slot.offset, slot.generation)
        if key in self._views:
            raise InvalidReference("the reference was sent before and its view is still alive")
        self._check_limit(layout.size)
        if self._copy:
            copied = copy_block(arena, slot.segment, slot.offset, slot.length, slot.generation, self._owners)
            self._to_release.append(key)
            copy: Raw = np.frombuffer(copied, np.uint8)
            lease = self._lease(copy, key)
            self._copies[id(lease)] = lease
            return copy
        segment = READERS.get(arena, slot.segment)
        segment.check(slot.offset, slot.length, slot.generation)
        # Unlike np.ndarray(buffer=...), frombuffer holds an export of the mapping, so that it cannot be unmapped under the array.
        raw: Raw = np.frombuffer(segment.map, np.uint8, layout.size, slot.offset + BLOCK_HEADER)
        self._views[key] = self._lease(raw, key)
        return raw

    def _lease(self, raw: Raw, key: _Key) -> _Lease:
        """Count the bytes `raw` until the last alias of the array is gone: each slice or torch tensor of it keeps `raw` alive."""
        lease = _Lease(raw, self._dropped.append)
        lease.key, lease.size = key, raw.nbytes
        self._held_bytes += lease.size
        return lease

    def _check_limit(self, size: int) -> None:
        unfinished = sum([assembly.size for assembly in self._assemblies.values()]) if self._assemblies else 0
        if self._held_bytes + unfinished + size > self._byte_limit:
            raise InvalidReference(f"more than {self._byte_limit} bytes of tensors are held at once on this stream")

    def _collect(self) -> None:
        """Stop counting tensors whose last alias is gone, and note which blocks to give back."""
        while self._dropped:
            lease = self._dropped.popleft()
            assert isinstance(lease, _Lease)
            self._held_bytes -= lease.size
            if self._copies.pop(id(lease), None) is None:  # A view; the block of a copy was given back at once.
                del self._views[lease.key]
                self._to_release.append(lease.key)

    def take_release(self) -> tensor_pb2.Release | None:
        """The release to send back: the blocks whose views are gone since the last call; None if there are none."""
        self._collect()
        if not self._to_release:
            return None
        keys, self._to_release = self._to_release, []
        return tensor_pb2.Release(slots=[tensor_pb2.Slot(segment=s, offset=o, generation=g) for s, o, g in keys])

    def close(self) -> None:
        """The stream is over: unfinished tensors are dropped. Views stay readable, but their memory may be reused. Idempotent."""
        self._closed = True
        self._assemblies.clear()
        READERS.drop_gone()
