"""Turns sound into the spectrograms that an encoder takes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import WhisperFeatureExtractor

from omnistage.models.common.checkpoint import BadCheckpoint
from omnistage.models.common.encoders.pictures import FILE, TOGETHER, processor_part

PUBLISHED = {"sampling_rate": 16_000, "hop_length": 160, "n_fft": 400}
"""Numbers of samples: in a second, from one frame to the next, and in a window. All encoders here were trained with these numbers."""

USUAL_BINS = 80
"""Number of mel bins by default, as in Transformers."""


class Spectrograms:
    """Log-mel spectrograms, made by Transformers' own extractor, of each sound as the published processor makes them of a sound alone."""

    def __init__(self, directory: Path, mel_bins: int, *, adds_silence: bool) -> None:
        """directory: the checkpoint. mel_bins: bins that the model was made for. adds_silence: whether silence follows a sound: the
        processor of Qwen2.5-Omni adds it up to 300 s, that of Qwen3-Omni adds none. Without silence the sound is mirrored at its end, and a
        rest that is shorter than a frame is dropped. Raises BadCheckpoint."""
        values = processor_part(directory, "feature_extractor", FILE)
        if values is None:
            raise BadCheckpoint(f"{directory} has neither {FILE} nor {TOGETHER} with a 'feature_extractor': give the whole folder")
        if (bins := values.value("feature_size", int, USUAL_BINS)) != mel_bins:
            raise BadCheckpoint(f"{values.place}: {bins} mel bins, the model was made for {mel_bins}")
        for name, published in PUBLISHED.items():
            if (value := values.value(name, int, published)) != published:
                raise BadCheckpoint(f"{values.place}: {name!r} is {value}, and only the published {published} is supported")
        if values.value("dither", float, 0.0):
            raise BadCheckpoint(f"{values.place}: 'dither' is not 0: a sound would be another one each time")
        self.extractor = WhisperFeatureExtractor(mel_bins, **PUBLISHED)  # type: ignore[no-untyped-call]
        self.sample_rate_hz, self._adds_silence = PUBLISHED["sampling_rate"], adds_silence

    def frames(self, samples: int) -> int:
        """Number of frames of a sound with this many samples."""
        hop = int(self.extractor.hop_length)
        return -(-samples // hop) if self._adds_silence else samples // hop

    def __call__(self, samples: NDArray[np.float32]) -> torch.Tensor:
        """The spectrogram of one sound, float32 [frames, mel_bins]. samples: [n], at `sample_rate_hz`.

        Where silence follows, the extractor gets a little of it, which gives the same frames as much of it."""
        hop, frames = int(self.extractor.hop_length), self.frames(len(samples))
        if self._adds_silence:
            silence = int(self.extractor.n_fft) // hop + 1
            samples = np.pad(samples, (0, (frames + silence) * hop - len(samples)))
        features = self.extractor(samples, sampling_rate=self.sample_rate_hz, truncation=False, padding="do_not_pad", return_tensors="np")
        return torch.from_numpy(np.ascontiguousarray(features["input_features"][0, :, :frames].T))
