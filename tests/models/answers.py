"""`python answers.py KIND...`: of each stage of the default model, the revision and a digest of its answers, as one line of JSON."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from helpers.models import text_pieces
from omnistage.models.conversation import Turn
from omnistage.models.interface import Piece, SpeechRequest, TextPiece, TextRequest, WaveRequest
from omnistage.models.options import LoadOptions
from omnistage.models.registry import load
from omnistage.models.smol.prosody import COUNT, FEATURE_WIDTH, INDEX

TEXTS = ("The tide comes in twice a day.", "Eleven grey horses ran, and nobody knew why; then it rained for a week without an end.", "Go!")


async def thought(model: Any) -> AsyncIterator[NDArray[np.generic]]:
    """Tokens of answers that are asked for at once, and how likely each was: it moves where a token does not yet."""
    requests = [TextRequest((Turn("user", (text * 9,)),), seed=3, max_tokens=24, logprobs=True) for text in TEXTS]
    for pieces in await asyncio.gather(*(text_pieces(model, request) for request in requests)):
        yield np.array([token for piece in pieces for token in piece.token_ids])
        yield np.array([logprob for piece in pieces for logprob in piece.logprobs])


async def spoken(model: Any) -> AsyncIterator[NDArray[np.float32]]:
    for text in TEXTS:
        async for frames in model.speak(
            await model.prepare(SpeechRequest(seed=1)), one(Piece("text", 0, True, TextPiece(text, (1,)))), {"features": 0}
        ):
            yield frames.rows


async def heard(model: Any) -> AsyncIterator[NDArray[np.float32]]:
    for profile, count in (("latency", 37), ("balanced", 90), ("offline", 333)):
        request = await model.prepare(WaveRequest(seed=2, profile=profile))
        async for sound in model.decode(request, one(Piece("features", 0, True, rows(count))), {"audio": 0}):
            yield sound.samples


def rows(count: int) -> NDArray[np.float32]:
    """One phrase of features that no Talker would make."""
    made = np.abs(np.random.Generator(np.random.PCG64(count)).standard_normal((count, FEATURE_WIDTH), np.float32))
    made[:, INDEX], made[:, COUNT] = np.arange(count), count
    return made


async def one(piece: Piece) -> AsyncIterator[Piece]:
    yield piece


async def told(kind: str) -> dict[str, str]:
    model = load("smol", kind, LoadOptions())
    digest = hashlib.sha256()
    async for part in {"thinker": thought, "talker": spoken, "code2wav": heard}[kind](model):
        digest.update(np.ascontiguousarray(part).tobytes())
    await model.close()
    return {"revision": model.info.revision, "answers": digest.hexdigest()[:12]}


if __name__ == "__main__":
    print(json.dumps({kind: asyncio.run(told(kind)) for kind in sys.argv[1:]}))
