"""How likely tokens were, as OpenAI's interface has it: with the text of each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omnistage.client.events import TextDelta

ASKED = 20
"""Of the likeliest tokens in each place, as many as may be asked for: among them the one that was said is found, and with it its text."""


def logprobs_of(delta: TextDelta, count: int) -> list[dict[str, Any]]:
    """A row for each token of a piece; none where the model does not tell. count: of the likeliest ones that are told."""
    if not delta.logprobs:
        return []
    tops = delta.top_logprobs or ((),) * len(delta.token_ids)
    found = [next((one.piece for one in top if one.token_id == id_), None) for id_, top in zip(delta.token_ids, tops, strict=True)]
    rows = zip(pieces_of(delta.text, found), delta.logprobs, tops, strict=True)
    return [
        {**_token(piece, logprob), "top_logprobs": [_token(one.piece, one.logprob) for one in top[:count]]} for piece, logprob, top in rows
    ]


def _token(piece: bytes, logprob: float) -> dict[str, Any]:
    return {"token": piece.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(piece)}


def pieces_of(text: str, found: Sequence[bytes | None]) -> list[bytes]:
    """The text of each token of a piece of text. found: of those that were among the likeliest. What stands between these is said by the
    others: of several beside each other, the first has all of it."""
    said, at = text.encode(), 0
    pieces: list[bytes] = []
    for i, piece in enumerate(found):
        if piece is None and i and found[i - 1] is None:
            piece = b""
        elif piece is None:
            after = next((one for one in found[i:] if one), None)
            end = -1 if after is None else said.find(after, at)
            piece = said[at:] if end < 0 else said[at:end]
        pieces.append(piece)
        at += len(piece)
    return pieces
