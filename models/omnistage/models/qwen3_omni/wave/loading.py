"""Code2Wav of Qwen3-Omni from the files of a checkpoint in the published layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from omnistage.engine.linear import LinearMaker, build_exact
from omnistage.engine.scratch import kernels_kept
from omnistage.models.common.checkpoint import name_of
from omnistage.models.common.revision import computed, revision
from omnistage.models.common.speech.loading import KERNELS, round_alike, sessions_of, workers_of
from omnistage.models.common.speech.trial import tried
from omnistage.models.common.weights import Weights
from omnistage.models.common.worker import Worker
from omnistage.models.devices import hardware
from omnistage.models.errors import LoadError
from omnistage.models.interface import Content, ModelInfo, PortSpec
from omnistage.models.options import LoadOptions, checked_options
from omnistage.models.qwen3_omni.wave.code2wav import AUDIO, CausalCode2Wav
from omnistage.models.qwen3_omni.wave.config import SAMPLE_RATE_HZ, WaveConfig, read_wave_config
from omnistage.models.qwen3_omni.wave.net import CausalNet
from omnistage.models.qwen3_omni.wave.schedules import SCHEDULES, schedule_of
from omnistage.models.qwen3_omni.wave.trial import WindowTrials
from omnistage.models.qwen3_omni.wave.window import Windows

CODE_REVISION = "1"
"""Part of the revision; grows whenever the code could give other samples for equal input."""

CODES = "codes"
MOST_WORKERS = 64

PREFIX = "code2wav."
OTHERS = ("thinker.", "talker.")


@dataclass(frozen=True, slots=True)
class Code2WavOptions:
    """workers: threads that compute side by side, each of which may have `threads` threads of torch's; 0: as many as there are cores, but
    few."""

    workers: int = 0

    @classmethod
    def from_settings(cls, options: Mapping[str, Any]) -> Code2WavOptions:
        """Raises LoadError."""
        made = cls(**checked_options(options, cls(), "the code2wav of qwen3_omni"))
        if not 0 <= made.workers <= MOST_WORKERS:
            raise LoadError(
                f"option workers of the code2wav of qwen3_omni is {made.workers}; give 1 to {MOST_WORKERS}, or 0 to leave it to the model"
            )
        return made


def load_code2wav(folder: Path, options: LoadOptions) -> CausalCode2Wav:
    """Raises LoadError."""
    config, chosen, device = read_wave_config(folder), Code2WavOptions.from_settings(options.family), torch.device(options.device)
    torch.set_num_threads(options.threads)
    round_alike(device)
    with kernels_kept(KERNELS):
        net, products = build_exact(partial(read_net, folder, config, device), torch.float32, device)
        windows = Windows(net)
    workers = [Worker(f"wave {number}", options.threads) for number in range(workers_of(chosen.workers, options, device))]
    schedules = {name: schedule_of(sizes, config.frames_before) for name, sizes in SCHEDULES.items()}
    trial = computed(partial(tried, WindowTrials(windows), schedules, workers, most=options.max_batch_size), options.threads)
    # What a window begins with is there until it is done, and so is what it leaves.
    sessions, why = sessions_of(2 * windows.net.start(1).bytes, options)
    info = ModelInfo(
        name=name_of(folder) + "-code2wav",
        revision=revision(
            folder,
            CODE_REVISION,
            dtype="float32",
            device=hardware(options.device),
            threads=options.threads,
            results=trial.results,
        ),
        accepts=(PortSpec(CODES, Content.CODES, rate_hz=config.frame_rate_hz, width=config.codebooks, compact=True),),
        produces=(PortSpec(AUDIO, Content.AUDIO, rate_hz=SAMPLE_RATE_HZ, width=1),),
        max_sessions=sessions,
        draws=False,
        settings={"max_sessions": why, "products": products, **trial.why},
    )
    return CausalCode2Wav(config, windows, workers, schedules, info, trial)


def read_net(folder: Path, config: WaveConfig, device: torch.device, linear: LinearMaker) -> CausalNet:
    """Raises BadCheckpoint."""
    with Weights(folder, OTHERS) as weights, torch.inference_mode():

        def weight(name: str, shape: tuple[int, ...]) -> torch.Tensor:
            weights.check_shape(PREFIX + name, shape)
            return weights.need(PREFIX + name).float().to(device)

        net = CausalNet(config, weight, linear)
        weights.check_read()
    return net
