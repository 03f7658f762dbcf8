"""The input of the stage at one link, and everything that a link can replay: the log of the input that it sent to its stage, and the
account of the output that came from it. `Feed` sends the chunks of every port within the credit of the stage, and keeps them in the log."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from omnistage.connector.transport import Parcel, Sender
from omnistage.link.stream import Stream
from omnistage.v1 import chunk_pb2, stage_pb2
from omnistage.wire.chunks import Batch, Content, MessagePayload, Output, PortReader, PortWriter
from omnistage.wire.errors import StageError, protocol_error
from omnistage.wire.limits import MAX_PORTS


class ReplayExpired(StageError):
    """A replacement needs input that the log has forgotten. The stage that made that input must be opened again."""

    def __init__(self, port: str, first_needed: int, first: int) -> None:
        super().__init__(
            "REPLAY_EXPIRED", f"port {port!r} is needed from item {first_needed} and kept from item {first} only", metadata={"port": port}
        )


@dataclass(slots=True, eq=False)
class _Entry:
    """One piece of input: `count` items, from number `first` on. last: the port ends with it. A tensor is in `parcel`, any other content in
    `payload`. size: bytes of the content."""

    first: int
    count: int
    last: bool
    payload: MessagePayload | None
    parcel: Parcel | None
    size: int

    @property
    def end(self) -> int:
        return self.first + self.count

    def drop(self) -> None:
        if self.parcel is not None:
            self.parcel.drop()


class InputLog:
    """One input port of the next stage: the pieces that wait to be sent, and before them the sent pieces that a replacement may need again.

    dropped (Keep, forget)  |  sent, kept for a replay  |  not sent on this stream yet
                          first                        next                          end
    """

    def __init__(self, port: str, first: int = 0) -> None:
        """first: the item with which the port begins."""
        self._entries: deque[_Entry] = deque()
        self._next = 0  # index of the first entry that was not sent on this stream
        self._first_kept = first  # no replacement needs items before this number
        self._start = first  # number of the first item that the present stream needs
        self._end = first  # number of the next item
        self._is_ended = False
        self._pending: deque[chunk_pb2.Chunk] = deque()  # numbered chunks of the entry before `_next`, not sent yet
        self._writer = PortWriter(port, first=first)
        self.port = port
        self.first = first
        """Number of the oldest item that can still be sent."""
        self.bytes = 0
        """Bytes of all entries, sent or not."""
        self._added = 0  # entries since the beginning, forgotten ones included

    @property
    def unsent(self) -> int:
        """Entries that wait for credit or for a stream."""
        return len(self._entries) - self._next

    @property
    def sent_pieces(self) -> int:
        """Number of pieces that were sent. A loss lowers it by the pieces that must be sent a second time."""
        return self._added - self.unsent

    @property
    def can_forget_oldest(self) -> bool:
        """Whether `forget_oldest` may be called: the oldest entry was sent, and is not a last entry without items, which only tells that
        the port has ended. Such an entry must stay: a replica that needs no more items would wait for the end for ever."""
        return self._next > 0 and not (self._entries[0].last and not self._entries[0].count)

    def add(self, output: Output, sender: Sender) -> None:
        """Append a piece. A tensor is stored here at once, before anything is awaited, so that a cancelled session knows all memory that it
        owns."""
        if self._is_ended:
            raise protocol_error(f"output after the last chunk of port {self.port!r}", port=self.port)
        entry = _Entry(self._end, output.count, output.last, None, None, 0)
        if isinstance(output.payload, np.ndarray):
            entry.parcel = sender.store(output.payload, element_type=output.element_type)
            entry.size = entry.parcel.size
        elif output.payload is not None:
            entry.payload = output.payload
            entry.size = output.payload.ByteSize()
        self._entries.append(entry)
        self._added += 1
        self._end += output.count
        self._is_ended = output.last
        self.bytes += entry.size

    def peek(self, sender: Sender, credit: int) -> chunk_pb2.Chunk | None:
        """The next chunk to send, which stays the next one; None if no piece waits, or its number is not below `credit`, the number of
        chunks allowed on this stream. sender: of this stream."""
        if not self._pending and not self._load(sender, credit):
            return None
        return self._pending[0] if self._pending[0].seq < credit else None

    def next_chunk(self, sender: Sender, credit: int) -> chunk_pb2.Chunk | None:
        """Return the chunk that `peek` returns, and count it as sent."""
        chunk = self.peek(sender, credit)
        if chunk is not None:
            self._pending.popleft()
        return chunk

    def _load(self, sender: Sender, credit: int) -> bool:
        """Make the chunks of the next entry that the stage needs; entries that end before its first needed item are skipped. Return False
        if no entry waits, or there is no credit for a chunk."""
        while self._next < len(self._entries):
            if self._writer.seq >= credit:
                return False
            entry = self._entries[self._next]
            self._next += 1
            # An entry without items that lies at `_start` itself is sent.
            if entry.first < self._start and entry.end <= self._start and not entry.last:
                self._writer.first = entry.end
                continue
            content: Content = entry.payload if entry.parcel is None else sender.post(entry.parcel)
            self._pending.extend(self._writer.chunks(entry.count, content, last=entry.last))
            return True
        return False

    def restart(self, first_needed: int) -> None:
        """Begin anew on a new stream, with chunks numbered from 0. The first entry is the one with item `first_needed`, or with the first
        kept item if that is later. Raises ReplayExpired."""
        self._start = max(first_needed, self._first_kept)
        if self._start < self.first:
            raise ReplayExpired(self.port, self._start, self.first)
        self._next = 0
        self._pending.clear()
        first = self._entries[0].first if self._entries else self._end
        self._writer = PortWriter(self.port, first=first)

    def keep(self, first: int) -> None:
        """Forget the items before `first`: no replacement will need them."""
        self._first_kept = max(self._first_kept, min(first, self._end))
        while self._next and self._entries[0].end <= self._first_kept and not self._entries[0].last:
            self._drop_first()

    def forget_oldest(self) -> None:
        """Forget the oldest entry that was sent, even if it may be needed. The end of the port is kept."""
        is_end = self._entries[0].last
        self._drop_first()
        if is_end:
            # The end by itself, which counts as sent, as the forgotten entry did.
            self._entries.append(_Entry(self._end, 0, True, None, None, 0))
            self._next = 1

    def _drop_first(self) -> None:
        """Forget the oldest entry, and give its memory back."""
        entry = self._entries.popleft()
        self._next -= 1
        self.first = entry.end
        self.bytes -= entry.size
        entry.drop()

    def close(self) -> None:
        """Give the memory of all tensors back."""
        for entry in self._entries:
            entry.drop()
        self._entries.clear()
        self._pending.clear()
        self._next = 0


class OutputAccount:
    """The output that came from a stage and all stages after it: the position of every port, and the chunks of the checkpoint ports, from
    which another replica rebuilds the stage."""

    def __init__(self, expected: Iterable[str], checkpoints: Iterable[str], resume: stage_pb2.Resume | None = None) -> None:
        """expected: ports that must end. checkpoints: ports whose chunks are kept. resume: output that the caller had before this link."""
        self._expected = set(expected)
        self._history: dict[str, list[chunk_pb2.Chunk]] = {port: [] for port in checkpoints}
        self._ports: dict[str, PortReader] = {}
        resume = resume if resume is not None else stage_pb2.Resume()
        for position in resume.positions:
            self._ports[position.port] = PortReader(
                position.port, granted=sys.maxsize, seq=position.seq, first=position.first, is_ended=position.ended
            )
        for chunk in resume.history:
            self._history.setdefault(chunk.port, []).append(chunk)
        self._begin = {port: reader.seq for port, reader in self._ports.items()}  # chunks that came before this link, by port
        self._stream_began = dict(self._begin)  # chunks that came before the present stream, by port

    def accept(self, chunk: chunk_pb2.Chunk) -> None:
        """Count the next chunk of a port, and keep it if the port is a checkpoint port. Raises PROTOCOL for a gap or a repeat."""
        reader = self._ports.get(chunk.port)
        if reader is None:
            if len(self._ports) >= MAX_PORTS:
                raise protocol_error(f"more than {MAX_PORTS} ports")
            reader = self._ports[chunk.port] = PortReader(chunk.port, granted=sys.maxsize)
        reader.accept(chunk)
        if chunk.port in self._history:
            self._history[chunk.port].append(_without_alternatives(chunk))

    @property
    def complete(self) -> bool:
        """Whether every expected port, and every port that has begun, has ended."""
        return self._expected <= self._ports.keys() and all(reader.is_ended for reader in self._ports.values())

    def expect(self, port: str) -> None:
        """Note that the caller gave credit for this port: the output is complete only when this port has ended too."""
        self._expected.add(port)

    def has_ended(self, port: str) -> bool:
        return port in self._ports and self._ports[port].is_ended

    @property
    def empty(self) -> bool:
        """Whether nothing has come since the very beginning of the answer."""
        return not any(reader.seq for reader in self._ports.values())

    def new_stream(self) -> None:
        """Note that from now on the chunks come on another stream, which counts its credit from 0."""
        self._stream_began = {port: reader.seq for port, reader in self._ports.items()}

    def earlier(self, port: str) -> int:
        """Chunks of the port that came to this link on streams before the present one. The present stream's credit is lower by this
        number."""
        return self._stream_began.get(port, 0) - self._begin.get(port, 0)

    def resume(self) -> stage_pb2.Resume:
        """The whole account, for the Open of the next replica."""
        resume = stage_pb2.Resume()
        for reader in self._ports.values():
            resume.positions.add(port=reader.port, seq=reader.seq, first=reader.first, ended=reader.is_ended)
        resume.history.extend(chunk for chunks in self._history.values() if (chunk := merge_chunks(chunks)) is not None)
        return resume


def _without_alternatives(chunk: chunk_pb2.Chunk) -> chunk_pb2.Chunk:
    """The chunk without the fields that no replica needs to rebuild a stage: other possible tokens, the text of each token, and
    thoughts."""
    if not chunk.text.top_logprobs and not chunk.text.pieces and not chunk.text.HasField("thought"):
        return chunk
    copy = chunk_pb2.Chunk()
    copy.CopyFrom(chunk)
    copy.text.ClearField("top_logprobs")
    copy.text.ClearField("pieces")
    copy.text.ClearField("thought")
    return copy


def merge_chunks(chunks: list[chunk_pb2.Chunk]) -> chunk_pb2.Chunk | None:
    """Join the chunks of a port of text or codes, from item 0 on, into one chunk and return it; None for an empty list. The list then has
    this chunk alone."""
    if not chunks:
        return None
    merged = chunk_pb2.Chunk()
    merged.CopyFrom(chunks[0])
    merged.seq = 0
    for chunk in chunks[1:]:
        merged.count += chunk.count
        merged.last = chunk.last
        if chunk.HasField("codes"):
            merged.codes.codebook_count = chunk.codes.codebook_count
            merged.codes.codes.extend(chunk.codes.codes)
        elif chunk.HasField("text"):
            merged.text.token_ids.extend(chunk.text.token_ids)
            merged.text.logprobs.extend(chunk.text.logprobs)
            merged.text.finish_reason = chunk.text.finish_reason
    if any(chunk.HasField("text") for chunk in chunks):
        merged.text.text = "".join(chunk.text.text for chunk in chunks)
    chunks[:] = [merged]
    return merged


MAX_UNSENT = 256
"""Largest number of pieces that wait for the stage's credit; at this number `send` waits. So text runs only so far ahead of sound."""

MAX_UNSENT_CODES = 1
"""The same for pieces of codes. Because of this limit a client's credit holds back the Talker: once a client plays no more sound, the
Talker makes only these codes, the codes on their way, and the codes that it may be ahead of its own link."""

REPLAY_BYTES = 64 << 20
"""Bytes of sent input that a link keeps for a replay. It forgets older input, and a loss that needs that ends with REPLAY_EXPIRED."""


class Feed:
    """The input that one link sends to its stage, by port. max_unsent: pieces that may wait. replay_bytes: sent input that is kept. Use:
    `restart` with every stream of the link, `stop` when that stream is lost, `close` at the end; `send` at any time."""

    def __init__(self, max_unsent: int, replay_bytes: int) -> None:
        self._max_unsent = max_unsent
        self._replay_bytes = replay_bytes
        self._inputs: dict[str, InputLog] = {}
        self._stream: Stream | None = None
        self._sender = Sender(None)
        """Sender of the last stream: it stores tensors even while there is no stream."""
        self._room = asyncio.Event()  # set when a piece was sent, or the session is over
        self._pumping = False  # whether a task writes now; it also writes what others add
        self._over = False
        self.needs: Mapping[str, int] = {}
        """Number of the first item that the stage needs, by input port; 0 for a port that is not in it."""

    def begin_at(self, port: str, first: int) -> None:
        """Begin the input port with item `first`: the stage needs nothing before it. Call it before the first `send` on the port."""
        self._inputs[port] = InputLog(port, first)

    def restart(self, stream: Stream) -> None:
        """Go on with this stream, from the items that its replica needs; nothing is sent before the next `send` or `pump`. Raises
        ReplayExpired."""
        needs = {position.port: position.first for position in stream.opened.needs}
        for port, inputs in self._inputs.items():
            inputs.restart(needs.get(port, 0))
        self.needs = needs
        self._stream, self._sender = stream, stream.sender

    def stop(self) -> None:
        """Note that the stream is lost: new input is kept for the next stream."""
        self._stream = None

    async def send(self, output: Output) -> None:
        """Send a piece of output of this process to the stage, or keep it until there is credit. Wait while `max_unsent` pieces are kept,
        or MAX_UNSENT_CODES of a port of codes. A stage that has ended needs nothing more: then this does nothing."""
        if self._over:
            return
        is_codes = isinstance(output.payload, chunk_pb2.CodeChunk)
        inputs = self._inputs.get(output.port)
        if inputs is None:
            inputs = self._inputs[output.port] = InputLog(output.port)
            inputs.restart(self.needs.get(output.port, 0))
        inputs.add(output, self._sender)
        await self.pump()
        while (self._unsent >= self._max_unsent or (is_codes and inputs.unsent >= MAX_UNSENT_CODES)) and not self._over:
            self._room.clear()
            await self._room.wait()

    def count_sent(self, port: str) -> int:
        """Return the number of pieces of the port that were sent. A loss lowers it by the pieces that must be sent a second time."""
        return self._inputs[port].sent_pieces if port in self._inputs else 0

    async def sends(self) -> None:
        """Return when the next piece is sent, or when the session is over."""
        if not self._over:
            self._room.clear()
            await self._room.wait()

    def keep(self, keep: stage_pb2.Keep) -> None:
        """Forget the items before `keep.first`: no replica needs them."""
        if keep.port in self._inputs:
            self._inputs[keep.port].keep(keep.first)

    def close(self) -> None:
        """End the feed: nobody reads what is sent, and no replica will need it. Idempotent."""
        self._over = True
        self._stream = None
        self._room.set()
        for inputs in self._inputs.values():
            inputs.close()

    async def pump(self) -> None:
        """Write every kept chunk that has credit. Only one task does so at a time; it also writes what others add meanwhile, and goes on
        with another stream if the present one is replaced."""
        if self._pumping:
            return
        self._pumping = True
        try:
            while (stream := self._stream) is not None and (message := self._next_message(stream)) is not None:
                await stream.write(message)
        finally:
            self._pumping = False

    @property
    def _unsent(self) -> int:
        return sum(inputs.unsent for inputs in self._inputs.values())

    def _next_message(self, stream: Stream) -> stage_pb2.RunRequest | None:
        """The next message to the stage: one chunk that has credit, or several small ones; they count as sent. None if no chunk has
        credit."""
        batch = Batch(together=stream.opened.batches)
        for port, inputs in self._inputs.items():
            credit = stream.allowance.total(port)
            while (chunk := inputs.peek(stream.sender, credit)) is not None and batch.add(chunk):
                inputs.next_chunk(stream.sender, credit)
                self._room.set()
                self._forget()
            if chunk is not None:  # The batch has no room for it.
                break
        return batch.put_into(stage_pb2.RunRequest()) if batch else None

    def _forget(self) -> None:
        """Forget sent input, in each port the oldest first, until at most `replay_bytes` are kept or no port can forget more."""
        total_bytes = sum(inputs.bytes for inputs in self._inputs.values())
        for inputs in self._inputs.values():
            while total_bytes > self._replay_bytes and inputs.can_forget_oldest:
                bytes_before = inputs.bytes
                inputs.forget_oldest()
                total_bytes -= bytes_before - inputs.bytes
