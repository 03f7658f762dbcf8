"""The sound encoder of Qwen2.5-Omni: turns log-mel spectrograms into rows of the Thinker, a row for each 40 ms of sound.

It is Whisper's encoder (Radford et al. 2022) in chunks of two seconds that do not see each other, with every two rows averaged at the end:
Transformers' `Qwen2_5OmniAudioEncoder`. A convolution is computed as a product of three frames at a time, so all products run as the
engine's do (omnistage.engine.linear), and the rows of a sound do not depend on other sounds in the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as functional

from omnistage.engine.linear import LinearMaker
from omnistage.models.encoders.encoder import LayerNorm, Need, Segments, WhisperLayer, sinusoids
from omnistage.models.qwen2_5_omni.config import AudioConfig


def rows_of_frames(frames: int) -> int:
    """Number of rows that this many frames of the spectrogram become: a convolution keeps every second frame, then pairs are averaged."""
    return ((frames - 1) // 2 + 1) // 2


class AudioEncoder:
    """The sound encoder; implements the common AudioEncoder. weight: returns a weight by its name without "thinker.audio_tower."."""

    def __init__(self, config: AudioConfig, weight: Need, linear: LinearMaker) -> None:
        self.config = config
        self._convolutions = tuple(linear(weight(f"{name}.weight").flatten(1), weight(f"{name}.bias")) for name in ("conv1", "conv2"))
        table = sinusoids(config.positions, config.hidden_size)
        embedding = weight("conv1.bias")
        self._positions = table.to(embedding.device, embedding.dtype)
        self._layers = [WhisperLayer(weight, f"layers.{index}", config.heads, linear, has_key_bias=False) for index in range(config.layers)]
        self._norm = LayerNorm.of(weight, "ln_post")
        self._proj = linear(weight("proj.weight"), weight("proj.bias"))

    @property
    def device(self) -> torch.device:
        return self._positions.device

    @property
    def dtype(self) -> torch.dtype:
        return self._positions.dtype

    def rows(self, frames: int) -> int:
        """Number of rows that this many frames of a spectrogram become."""
        return rows_of_frames(frames)

    def pieces(self, spectrogram: torch.Tensor) -> Sequence[torch.Tensor]:
        """Cut a spectrogram, [frames, mel_bins], into pieces of several chunks each."""
        return torch.split(spectrogram, self.config.piece)

    def encode(self, spectrograms: Sequence[torch.Tensor], on_layer: Callable[[], None] = lambda: None) -> list[torch.Tensor]:
        """The rows of sounds, [rows_of_frames(frames), output_size] for each. spectrograms: [frames, mel_bins] each, at least 3 frames.
        on_layer: called before each layer; an error of this call ends the work."""
        config = self.config
        chunks = [chunk for spectrogram in spectrograms for chunk in torch.split(spectrogram, config.chunk)]
        x = self._convolve(0, chunks, 1)
        x = self._convolve(1, torch.split(x, [len(chunk) for chunk in chunks]), 2)
        lengths = [(len(chunk) - 1) // 2 + 1 for chunk in chunks]
        x = x + torch.cat([self._positions[:length] for length in lengths])
        segments = Segments(lengths)
        for layer in self._layers:
            on_layer()
            x = layer(x, segments)
        counts = [(len(spectrogram) - 1) // 2 + 1 for spectrogram in spectrograms]
        pooled = torch.cat([(rows[0 : len(rows) - 1 : 2] + rows[1::2]) / 2 for rows in torch.split(x, counts)])
        rows = self._proj(self._norm(pooled))
        return list(torch.split(rows, [count // 2 for count in counts]))

    def _convolve(self, index: int, chunks: Sequence[torch.Tensor], stride: int) -> torch.Tensor:
        """Apply a convolution over three frames, then GELU, to chunks [frames, width] each, padded with a zero frame before and after.
        index: number of the convolution, 0 or 1. Returns the frames of all chunks, joined, [frames, hidden_size]."""
        threes = [functional.pad(chunk, (0, 0, 1, 1)).unfold(0, 3, stride).flatten(1) for chunk in chunks]
        return functional.gelu(self._convolutions[index](torch.cat(threes)))
