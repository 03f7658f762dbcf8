"""How likely tokens were, as OpenAI's interface has it: with the text of each token."""

from __future__ import annotations

from typing import Any

from omnistage.client.events import TextDelta


def logprobs_of(delta: TextDelta, count: int) -> list[dict[str, Any]]:
    """A row for each token of a piece; none where the model does not tell. count: of the likeliest tokens that are told in each place."""
    tokens = len(delta.logprobs)
    pieces, tops = delta.pieces or (b"",) * tokens, delta.top_logprobs or ((),) * tokens
    return [
        {**_token(piece, logprob), "top_logprobs": [_token(one.piece, one.logprob) for one in top[:count]]}
        for piece, logprob, top in zip(pieces, delta.logprobs, tops, strict=True)
    ]


def _token(piece: bytes, logprob: float) -> dict[str, Any]:
    return {"token": piece.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(piece)}
