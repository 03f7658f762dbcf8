"""The shared part of Code2Wavs that compute windows of many speeches in one loop of steps, on threads of their own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, Generic, TypeVar

from omnistage.models.common.worker import Worker
from omnistage.models.interface import Activity, Array, Load, ModelInfo, Piece, Sound, Wanted, WaveRequest
from omnistage.models.steps.loop import Loop

AUDIO = "audio"

Prepared = TypeVar("Prepared")


class WindowedCode2Wav(ABC, Generic[Prepared]):
    """Implements the shared part of `Code2WavModel`. loop: makes the windows of all speeches. workers: the threads on which it computes."""

    def __init__(self, info: ModelInfo, loop: Loop[Any, float, None], workers: Sequence[Worker]) -> None:
        self.info, self._loop, self._workers = info, loop, workers
        self.threads: Sequence[Activity] = tuple(worker.activity for worker in workers)

    def load(self) -> Load:
        return self._loop.load

    @abstractmethod
    async def prepare(self, request: WaveRequest) -> Prepared:
        """See Code2WavModel.prepare."""

    @abstractmethod
    def decode(self, prepared: Prepared, inputs: AsyncIterator[Piece], ports: Wanted) -> AsyncGenerator[Sound, None]:
        """See Code2WavModel.decode."""

    @abstractmethod
    def usual_codes(self, prepared: Prepared) -> Array:
        """Codes for warming up, [frames, codebooks], enough for a window of each size."""

    async def warm_up(self) -> None:
        """Make sound from the usual codes, and drop it."""
        prepared = await self.prepare(WaveRequest(seed=0))
        (port,) = self.info.accepts
        async with aclosing(self.decode(prepared, _one(Piece(port.name, 0, True, self.usual_codes(prepared))), {AUDIO: 0})) as sounds:
            async for _ in sounds:
                pass

    async def close(self) -> None:
        """End the threads. No session may be running."""
        for worker in self._workers:
            await worker.close()


async def _one(piece: Piece) -> AsyncIterator[Piece]:
    yield piece
