"""The settings by which a Qwen2.5-Omni checkpoint wants its media prepared, and sound as the audio encoder takes it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import WhisperFeatureExtractor

from omnistage.models.common.checkpoint import BadCheckpoint, Config, json_object
from omnistage.models.qwen2_5_omni.config import ThinkerConfig
from omnistage.models.qwen2_5_omni.patches import Normalization

FILE = "preprocessor_config.json"
FILM_MIN_PIXELS, FILM_MAX_PIXELS = 128 * 28 * 28, 768 * 28 * 28
"""Of one frame of a film: those of the published processor, which its file does not hold."""

FILM_RATE_HZ = 2.0
"""Frames of a film that are looked at, as the published processor has it."""


@dataclass(frozen=True, slots=True)
class PictureSettings:
    """min_pixels, max_pixels: of a picture after it was resized. colours: what its values are normalized with."""

    min_pixels: int
    max_pixels: int
    colours: Normalization


def read_pictures(directory: Path, config: ThinkerConfig) -> PictureSettings:
    """Raises BadCheckpoint for a file that does not fit the model."""
    path = directory / FILE
    values = Config(json_object(path), str(path))
    for name, wanted in (
        ("patch_size", config.vision.patch_size),
        ("temporal_patch_size", config.vision.frames),
        ("merge_size", config.vision.merge),
    ):
        if values.value(name, int, wanted) != wanted:
            raise BadCheckpoint(f"{path}: {name!r} is {values.value(name, int)}, the model was made for {wanted}")
    pixels = values.section("size") if values.has("size") else values
    least, most = ("shortest_edge", "longest_edge") if values.has("size") else ("min_pixels", "max_pixels")
    return PictureSettings(
        pixels.value(least, int),
        pixels.value(most, int),
        Normalization(values.values("image_mean", float), values.values("image_std", float)),
    )


class Spectrograms:
    """Log-mel spectrograms, made by Transformers' own extractor."""

    def __init__(self, directory: Path, config: ThinkerConfig) -> None:
        self.extractor = WhisperFeatureExtractor.from_pretrained(directory, local_files_only=True)
        self.sample_rate_hz: int = self.extractor.sampling_rate
        if self.extractor.feature_size != config.audio.mel_bins:
            raise BadCheckpoint(
                f"{directory / FILE}: {self.extractor.feature_size} mel bins, the model was made for {config.audio.mel_bins}"
            )

    def frames(self, samples: int) -> int:
        """Of a sound of so many samples."""
        return -(-samples // int(self.extractor.hop_length))

    def __call__(self, samples: NDArray[np.float32]) -> torch.Tensor:
        """Of one sound, samples [n] at `sample_rate_hz`; float32 [frames, mel_bins].

        The extractor pads every sound with silence to 300 s and cuts the spectrogram again; a little silence gives the same frames."""
        hop, frames = int(self.extractor.hop_length), self.frames(len(samples))
        silence = int(self.extractor.n_fft) // hop + 1
        padded = np.pad(samples, (0, (frames + silence) * hop - len(samples)))
        made = self.extractor(padded, sampling_rate=self.sample_rate_hz, truncation=False, padding="do_not_pad", return_tensors="np")
        return torch.from_numpy(np.ascontiguousarray(made["input_features"][0, :, :frames].T))
