"""The same models in one process without a server: the chain of servers is compared with it. Run as a module it answers every line on
standard input, a JSON list of a question, a seed and a number of tokens, with a JSON list of `AnswerTimes`."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import NamedTuple, TypeVar, cast

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
    TextPiece,
    TextRequest,
    ThinkerModel,
    WaveRequest,
    inputs_of,
)
from omnistage.models.options import LoadOptions
from omnistage.models.registry import load

T = TypeVar("T")

REPETITION_PENALTY = 1.1
"""The value in deploy/pipelines/smol.yaml."""


class AnswerTimes(NamedTuple):
    """The figures of an answer. ttft, ttfa: seconds to the first text and the first sound. rtf: seconds to the last sound, divided by
    `audio`. audio: seconds of sound."""

    ttft: float
    ttfa: float
    rtf: float
    audio: float


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

    async def ask(self, question: str, seed: int, max_tokens: int) -> AnswerTimes:
        """Answer a question."""
        self._begin_s = time.perf_counter()
        self._ttft_s = 0.0
        first_sound = last_sound = 0.0
        samples = 0
        sampling = Sampling(repetition_penalty=REPETITION_PENALTY)
        request = TextRequest((Turn("user", (question,)),), seed, sampling, max_tokens=max_tokens, ignore_eos=True)
        frames = self._speak(self._read(self._text(request)), seed)
        async with aclosing(self._code2wav.decode(await self._code2wav.prepare(WaveRequest(seed)), frames, {"audio": 0})) as sounds:
            async for sound in sounds:
                last_sound = time.perf_counter() - self._begin_s
                samples += len(sound.samples)
                if not first_sound and is_audible(sound.samples):
                    first_sound = last_sound
        audio_s = samples / self._code2wav.info.produces[0].rate_hz
        return AnswerTimes(self._ttft_s, first_sound, last_sound / audio_s, audio_s)

    async def _text(self, request: TextRequest) -> AsyncIterator[TextPiece]:
        """Make the pieces of the text, and note when the first text is there."""
        async for piece in self._thinker.generate(await self._thinker.prepare(request), inputs_of(), {"text": 0}):
            assert isinstance(piece, TextPiece)
            if piece.text and not self._ttft_s:
                self._ttft_s = time.perf_counter() - self._begin_s
            yield piece

    async def _read(self, text: AsyncIterator[TextPiece]) -> AsyncIterator[Piece]:
        """Yield the text as the Talker's input."""
        first = 0
        async for piece in run_ahead(text):
            yield Piece("text", first, piece.finish_reason is not None, piece)
            first += len(piece.token_ids)

    async def _speak(self, text: AsyncIterator[Piece], seed: int) -> AsyncIterator[Piece]:
        """Speak the text; yields the feature rows as Code2Wav's input."""
        first = 0
        async for frames in run_ahead(self._talker.speak(await self._talker.prepare(SpeechRequest(seed)), text, {"features": 0})):
            assert isinstance(frames, Frames)
            yield Piece("features", first, frames.finish_reason is not None, frames.rows)
            first += len(frames.rows)


async def run_ahead(outputs: AsyncIterator[T]) -> AsyncIterator[T]:
    """Yield the outputs, which are made on a task of their own, so that it runs ahead of the reader as on a server of its own."""
    queue: asyncio.Queue[T | None] = asyncio.Queue(256)

    async def fill() -> None:
        async for output in outputs:
            await queue.put(output)
        await queue.put(None)

    async with asyncio.TaskGroup() as group:
        group.create_task(fill())
        while (output := await queue.get()) is not None:
            yield output


@asynccontextmanager
async def started() -> AsyncIterator[Callable[[str, int, int], Awaitable[AnswerTimes]]]:
    """Start such a process; yields a function that asks it, as `OneProcess.ask` does."""
    command = [sys.executable, "-m", "benchmarks.one_process"]
    process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
    reading, writing = process.stdout, process.stdin
    if reading is None or writing is None:
        raise RuntimeError("no pipes to the one process")

    async def ask(question: str, seed: int, max_tokens: int) -> AnswerTimes:
        writing.write(json.dumps([question, seed, max_tokens]).encode() + b"\n")
        return AnswerTimes(*json.loads(await reading.readline()))

    try:
        await reading.readline()
        yield ask
    finally:
        writing.close()
        await process.wait()


async def main() -> None:
    process = OneProcess()
    await process.warm_up()
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await process.ask(*json.loads(line))), flush=True)
    await process.close()


if __name__ == "__main__":
    asyncio.run(main())
