"""Rows to samples: a net makes short-time spectra of frames of features, and these become sound: pulses at the pitch, shaped by the net,
plus shaped noise, then an inverse short-time Fourier transform.

    S = exp(lh) e^(i pi tanh(theta)) STFT(pulses(f0)) + exp(ln) Z + exp(lr) e^(i phi)

The formulas are those of `hibari/dsp.py` (hibari-tts 0.2.1, Apache-2.0). Differences: everything here works on a phrase as it comes, the
noise Z is a function of (seed, frame), and outside a phrase the pulse train is silent instead of mirrored (phrases end in silence)."""

from __future__ import annotations

import math
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from omnistage.engine.types import SEEDS
from omnistage.models.smol.prosody import ConvNeXtBlock

BINS = 601
IN_WIDTH = 130
WIDTH = 256
KERNEL = 7
LAYERS = 8
NET_LOOKAHEAD = (LAYERS + 1) * (KERNEL // 2)
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
    """The decoder's weights, under the names of the original graph. Its results are five numbers a bin: see `mix`."""

    def __init__(self) -> None:
        super().__init__()
        self.dec_in = InputConv()
        self.dec = nn.ModuleList(ConvNeXtBlock(WIDTH, 3 * WIDTH, KERNEL) for _ in range(LAYERS))
        self.dec_norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 5 * BINS)


class SpectrumStream:
    """Passes one phrase through a SpectrumNet, part by part; keeps the last rows of each layer's input for the next part.

    Every layer is a convolution over 7 frames, so a spectrum depends on 27 frames on each side. Nothing is computed twice, however a phrase
    is cut, and a cut changes a result only in the last bits of float32 (matrix products of other sizes round differently)."""

    def __init__(self, net: SpectrumNet) -> None:
        self._net = net
        device = net.head.weight.device
        half = KERNEL // 2
        self._layer_rows = [torch.zeros(half, IN_WIDTH, device=device)] + [torch.zeros(half, WIDTH, device=device) for _ in net.dec]

    @torch.inference_mode()
    def push(self, frames: Tensor, last: bool) -> Tensor:
        """Take frames [n, IN_WIDTH]; return the spectra that are complete now, [m, 5 * BINS]: up to NET_LOOKAHEAD frames before
        the end, all if `last`."""
        rows = self._net.dec_in(self._extend(0, frames, last))
        for index, block in enumerate(self._net.dec, start=1):
            rows = cast(ConvNeXtBlock, block).inner(self._extend(index, rows, last))
        out: Tensor = self._net.head(self._net.dec_norm(rows))
        return out

    def skip(self, count: int) -> int:
        """Go on as if `count` frames had been pushed, but compute nothing. If nothing came before, `count` must be at least NET_LOOKAHEAD.
        Returns how many spectra `push` would have returned. Spectra are right from NET_LOOKAHEAD frames after the skipped frames on."""
        is_fresh = self._layer_rows[0].shape[0] == KERNEL // 2  # As in `__init__`: later KERNEL - 1 rows are kept.
        self._layer_rows = [part.new_zeros(KERNEL - 1, part.shape[1]) for part in self._layer_rows]
        return count - NET_LOOKAHEAD if is_fresh else count

    def _extend(self, layer: int, rows: Tensor, last: bool) -> Tensor:
        """Join the layer's kept rows, the new rows, and zeros after the end of the phrase; keep the rows that the next call needs."""
        parts = [self._layer_rows[layer], rows]
        if last:
            parts.append(rows.new_zeros(KERNEL // 2, rows.shape[1]))
        extended = torch.cat(parts)
        self._layer_rows[layer] = extended[max(extended.shape[0] - (KERNEL - 1), 0) :]
        return extended


# Spectra to samples ------------------------------------------------------------------------------------------------------------------


SAMPLE_RATE_HZ = 24000
HOP = 300
"""Samples of one frame: 80 frames a second."""
WINDOW = 1200
_OVERLAP = WINDOW // HOP
OVERLAP_LOOKAHEAD = 2
"""How many frames after a frame its samples depend on, because the windows overlap."""
OVERLAP_LOOKBEHIND = 1
"""How many frames before a frame its samples depend on."""
_LOWEST_HZ = 40.0
_HIGHEST_HZ = 11000.0
_HANN = torch.hann_window(WINDOW)
_HANN_SQUARED = (_HANN * _HANN).view(_OVERLAP, HOP)


def noise(seed: int, first: int, count: int) -> Tensor:
    """Complex normal noise of `count` frames of a session from `first` on, complex64 [count, BINS]: a function of (seed, frame)."""
    rows = np.empty((count, 2 * BINS), np.float32)
    for index in range(count):
        source = np.random.Philox(key=seed % SEEDS, counter=[0, first + index, 0, 0])
        np.random.Generator(source).standard_normal(dtype=np.float32, out=rows[index])
    return torch.view_as_complex(torch.from_numpy(rows).view(count, BINS, 2))


class PulseTrain:
    """A train of band-limited pulses that follows f0, and its spectra. Every harmonic h of f0 below 11 kHz has amplitude 1: sum over h of
    cos(h t) = sin((H + 1/2) t) / (2 sin(t / 2)) - 1/2. Below 40 Hz a frame is unvoiced and silent."""

    def __init__(self) -> None:
        self._f0: NDArray[np.float32] = np.empty(0, np.float32)  # Hz, of the last two frames.
        self._f0_sum = 0.0  # The sum of f0 for all samples so far.
        self._samples = torch.zeros(WINDOW // 2)  # Pulses that further windows need.
        place = ((np.arange(HOP) + 0.5) / HOP - 0.5) % 1.0
        self._place = place.astype(np.float32)  # Places of a frame's samples, 0..1 between the middles of two frames.

    def push(self, f0_hz: NDArray[np.float32], last: bool) -> Tensor:
        """Take f0 of the next frames, [n], n >= 1 in the first call; return the spectra that are complete now, complex64 [m, BINS]."""
        if self._f0.size == 0:
            self._f0 = f0_hz[:1]
        extended_hz = np.concatenate([self._f0, f0_hz])
        if last:
            extended_hz = np.concatenate([extended_hz, extended_hz[-1:]])
        parts = [self._samples, torch.from_numpy(self._pulses(extended_hz))]
        if last:
            parts.append(torch.zeros(WINDOW // 2 - HOP))  # So that there are as many windows as frames.
        samples = torch.cat(parts)
        self._f0 = extended_hz[-2:]
        count = max((len(samples) - WINDOW) // HOP + 1, 0)
        self._samples = samples[count * HOP :]
        if not count:
            return torch.zeros(0, BINS, dtype=torch.complex64)
        # This scale gives a cosine of amplitude 1 a peak of 1, so exp(lh) is the magnitude of a harmonic.
        spectra: Tensor = torch.fft.rfft(samples.unfold(0, WINDOW, HOP)[:count] * (_HANN / (WINDOW / 4)))
        return spectra

    def _pulses(self, f0_hz: NDArray[np.float32]) -> NDArray[np.float32]:
        """f0 in Hz of n + 2 frames -> samples [n * HOP] of the n frames in the middle; f0 is linear between the middles of two frames."""
        if len(f0_hz) < 3:
            return np.empty(0, np.float32)
        before, middle, after = f0_hz[:-2, None], f0_hz[1:-1, None], f0_hz[2:, None]
        half = HOP // 2
        first, second = self._place[:half], self._place[half:]
        f0 = np.concatenate([before * (1 - first) + middle * first, middle * (1 - second) + after * second], axis=1).reshape(-1)
        voiced = f0 > _LOWEST_HZ
        f0 = np.maximum(f0, np.float32(_LOWEST_HZ))
        # f0 is summed in float64 from the beginning of the phrase, so cuts change no bit. The sum / SAMPLE_RATE_HZ is a number of turns.
        sums = np.cumsum(np.concatenate([[self._f0_sum], f0.astype(np.float64)]))[1:]
        self._f0_sum = float(sums[-1])
        angle = (sums / SAMPLE_RATE_HZ % 1.0 * (2 * math.pi)).astype(np.float32)
        harmonics = np.floor(np.float32(_HIGHEST_HZ) / f0) + np.float32(0.5)  # H + 1/2, which is also the limit of the quotient at t = 0.
        divisor = 2 * np.sin(angle / 2)
        is_near_zero = np.abs(divisor) <= 2e-3
        quotient = np.sin(harmonics * angle) / np.where(is_near_zero, np.float32(1), divisor)
        return np.where(voiced, np.where(is_near_zero, harmonics, quotient) - np.float32(0.5), np.float32(0))


class OverlapAdd:
    """The inverse STFT of a phrase that comes in parts; the result equals torch.istft(center=True, length=frames * HOP)."""

    def __init__(self) -> None:
        self._sum = torch.zeros(_OVERLAP - 1, HOP)  # Samples to which further windows add.
        self._norm = torch.zeros(_OVERLAP - 1, HOP)  # The sum of the squared windows at each of them.
        self._skip = _OVERLAP // 2  # Hops before the phrase, where the first window begins, that are still to be dropped.

    def push(self, spectra: Tensor, last: bool) -> Tensor:
        """Take the next spectra, complex64 [m, BINS]; return the samples that are complete now, float32: up to OVERLAP_LOOKAHEAD frames
        before the end, all if `last`."""
        count = spectra.shape[0]
        total = torch.cat([self._sum, torch.zeros(count, HOP)])
        norm = torch.cat([self._norm, torch.zeros(count, HOP)])
        if count:
            frames = (torch.fft.irfft(spectra, n=WINDOW) * _HANN).view(count, _OVERLAP, HOP)
            for block in range(_OVERLAP):
                total[block : block + count] += frames[:, block]
                norm[block : block + count] += _HANN_SQUARED[block]
        self._sum, self._norm = total[count:], norm[count:]
        # The first window starts half a window before the first sample, the last window ends half a window after the last sample.
        done = count + _OVERLAP // 2 if last else count
        skip = min(self._skip, done)
        self._skip -= skip
        return (total[skip:done] / norm[skip:done].clamp(min=1e-11)).view(-1)


def mix(maps: Tensor, pulses: Tensor, noise_: Tensor) -> Tensor:
    """The net's results [n, 5 * BINS], spectra of pulses and noise [n, BINS] -> complex64 [n, BINS]: see the module's formula."""
    harmonic, rotation, hiss, free, phase = torch.split(maps, BINS, dim=1)  # lh, theta, ln, lr, phi.
    voiced = torch.polar(_magnitude(harmonic), math.pi * rotation.tanh()) * pulses
    return voiced + _magnitude(hiss) * noise_ + torch.polar(_magnitude(free), phase)


def _magnitude(log_magnitude: Tensor) -> Tensor:
    return log_magnitude.clamp(max=7).exp()
