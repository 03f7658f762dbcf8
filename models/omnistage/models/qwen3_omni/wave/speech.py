"""Turns the frames of one speech into windows, and keeps the state that each window leaves to the next window."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from omnistage.models.interface import Array, BadRequest, Sound
from omnistage.models.qwen3_omni.wave.config import WaveConfig
from omnistage.models.qwen3_omni.wave.net import CausalNet
from omnistage.models.qwen3_omni.wave.window import WindowJob
from omnistage.models.speech.schedule import Codes, Schedule, Window


@dataclass(frozen=True, slots=True)
class PreparedSpeech:
    """The parameters of a speech. schedule: cuts it into windows. heard: whether somebody listens while the sound is made."""

    schedule: Schedule
    heard: bool


class Speech:
    """Makes the windows of one speech from its frames, one after the other. Not safe to use from two threads at once.

    first_sample: the first sample that is wanted. Earlier frames are computed only as far back as the wanted samples depend on them, in the
    same windows as in the first run, so that all bits are the same. Windows far before that sample are silent: only attention needs
    them."""

    def __init__(self, config: WaveConfig, net: CausalNet, schedule: Schedule, first_sample: int = 0) -> None:
        self._config, self._schedule, self._first_sample = config, schedule, first_sample
        self.window: Window | None = None
        """The window that `next` returned last."""
        frame = first_frame(config, first_sample)
        self._number = schedule.entry(frame)
        self._sounding = schedule.begin(schedule.holding(frame)) - config.heard_frames
        """Number of the first frame that the convolutions of wanted sound see; windows before it are silent."""
        begin = schedule.first_code(self._number)
        self._codes = Codes(begin, config.codebooks)
        self._state = net.start(begin)
        self._ended = False

    def feed(self, first: int, codes: Array, *, last: bool) -> None:
        """Add the next frames, [n, codebooks]. first: number of the first of these frames in the speech; frames before the first needed
        frame are dropped. last: no more frames come. Raises BadRequest for codes outside the table, if needed frames were skipped, and for
        a speech that ends before `first_sample`."""
        frames = codes.astype(np.int64)
        if len(wrong := frames[frames >= self._config.codes]):
            raise BadRequest("codes", f"there is no code {wrong[0]}; codes are below {self._config.codes}")
        self._codes.add(first, frames)
        self._ended = self._ended or last
        samples = max(self._codes.came * self._config.frame_samples - self._config.missing, 0)
        if self._ended and samples < self._first_sample:
            raise BadRequest("resume.positions", f"the sound has {samples} samples: it cannot go on at sample {self._first_sample}")

    def next(self) -> WindowJob | None:
        """The next window; None: some of its frames have not come, or the speech is over. Before that, call `made` for the previous
        window."""
        self.window = self._schedule.window(self._number, self._codes.past, has_ended=self._ended)
        if self.window is None:
            return None
        codes = torch.from_numpy(self._codes.between(self.window.begin, self.window.end))
        return WindowJob(codes, self._state, silent=self.window.end <= self._sounding)

    def made(self, job: WindowJob) -> Sound:
        """The sound of the window that `next` returned last, without samples before `first_sample`, and with `Sound.needs`. job: that
        window, done."""
        assert self.window is not None and job.after is not None and job.samples is not None
        begins = max(job.state.place * self._config.frame_samples - self._config.missing, 0)
        self._state = job.after
        self._number += 1
        self._codes.forget(self.window.end)
        unheard = max(self._first_sample - begins, 0)
        return Sound(job.samples[unheard:, None].numpy(), self._schedule.first_code(self._schedule.entry(self.window.end)))


def first_frame(config: WaveConfig, sample: int) -> int:
    """The number of the frame with which a sample is made; it may be later than the sample's own frame: see `WaveConfig.missing`."""
    return (sample + config.missing) // config.frame_samples
