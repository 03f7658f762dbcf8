"""The Omni families for `benchmarks.pipeline`: the requests to them and to Transformers, and the model calls before the first sound."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from benchmarks.figures import Figure
from benchmarks.talker import NEVER_ENDS, steps_s, thinker_params
from helpers.omni_reference import OmniReference
from helpers.qwen3_reference import Qwen3Reference
from omnistage.engine.request import Prompt, SequenceRequest
from omnistage.models.conversation import Turn
from omnistage.models.encoders.thinker import MediaThinker
from omnistage.models.interface import SpeechRequest, TextRequest, WaveRequest
from omnistage.models.options import LoadOptions
from omnistage.models.qwen2_5_omni import talker as loading_talker2_5
from omnistage.models.qwen2_5_omni import thinker as loading2_5
from omnistage.models.qwen2_5_omni.wave import code2wav as loading_wave2_5
from omnistage.models.qwen2_5_omni.wave.code2wav import Speech as FlowSpeech
from omnistage.models.qwen2_5_omni.wave.code2wav import sound
from omnistage.models.qwen3_omni import talker as loading_talker3
from omnistage.models.qwen3_omni import thinker as loading3
from omnistage.models.qwen3_omni.wave import code2wav as loading_wave3
from omnistage.models.qwen3_omni.wave.code2wav import Speech as CausalSpeech
from omnistage.models.speech.talker import PLACES, PROMPT, RowTalker
from omnistage.models.tiny.qwen3_omni import SIZES, SPECIAL
from omnistage.v1 import stage_pb2

TOKENS, CHARACTERS = 40, 80
"""Tokens of an answer, and characters of a question."""


class SoundPath(ABC):
    """The model calls from a question to the first sound, run in this process; each call needs the result of the call before it."""

    frames: ClassVar[int]
    """How many frames the first sound needs."""
    late: ClassVar[int]
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

    async def seconds(self, seed: int) -> float:
        """Seconds from a question to the first sound, if each call begins when the one before it ends."""
        text = thinker_params(seed, CHARACTERS).messages[0].parts[0].text
        request = TextRequest((Turn("user", (text,)),), seed=seed, max_tokens=TOKENS, ignore_eos=True)
        thought = SequenceRequest(Prompt.of_tokens((await self.thinker.prepare(request)).prompt_ids), seed, TOKENS, taps_from=0)
        speaker = await self.talker.prepare(SpeechRequest(seed, max_frames=self.frames))
        width = {port.name: port.width for port in self.talker.info.accepts}
        speech = self.talker.sequence(speaker, np.zeros((width[PLACES], len(thought.prompt)), np.int64))
        rows = torch.randn(len(speech.prompt), width[PROMPT]).to(self.talker.engine.spec.dtype)
        with torch.inference_mode():
            thoughts = steps_s(self.thinker.engine, thought, steps=self.frames - 1 + self.late)
            frames = steps_s(self.talker.engine, speech, steps=self.frames - 1, vectors=rows)
        return self._frames_s(thoughts, frames) + await self.window_s(seed)

    def _frames_s(self, thinker: Sequence[float], talker: Sequence[float]) -> float:
        """Seconds until the last frame is made, if both compute at the same time: the first frame needs the row of the Thinker's first
        token, and each frame after it the row of the next token. thinker, talker: seconds of the prompt, then of each step."""
        rows = list(accumulate(thinker))[self.late :]
        done = rows[0] + talker[0]
        for row, step in zip(rows[1:], talker[1:], strict=True):
            done = max(row, done) + step
        return done

    async def close(self) -> None:
        await asyncio.gather(self.thinker.close(), self.talker.close(), self.code2wav.close())


class FlowPath(SoundPath):
    """The path of Qwen2.5-Omni, whose first sound needs 24 codes, a window of Code2Wav."""

    frames = 24
    late = 1
    loaders = (loading2_5.load_thinker, loading_talker2_5.load_talker, loading_wave2_5.load_code2wav)

    async def window_s(self, seed: int) -> float:
        model = self.code2wav
        speech = FlowSpeech(model.config, model.windows, await model.prepare(WaveRequest(seed=0)))
        codes = torch.randint(0, 8192, (self.frames, 1), generator=torch.Generator().manual_seed(seed)).numpy().astype("uint32")
        begin_s = time.perf_counter()
        speech.feed(0, codes, last=False)
        flow = speech.next()
        assert flow is not None
        while not flow.done:
            model.windows.step([flow])
        vocoding = speech.solved(flow)
        while not vocoding.done:
            model.windows.step([vocoding])
        sound(vocoding)
        return time.perf_counter() - begin_s


class CausalPath(SoundPath):
    """The path of Qwen3-Omni, whose first sound needs one frame."""

    frames = 1
    late = 0
    loaders = (loading3.load_thinker, loading_talker3.load_talker, loading_wave3.load_code2wav)

    async def window_s(self, seed: int) -> float:
        model = self.code2wav
        speech = CausalSpeech(model.config, model.windows.net, (await model.prepare(WaveRequest(seed=0, profile="latency"))).schedule)
        shape = (self.frames, model.config.codebooks)
        codes = torch.randint(0, model.config.codes, shape, generator=torch.Generator().manual_seed(seed)).numpy().astype("uint32")
        begin_s = time.perf_counter()
        speech.feed(0, codes, last=False)
        job = speech.next()
        assert job is not None
        model.windows.step([job])
        speech.made(job)
        return time.perf_counter() - begin_s


@dataclass(frozen=True, slots=True)
class Chain:
    """A family to measure. maker: makes its checkpoint. family: names its pipeline and models. suffix: ends the names of its figures.
    frames, samples: length of an answer. profile: for Code2Wav. sampling: for the Talker. reference: loads the model of Transformers.
    asked: makes more arguments of its `generate` from its config. path: makes a SoundPath. goal, relays: goals of ttfa_over_hf_e2e and
    ttfa_relays."""

    maker: str
    family: str
    suffix: str
    frames: int
    samples: int
    profile: str
    sampling: stage_pb2.Sampling
    reference: Callable[[Path], OmniReference]
    asked: Callable[[Any], Mapping[str, Any]]
    path: Callable[[Path], SoundPath]
    goal: str
    relays: str = ""

    def figure(self, name: str, value: float, unit: str, goal: str, note: str) -> Figure:
        """Make a figure of this family."""
        return Figure(f"{name}{self.suffix}", value, unit, goal, note)


def _asked2_5(config: Any) -> Mapping[str, Any]:
    """Arguments that make Transformers give as many frames as we do. Items that are no codes are banned: the vocoder has no row for
    them."""
    others = range(config.token2wav_config.dit_config.num_embeds, config.talker_config.vocab_size)
    count = CHAINS["qwen2_5_omni"].frames
    return {"talker_max_new_tokens": count, "talker_min_new_tokens": count, "talker_bad_words_ids": [[number] for number in others]}


def _asked3(config: Any) -> Mapping[str, Any]:
    """Arguments that make Transformers give as many frames as we do: its Talker makes one frame fewer than it may make tokens."""
    count = CHAINS["qwen3_omni"].frames + 1
    return {"talker_max_new_tokens": count, "talker_min_new_tokens": count}


class _Speaking(Qwen3Reference):
    """The model of Transformers with its Talker."""

    loading: ClassVar = {}


_END = SIZES["small"]["talker"]["codes"] + SPECIAL["codec_eos_token_id"]
CHAINS: Mapping[str, Chain] = {
    "qwen2_5_omni": Chain(
        "qwen2.5-omni",
        "qwen2_5_omni",
        "",
        frames=500,
        samples=500 * 480,
        profile="",
        sampling=stage_pb2.Sampling(temperature=0.9, top_k=40, top_p=0.8, repetition_penalty=1.05, logit_bias=NEVER_ENDS),
        reference=OmniReference,
        asked=_asked2_5,
        path=FlowPath,
        goal="<= 0.15",
    ),
    "qwen3_omni": Chain(
        "qwen3-omni",
        "qwen3_omni",
        "_qwen3",
        frames=63,
        samples=63 * 1920 - 555,
        profile="latency",
        sampling=stage_pb2.Sampling(temperature=0.9, top_k=50, repetition_penalty=1.05, logit_bias={_END: -100.0}),
        reference=_Speaking,
        asked=_asked3,
        path=CausalPath,
        goal="<= 0.10",
        relays="<= 0.10",
    ),
}
"""By the names of the families. Answers of ten seconds, and of five."""
