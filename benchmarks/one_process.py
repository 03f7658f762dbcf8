"""The same models in one process without a server: the chain of servers is compared with it. Run as a module it answers every line on
standard input, a JSON object {question, seed, max_tokens}, with a line of figures."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import cast

from benchmarks.figures import QUESTION
from omnistage.client.events import is_audible
from omnistage.engine.types import Sampling
from omnistage.models.conversation import Turn
from omnistage.models.interface import (
    Code2WavModel,
    Frames,
    Piece,
    SpeechRequest,
    TalkerModel,
    TensorRows,
    TextPiece,
    TextRequest,
    ThinkerModel,
    WaveRequest,
    inputs_of,
)
from omnistage.models.options import LoadOptions
from omnistage.models.registry import load

REPETITION_PENALTY = 1.1
"""The value in deploy/pipelines/smol.yaml."""


class OneProcess:
    """Thinker, Talker and Code2Wav, joined by queues."""

    def __init__(self) -> None:
        self._thinker = cast(ThinkerModel[object], load("smol", "thinker", LoadOptions()))
        self._talker = cast(TalkerModel[object], load("smol", "talker", LoadOptions()))
        self._code2wav = cast(Code2WavModel[object], load("smol", "code2wav", LoadOptions()))

    async def warm_up(self) -> None:
        for model in (self._thinker, self._talker, self._code2wav):
            await model.warm_up()
        await self.ask(QUESTION, 0, 24)

    async def close(self) -> None:
        for model in (self._thinker, self._talker, self._code2wav):
            await model.close()

    async def ask(self, question: str, seed: int, max_tokens: int) -> dict[str, float]:
        """Answer a question; returns ttft_s and ttfa_s, seconds to first text and sound, audio_s, seconds of sound, and rtf, time by
        audio_s."""
        self._begin_s = time.perf_counter()
        self._ttft_s = 0.0
        first_sound = last_sound = 0.0
        samples = 0
        sampling = Sampling(repetition_penalty=REPETITION_PENALTY)
        request = TextRequest((Turn("user", (question,)),), seed, sampling, max_tokens=max_tokens, ignore_eos=True)
        prepared = await self._thinker.prepare(request)
        frames = self._frames(self._noted(self._thinker.generate(prepared, inputs_of(), {"text": 0})), seed)
        wave = await self._code2wav.prepare(WaveRequest(seed))
        async with aclosing(self._code2wav.decode(wave, frames, {"audio": 0})) as sounds:
            async for sound in sounds:
                last_sound = time.perf_counter() - self._begin_s
                samples += len(sound.samples)
                if not first_sound and is_audible(sound.samples):
                    first_sound = last_sound
        audio_s = samples / self._code2wav.info.produces[0].rate_hz
        return {"ttft_s": self._ttft_s, "ttfa_s": first_sound, "audio_s": audio_s, "rtf": last_sound / audio_s}

    async def _noted(self, pieces: AsyncIterator[TextPiece | TensorRows]) -> AsyncIterator[Piece]:
        """Pass the Thinker's pieces on through a queue, so that it runs ahead of the Talker as on its own server; time the first text."""
        queue: asyncio.Queue[TextPiece | None] = asyncio.Queue(256)

        async def fill() -> None:
            async for piece in pieces:
                assert isinstance(piece, TextPiece)
                if piece.text and not self._ttft_s:
                    self._ttft_s = time.perf_counter() - self._begin_s
                await queue.put(piece)
            await queue.put(None)

        first = 0

        async with asyncio.TaskGroup() as group:
            group.create_task(fill())
            while (piece := await queue.get()) is not None:
                yield Piece("text", first, piece.finish_reason is not None, piece)
                first += len(piece.token_ids)

    async def _frames(self, text: AsyncIterator[Piece], seed: int) -> AsyncIterator[Piece]:
        """Speak the text on a task of its own; yields the feature rows."""
        queue: asyncio.Queue[Frames | None] = asyncio.Queue(256)

        async def fill() -> None:
            speech = await self._talker.prepare(SpeechRequest(seed))
            async for frames in self._talker.speak(speech, text, {"features": 0}):
                assert isinstance(frames, Frames)
                await queue.put(frames)
            await queue.put(None)

        first = 0
        async with asyncio.TaskGroup() as group:
            group.create_task(fill())
            while (frames := await queue.get()) is not None:
                yield Piece("features", first, frames.finish_reason is not None, frames.rows)
                first += len(frames.rows)


async def main() -> None:
    process = OneProcess()
    await process.warm_up()
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await process.ask(**json.loads(line))), flush=True)
    await process.close()


if __name__ == "__main__":
    asyncio.run(main())
