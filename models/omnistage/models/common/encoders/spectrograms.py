"""Sound as an encoder takes it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import WhisperFeatureExtractor

from omnistage.models.common.checkpoint import BadCheckpoint

FILE = "preprocessor_config.json"


class Spectrograms:
    """Log-mel spectrograms, made by Transformers' own extractor."""

    def __init__(self, directory: Path, mel_bins: int) -> None:
        """mel_bins: that the model was made for. Raises BadCheckpoint."""
        self.extractor = WhisperFeatureExtractor.from_pretrained(directory, local_files_only=True)
        self.sample_rate_hz: int = self.extractor.sampling_rate
        if self.extractor.feature_size != mel_bins:
            raise BadCheckpoint(f"{directory / FILE}: {self.extractor.feature_size} mel bins, the model was made for {mel_bins}")

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
