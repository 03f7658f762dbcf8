"""Loads a Code2Wav of Qwen3-Omni from the files of a checkpoint in the published layout."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from omnistage.engine.linear import LinearMaker, build_exact
from omnistage.engine.memory import kernels_kept
from omnistage.models.checkpoint.files import name_of
from omnistage.models.checkpoint.revision import compute_on_thread, revision
from omnistage.models.checkpoint.weights import Weights
from omnistage.models.devices import hardware
from omnistage.models.interface import Content, ModelInfo, PortSpec
from omnistage.models.options import LoadOptions
from omnistage.models.qwen3_omni.options import Code2WavOptions
from omnistage.models.qwen3_omni.wave.code2wav import CausalCode2Wav
from omnistage.models.qwen3_omni.wave.config import SAMPLE_RATE_HZ, WaveConfig, read_wave_config
from omnistage.models.qwen3_omni.wave.net import CausalNet
from omnistage.models.qwen3_omni.wave.schedules import SCHEDULES, schedule_of
from omnistage.models.qwen3_omni.wave.trial import WindowTrials
from omnistage.models.qwen3_omni.wave.window import Windows
from omnistage.models.speech.code2wav import AUDIO, KERNELS, round_alike, sessions_of, try_windows, workers_of
from omnistage.models.speech.talker import codes_port
from omnistage.models.worker import Worker

CODE_REVISION = "2"
"""Part of the revision; raise it whenever the code could give other samples for equal input."""

PREFIX = "code2wav."
OTHERS = ("thinker.", "talker.")


def load_code2wav(folder: Path, options: LoadOptions) -> CausalCode2Wav:
    """Load a Code2Wav, try its windows on this machine, and start its threads. Raises LoadError."""
    config, wave_options, device = read_wave_config(folder), Code2WavOptions.from_settings(options.family), torch.device(options.device)
    torch.set_num_threads(options.threads)
    round_alike(device)
    with kernels_kept(KERNELS):
        net, products = build_exact(partial(read_net, folder, config, device), torch.float32, device)
        windows = Windows(net)
    workers = [Worker(f"wave {number}", options.threads) for number in range(workers_of(wave_options.workers, options, device))]
    schedules = {name: schedule_of(sizes, config.frames_before) for name, sizes in SCHEDULES.items()}
    trial = compute_on_thread(
        partial(try_windows, WindowTrials(windows), schedules, workers, max_windows=options.max_batch_size), options.threads
    )
    # Twice, because a speech keeps the state before a window until the window is done, and then has the state after it too.
    sessions, reason = sessions_of(2 * windows.net.start(1).bytes, options)
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
        accepts=(codes_port(config.codebooks, config.frame_rate_hz),),
        produces=(PortSpec(AUDIO, Content.AUDIO, rate_hz=SAMPLE_RATE_HZ, width=1),),
        max_sessions=sessions,
        draws=False,
        settings={"max_sessions": reason, "products": products, **trial.why},
    )
    return CausalCode2Wav(config, windows, workers, schedules, info, trial)


def read_net(folder: Path, config: WaveConfig, device: torch.device, linear: LinearMaker) -> CausalNet:
    """Read the net. Raises BadCheckpoint."""
    with Weights(folder, OTHERS) as weights, torch.inference_mode():

        def weight(name: str, shape: tuple[int, ...]) -> torch.Tensor:
            weights.check_shape(PREFIX + name, shape)
            return weights.need(PREFIX + name).float().to(device)

        net = CausalNet(config, weight, linear)
        weights.check_read()
    return net
