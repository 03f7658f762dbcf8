"""Loads a Code2Wav of Qwen2.5-Omni from the files of a checkpoint in the published layout."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import torch

from omnistage.engine.memory import kernels_kept
from omnistage.models.checkpoint.files import BadCheckpoint, name_of
from omnistage.models.checkpoint.header import bound_building
from omnistage.models.checkpoint.revision import compute_on_thread, revision
from omnistage.models.checkpoint.weights import Weights
from omnistage.models.devices import hardware
from omnistage.models.interface import Content, ModelInfo, PortSpec
from omnistage.models.options import LoadOptions
from omnistage.models.qwen2_5_omni.options import Code2WavOptions
from omnistage.models.qwen2_5_omni.ports import CODES_PORT
from omnistage.models.qwen2_5_omni.voices import VoiceSizes, read_voices
from omnistage.models.qwen2_5_omni.wave.code2wav import FlowCode2Wav
from omnistage.models.qwen2_5_omni.wave.config import WaveConfig, read_wave_config
from omnistage.models.qwen2_5_omni.wave.dit import Dit
from omnistage.models.qwen2_5_omni.wave.schedules import SCHEDULES, schedule_of
from omnistage.models.qwen2_5_omni.wave.solver import Solver
from omnistage.models.qwen2_5_omni.wave.speaker import Speaker, example_net, speaker
from omnistage.models.qwen2_5_omni.wave.trial import WindowTrials
from omnistage.models.qwen2_5_omni.wave.vocoder import Vocoder
from omnistage.models.qwen2_5_omni.wave.window import Windows
from omnistage.models.speech.code2wav import AUDIO, KERNELS, round_alike, sessions_of, try_windows, workers_of
from omnistage.models.worker import Worker

CODE_REVISION = "2"
"""Part of the revision; raise it whenever the code could give other samples for equal input."""

STEPS = 9
"""Number of steps of the solver, as published."""

FLOAT_BYTES = 4

_PREFIX = "token2wav.code2wav_dit_model."
_VOCODER = "token2wav.code2wav_bigvgan_model."
_EXAMPLE = f"{_PREFIX}input_embed.spk_encoder."
_OTHERS = ("thinker.", "talker.")


def load_code2wav(folder: Path, options: LoadOptions) -> FlowCode2Wav:
    """Load a Code2Wav, try its windows on this machine, and start its threads. Raises LoadError."""
    config, wave_options, device = read_wave_config(folder), Code2WavOptions.from_settings(options.family), torch.device(options.device)
    torch.set_num_threads(options.threads)
    round_alike(device)
    solver = Solver.of(wave_options.solver, wave_options.steps or STEPS)
    with kernels_kept(KERNELS):
        windows, speakers = read_parts(folder, config, solver, device)
    count = workers_of(wave_options.workers, options, device)
    workers = [Worker(f"flow {number}", options.threads) for number in range(count)]
    schedules = {
        name: schedule_of(sizes, wave_options.lookahead or blocks_ahead, config.block_codes)
        for name, (sizes, blocks_ahead) in SCHEDULES.items()
    }
    trial = compute_on_thread(
        partial(try_windows, WindowTrials(config, windows), schedules, workers, max_windows=options.max_batch_size), options.threads
    )
    sessions, reason = sessions_of(2 * solver.evaluations * math.prod(windows.dit.kept_shape()) * FLOAT_BYTES, options)
    info = ModelInfo(
        name=name_of(folder) + "-code2wav",
        revision=revision(
            folder,
            CODE_REVISION,
            dtype="float32",
            device=hardware(options.device),
            threads=options.threads,
            results=trial.results,
            settings=f"{wave_options.solver} {solver.steps} {wave_options.lookahead}",
        ),
        accepts=(CODES_PORT,),
        produces=(PortSpec(AUDIO, Content.AUDIO, rate_hz=config.sample_rate_hz, width=1),),
        max_sessions=sessions,
        voices=tuple(speakers),
        draws=True,
        settings={
            "solver": f"{wave_options.solver}, {solver.steps} steps, {solver.evaluations} evaluations",
            "lookahead": f"{wave_options.lookahead} blocks" if wave_options.lookahead else "by the profile",
            "max_sessions": reason,
            **trial.why,
        },
    )
    return FlowCode2Wav(config, windows, workers, schedules, speakers, info, trial)


def read_parts(folder: Path, config: WaveConfig, solver: Solver, device: torch.device) -> tuple[Windows, dict[str, Speaker]]:
    """(the nets, name of a voice -> its speaker). Raises BadCheckpoint."""
    with Weights(folder, _OTHERS) as weights, torch.inference_mode():

        def weight(prefix: str, name: str, shape: tuple[int, ...]) -> torch.Tensor:
            return _take_shaped(weights, prefix + name, shape).to(device)

        dit = Dit(config.dit, partial(weight, _PREFIX), solver.evaluation_times())
        vocoder = Vocoder(config.vocoder, partial(weight, _VOCODER))
        stored = {name: each for name, each in weights.header.items() if name.startswith(_EXAMPLE)}
        with torch.device("meta"), bound_building(stored, folder):  # Without memory, because its sizes are checked only when it is filled.
            examples = example_net(config.dit)
        fill(examples, weights, _EXAMPLE)
        weights.check_read()
        voices = read_voices(folder, VoiceSizes(config.dit.voice_size, config.dit.mel_bins))
        # Computed once for each voice, on the CPU; afterwards the net of the examples is not needed any more.
        speakers = {name: speaker(examples, voice.speaker, voice.example).to(device) for name, voice in voices.items()}
    return Windows(dit, vocoder, solver), speakers


def fill(net: torch.nn.Module, weights: Weights, prefix: str) -> None:
    """Put the weights whose names begin with `prefix` into a net. Raises BadCheckpoint."""
    state = {name: _take_shaped(weights, prefix + name, tuple(value.shape)) for name, value in net.state_dict().items()}
    net.load_state_dict(state, assign=True)
    net.eval().requires_grad_(False)


def _take_shaped(weights: Weights, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The weight of a name in float32. Raises BadCheckpoint if it is missing or misshapen."""
    weight = weights.need(name)
    if weight.shape != shape:
        raise BadCheckpoint(f"{weights.directory}: {name} is {tuple(weight.shape)}, not {shape}")
    return weight.float()
