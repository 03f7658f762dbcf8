"""The input of the stage at one link: sends the chunks of every port within the credit of the stage, and keeps them for a replay."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from omnistage.connector.transport import Sender
from omnistage.link.replay import InputLog
from omnistage.link.stream import Stream
from omnistage.v1 import chunk_pb2, stage_pb2
from omnistage.wire.batches import Batch
from omnistage.wire.ports import Output

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

    def sent(self, port: str) -> int:
        """Number of pieces of the port that were sent. A loss lowers it by the pieces that must be sent a second time."""
        return self._inputs[port].sent if port in self._inputs else 0

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
            if chunk is not None:
                break
        return batch.put_into(stage_pb2.RunRequest()) if batch else None

    def _forget(self) -> None:
        """Forget sent input, in each port the oldest first, until at most `replay_bytes` are kept or no port can be cut."""
        total_bytes = sum(inputs.bytes for inputs in self._inputs.values())
        for inputs in self._inputs.values():
            while total_bytes > self._replay_bytes and inputs.can_cut:
                before = inputs.bytes
                inputs.cut()
                total_bytes -= before - inputs.bytes
