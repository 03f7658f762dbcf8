"""A toy Thinker that counts what it computes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator

import numpy as np
from numpy.typing import NDArray

from omnistage.models.interface import Piece, TensorRows, TextPiece, TextRequest, Wanted
from omnistage.models.toy.stages import ToyThinker


class CountingThinker(ToyThinker):
    """computed: rows that were made. wanted, clients: what it was told, one for each session."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.computed = 0
        self.wanted: list[Wanted] = []
        self.clients: list[str] = []

    async def prepare(self, request: TextRequest) -> TextRequest:
        self.clients.append(request.client)
        return await super().prepare(request)

    def generate(self, prepared: TextRequest, inputs: AsyncIterator[Piece], ports: Wanted) -> AsyncGenerator[TextPiece | TensorRows, None]:
        self.wanted.append(ports)
        return super().generate(prepared, inputs, ports)

    def _rows(self, tokens: tuple[int, ...]) -> NDArray[np.float32]:
        self.computed += len(tokens)
        return super()._rows(tokens)
