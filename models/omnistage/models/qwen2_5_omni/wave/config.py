"""The facts of Code2Wav of Qwen2.5-Omni: the port of its codes, its config from a checkpoint's config.json, and by profile which codes
become sound together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from omnistage.models.checkpoint.decoder import rope_theta_of
from omnistage.models.checkpoint.files import BadCheckpoint, Config, read_config
from omnistage.models.checkpoint.header import check_plain
from omnistage.models.interface import Profile
from omnistage.models.qwen2_5_omni.family import FAMILY, MODEL_TYPE
from omnistage.models.registry import check_said
from omnistage.models.speech.schedule import Schedule
from omnistage.models.speech.talker import codes_port

CODE_RATE_HZ = 50.0
"""Codes in a second, because a second has 24,000 samples, a mel frame 240 samples, and a code two mel frames."""

CODES_PORT = codes_port(1, CODE_RATE_HZ)


BACK_LAYERS, AHEAD_LAYERS = 2, 1
"""Numbers of layers that see the previous block, and the next block, as published. So in one evaluation of the net, a block depends on this
many blocks back and ahead."""

MAX_BLOCK_FRAMES = 1 << 12
"""Largest number of frames of a block, because every speech has memory for a block. The published number is 24."""

_VOCODER = {"upsample_rates": (5, 3, 2, 2, 2, 2), "upsample_kernel_sizes": (11, 7, 4, 4, 4, 4), "resblock_kernel_sizes": (3, 7, 11)}
_DILATIONS = ((1, 3, 5),) * 3
"""The published values, here and above. They decide on how many frames a sample depends (vocoder.FIELD), and so where sound may be cut into
windows."""


@dataclass(frozen=True, slots=True)
class SpeakerConfig:
    """The config of the net (ECAPA-TDNN) that makes a vector from a voice's example. size: width of the vector. Tuples have a number for
    each layer."""

    size: int
    channels: tuple[int, ...]
    kernel_sizes: tuple[int, ...]
    dilations: tuple[int, ...]
    attention_channels: int
    scale: int
    squeeze_channels: int


@dataclass(frozen=True, slots=True)
class DitConfig:
    """The config of the net that computes the flow of mel frames. Frames attend within blocks of `block_frames`; in `ahead_layers` also to
    the next block, in `back_layers` also to the previous block. code_rows: rows of the table of codes. repeats: frames of a code.
    voice_size: width of a voice's vector. max_frames: largest number of frames of a speech."""

    layers: int
    hidden_size: int
    heads: int
    head_size: int
    ffn_size: int
    mel_bins: int
    code_rows: int
    code_size: int
    voice_size: int
    repeats: int
    block_frames: int
    ahead_layers: frozenset[int]
    back_layers: tuple[int, ...]
    rope_theta: float
    max_frames: int
    speaker: SpeakerConfig


@dataclass(frozen=True, slots=True)
class VocoderConfig:
    """The config of the net (BigVGAN) that makes samples from mel frames. channels: number of channels before the first upsampling; each
    upsampling halves it. rates, kernel_sizes: of the upsamplings. block_kernel_sizes, block_dilations: of the residual blocks after each
    upsampling."""

    mel_bins: int
    channels: int
    rates: tuple[int, ...]
    kernel_sizes: tuple[int, ...]
    block_kernel_sizes: tuple[int, ...]
    block_dilations: tuple[tuple[int, ...], ...]

    @property
    def frame_samples(self) -> int:
        """Number of samples of a mel frame."""
        return math.prod(self.rates)


@dataclass(frozen=True, slots=True)
class WaveConfig:
    """The config of a Code2Wav. dit: the net of the flow. vocoder: the net that makes samples. ends: items that end a speech."""

    dit: DitConfig
    vocoder: VocoderConfig
    ends: tuple[int, ...]

    @property
    def code_samples(self) -> int:
        """Number of samples of a code."""
        return self.dit.repeats * self.vocoder.frame_samples

    @property
    def sample_rate_hz(self) -> int:
        """Number of samples in a second, computed from 50 codes in a second, because no config has it."""
        return round(CODE_RATE_HZ * self.code_samples)

    @property
    def block_codes(self) -> int:
        """Number of codes of a block. Only at the end of a speech is sound made of less than a block."""
        return self.dit.block_frames // self.dit.repeats


def read_wave_config(directory: Path) -> WaveConfig:
    """Read the config of the checkpoint in a folder. Raises BadCheckpoint."""
    root_config = read_config(directory, MODEL_TYPE)
    check_said(root_config, FAMILY, "code2wav")
    section = root_config.section("token2wav_config")
    check_plain(root_config, section)
    dit, vocoder = _dit(section.section("dit_config")), _vocoder(section.section("bigvgan_config"))
    if dit.mel_bins != vocoder.mel_bins:
        raise BadCheckpoint(f"{section.place}: 'mel_dim' is {dit.mel_bins} of what is made, {vocoder.mel_bins} of what is made to sound")
    talker = root_config.section("talker_config")
    end, pad = (talker.value(f"tts_codec_{name}_token_id", int) for name in ("end", "pad"))
    return WaveConfig(dit, vocoder, (end, pad))


def _dit(config: Config) -> DitConfig:
    """Read a dit_config. Raises BadCheckpoint."""
    hidden, layers = _read_number(config, "hidden_size", "dim"), _read_number(config, "num_hidden_layers", "depth")
    dit = DitConfig(
        layers=layers,
        hidden_size=hidden,
        heads=_read_number(config, "num_attention_heads", "heads"),
        head_size=config.size("head_dim"),
        ffn_size=hidden * config.size("ff_mult"),
        mel_bins=config.size("mel_dim"),
        code_rows=config.size("num_embeds") + 1,
        code_size=config.size("emb_dim"),
        voice_size=config.size("enc_emb_dim"),
        repeats=config.size("repeats"),
        block_frames=config.size("block_size", MAX_BLOCK_FRAMES),
        ahead_layers=frozenset(config.values("look_ahead_layers", int)),
        back_layers=tuple(sorted(set(config.values("look_backward_layers", int)))),
        rope_theta=rope_theta_of(config),
        max_frames=config.size("max_position_embeddings"),
        speaker=SpeakerConfig(
            size=config.size("enc_dim"),
            channels=config.values("enc_channels", int),
            kernel_sizes=config.values("enc_kernel_sizes", int),
            dilations=config.values("enc_dilations", int),
            attention_channels=config.size("enc_attention_channels"),
            scale=config.size("enc_res2net_scale"),
            squeeze_channels=config.size("enc_se_channels"),
        ),
    )
    if dit.block_frames % dit.repeats:
        raise BadCheckpoint(f"{config.place}: 'block_size' is {dit.block_frames}, no whole number of codes of {dit.repeats} frames")
    if any(not 0 <= layer < layers for layer in (*dit.ahead_layers, *dit.back_layers)):
        raise BadCheckpoint(f"{config.place}: layers look ahead or back that are not among the {layers} that there are")
    if (len(dit.back_layers), len(dit.ahead_layers)) != (BACK_LAYERS, AHEAD_LAYERS):
        looking = f"{len(dit.back_layers)} layers look back and {len(dit.ahead_layers)} ahead"
        raise BadCheckpoint(f"{config.place}: {looking}; the published {BACK_LAYERS} and {AHEAD_LAYERS} are supported")
    return dit


def _vocoder(config: Config) -> VocoderConfig:
    """Read a bigvgan_config. Raises BadCheckpoint for other than the published values."""
    for name, published in _VOCODER.items():
        if (values := config.values(name, int)) != published:
            raise BadCheckpoint(f"{config.place}: {name!r} is {list(values)}; only the published one is supported, {list(published)}")
    dilations = config.lists("resblock_dilation_sizes", int)
    if dilations != _DILATIONS:
        raise BadCheckpoint(f"{config.place}: 'resblock_dilation_sizes' are {dilations}; only the published ones are supported")
    return VocoderConfig(
        mel_bins=config.size("mel_dim"),
        channels=config.size("upsample_initial_channel"),
        rates=config.values("upsample_rates", int),
        kernel_sizes=config.values("upsample_kernel_sizes", int),
        block_kernel_sizes=config.values("resblock_kernel_sizes", int),
        block_dilations=dilations,
    )


def _read_number(config: Config, name: str, alternative: str) -> int:
    return config.size(name if config.has(name) else alternative)


CONTEXT = BACK_LAYERS
"""Number of earlier blocks on which a block depends in one evaluation of the net."""

REFRESH_BLOCKS = 24
"""Least number of blocks between two refreshes, 5.8 s; each refresh computes CONTEXT blocks once more."""

SCHEDULES: Mapping[str, tuple[tuple[int, ...], int]] = {
    Profile.LATENCY: ((1, 1, 2, 3), 1),
    Profile.BALANCED: ((1, 2, 3, 6), 1),
    Profile.QUALITY: ((2, 3, 6), 2),
    Profile.OFFLINE: ((), 0),
}
"""Profile -> (numbers of blocks of the chunks, number of blocks that a window looks ahead)."""


def schedule_of(sizes: tuple[int, ...], blocks_ahead: int, block: int) -> Schedule:
    """The schedule of a profile. sizes, blocks_ahead: as in SCHEDULES. block: number of codes in a block."""
    return Schedule(sizes, blocks_ahead if sizes else 0, block, CONTEXT, REFRESH_BLOCKS)
