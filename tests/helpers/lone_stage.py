"""Answers of a chain of toys behind `omnistage serve`, in the middle of which the only process of a stage is killed."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from helpers.toy_pipeline import toy_pipeline
from omnistage.client import AudioChunk, Failover, Omni, TextDelta
from omnistage.models.toy import formulas

PROMPT = "A long story."
TOKENS, SAMPLES_PER_FRAME = 100, 240


def slow_chain(folder: Path, load_s: float) -> str:
    """The file of the pipeline, each of whose stages takes so long to load. An answer takes two seconds."""
    return toy_pipeline(folder, interval_s=0.02, length=TOKENS, samples_per_frame=SAMPLES_PER_FRAME, load_s=load_s)


@dataclass
class StruckAnswer:
    """The outcome of an answer. pid: the process that was killed."""

    seed: int
    pid: int
    text: str = ""
    samples: list[float] = field(default_factory=list)
    failovers: list[Failover] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Whether text and sound are those of the formulas, without a gap or a repeat."""
        sound = formulas.audio(self.seed, PROMPT, TOKENS, SAMPLES_PER_FRAME)[:, 0]
        is_sound_whole = len(self.samples) == len(sound) and np.allclose(self.samples, sound, atol=1e-4)
        return is_sound_whole and self.text == formulas.text(self.seed, PROMPT, TOKENS)


def struck_answer(omni: Omni, kind: str, seed: int) -> StruckAnswer:
    """An answer at whose first sound the process of a stage is killed. Raises OmniError."""
    answer = StruckAnswer(seed, next(replica.pid for replica in omni.replicas() if replica.stage == kind))
    for event in omni.stream(PROMPT, seed=seed):
        match event:
            case TextDelta():
                answer.text += event.text
            case AudioChunk():
                if not answer.samples:
                    os.kill(answer.pid, signal.SIGKILL)
                answer.samples.extend(event.samples)
            case Failover():
                answer.failovers.append(event)
    return answer
