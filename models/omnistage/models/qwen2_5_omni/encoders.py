"""The encoders of Qwen2.5-Omni: pictures, films and sound become rows of the Thinker. All products run as the engine's do
(omnistage.engine.linear), so the rows of a medium do not depend on other media in the pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as functional

from omnistage.engine.linear import Linear, LinearMaker
from omnistage.models.encoders.encoder import Grid, LayerNorm, Need, Rotation, Segments, WhisperLayer, places_of, product_of, sinusoids
from omnistage.models.qwen2_5_omni.config import AudioConfig, VisionConfig

NORM_EPS = 1e-6


class VisionEncoder:
    """The encoder of pictures and films; implements the common VisionEncoder. weight: returns a weight by its name without
    "thinker.visual.".

    It is Transformers' `Qwen2_5OmniVisionEncoder`: a vision transformer with RMS norms, gated feed-forward layers, rotary positions on two
    axes (row and column of a patch) and attention within windows, except in a few layers. At the end, patches are merged two by two on each
    side."""

    def __init__(self, config: VisionConfig, weight: Need, linear: LinearMaker) -> None:
        self.config = config
        self._embed = linear(weight("patch_embed.proj.weight").reshape(config.hidden_size, config.patch_values))
        self._blocks = [_Block(weight, f"blocks.{index}", config.heads, linear) for index in range(config.layers)]
        self._merge_norm = weight("merger.ln_q.weight").clone()
        self.device, self.dtype = self._merge_norm.device, self._merge_norm.dtype
        self._merge = tuple(product_of(weight, f"merger.mlp.{index}", linear) for index in (0, 2))

    def encode(self, patches: torch.Tensor, grids: Sequence[Grid], on_layer: Callable[[], None] = lambda: None) -> list[torch.Tensor]:
        """The rows of pictures and films, [grid.patches / merge², output_size] for each grid. patches: of all grids, [patches,
        patch_values]; the patches of an output row are next to each other. on_layer: called before each layer; an error of this call ends
        the work."""
        order, windows, frames = self._arrange(grids)
        unit, width = self.config.unit, self.config.hidden_size
        order = order.to(patches.device)
        x = self._embed(patches.view(-1, unit, patches.shape[1])[order].reshape(patches.shape))
        places = places_of(grids, self.config.merge, x.device).view(-1, unit, 2)[order].view(-1, 2)
        rotation = Rotation.of(places, self.config.hidden_size // self.config.heads, self.config.rope_theta)
        for index, block in enumerate(self._blocks):
            on_layer()
            x = block(x, rotation, frames if index in self.config.full_layers else windows)
        normed = functional.rms_norm(x, (width,), self._merge_norm, NORM_EPS)
        merged = self._merge[1](functional.gelu(self._merge[0](normed.view(-1, unit * width))))
        rows = torch.empty_like(merged)
        rows[order] = merged
        return list(torch.split(rows, [grid.patches // unit for grid in grids]))

    def _arrange(self, grids: Sequence[Grid]) -> tuple[torch.Tensor, Segments, Segments]:
        """(numbers of the output rows in the order of windows, int64 [rows]; the windows, the frames, both as Segments of patches in this
        order)."""
        # The side of a window, in output rows.
        side, unit = self.config.window_size // self.config.merge // self.config.patch_size, self.config.unit
        orders, windows, frames, start = list[torch.Tensor](), list[int](), list[int](), 0
        for grid in grids:
            height, width = grid.height // self.config.merge, grid.width // self.config.merge
            index = torch.arange(start, start + grid.frames * height * width).view(grid.frames, height, width)
            for frame in index:
                for rows in frame.split(side, 0):
                    for window in rows.split(side, 1):
                        orders.append(window.reshape(-1))
                        windows.append(window.numel() * unit)
            frames += [height * width * unit] * grid.frames
            start += index.numel()
        return torch.cat(orders), Segments(windows), Segments(frames)


class _Block:
    """One layer, from rows [patches, hidden_size] to the same shape. name: beginning of the names of its weights. When it is called:
    rotation: by the positions. segments: which patches see each other."""

    def __init__(self, weight: Need, name: str, heads: int, linear: LinearMaker) -> None:
        def fused(*parts: str) -> Linear:
            matrix = torch.cat([weight(f"{name}.{part}.weight") for part in parts])
            return linear(matrix, torch.cat([weight(f"{name}.{part}.bias") for part in parts]))

        self._heads = heads
        self._attention_norm, self._ffn_norm = (weight(f"{name}.{norm}.weight").clone() for norm in ("norm1", "norm2"))
        self._query_key_value, self._gate_up = fused("attn.q", "attn.k", "attn.v"), fused("mlp.gate_proj", "mlp.up_proj")
        self._output, self._down = (product_of(weight, f"{name}.{part}", linear) for part in ("attn.proj", "mlp.down_proj"))

    def __call__(self, x: torch.Tensor, rotation: Rotation, segments: Segments) -> torch.Tensor:
        width = x.shape[1:]
        qkv = self._query_key_value(functional.rms_norm(x, width, self._attention_norm, NORM_EPS))
        query, key, value = qkv.view(len(x), 3, self._heads, -1).unbind(1)
        x = x + self._output(segments.attention(rotation(query), rotation(key), value))
        gate, up = self._gate_up(functional.rms_norm(x, width, self._ffn_norm, NORM_EPS)).chunk(2, -1)
        return x + self._down(functional.silu(gate) * up)


# Sound -------------------------------------------------------------------------------------------------------------------------------


def rows_of_frames(frames: int) -> int:
    """Number of rows that this many frames of the spectrogram become: a convolution keeps every second frame, then pairs are averaged."""
    return ((frames - 1) // 2 + 1) // 2


class AudioEncoder:
    """The sound encoder; implements the common AudioEncoder. weight: returns a weight by its name without "thinker.audio_tower.".

    It is Transformers' `Qwen2_5OmniAudioEncoder`: Whisper's encoder (Radford et al. 2022) in chunks of two seconds that do not see each
    other, with every two rows averaged at the end, so that a row stands for 40 ms. A convolution is computed as a product of three frames
    at a time."""

    def __init__(self, config: AudioConfig, weight: Need, linear: LinearMaker) -> None:
        self.config = config
        self._convolutions = tuple(linear(weight(f"{name}.weight").flatten(1), weight(f"{name}.bias")) for name in ("conv1", "conv2"))
        bias = weight("conv1.bias")
        self.device, self.dtype = bias.device, bias.dtype
        self._positions = sinusoids(config.positions, config.hidden_size).to(self.device, self.dtype)
        self._layers = [WhisperLayer(weight, f"layers.{index}", config.heads, linear, has_key_bias=False) for index in range(config.layers)]
        self._norm = LayerNorm.of(weight, "ln_post")
        self._proj = product_of(weight, "proj", linear)

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
        # The mean of each two rows; a row without a second one is dropped.
        pooled = torch.cat([(rows[0 : len(rows) - 1 : 2] + rows[1::2]) / 2 for rows in torch.split(x, counts)])
        rows = self._proj(self._norm(pooled))
        return list(torch.split(rows, [count // 2 for count in counts]))

    def _convolve(self, index: int, chunks: Sequence[torch.Tensor], stride: int) -> torch.Tensor:
        """Apply a convolution over three frames, then GELU, to chunks [frames, width] each, padded with a zero frame before and after.
        index: number of the convolution, 0 or 1. Returns the frames of all chunks, joined, [frames, hidden_size]."""
        threes = [functional.pad(chunk, (0, 0, 1, 1)).unfold(0, 3, stride).flatten(1) for chunk in chunks]
        return functional.gelu(self._convolutions[index](torch.cat(threes)))
