"""Driving the voice in process: text to rows, rows to samples."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from omnistage.models.interface import Alignment, Frames, Piece, Sound, SpeechRequest, SpokenWord, TextPiece, Unspoken, WaveRequest
from omnistage.models.smol.code2wav import SmolCode2Wav
from omnistage.models.smol.prosody import FEATURE_WIDTH
from omnistage.models.smol.talker import SmolTalker

Array = NDArray[np.float32]


async def pieces(texts: Iterable[str]) -> AsyncIterator[Piece]:
    """Text deltas as a Thinker sends them, one token each."""
    count = 0
    for text in texts:
        yield Piece("text", count, False, TextPiece(text, (count,)))
        count += 1
    yield Piece("text", count, True, TextPiece("", ()))


async def arrays(parts: Iterable[Array], first: int = 0) -> AsyncIterator[Piece]:
    """Rows as they arrive, from row `first` on; the memory of each is overwritten when the next is asked for, as shared memory is."""
    for part in parts:
        view = part.copy()
        yield Piece("features", first, False, view)
        first += len(view)
        view.fill(np.nan)


async def frames_of(talker: SmolTalker, *texts: str, request: SpeechRequest | None = None, first: int = 0) -> list[Frames]:
    """Everything the Talker yields for the deltas, from frame `first` on."""
    return [made for made in await made_of(talker, *texts, request=request, wanted={"features": first}) if isinstance(made, Frames)]


async def words_of(talker: SmolTalker, *texts: str, request: SpeechRequest | None = None, first: int = 0) -> list[SpokenWord]:
    """The words that are spoken, from word `first` on."""
    made = await made_of(talker, *texts, request=request, wanted={"alignment": first})
    return [word for one in made if isinstance(one, Alignment) for word in one.words]


async def unspoken_of(talker: SmolTalker, *texts: str, request: SpeechRequest | None = None, **wanted: int) -> list[str]:
    """The words that are told as not spoken, whatever is wanted."""
    made = await _all_of(talker, *texts, request=request, wanted=wanted)
    return [run for one in made if isinstance(one, Unspoken) for run in one.runs]


async def made_of(
    talker: SmolTalker, *texts: str, wanted: Mapping[str, int], request: SpeechRequest | None = None
) -> list[Frames | Alignment]:
    """Everything the Talker yields for the deltas, of the ports that are wanted."""
    made = await _all_of(talker, *texts, wanted=wanted, request=request)
    return [one for one in made if not isinstance(one, Unspoken)]


async def _all_of(
    talker: SmolTalker, *texts: str, wanted: Mapping[str, int], request: SpeechRequest | None
) -> list[Frames | Alignment | Unspoken]:
    prepared = await talker.prepare(request or SpeechRequest(seed=0))
    return [made async for made in talker.speak(prepared, pieces(texts), wanted)]


async def rows_of(talker: SmolTalker, *texts: str, request: SpeechRequest | None = None) -> Array:
    """All rows [n, FEATURE_WIDTH] for the deltas."""
    return np.concatenate([frames.rows for frames in await frames_of(talker, *texts, request=request)]).astype(np.float32)


async def sounds_of(
    code2wav: SmolCode2Wav, *parts: Array, request: WaveRequest | None = None, first: int = 0, sample: int = 0
) -> list[Sound]:
    """All that is yielded from a sample on, for rows that arrive in these parts, from row `first` on."""
    prepared = await code2wav.prepare(request or WaveRequest(seed=0))
    return [sound async for sound in code2wav.decode(prepared, arrays(parts, first), {"audio": sample})]


async def chunks_of(code2wav: SmolCode2Wav, *parts: Array, request: WaveRequest | None = None) -> list[Array]:
    """The chunks of sound for rows that arrive in these parts."""
    return [sound.samples for sound in await sounds_of(code2wav, *parts, request=request)]


async def samples_of(code2wav: SmolCode2Wav, *parts: Array, request: WaveRequest | None = None) -> Array:
    """All samples [n, 1]."""
    return np.concatenate([np.empty((0, 1), np.float32), *await chunks_of(code2wav, *parts, request=request)])


async def spoken(talker: SmolTalker, code2wav: SmolCode2Wav, text: str) -> Array:
    """The samples of a text, the two stages running at the same time."""

    async def rows() -> AsyncIterator[Piece]:
        first = 0
        async for frames in talker.speak(SpeechRequest(seed=0), pieces([text]), {"features": 0}):
            assert isinstance(frames, Frames)
            assert frames.rows.shape[1] == FEATURE_WIDTH
            yield Piece("features", first, frames.finish_reason is not None, frames.rows)
            first += len(frames.rows)

    chunks = [sound.samples async for sound in code2wav.decode(WaveRequest(seed=0), rows(), {"audio": 0})]
    return np.concatenate([np.empty((0, 1), np.float32), *chunks])


async def cancel_often(model: SmolTalker | SmolCode2Wav, outputs: Callable[[], AsyncIterator[object]], draw: random.Random) -> None:
    """Cancel three readers of the model's outputs at a random moment, again and again; nothing is left in its queue each time."""

    async def listen() -> None:
        async for _ in outputs():
            await asyncio.sleep(0)

    for _ in range(60):
        tasks = [asyncio.create_task(listen()) for _ in range(3)]
        await asyncio.sleep(draw.random() * 0.05)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert model.load().queued == 0
