"""Code2Wav of Qwen2.5-Omni from the files of a checkpoint in the published layout."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path

import torch

from omnistage.models.common.checkpoint import BadCheckpoint
from omnistage.models.common.due import DueQueue
from omnistage.models.common.engine_model import MAX_SESSIONS
from omnistage.models.common.revision import computed, revision
from omnistage.models.common.weights import Weights
from omnistage.models.common.worker import Worker
from omnistage.models.devices import hardware
from omnistage.models.interface import Content, ModelInfo, PortSpec
from omnistage.models.options import LoadOptions
from omnistage.models.qwen2_5_omni.config import read_talker_config
from omnistage.models.qwen2_5_omni.ports import CODES_PORT, name_of
from omnistage.models.qwen2_5_omni.voices import read_voices
from omnistage.models.qwen2_5_omni.wave.code2wav import AUDIO, FlowCode2Wav
from omnistage.models.qwen2_5_omni.wave.config import read_wave_config
from omnistage.models.qwen2_5_omni.wave.dit import Dit
from omnistage.models.qwen2_5_omni.wave.schedule import PROFILES, Schedule
from omnistage.models.qwen2_5_omni.wave.solver import Solver
from omnistage.models.qwen2_5_omni.wave.speaker import example_net, speaker
from omnistage.models.qwen2_5_omni.wave.vocoder import Vocoder
from omnistage.models.qwen2_5_omni.wave.window import Windows

CODE_REVISION = "1"
"""Part of the revision; grows whenever the code could give other samples for equal input."""

_PREFIX = "token2wav.code2wav_dit_model."
_VOCODER = "token2wav.code2wav_bigvgan_model."
_EXAMPLE = f"{_PREFIX}input_embed.spk_encoder."
_OTHERS = ("thinker.", "talker.")


def load_code2wav(folder: Path, options: LoadOptions) -> FlowCode2Wav:
    """Raises LoadError."""
    config, talker = read_wave_config(folder), read_talker_config(folder)
    torch.set_num_threads(options.threads)
    solver = Solver.of("rk4", 10)
    worker = Worker("flow", options.threads)
    with Weights(folder) as weights, torch.inference_mode():

        def weight(name: str, shape: tuple[int, ...]) -> torch.Tensor:
            found = weights.need(_PREFIX + name)
            if found.shape != shape:
                raise BadCheckpoint(f"{folder}: {_PREFIX + name} is {tuple(found.shape)}, not {shape}")
            return found.float()

        dit = Dit(config.dit, weight, solver.evaluation_times())
        vocoder = Vocoder(config.vocoder)
        fill(vocoder.net, weights, _VOCODER)
        net = example_net(config.dit)
        fill(net, weights, _EXAMPLE)
        weights.check_read(ignored=_OTHERS)
        voices = read_voices(folder, talker, 1 << 62)
        speakers = {name: speaker(net, voice.speaker, voice.example) for name, voice in voices.items()}
    windows = Windows(dit, vocoder, solver, worker.activity.step)
    rate = 24000
    info = ModelInfo(
        name=name_of(folder) + "-code2wav",
        revision=revision(folder, CODE_REVISION, dtype="float32", device=hardware(options.device), threads=options.threads, results=[]),
        accepts=(CODES_PORT,),
        produces=(PortSpec(AUDIO, Content.AUDIO, rate_hz=rate, width=1),),
        max_sessions=options.max_sessions or MAX_SESSIONS,
        voices=tuple(voices),
    )
    schedules = {name: Schedule(sizes, ahead, config.block_codes) for name, (sizes, ahead) in PROFILES.items()}

    def most(shape: Hashable, there: int) -> int:
        return min(there, 8)

    queue = DueQueue(worker, windows.step, windows.shape, most)
    return FlowCode2Wav(config, windows, queue, worker, schedules, speakers, (talker.codec.eos, talker.codec.pad), info)


def fill(net: torch.nn.Module, weights: Weights, prefix: str) -> None:
    """Put the weights whose names begin so into a net. Raises BadCheckpoint."""
    found = {}
    for name, value in net.state_dict().items():
        found[name] = weights.need(prefix + name).float()
        if found[name].shape != value.shape:
            raise BadCheckpoint(f"{weights.directory}: {prefix + name} is {tuple(found[name].shape)}, not {tuple(value.shape)}")
    net.load_state_dict(found, assign=True)
    net.eval().requires_grad_(False)
