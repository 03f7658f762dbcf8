"""The shared part of configs of Thinkers with encoders: renamed weights, and the sizes of the encoders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omnistage.models.common.checkpoint import Config
from omnistage.models.common.decoder_config import rope_theta_of

RENAMED = {
    "thinker.model.language_model.": "thinker.model.",
    "thinker.model.visual.": "thinker.visual.",
    "thinker.model.audio_tower.": "thinker.audio_tower.",
}
"""Beginning of a weight's name in Transformers 5 -> its beginning in the published checkpoints."""

MOST_SOUND_POSITIONS = 1 << 16
"""Largest number of positions of a sound encoder, because each has a row in memory."""

FRAMES_HZ = 100.0
"""Frames of a sound's spectrogram in a second."""


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """The config of an encoder of pictures and films. patch_size: pixels on a side of a patch. frames: frames of a patch. merge: merge *
    merge patches become an output row. output_size: width of an output row. channels: number of colours of a picture. rope_theta: theta of
    the rotary positions of patches. A family adds the values that only its encoder has."""

    layers: int
    hidden_size: int
    ffn_size: int
    heads: int
    patch_size: int
    frames: int
    merge: int
    output_size: int
    channels: int
    rope_theta: float

    @property
    def patch_values(self) -> int:
        """Number of values of one patch."""
        return self.channels * self.frames * self.patch_size**2

    @property
    def unit(self) -> int:
        """Number of patches that become one output row."""
        return self.merge**2


@dataclass(frozen=True, slots=True)
class AudioConfig:
    """The config of a sound encoder. mel_bins: number of values of one frame of the spectrogram. positions: number of rows of the table of
    positions. output_size: width of an output row. A family adds the values that only its encoder has."""

    layers: int
    hidden_size: int
    ffn_size: int
    heads: int
    mel_bins: int
    positions: int
    output_size: int


def vision_sizes(config: Config) -> dict[str, Any]:
    """The values of a VisionConfig except its channels, from a vision_config. Raises BadCheckpoint."""
    return {
        "layers": config.size("depth"),
        "hidden_size": config.size("hidden_size"),
        "ffn_size": config.size("intermediate_size"),
        "heads": config.size("num_heads"),
        "patch_size": config.size("patch_size"),
        "frames": config.size("temporal_patch_size"),
        "merge": config.size("spatial_merge_size"),
        "output_size": config.size("out_hidden_size"),
        "rope_theta": rope_theta_of(config, "axial"),
    }


def audio_sizes(config: Config) -> dict[str, int]:
    """The values of an AudioConfig, from an audio_config. Raises BadCheckpoint."""
    return {
        "layers": config.size("encoder_layers"),
        "hidden_size": config.size("d_model"),
        "ffn_size": config.size("encoder_ffn_dim"),
        "heads": config.size("encoder_attention_heads"),
        "mel_bins": config.size("num_mel_bins"),
        "positions": config.size("max_source_positions", MOST_SOUND_POSITIONS),
        "output_size": config.size("output_dim"),
    }
