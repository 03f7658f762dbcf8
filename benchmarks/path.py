"""The calls of models that the first sound of an Omni model needs, made in this process, without the engine's own thread."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from omnistage.engine.engine import Engine
from omnistage.engine.memory import PAGE_ROWS, pages_for
from omnistage.engine.request import Given, Prompt, SequenceRequest
from omnistage.engine.scheduler import Run
from omnistage.engine.sequence import Sequence as EngineSequence
from omnistage.models.conversation import Turn
from omnistage.models.encoders.thinker import MediaThinker
from omnistage.models.interface import SpeechRequest, TextRequest, WaveRequest
from omnistage.models.options import LoadOptions
from omnistage.models.qwen2_5_omni import talker as talker2_5
from omnistage.models.qwen2_5_omni import thinker as thinker2_5
from omnistage.models.qwen2_5_omni.wave import code2wav as code2wav2_5
from omnistage.models.qwen3_omni import talker as talker3
from omnistage.models.qwen3_omni import thinker as thinker3
from omnistage.models.qwen3_omni.wave import code2wav as code2wav3
from omnistage.models.speech.talker import PLACES, PROMPT, RowTalker

TOKENS = 40
"""Most tokens of the text."""

PASS_ROWS = 512
"""How many rows of a prompt one step reads."""


def steps_s(engine: Engine, request: SequenceRequest, steps: int, vectors: torch.Tensor | None = None) -> list[float]:
    """Seconds to read a prompt, then the seconds of each of `steps` steps after it. vectors: of the prompt's rows, [rows, width]; the last
    vector serves for the row of each step too. The caller is in inference mode."""
    sequence, length = EngineSequence(request), len(request.prompt)
    sequence.pages = [engine._pool.take() for _ in range(pages_for(length + steps))]
    engine._runner.follow(*engine._pool.changes())
    if vectors is not None:
        sequence.give(Given(0, vectors))
        sequence.append(vectors[-1:], end=True)
    clock = [time.perf_counter()]
    for first in range(0, length, PASS_ROWS):
        end = min(first + PASS_ROWS, length)
        engine._runner.run([Run(sequence, at, min(PAGE_ROWS, end - at)) for at in range(first, end, PAGE_ROWS)])
    clock.append(time.perf_counter())
    for step in range(steps):
        sequence.items.append((7,) * engine.spec.codebooks)
        engine._runner.run([Run(sequence, length + step, 1)])
        clock.append(time.perf_counter())
    engine._pool.give_back(sequence.pages)
    return [after - before for before, after in pairwise(clock)]


class SoundPath(ABC):
    """The model calls from a question to the first sound, run in this process; each call needs the result of the call before it."""

    frames: ClassVar[int]
    """How many frames the first sound needs."""
    row_delay_steps: ClassVar[int]
    """How many steps of the Thinker a row comes after its token."""

    loaders: ClassVar[tuple[Callable[[Path, LoadOptions], Any], ...]]

    def __init__(self, folder: Path) -> None:
        models = [load(folder, LoadOptions(path=folder, dtype="float32")) for load in self.loaders]
        self.thinker: MediaThinker = models[0]
        self.talker: RowTalker = models[1]
        self.code2wav = models[2]

    @abstractmethod
    async def window_s(self, seed: int) -> float:
        """Seconds that Code2Wav takes for the sound of the first frames."""

    async def seconds(self, question: str, seed: int) -> float:
        """Seconds from a question to the first sound, if each call begins when the one before it ends."""
        request = TextRequest((Turn("user", (question,)),), seed=seed, max_tokens=TOKENS, ignore_eos=True)
        text_sequence = SequenceRequest(Prompt.of_tokens((await self.thinker.prepare(request)).prompt_ids), seed, TOKENS, taps_from=0)
        speech_request = await self.talker.prepare(SpeechRequest(seed, max_frames=self.frames))
        width = {port.name: port.width for port in self.talker.info.accepts}
        speech_sequence = self.talker.sequence(speech_request, np.zeros((width[PLACES], len(text_sequence.prompt)), np.int64))
        rows = torch.randn(len(speech_sequence.prompt), width[PROMPT]).to(self.talker.engine.spec.dtype)
        with torch.inference_mode():
            thinker_s = steps_s(self.thinker.engine, text_sequence, steps=self.frames - 1 + self.row_delay_steps)
            talker_s = steps_s(self.talker.engine, speech_sequence, steps=self.frames - 1, vectors=rows)
        return self._frames_s(thinker_s, talker_s) + await self.window_s(seed)

    def _frames_s(self, thinker_s: Sequence[float], talker_s: Sequence[float]) -> float:
        """Seconds until the last frame is made, if both compute at the same time: the first frame needs the row of the Thinker's first
        token, and each frame after it the row of the next token. thinker_s, talker_s: seconds of the prompt, then of each step."""
        row_ends = list(accumulate(thinker_s))[self.row_delay_steps :]
        frame_end = row_ends[0] + talker_s[0]
        for row_end, step_s in zip(row_ends[1:], talker_s[1:], strict=True):
            frame_end = max(row_end, frame_end) + step_s
        return frame_end

    async def close(self) -> None:
        await asyncio.gather(self.thinker.close(), self.talker.close(), self.code2wav.close())


class FlowPath(SoundPath):
    """The path of Qwen2.5-Omni, whose first sound needs 24 codes, a window of Code2Wav."""

    frames = 24
    row_delay_steps = 1
    loaders = (thinker2_5.load_thinker, talker2_5.load_talker, code2wav2_5.load_code2wav)

    async def window_s(self, seed: int) -> float:
        model = self.code2wav
        speech = code2wav2_5.Speech(model.config, model.windows, await model.prepare(WaveRequest(seed=0)))
        codes = torch.randint(0, 8192, (self.frames, 1), generator=torch.Generator().manual_seed(seed)).numpy().astype("uint32")
        begin_s = time.perf_counter()
        speech.feed(0, codes, last=False)
        step = speech.next()
        assert step is not None
        window, flow = step
        while not flow.done:
            model.windows.step([flow])
        vocoding = speech.solved(window, flow)
        while not vocoding.done:
            model.windows.step([vocoding])
        code2wav2_5.sound(vocoding)
        return time.perf_counter() - begin_s


class CausalPath(SoundPath):
    """The path of Qwen3-Omni, whose first sound needs one frame."""

    frames = 1
    row_delay_steps = 0
    loaders = (thinker3.load_thinker, talker3.load_talker, code2wav3.load_code2wav)

    async def window_s(self, seed: int) -> float:
        model = self.code2wav
        speech = code2wav3.Speech(model.config, model.windows.net, (await model.prepare(WaveRequest(seed=0, profile="latency"))).schedule)
        shape = (self.frames, model.config.codebooks)
        codes = torch.randint(0, model.config.codes, shape, generator=torch.Generator().manual_seed(seed)).numpy().astype("uint32")
        begin_s = time.perf_counter()
        speech.feed(0, codes, last=False)
        step = speech.next()
        assert step is not None
        window, job = step
        model.windows.step([job])
        speech.finish(window, job)
        return time.perf_counter() - begin_s
