"""The config of a Qwen3-Omni checkpoint's Code2Wav, from its config.json, and by profile which frames become sound together.

The net makes the same samples with every schedule, so a profile decides only how soon there is sound and how much it costs. The first
window can be one frame, because no window looks ahead. Sizes grow slowly: the largest step between two sizes decides how long a player must
wait before it plays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from omnistage.models.checkpoint.decoder import check_activation, rope_theta_of
from omnistage.models.checkpoint.files import BadCheckpoint, Config, read_config
from omnistage.models.checkpoint.header import check_plain
from omnistage.models.interface import Profile
from omnistage.models.qwen3_omni.family import FAMILY, MODEL_TYPE
from omnistage.models.registry import check_said
from omnistage.models.speech.schedule import Schedule

SAMPLE_RATE_HZ = 24_000
"""Samples in a second. No config has this number."""

KERNEL = 7
"""Number of inputs that a convolution sees, the present and past inputs; the convolution at the end of a residual unit sees only one."""

DILATIONS = (1, 3, 9)
"""Dilations of the residual units after each upsampling of the decoder. They are in the code of Transformers, and in no config."""

MAX_SAMPLES = SAMPLE_RATE_HZ
"""Largest number of samples of a frame: a second, because nobody would wait longer for a frame."""

MAX_WINDOW = 1 << 12
"""Largest number of frames that attention may see, because every speech has their keys in memory. The published number is 72."""


@dataclass(frozen=True, slots=True)
class WaveConfig:
    """The config of a Code2Wav. codebooks: number of codes in a frame. codes: number of ids of a codebook. window: number of frames that
    attention sees, the frame itself included. widening: factors by which the first upsamplings multiply the number of rows. channels:
    number of channels of the decoder before its upsamplings. rates: factors of these upsamplings, each of which halves the channels."""

    codebooks: int
    codes: int
    hidden_size: int
    ffn_size: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    window: int
    norm_epsilon: float
    rope_theta: float
    attention_bias: bool
    widening: tuple[int, ...]
    channels: int
    rates: tuple[int, ...]

    @property
    def frame_samples(self) -> int:
        """Number of samples of a frame."""
        return math.prod((*self.widening, *self.rates))

    @property
    def missing(self) -> int:
        """Number of samples that are missing at the end of a speech. Each upsampling of the decoder looks one input ahead, so it makes no
        output from the last input. So sample s is made with the frame of number (s + missing) // frame_samples."""
        missing = 0
        for rate in self.rates:
            missing = (missing + 1) * rate
        return missing

    @property
    def heard_frames(self) -> int:
        """Number of frames before a window on which the window's samples depend through convolutions; through these, earlier frames change
        no bit."""
        reach = KERNEL - 1
        for rate in reversed(self.rates):
            # One more: an upsampling makes its outputs from an input and the next one.
            reach = 1 + -(-(reach + (KERNEL - 1) * sum(DILATIONS)) // rate)
        reach += KERNEL - 1
        for factor in reversed(self.widening):
            reach = -(-(reach + KERNEL - 1) // factor)
        return reach

    @property
    def frames_before(self) -> int:
        """Number of frames before a window on which the window's samples depend at all, through layers and convolutions."""
        return self.layers * (self.window - 1) + self.heard_frames

    @property
    def frame_rate_hz(self) -> float:
        return SAMPLE_RATE_HZ / self.frame_samples


def read_wave_config(directory: Path) -> WaveConfig:
    """Read the config of the checkpoint in a folder. Raises BadCheckpoint."""
    root_config = read_config(directory, MODEL_TYPE)
    check_said(root_config, FAMILY, "code2wav")
    section = root_config.section("code2wav_config")
    check_plain(root_config, section)
    return wave_config(section)


def wave_config(section: Config) -> WaveConfig:
    """Read the config from the section about Code2Wav. Raises BadCheckpoint."""
    check_activation(section, "hidden_act", "silu")
    hidden, heads = section.size("hidden_size"), section.size("num_attention_heads")
    config = WaveConfig(
        codebooks=section.size("num_quantizers"),
        codes=section.size("codebook_size"),
        hidden_size=hidden,
        ffn_size=section.size("intermediate_size"),
        layers=section.size("num_hidden_layers"),
        heads=heads,
        kv_heads=section.size("num_key_value_heads"),
        head_size=section.size("head_dim") if section.has("head_dim") else hidden // heads,
        window=section.size("sliding_window", MAX_WINDOW),
        norm_epsilon=section.at_least("rms_norm_eps", 0, 1e-5),
        rope_theta=rope_theta_of(section),
        attention_bias=section.value("attention_bias", bool, False),
        widening=_sizes(section, "upsampling_ratios"),
        channels=section.size("decoder_dim"),
        rates=_sizes(section, "upsample_rates"),
    )
    if config.heads % config.kv_heads or config.head_size % 2:
        raise BadCheckpoint(
            f"{section.place}: {config.heads} heads of {config.head_size} components cannot share {config.kv_heads} heads of keys: "
            "the second must divide the first, and components come in pairs"
        )
    if config.channels % 2 ** len(config.rates):
        raise BadCheckpoint(f"{section.place}: 'decoder_dim' is {config.channels}, which cannot be halved {len(config.rates)} times")
    if config.frame_samples > MAX_SAMPLES:
        raise BadCheckpoint(
            f"{section.place}: 'upsampling_ratios' and 'upsample_rates' make {config.frame_samples} samples of a frame: "
            f"{MAX_SAMPLES} are the most"
        )
    if config.frame_samples <= config.missing:
        raise BadCheckpoint(
            f"{section.place}: one frame makes {config.frame_samples} samples and the end of a speech lacks {config.missing}: "
            "such 'upsampling_ratios' and 'upsample_rates' are not supported, since no sound comes of a first frame"
        )
    return config


def _sizes(section: Config, name: str) -> tuple[int, ...]:
    """The list of factors under a name. Raises BadCheckpoint."""
    factors = section.values(name, int)
    if not factors or min(factors) < 1 or math.prod(factors) > MAX_SAMPLES:
        raise BadCheckpoint(f"{section.place}: {name!r} is {list(factors)}; give rates of 1 and more, {MAX_SAMPLES} in all at most")
    return factors


SCHEDULES: Mapping[str, tuple[int, ...]] = {
    Profile.LATENCY: (1, 1, 2, 3, 4, 6, 8),
    Profile.BALANCED: (2, 3, 4, 6, 8, 12),
    Profile.QUALITY: (4, 6, 8, 12),
    Profile.OFFLINE: (12,),
}
"""Profile -> numbers of frames of the windows; a frame is 80 ms. With more than twelve frames at once a frame costs hardly less, and other
speeches would wait longer."""


def schedule_of(sizes: tuple[int, ...], frames_before: int) -> Schedule:
    """The schedule of a profile. sizes: as in SCHEDULES. frames_before: see WaveConfig. No window is refreshed: each gets the exact state
    of the windows before it."""
    return Schedule(sizes, ahead_blocks=0, block=1, context=frames_before, refresh=0)
