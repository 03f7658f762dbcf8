"""The net of Code2Wav: frames of features in, short-time spectra out, as they come.

Every layer is a convolution over 7 frames, so a frame of the result depends on 27 frames on each side. The stream keeps six rows of every
layer's input: nothing is computed twice, however a phrase is cut, and a cut changes a result only in the last bits of float32 (matrix
products of other sizes round differently).
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from omnistage.models.smol.voice_layers import ConvNeXtBlock

BINS = 601
IN_WIDTH = 130
WIDTH = 256
KERNEL = 7
LAYERS = 8
LOOKAHEAD = (LAYERS + 1) * (KERNEL // 2)
"""Frames (80 a second) after a frame that its spectrum depends on."""


class InputConv(nn.Module):
    """A plain convolution over time, without padding: [n, IN_WIDTH] -> [n - 6, WIDTH], at least 0 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH, IN_WIDTH, KERNEL))
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, rows: Tensor) -> Tensor:
        if rows.shape[0] < KERNEL:
            return rows.new_zeros(0, WIDTH)
        windows = rows.unfold(0, KERNEL, 1).flatten(1)
        return torch.addmm(self.bias, windows, self.weight.flatten(1).T)


class SpectrumNet(nn.Module):
    """The decoder's weights, under the names of the original graph. Its results are five numbers a bin: see waveform.mix."""

    def __init__(self) -> None:
        super().__init__()
        self.dec_in = InputConv()
        self.dec = nn.ModuleList(ConvNeXtBlock(WIDTH, 3 * WIDTH, KERNEL) for _ in range(LAYERS))
        self.dec_norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 5 * BINS)


class SpectrumStream:
    """Passes one phrase through a SpectrumNet, part by part; keeps the last rows of each layer's input for the next part."""

    def __init__(self, net: SpectrumNet) -> None:
        self._net = net
        device = net.head.weight.device
        half = KERNEL // 2
        self._kept = [torch.zeros(half, IN_WIDTH, device=device)] + [torch.zeros(half, WIDTH, device=device) for _ in net.dec]

    @torch.inference_mode()
    def push(self, frames: Tensor, last: bool) -> Tensor:
        """Take frames [n, IN_WIDTH]; return new complete spectra [m, 5 * BINS]: up to LOOKAHEAD frames before the end, all if `last`."""
        rows = self._net.dec_in(self._extend(0, frames, last))
        for index, block in enumerate(self._net.dec, start=1):
            rows = cast(ConvNeXtBlock, block).inner(self._extend(index, rows, last))
        out: Tensor = self._net.head(self._net.dec_norm(rows))
        return out

    def skip(self, count: int) -> int:
        """Go on as if `count` frames had been pushed, but compute nothing. If nothing came before, `count` must be at least LOOKAHEAD.
        Returns how many spectra `push` would have returned. Spectra are right from LOOKAHEAD frames after the skipped frames on."""
        half = KERNEL // 2
        fresh = self._kept[0].shape[0] == half
        self._kept = [part.new_zeros(KERNEL - 1, part.shape[1]) for part in self._kept]
        return count - LOOKAHEAD if fresh else count

    def _extend(self, layer: int, rows: Tensor, last: bool) -> Tensor:
        """Join the layer's kept rows, the new rows, and zeros after the end of the phrase; keep the rows that the next call needs."""
        parts = [self._kept[layer], rows]
        if last:
            parts.append(rows.new_zeros(KERNEL // 2, rows.shape[1]))
        extended = torch.cat(parts)
        self._kept[layer] = extended[max(extended.shape[0] - (KERNEL - 1), 0) :]
        return extended
