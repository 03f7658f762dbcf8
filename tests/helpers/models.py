"""Driving models in process, without a server: a Thinker, a Thinker with a Talker, and one that counts what it computes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omnistage.models.interface import (
    Frames,
    P,
    Piece,
    SpeechRequest,
    TalkerModel,
    TensorRows,
    TextPiece,
    TextRequest,
    ThinkerModel,
    Wanted,
    inputs_of,
)
from omnistage.models.toy.stages import ToyThinker


async def said(model: ThinkerModel[P], request: TextRequest, wanted: Wanted | None = None) -> AsyncGenerator[TextPiece | TensorRows, None]:
    """The output of a Thinker for a request: its text after the history, where nothing else is wanted."""
    given = model.generate(await model.prepare(request), inputs_of(), wanted or {"text": len(request.history)})
    async with aclosing(given) as pieces:
        async for piece in pieces:
            yield piece


async def text_pieces(model: ThinkerModel[P], request: TextRequest) -> list[TextPiece]:
    async with aclosing(said(model, request)) as pieces:
        return [piece async for piece in pieces if isinstance(piece, TextPiece)]


ROW_PORTS = ("prompt", "places", "hidden")


@dataclass(slots=True)
class SaidAnswer:
    """tokens, codes: of the answer. events: names of what came, in order."""

    tokens: list[int] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)
    events: list[str] = field(default_factory=list)


class RowInputs:
    """The rows of a Thinker as the inputs of a Talker."""

    def __init__(self) -> None:
        self._pieces = asyncio.Queue[Piece | None]()
        self.rows = dict.fromkeys(ROW_PORTS, 0)
        """That were put, by port."""

    def put(self, rows: TensorRows) -> None:
        self._pieces.put_nowait(Piece(rows.port, self.rows[rows.port], rows.last, rows.rows))
        self.rows[rows.port] += len(rows.rows)

    def end(self) -> None:
        """No more comes, as after an interrupt."""
        self._pieces.put_nowait(None)

    async def inputs(self) -> AsyncIterator[Piece]:
        while (piece := await self._pieces.get()) is not None:
            yield piece


async def speak(
    thinker: ThinkerModel[Any], talker: TalkerModel[Any], asked: TextRequest, speech: SpeechRequest, wanted: Mapping[str, int] | None = None
) -> SaidAnswer:
    """The outputs of a Thinker and a Talker. wanted: those that the Thinker is asked for."""
    said, line = SaidAnswer(), RowInputs()
    begun = [0 if speech.history is None else len(speech.history)]

    async def think() -> None:
        wants = wanted or {"text": len(asked.history), **dict.fromkeys(ROW_PORTS, 0)}
        async with aclosing(thinker.generate(await thinker.prepare(asked), inputs_of(), wants)) as pieces:
            async for piece in pieces:
                if isinstance(piece, TextPiece):
                    said.tokens += piece.token_ids
                    said.events += ["token"] * len(piece.token_ids)
                else:
                    line.put(piece)
                    said.events += [piece.port] * len(piece.rows)

    thinking = asyncio.create_task(think())
    async with aclosing(talker.speak(await talker.prepare(speech), line.inputs(), {"codes": begun[0]})) as frames:
        async for made in frames:
            assert isinstance(made, Frames)
            said.codes += made.rows[:, 0].tolist()
            said.events += ["code"] * len(made.rows)
    await thinking
    return said


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
