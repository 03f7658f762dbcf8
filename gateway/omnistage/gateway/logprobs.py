"""Log probabilities of tokens in OpenAI's shape: with the text of each token."""

from __future__ import annotations

from typing import Any

from omnistage.client.events import TextDelta


def logprobs_of(delta: TextDelta, count: int) -> list[dict[str, Any]]:
    """A row for each token of a piece of text; no rows if the model gives no logprobs. count: how many likeliest tokens a row lists."""
    tokens = len(delta.logprobs)
    pieces, tops = delta.pieces or (b"",) * tokens, delta.top_logprobs or ((),) * tokens
    return [
        {**_token(piece, logprob), "top_logprobs": [_token(one.piece, one.logprob) for one in top[:count]]}
        for piece, logprob, top in zip(pieces, delta.logprobs, tops, strict=True)
    ]


def _token(piece: bytes, logprob: float) -> dict[str, Any]:
    return {"token": piece.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(piece)}
