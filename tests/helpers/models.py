"""Driving a model in process, without a server."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from omnistage.models.interface import P, TensorRows, TextPiece, TextRequest, ThinkerModel, Wanted, no_inputs


async def said(model: ThinkerModel[P], request: TextRequest, wanted: Wanted | None = None) -> AsyncGenerator[TextPiece | TensorRows, None]:
    """The output of a Thinker for a request: its text after the history, where nothing else is wanted."""
    given = model.generate(await model.prepare(request), no_inputs(), wanted or {"text": len(request.history)})
    async with aclosing(given) as pieces:
        async for piece in pieces:
            yield piece


async def text_pieces(model: ThinkerModel[P], request: TextRequest) -> list[TextPiece]:
    """The text of an answer."""
    async with aclosing(said(model, request)) as pieces:
        return [piece async for piece in pieces if isinstance(piece, TextPiece)]
