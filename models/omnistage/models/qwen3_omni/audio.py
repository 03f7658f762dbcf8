"""The sound encoder of Qwen3-Omni: turns log-mel spectrograms into rows of the Thinker, 13 rows for a second.

Three convolutions over time and pitch see chunks of a second, each by itself; Whisper's layers see windows of several chunks. It is
Transformers' `Qwen3OmniMoeAudioEncoder`. A convolution is computed as a product of three by three numbers at a time, so all products run as
the engine's do (omnistage.engine.linear), and the rows of a sound do not depend on other sounds in the pass.

If a sound is longer than a chunk, its last chunk is padded with silence to a whole one, as in Transformers. Transformers also pads a sound
that is shorter than a chunk if a longer sound is in the same conversation, and then its last row differs; here a sound always has the rows
that it has alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as functional

from omnistage.engine.linear import LinearMaker
from omnistage.models.encoders.encoder import LayerNorm, Need, Segments, WhisperLayer, sinusoids
from omnistage.models.qwen3_omni.config import CHUNK_ROWS, AudioConfig, convolved_length

CHUNKS = 8
"""Number of chunks that go through the convolutions at once, to bound the memory of these."""


class AudioEncoder:
    """The sound encoder; implements the common AudioEncoder. weight: returns a weight by its name without "thinker.audio_tower."."""

    def __init__(self, config: AudioConfig, weight: Need, linear: LinearMaker) -> None:
        self.config = config
        names = ("conv2d1", "conv2d2", "conv2d3")
        self._convolutions = [linear(weight(f"{name}.weight").flatten(1), weight(f"{name}.bias")) for name in names]
        join_weight = weight("conv_out.weight")
        self._join = linear(join_weight, None)
        self._positions = sinusoids(config.positions, config.hidden_size).to(join_weight.device, join_weight.dtype)
        self._layers = [WhisperLayer(weight, f"layers.{index}", config.heads, linear, has_key_bias=True) for index in range(config.layers)]
        self._norm = LayerNorm.of(weight, "ln_post")
        self._first, self._second = (linear(weight(f"{name}.weight"), weight(f"{name}.bias")) for name in ("proj1", "proj2"))

    @property
    def device(self) -> torch.device:
        return self._positions.device

    @property
    def dtype(self) -> torch.dtype:
        return self._positions.dtype

    def rows(self, frames: int) -> int:
        """Number of rows that this many frames of a spectrogram become."""
        full_chunks, rest = divmod(frames, self.config.chunk)
        return full_chunks * CHUNK_ROWS + convolved_length(rest)

    def pieces(self, spectrogram: torch.Tensor) -> Sequence[torch.Tensor]:
        """Cut a spectrogram into windows of attention. A rest that is shorter than a chunk stays with the previous window, because it must
        be padded."""
        pieces = list(torch.split(spectrogram, self.config.piece))
        if len(pieces) > 1 and len(pieces[-1]) < self.config.chunk:
            pieces[-2:] = [torch.cat(pieces[-2:])]
        return pieces

    def encode(self, spectrograms: Sequence[torch.Tensor], on_layer: Callable[[], None] = lambda: None) -> list[torch.Tensor]:
        """See common's AudioEncoder; a row has row_size numbers. spectrograms: at least 1 frame each."""
        config = self.config
        x = self._convolve(spectrograms)
        counts = [self.rows(len(spectrogram)) for spectrogram in spectrograms]
        window = CHUNK_ROWS * config.window_chunks
        segments = Segments([min(window, count - first) for count in counts for first in range(0, count, window)])
        for layer in self._layers:
            on_layer()
            x = layer(x, segments)
        rows = self._second(functional.gelu(self._first(self._norm(x))))
        return list(torch.split(functional.pad(rows, (0, config.row_size - config.output_size)), counts))

    def _convolve(self, spectrograms: Sequence[torch.Tensor]) -> torch.Tensor:
        """The results of the convolutions for all chunks, plus the positions of rows in their chunks, [rows, hidden_size]."""
        chunks, rows = list[torch.Tensor](), list[int]()
        for spectrogram in spectrograms:
            for chunk in torch.split(spectrogram, self.config.chunk):
                missing = self.config.chunk - len(chunk) if len(spectrogram) > self.config.chunk else 0
                chunks.append(functional.pad(chunk, (0, 0, 0, missing)))
                rows.append(convolved_length(len(chunk)))
        outputs = list[torch.Tensor]()
        for first in range(0, len(chunks), CHUNKS):
            some = chunks[first : first + CHUNKS]
            if len({len(chunk) for chunk in some}) == 1:
                outputs += self._convolve_alike(torch.stack(some))
            else:
                outputs += [self._convolve_alike(chunk[None])[0] for chunk in some]
        return torch.cat([chunk[:count] + self._positions[:count] for chunk, count in zip(outputs, rows, strict=True)])

    def _convolve_alike(self, chunks: torch.Tensor) -> torch.Tensor:
        """Apply the convolutions to chunks of equal length. chunks: [chunks, frames, bins]. Returns [chunks, rows, hidden_size]."""
        x = chunks.mT[:, None]
        for convolution in self._convolutions:
            height, width = ((side - 1) // 2 + 1 for side in x.shape[2:])
            nines = functional.unfold(x, 3, padding=1, stride=2).mT.flatten(0, 1)
            x = functional.gelu(convolution(nines)).view(len(chunks), height, width, -1).permute(0, 3, 1, 2)
        features = x.permute(0, 3, 1, 2).flatten(2)
        return self._join(features.flatten(0, 1)).view(*features.shape[:2], -1)
