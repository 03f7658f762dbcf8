"""Turns the codes of one speech into windows, and keeps the state that the flow of a window leaves to the next window."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from omnistage.models.interface import Array, BadRequest, Sound
from omnistage.models.qwen2_5_omni.wave.config import WaveConfig
from omnistage.models.qwen2_5_omni.wave.noise import noise
from omnistage.models.qwen2_5_omni.wave.speaker import Speaker
from omnistage.models.qwen2_5_omni.wave.vocoder import FIELD
from omnistage.models.qwen2_5_omni.wave.window import PIECE_FRAMES, Flow, Vocoding, Windows
from omnistage.models.speech.schedule import Codes, Schedule, Window


@dataclass(frozen=True, slots=True)
class PreparedSpeech:
    """The seed, schedule and speaker of a speech."""

    seed: int
    schedule: Schedule
    speaker: Speaker


class Speech:
    """Makes the windows of one speech from its codes, one after the other. Not safe to use from two threads at once. first_sample: the
    first sample that is wanted; earlier samples are computed only if later samples depend on them."""

    def __init__(self, config: WaveConfig, windows: Windows, prepared: PreparedSpeech, first_sample: int = 0) -> None:
        self._config, self._windows, self._prepared = config, windows, prepared
        self._first_sample = first_sample
        self.window: Window | None = None
        """The window that `next` returned last."""
        self._number = prepared.schedule.entry(first_sample // config.code_samples)
        self._codes = Codes(prepared.schedule.first_code(self._number), 1)
        self._ended = self._over = False  # whether all codes have come; whether the last window was solved
        self._left: torch.Tensor | None = None
        """The state that the last window left to the next window; see Flow."""
        self._before = torch.zeros(0, config.dit.mel_bins, device=windows.dit.device)
        """The last mel frames before the next window, which the vocoder needs, [n, mel_bins]."""

    def feed(self, first: int, codes: Array, *, last: bool) -> None:
        """Add the next codes, [n, 1]. first: number of the first of these codes in the speech; codes before the first needed code are
        dropped. last: no more codes come. Raises BadRequest for codes outside the table, if needed codes were skipped, and for a speech
        that ends before `first_sample`."""
        if not self._ended:
            self._take(first, codes.astype(np.int64))
        self._ended = self._ended or last
        samples = self._codes.came * self._config.code_samples
        if self._ended and samples < self._first_sample:
            raise BadRequest("resume.positions", f"the sound has {samples} samples: it cannot go on at sample {self._first_sample}")

    def next(self) -> Flow | None:
        """The flow of the next window; None: some of its codes have not come, or the speech is over. Before that, call `solved` for the
        previous window."""
        if self._over:
            return None
        self.window = self._prepared.schedule.window(self._number, self._codes.past, has_ended=self._ended)
        return None if self.window is None else self._flow(self.window)

    def solved(self, flow: Flow) -> Vocoding:
        """The next step of the window that `next` returned last: its mel frames, to be made into sound. flow: that window's flow, done."""
        assert self.window is not None
        schedule, mel = self._prepared.schedule, torch.cat((self._before, flow.mel))
        end = len(mel) - flow.ahead
        self._left, self._before = flow.leaves, mel[max(end - FIELD, 0) : end]
        begins = schedule.begin(self._number) * self._config.code_samples
        self._number += 1
        self._over = flow.leaves is None
        self._codes.forget(schedule.first_code(self._number))
        unheard = min((self._first_sample - begins) // self._config.vocoder.frame_samples, flow.chunk)
        # Only whole pieces are left out, because samples of a shorter piece may have other bits.
        unheard = max(unheard if unheard == flow.chunk else unheard // PIECE_FRAMES * PIECE_FRAMES, 0)
        return Vocoding(
            mel,
            flow.chunk,
            flow.ahead,
            unheard,
            wanted_frames=flow.chunk - unheard,
            needless=max(self._first_sample - begins - unheard * self._config.vocoder.frame_samples, 0),
            needs=schedule.first_code(schedule.entry(self.window.end)),
            last=self._over,
        )

    def _take(self, first: int, codes: NDArray[np.int64]) -> None:
        """Add codes, up to a code that ends the speech. See `feed`."""
        ends = np.flatnonzero(np.isin(codes, self._config.ends))
        if len(ends):
            codes, self._ended = codes[: ends[0]], True
        if len(wrong := codes[codes >= self._config.dit.code_rows]):
            raise BadRequest("codes", f"there is no code {wrong[0]}; codes are below {self._config.dit.code_rows}")
        self._codes.add(first, codes)
        max_codes = self._config.dit.max_frames // self._config.dit.repeats
        if not self._prepared.schedule.sizes and self._codes.came > max_codes:
            raise BadRequest("code2wav.profile", f"offline makes at most {max_codes} codes into sound: ask for another profile")

    def _flow(self, window: Window) -> Flow:
        """The flow of a window. The flow makes its noise and conditions when it begins."""
        config, dit, prepared = self._config.dit, self._windows.dit, self._prepared
        codes = torch.from_numpy(self._codes.between(window.first, window.past)[:, 0])
        first, blocks = window.first // self._config.block_codes, -(-len(codes) // self._config.block_codes)

        def begin() -> tuple[torch.Tensor, torch.Tensor]:
            start = noise(prepared.seed, first, blocks, config.block_frames, config.mel_bins)
            return start.to(dit.device), dit.conditions(codes.to(dit.device), prepared.speaker, blocks)

        if window.fresh:  # It uses nothing of the windows before it.
            self._left, self._before = None, self._before[:0]
        return Flow(
            context=window.context * config.repeats,
            chunk=(window.end - window.begin) * config.repeats,
            ahead=window.ahead * config.repeats,
            begin=begin,
            left=self._left,
            leaves=None if window.last else torch.empty(self._windows.solver.evaluations, *dit.kept_shape(), device=dit.device),
        )


def sound(vocoding: Vocoding) -> Sound:
    """The sound of a chunk, without the samples that are not wanted."""
    samples = torch.cat(vocoding.samples) if vocoding.samples else torch.zeros(0)
    return Sound(samples[vocoding.needless :, None].numpy(), vocoding.needs)
