"""The vocoder of Qwen2.5-Omni's Token2Wav, BigVGAN (Lee et al. 2023): makes samples from mel frames, many windows at once.

A sample depends on mel frames far away, but each level needs less context than the previous level. So frames that are only context are cut
off as soon as no wanted sample depends on them. Filters are sums of shifted copies, without the intermediate samples that other
implementations write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as functional
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import kaiser_sinc_filter1d

from omnistage.models.checkpoint.weights import ShapedNeed
from omnistage.models.qwen2_5_omni.wave.config import VocoderConfig
from omnistage.models.steps.loop import Aside
from omnistage.models.worker import by_two

FIELD = 28
"""With the published kernels and rates, a frame's samples depend on this many mel frames on each side; other frames change no bit."""

TAPS = 12
"""Number of taps of the filters between a signal and the same signal at twice its rate."""

ACTIVATION_REACH = 5
"""An activation depends on this many samples on each side, because of its two filters of TAPS taps."""

MIN_DB, REFERENCE_DB = -115.0, 20.0


@dataclass(frozen=True, slots=True)
class _Convolution:
    """A convolution of [windows, channels, samples], which keeps the number of samples."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    dilation: int = 1

    @property
    def reach(self) -> int:
        """Number of samples on each side on which a sample depends."""
        return self.dilation * (self.weight.shape[2] - 1) // 2

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.conv1d(x, self.weight, self.bias, padding=self.reach, dilation=self.dilation)


@dataclass(frozen=True, slots=True)
class _Activation:
    """Computes x + sin(frequency * x)^2 / height (SnakeBeta), at twice the rate, so that frequencies above half the rate can be filtered
    away (Karras et al. 2021). frequency, inverse_height (1 / height): [channels, 1]. up, down: taps of the filters."""

    frequency: torch.Tensor
    inverse_height: torch.Tensor
    up: Sequence[float]
    down: Sequence[float]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [windows, channels, samples]; returns the same shape. Beyond its ends the signal goes on with its first and last sample."""
        count, first, last = x.shape[2], x[..., :1], x[..., -1:]
        padded = torch.cat((first.expand(-1, -1, 3), x, last.expand(-1, -1, 3)), 2)
        # The even and the odd samples of the signal at twice the rate. even[i] is made of x[i - 3] to x[i + 2], odd[i] of x[i - 2] to
        # x[i + 3].
        even = self._snake(_filter([(self.up[-1 - 2 * tap], padded[..., tap : tap + count]) for tap in range(TAPS // 2)]))
        odd = self._snake(_filter([(self.up[-2 - 2 * tap], padded[..., tap + 1 : tap + 1 + count]) for tap in range(TAPS // 2)]))
        # Output i is made of even[i - 2] to even[i + 3], and odd[i - 3] to odd[i + 2].
        first, last = even[..., :1], odd[..., -1:]
        even = torch.cat((first.expand(-1, -1, 2), even, last.expand(-1, -1, 3)), 2)
        odd = torch.cat((first.expand(-1, -1, 3), odd, last.expand(-1, -1, 2)), 2)
        taps = [(self.down[2 * tap + 1], even[..., tap : tap + count]) for tap in range(TAPS // 2)]
        return _filter([*taps, *((self.down[2 * tap], odd[..., tap : tap + count]) for tap in range(TAPS // 2))])

    def _snake(self, x: torch.Tensor) -> torch.Tensor:
        turned = torch.sin(x * self.frequency)
        return x.addcmul_(turned.mul_(turned), self.inverse_height)


def _filter(taps: Sequence[tuple[float, torch.Tensor]]) -> torch.Tensor:
    """The sum of shifted copies of a signal, each times its weight. taps: pairs of weight and copy."""
    (weight, moved), *others = taps
    out = moved * weight
    for weight, moved in others:
        out.add_(moved, alpha=weight)
    return out


@dataclass(frozen=True, slots=True)
class _Residual:
    """A residual block: each step adds to the signal the result of its two activations and convolutions."""

    steps: Sequence[tuple[_Activation, _Convolution, _Activation, _Convolution]]

    @property
    def reach(self) -> int:
        return sum(2 * ACTIVATION_REACH + first.reach + second.reach for _, first, _, second in self.steps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        for activation, convolution, activation_after, convolution_after in self.steps:
            x = x + convolution_after(activation_after(convolution(activation(x))))
        return x


@dataclass(frozen=True, slots=True)
class _Level:
    """One level: an upsampling, then the mean of some residual blocks. rate: factor of the upsampling. context: number of samples of the
    output, on each side of the wanted samples, on which later levels depend."""

    weight: torch.Tensor
    bias: torch.Tensor
    rate: int
    padding: int
    blocks: Sequence[_Residual]
    context: int

    def __call__(self, x: torch.Tensor, aside: Aside | None) -> torch.Tensor:
        """x: [windows, channels, samples]. aside: a thread for the last block, which has the largest kernels; None: there is none."""
        x = functional.conv_transpose1d(x, self.weight, self.bias, stride=self.rate, padding=self.padding)
        *first_blocks, last_block = range(len(self.blocks))
        outputs: dict[int, torch.Tensor] = {}

        def make(*blocks: int) -> None:
            with torch.inference_mode():
                for block in blocks:
                    outputs[block] = self.blocks[block](x)

        if aside is None:
            make(*first_blocks, last_block)
        else:
            by_two(aside, partial(make, *first_blocks), partial(make, last_block))
        total = outputs[0]
        for block in range(1, len(self.blocks)):
            total.add_(outputs[block])
        return total.div_(len(self.blocks))

    @property
    def input_context(self) -> int:
        """Number of samples of the input, on each side of the wanted samples, on which this level and later levels depend."""
        reached = self.context + max(block.reach for block in self.blocks)
        return (reached + self.weight.shape[2] - 1 - self.padding) // self.rate


class Vocoder:
    """The net. weight: returns a weight by its name in the checkpoint, without "token2wav.code2wav_bigvgan_model."."""

    def __init__(self, config: VocoderConfig, weight: ShapedNeed) -> None:
        self.config = config
        # As published for a factor of 2: the cutoff is 0.5 / 2, and half of the width of the transition 0.6 / 2.
        self._taps = kaiser_sinc_filter1d(0.25, 0.3, TAPS).flatten().tolist()  # type: ignore[no-untyped-call]
        channels = config.channels >> len(config.rates)
        enter = (config.channels, config.mel_bins, 7)
        self._enter = _Convolution(weight("conv_pre.weight", enter), weight("conv_pre.bias", enter[:1]))
        self._activation = self._read_activation(weight, "activation_post", channels)
        self._leave = _Convolution(weight("conv_post.weight", (1, channels, 7)), None)
        context, levels = ACTIVATION_REACH + self._leave.reach, list[_Level]()
        for number in reversed(range(len(config.rates))):
            levels.insert(0, self._read_level(weight, number, context))
            context = levels[0].input_context
        self._levels = levels

    def samples(self, mel: torch.Tensor, before: int = 0, after: int = 0, aside: Aside | None = None) -> torch.Tensor:
        """Make samples, float32 [windows, (frames - before - after) * frame_samples] in -1..1. mel: frames from the flow, [windows, frames,
        mel_bins]. before, after: numbers of frames at the beginning and the end of `mel` that are only context. aside: a thread for half of
        the work; None: there is none."""
        x = self._enter(_scale_mel(mel.transpose(1, 2)))
        for level in self._levels:
            x, before, after = _cut_ends(level(x, aside), before * level.rate, after * level.rate, level.context)
        sound = self._leave(self._activation(x)).squeeze(1)
        return sound[:, before : sound.shape[1] - after].clamp(-1.0, 1.0)

    def _read_level(self, weight: ShapedNeed, number: int, context: int) -> _Level:
        """Read a level. context: see _Level."""
        config = self.config
        channels, kernel, rate = config.channels >> (number + 1), config.kernel_sizes[number], config.rates[number]
        count = len(config.block_kernel_sizes)
        return _Level(
            weight(f"ups.{number}.0.weight", (2 * channels, channels, kernel)),
            weight(f"ups.{number}.0.bias", (channels,)),
            rate,
            (kernel - rate) // 2,
            [self._read_block(weight, f"resblocks.{number * count + block}", channels, block) for block in range(count)],
            context,
        )

    def _read_block(self, weight: ShapedNeed, name: str, channels: int, block: int) -> _Residual:
        """Read a residual block. block: its number within its level."""
        size = self.config.block_kernel_sizes[block]

        def convolution(part: str, dilation: int) -> _Convolution:
            shape = (channels, channels, size)
            return _Convolution(weight(f"{name}.{part}.weight", shape), weight(f"{name}.{part}.bias", shape[:1]), dilation)

        steps = [
            (
                self._read_activation(weight, f"{name}.activations.{2 * step}", channels),
                convolution(f"convs1.{step}", dilation),
                self._read_activation(weight, f"{name}.activations.{2 * step + 1}", channels),
                convolution(f"convs2.{step}", 1),
            )
            for step, dilation in enumerate(self.config.block_dilations[block])
        ]
        return _Residual(steps)

    def _read_activation(self, weight: ShapedNeed, name: str, channels: int) -> _Activation:
        frequency, height = (weight(f"{name}.act.{part}", (channels,)).exp().unsqueeze(1) for part in ("alpha", "beta"))
        return _Activation(frequency, 1.0 / (height + 1e-9), [2 * tap for tap in self._taps], self._taps)


def _cut_ends(x: torch.Tensor, before: int, after: int, context: int) -> tuple[torch.Tensor, int, int]:
    """Cut off samples at the ends of x, up to `context` samples from the wanted samples. before, after: numbers of unwanted samples at the
    beginning and the end of x. Returns the rest, and these two numbers for the rest."""
    first, last = max(before - context, 0), max(after - context, 0)
    return x[..., first : x.shape[2] - last], before - first, after - last


def _scale_mel(mel: torch.Tensor) -> torch.Tensor:
    """Turn natural logarithms of amplitudes into decibels, scaled to -1..1."""
    # The last factor is the natural logarithm of 10.
    min_amplitude = torch.exp(torch.tensor(MIN_DB / 20.0 * 2.302585092994046, dtype=mel.dtype, device=mel.device))
    decibels = 20 * torch.log10(torch.clamp(torch.exp(mel), min=min_amplitude)) - REFERENCE_DB
    return torch.clamp(2 * (decibels - MIN_DB) / -MIN_DB - 1, -1.0, 1.0)
