"""The way down of one link: the input of every port, sent within the credit of the stage, and kept for a replay."""

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
"""Pieces that a link holds for a stage without credit; then `send` waits. This is the bound on what text runs ahead of sound."""

MAX_UNSENT_CODES = 1
"""The same where pieces are codes. It is the client's credit that ends here: who plays no more sound has no more codes made than these,
what is on its way, and what a Talker is ahead of its own link."""

REPLAY_BYTES = 64 << 20
"""Bytes that a link keeps of what it sent, for a replay. Beyond it the oldest is forgotten: a loss that needs it is REPLAY_EXPIRED."""


class Feed:
    """Use: `restart` with every stream of the link, `stop` when that one is lost, `close` at last; `send` at any time."""

    def __init__(self, max_unsent: int, replay_bytes: int) -> None:
        self._max_unsent = max_unsent
        self._replay_bytes = replay_bytes
        self._inputs: dict[str, InputLog] = {}
        self._stream: Stream | None = None
        self._sender = Sender(None)
        """Of the last stream: tensors are placed there even while there is none."""
        self._room = asyncio.Event()
        self._pumping = False
        self._over = False
        self.needs: Mapping[str, int] = {}
        """First item that the stage needs of each input port; 0 for one that is not named."""

    def begin_at(self, port: str, first: int) -> None:
        """The input port begins with item `first`: the stage needs nothing before it. Before the first `send` on it."""
        self._inputs[port] = InputLog(port, first)

    def restart(self, stream: Stream) -> None:
        """Go on with this stream, from what its replica needs; nothing is sent before the next `send` or `pump`. Raises ReplayExpired."""
        needs = {position.port: position.first for position in stream.opened.needs}
        for port, inputs in self._inputs.items():
            inputs.restart(needs.get(port, 0))
        self.needs = needs
        self._stream, self._sender = stream, stream.sender

    def stop(self) -> None:
        """The stream is lost: keep what comes for the next one."""
        self._stream = None

    async def send(self, output: Output) -> None:
        """Send a piece of a port, or keep it until there is credit; wait while `max_unsent` pieces are kept, or MAX_UNSENT_CODES of a port
        of codes. A stage that has ended needs nothing more: then this does nothing."""
        if self._over:
            return
        few = isinstance(output.payload, chunk_pb2.CodeChunk)
        inputs = self._inputs.get(output.port)
        if inputs is None:
            inputs = self._inputs[output.port] = InputLog(output.port)
            inputs.restart(self.needs.get(output.port, 0))
        inputs.add(output, self._sender)
        await self.pump()
        while (self._unsent >= self._max_unsent or (few and inputs.unsent >= MAX_UNSENT_CODES)) and not self._over:
            self._room.clear()
            await self._room.wait()

    def sent(self, port: str) -> int:
        """Pieces of the port that went down. Less after a loss, until they have gone down again."""
        return self._inputs[port].sent if port in self._inputs else 0

    async def sends(self) -> None:
        """Return when the next piece goes down, or when the session is over."""
        if not self._over:
            self._room.clear()
            await self._room.wait()

    def keep(self, keep: stage_pb2.Keep) -> None:
        """No replica needs what was before."""
        if keep.port in self._inputs:
            self._inputs[keep.port].keep(keep.first)

    def close(self) -> None:
        """The session is over: nobody reads what is sent, and no replica will need it. Idempotent."""
        self._over = True
        self._stream = None
        self._room.set()
        for inputs in self._inputs.values():
            inputs.close()

    async def pump(self) -> None:
        """Write every kept chunk that has credit. Only one task does it at a time; it also sees what others add meanwhile, and goes on with
        another stream when the one that it writes to is replaced."""
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
        """The chunk to be sent now, with those behind it that are small and may go too; None if there is none."""
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
        """Keep within `replay_bytes`: what was sent goes, the oldest first."""
        held = sum(inputs.bytes for inputs in self._inputs.values())
        for inputs in self._inputs.values():
            while held > self._replay_bytes and inputs.can_cut:
                before = inputs.bytes
                inputs.cut()
                held -= before - inputs.bytes
