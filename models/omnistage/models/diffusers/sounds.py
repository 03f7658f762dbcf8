"""Sounds as the product of a drawing: samples leave while the VAE still decodes, and only requested samples are decoded."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from omnistage.models.checkpoint.files import BadCheckpoint
from omnistage.models.diffusers.painter import Canvas, Painter
from omnistage.models.diffusers.plan import DrawingPlan
from omnistage.models.interface import (
    BadRequest,
    Content,
    Drawn,
    DrawRequest,
    ElementType,
    Failed,
    PortSpec,
    Preview,
    Sound,
    TensorRows,
    Wanted,
)

AUDIO, LATENTS = "audio", "latents"
FIRST_LATENTS, MAX_LATENTS = 8, 64
"""Latents decoded at once: few at first, so that sound begins early; then twice as many each time, as each time costs an overlap."""


class SoundPainter(Painter):
    """The loop of sounds. Latents are [1, channels, length], equally long for all sounds."""

    @property
    @abstractmethod
    def rate_hz(self) -> int:
        """Samples a second."""

    @property
    @abstractmethod
    def sound_channels(self) -> int:
        """The number of channels of the sound."""

    @property
    @abstractmethod
    def latent_length(self) -> int:
        """The length of the latents."""

    @property
    @abstractmethod
    def upsampling(self) -> Upsampling:
        """The upsampling of the VAE's decoder."""

    @abstractmethod
    def samples(self, latents: Tensor) -> Tensor:
        """The samples that the VAE makes of latents: [1, channels of sound, samples], float32."""

    def window(self, plan: DrawingPlan) -> tuple[int, int]:
        """The part of the sound that is asked for: its first sample, and the sample after its last."""
        max_samples = self.upsampling.samples(self.latent_length)
        first, end = (min(int(second * self.rate_hz), max_samples) for second in (plan.begin_s, plan.begin_s + plan.seconds))
        return first, end

    def check_steps(self, plan: DrawingPlan) -> None:
        """Raises BadRequest for impossible steps, and for so little sound that it has no sample."""
        super().check_steps(plan)
        first, end = self.window(plan)
        if first == end:
            fault = f"{plan.seconds:g} s from {plan.begin_s:g} s on have no sample at {self.rate_hz} Hz"
            raise BadRequest("diffusion.duration_s", f"{fault}: ask for more, or begin earlier")

    def values(self, plan: DrawingPlan) -> int:
        return self.channels * self.latent_length

    def product(self, model: str) -> Sounds:
        return Sounds(self, model)


class Sounds:
    """The product of sound models, a `CanvasProduct`. model: the model's name, for messages."""

    def __init__(self, painter: SoundPainter, model: str) -> None:
        self._painter, self._model = painter, model

    @property
    def ports(self) -> tuple[PortSpec, ...]:
        """The port of latents has all rows that the model has, even for a shorter sound."""
        painter = self._painter
        return (
            PortSpec(AUDIO, Content.AUDIO, rate_hz=painter.rate_hz, width=painter.sound_channels),
            PortSpec(LATENTS, Content.TENSOR, width=painter.channels, element_type=ElementType.FLOAT32),
        )

    def check(self, request: DrawRequest) -> None:
        check_sound(request, self._model)

    def items(self, plan: DrawingPlan) -> Mapping[str, int]:
        first, end = self._painter.window(plan)
        return {AUDIO: end - first, LATENTS: self._painter.latent_length}

    def first(self, plan: DrawingPlan, ports: Wanted) -> int:
        """0 if the sound must be drawn; 1 if the client has all wanted items of it. States alone may be wanted: these have to be drawn."""
        are_sent = [ports[port] >= count for port, count in self.items(plan).items() if port in ports]
        return int(bool(are_sent) and all(are_sent))

    def preview(self, canvas: Canvas) -> Sequence[Preview]:
        return []

    def decode(self, plan: DrawingPlan, latents: Sequence[Canvas], ports: Wanted) -> Generator[Drawn, None, None]:
        """Yields the latents of a sound, and then its samples piece by piece, from the wanted items on."""
        for canvas in latents:
            if LATENTS in ports:
                yield TensorRows(LATENTS, canvas.latents[0].T.float().cpu().numpy()[ports[LATENTS] :])
            if AUDIO in ports:
                pieces = SoundPieces(self._painter.samples, self._painter.upsampling)
                for samples in pieces.decoded(canvas.latents, *self._painter.window(plan), ports[AUDIO]):
                    yield Sound(samples)


class SoundPieces:
    """Decodes a sound piece by piece. samples: makes [1, channels, samples] of latents. upsampling: the decoder's."""

    def __init__(self, samples: Callable[[Tensor], Tensor], upsampling: Upsampling) -> None:
        self._samples, self._upsampling = samples, upsampling

    def decoded(self, latents: Tensor, first: int, end: int, skipped: int = 0) -> Iterator[NDArray[np.float32]]:
        """Yields the samples from `first` to before `end`, without the first `skipped`, as [samples, channels]. Pieces always have the
        same borders, because others would change some bits. Raises Failed for values that are no numbers: the sound would be silent."""
        count, begin = FIRST_LATENTS, first + skipped
        while first < end:
            piece_end = min(first + count * self._upsampling.hop, end)
            if piece_end > begin:
                samples = self._part(latents, first, piece_end)
                if not torch.isfinite(samples).all():
                    raise Failed("the VAE makes no number of the sound: with these weights it cannot be drawn")
                yield np.ascontiguousarray(samples[:, max(begin - first, 0) :].clamp(-1, 1).T.cpu().numpy())
            first, count = piece_end, min(2 * count, MAX_LATENTS)

    def _part(self, latents: Tensor, first: int, end: int) -> Tensor:
        """The samples from `first` to before `end`, [channels, samples], from the latents that they depend on."""
        low, high = self._upsampling.latents(first, end)
        low, high = max(low, 0), min(high, latents.shape[2])
        offset = low * self._upsampling.hop
        return self._samples(latents[:, :, low:high])[0, :, first - offset : end - offset]


def check_sound(request: DrawRequest, model: str) -> None:
    """Raises BadRequest for a request for another product than a sound. model: its name, for the text of the error."""
    if request.frames:
        raise BadRequest("diffusion.frames", f"{model} makes sound and no films: leave it out, and say how long the sound is")
    for field in ("width", "height"):
        if getattr(request, field):
            raise BadRequest(f"diffusion.{field}", f"{model} makes sound and no pictures: leave it out")
    if request.media_type:
        raise BadRequest("diffusion.media_type", f"{model} makes sound: leave it out")


@dataclass(frozen=True, slots=True)
class Convolution:
    """A convolution of the decoder. reach: values from the first that it looks at to the last. padding: number of zeros on each side.
    is_transposed: whether it turns each value into `stride` values; else into one."""

    reach: int
    padding: int
    stride: int = 1
    is_transposed: bool = False

    def made_of(self, count: int) -> int:
        """The number of values that the convolution makes of `count` values."""
        if self.is_transposed:
            return (count - 1) * self.stride + self.reach + 1 - 2 * self.padding
        return count + 2 * self.padding - self.reach


class Upsampling:
    """The latents that the samples of a decoder depend on. A decoder is a chain of convolutions, each of which looks at some neighbours:
    with these neighbours, a part of the latents gives the same samples as all latents."""

    def __init__(self, decoder: nn.Module) -> None:
        """decoder: uses its convolutions in the order in which it has them, and no other part of it looks further than they do. Raises
        BadCheckpoint for a decoder of another kind."""
        self._chain = tuple(_convolution(each) for each in decoder.modules() if isinstance(each, nn.Conv1d | nn.ConvTranspose1d))

    @property
    def hop(self) -> int:
        """The samples for each latent."""
        return math.prod(each.stride for each in self._chain)

    def samples(self, latents: int) -> int:
        """The number of samples that the decoder makes of `latents` latents."""
        count = latents
        for each in self._chain:
            count = each.made_of(count)
        return count

    def latents(self, first: int, end: int) -> tuple[int, int]:
        """The first latent that samples from `first` to before `end` depend on, and the latent after the last. They may not exist."""
        last = end - 1
        for each in reversed(self._chain):
            if each.is_transposed:
                first, last = -(-(first + each.padding - each.reach) // each.stride), (last + each.padding) // each.stride
            else:
                first, last = first - each.padding, last + each.reach - each.padding
        return first, last + 1


def _convolution(module: nn.Conv1d | nn.ConvTranspose1d) -> Convolution:
    """The sizes of a convolution. Raises BadCheckpoint for a kind with which sound cannot be decoded in parts."""
    is_transposed = isinstance(module, nn.ConvTranspose1d)
    [size], [dilation], [stride] = module.kernel_size, module.dilation, module.stride
    padding = module.padding[0]
    if isinstance(padding, str) or (stride != 1 and not is_transposed):
        raise BadCheckpoint(f"vae: its decoder has {module}, of which sound cannot be decoded in parts; give AutoencoderOobleck")
    return Convolution((size - 1) * dilation, padding, stride, is_transposed)
