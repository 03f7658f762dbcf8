"""A queue of media for an encoder. Encoders do not run in the steps of the engine, but on a thread of their own, which encodes pieces of
several media in one pass.

A medium is cut into pieces that do not see each other (the frames of a film, chunks of sound). Waiting media take turns, piece by piece,
and every pass is bounded, so a long medium delays nobody for long.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

import torch

from omnistage.models.common.worker import Worker

Slice = TypeVar("Slice")
"""A part of a medium that the other parts do not see: the frames of one patch, some chunks of sound."""

Pass = Callable[[Sequence[Slice], Callable[[], None]], list[torch.Tensor]]
"""Computes the rows of some pieces, in order. It calls its second argument between layers; an error of that call ends the pass."""


class _GivenUp(Exception):
    """The pass is pointless: nobody waits any more for a medium of it."""


@dataclass(eq=False, slots=True)
class _Encoding(Generic[Slice]):
    """A medium that is being encoded. pieces: the pieces that are in no pass yet. count: number of all its pieces. done: gets the result.
    rows: of the finished pieces, in order. unwanted: whether nobody waits for the result any more."""

    pieces: deque[Slice]
    count: int
    done: asyncio.Future[list[torch.Tensor]]
    rows: list[torch.Tensor] = field(default_factory=list)
    unwanted: bool = False


class EncoderQueue(Generic[Slice]):
    """Encodes media in passes over their pieces. encode: runs a pass on the worker's thread. size: returns the size of a piece, in patches
    or in frames of a spectrogram. most_size: largest size of a pass with several pieces. together: whether several pieces may share a pass,
    because a trial found that this changes no bit."""

    def __init__(self, worker: Worker, encode: Pass[Slice], size: Callable[[Slice], int], *, most_size: int, together: bool) -> None:
        self.worker, self._encode, self._size = worker, encode, size
        self._most_size, self._together = most_size, together
        self._waiting: deque[_Encoding[Slice]] = deque()
        self._running: asyncio.Task[None] | None = None

    async def rows(self, pieces: Sequence[Slice]) -> list[torch.Tensor]:
        """The rows of one medium, [rows, width] for each piece. If the caller is cancelled, a pass with pieces of other media is finished,
        and no further piece of this medium is begun."""
        medium = _Encoding(deque(pieces), len(pieces), asyncio.get_running_loop().create_future())
        self._waiting.append(medium)
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        try:
            return await medium.done
        except asyncio.CancelledError:
            medium.unwanted = True
            raise

    async def _run(self) -> None:
        """Run passes until no medium waits."""
        try:
            while batch := self._take():
                await self._pass(batch)
        finally:
            self._running = None

    def _take(self) -> list[tuple[_Encoding[Slice], Slice]]:
        """The pieces of the next pass, each with its medium: one piece of each medium in turn, until the pass is full; empty: none wait."""
        batch = list[tuple[_Encoding[Slice], Slice]]()
        batch_size = 0
        while self._waiting:
            medium = self._waiting[0]
            if medium.unwanted or not medium.pieces:
                self._waiting.popleft()
                continue
            size = self._size(medium.pieces[0])
            if batch and (batch_size + size > self._most_size or not self._together):
                break
            batch.append((medium, medium.pieces.popleft()))
            batch_size += size
            self._waiting.rotate(-1)
        return batch

    async def _pass(self, batch: Sequence[tuple[_Encoding[Slice], Slice]]) -> None:
        """Encode pieces of some media in one pass. If that fails, encode each piece by itself; a medium whose piece fails gets the
        error."""
        try:
            results = await self.worker.run(partial(self._compute, batch))
        except _GivenUp:
            return
        except Exception as error:  # The error belongs to the task that waits for one of these media.
            if len(batch) > 1:
                for one in batch:
                    await self._pass([one])
            elif not batch[0][0].done.done():
                batch[0][0].unwanted = True
                batch[0][0].done.set_exception(error)
            return
        for (medium, _), rows in zip(batch, results, strict=True):
            medium.rows.append(rows)
            if len(medium.rows) == medium.count and not medium.done.done():
                medium.done.set_result(medium.rows)

    def _compute(self, batch: Sequence[tuple[_Encoding[Slice], Slice]]) -> list[torch.Tensor]:
        """Run a pass, on the worker's thread. Raises _GivenUp between two layers if no medium of the pass is wanted any more."""

        def between() -> None:
            self.worker.activity.step()
            if all(medium.unwanted for medium, _ in batch):
                raise _GivenUp

        with torch.inference_mode():
            return self._encode([piece for _, piece in batch], between)
