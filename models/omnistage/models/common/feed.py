"""Passes rows to a running sequence as they come, such as the rows of an answer that a Talker speaks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import torch

from omnistage.engine.request import SequenceEvent
from omnistage.engine.sequence import SequenceStream
from omnistage.models.common.arrays import tensor_of
from omnistage.models.interface import Array, BadRequest, Piece


async def next_rows(inputs: AsyncIterator[Piece]) -> Piece:
    """The next piece of the inputs. Raises BadRequest if there is none, as after an interrupt."""
    piece = await anext(inputs, None)
    if piece is None:
        raise BadRequest("talker", "the rows of the answer ended before the last one")
    return piece


class PortFeed:
    """Passes the rows of a port to a sequence as they come, while the caller takes the sequence's items. rows: number of rows passed so
    far, including `end_rows`. ended: whether all rows have been passed."""

    def __init__(self, stream: SequenceStream, inputs: AsyncIterator[Piece], port: str, end_rows: torch.Tensor | None = None) -> None:
        """stream: the sequence. inputs: pieces of all ports. port: the port whose rows are used. end_rows: rows [n, width] that follow the
        port's last row; None: there are none."""
        self._stream, self._inputs, self._port, self._behind = stream, inputs, port, end_rows
        self._task: asyncio.Task[None] | None = None
        self.rows, self.ended = 0, False

    def give(self, rows: torch.Tensor, *, last: bool) -> None:
        """Pass the next rows [n, width] to the sequence; do not change them afterwards. last: the port has no more."""
        if last and self._behind is not None:
            rows = torch.cat((rows, self._behind))
        self.rows += len(rows)
        self.ended = last
        self._stream.append(rows, end=last)

    @asynccontextmanager
    async def feeding(self) -> AsyncIterator[None]:
        """Pass rows in a task while the context is open."""
        self._task = asyncio.create_task(self._feed())
        try:
            yield
        finally:
            # Forgotten here, because a cancelled task refers to its frames, and these to this object: a cycle.
            task, self._task = self._task, None
            task.cancel()
            await asyncio.wait([task])

    async def take(self) -> list[SequenceEvent]:
        """Wait for events of the sequence, and return them. Empty: the last row was passed before an event came, or the sequence ended.
        Raises the errors of `inputs`."""
        assert self._task is not None
        taking = asyncio.ensure_future(self._stream.take())
        try:
            waited = [taking] if self._task.done() else [taking, self._task]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if self._task.done():
                self._task.result()
            return taking.result() if taking.done() else []
        finally:
            taking.cancel()
            del taking  # Its error refers to this frame, which would be a cycle.

    async def _feed(self) -> None:
        """The task that passes rows until the last row."""
        while not self.ended:
            piece = await next_rows(self._inputs)
            if piece.port == self._port:
                self.give(tensor_of(cast(Array, piece.content)), last=piece.last)
