"""Films as the product of a drawing: frames leave while the VAE still decodes, in a file that can be played while it comes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify
from numpy.typing import NDArray
from torch import Tensor

from omnistage.models.diffusers.painter import Canvas, Painter
from omnistage.models.diffusers.plan import DrawingPlan
from omnistage.models.interface import (
    MAX_CLIP_BYTES,
    BadRequest,
    Clip,
    Content,
    Drawn,
    DrawRequest,
    ElementType,
    Failed,
    PortSpec,
    Preview,
    TensorRows,
    Wanted,
)
from omnistage.models.media.film_file import MAX_RATE_HZ, MIN_RATE_HZ, FilmWriter, Track, film_kind, told_kinds

VIDEO, LATENTS, PIXELS = "video", "latents", "pixels"
MAX_HELD = 16
"""How many messages of a film may wait for more frames."""
Frame = NDArray[np.uint8]
"""[height, width, 3], RGB."""


class FilmPainter(Painter):
    """The loop of films. Latents come from a causal VAE: [1, channels, frames, height, width]."""

    def frames(self, plan: DrawingPlan) -> int:
        """The number of frames of the latents: the first stands for one frame of the film, each other one for several."""
        return 1 + (plan.frames - 1) // int(self.pipe.vae_scale_factor_temporal)

    def grid_places(self, plan: DrawingPlan) -> int:
        """The number of places of one frame of the latents."""
        side = int(self.pipe.vae_scale_factor_spatial)
        return plan.height // side * (plan.width // side)

    def values(self, plan: DrawingPlan) -> int:
        return self.channels * self.frames(plan) * self.grid_places(plan)

    def product(self, model: str) -> Films:
        return Films(self, model)

    def finished(self, canvas: Canvas) -> Tensor:
        """The canvas's latents after the last step, float32."""
        return canvas.latents

    @abstractmethod
    def decoded(self, latents: Tensor) -> Iterator[Tensor]:
        """Yields the decoded frames of latents, as the VAE makes them one after the other: [1, 3, frames, height, width], -1 to 1."""

    def shown(self, latents: Tensor) -> Iterator[Frame]:
        """Yields the frames of a film. Raises Failed for values that are no numbers: the film would be flat, and pass for a film."""
        for part in self.decoded(latents):
            if not torch.isfinite(part).all():
                raise Failed("the VAE makes no number of the film: with these weights it cannot be drawn")
            frames = self.pipe.video_processor.postprocess_video(part, output_type="np")[0]
            yield from (frames * 255).round().astype(np.uint8)


class Films:
    """The product of a film model, a `CanvasProduct`. model: the model's name, for messages."""

    def __init__(self, painter: FilmPainter, model: str) -> None:
        self._painter, self._model = painter, model

    @property
    def ports(self) -> tuple[PortSpec, ...]:
        """Rows of latents are places of the VAE's grid, row by row from the top, one frame after the other; rows of pixels are pixels."""
        return (
            PortSpec(VIDEO, Content.VIDEO),
            PortSpec(LATENTS, Content.TENSOR, width=self._painter.channels, element_type=ElementType.FLOAT32),
            PortSpec(PIXELS, Content.TENSOR, width=3, element_type=ElementType.UINT8),
        )

    def check(self, request: DrawRequest) -> None:
        check_film(request, self._model)

    def items(self, plan: DrawingPlan) -> Mapping[str, int]:
        places = self._painter.frames(plan) * self._painter.grid_places(plan)
        return {VIDEO: plan.frames, LATENTS: places, PIXELS: plan.frames * plan.height * plan.width}

    def first(self, plan: DrawingPlan, ports: Wanted) -> int:
        have = [ports[port] >= count for port, count in self.items(plan).items() if port in ports]
        return int(bool(have) and all(have))  # Kept states alone may be wanted: these have to be drawn.

    def preview(self, canvas: Canvas) -> Sequence[Preview]:
        return []

    def decode(self, plan: DrawingPlan, latents: Sequence[Canvas], ports: Wanted) -> Generator[Drawn, None, None]:
        """Yields the latents of a film, and then its pixels and clips frame by frame, from the wanted items on."""
        for canvas in latents:
            film_latents = self._painter.finished(canvas)
            if LATENTS in ports:
                yield TensorRows(LATENTS, _places(film_latents)[ports[LATENTS] :])
            if VIDEO in ports or PIXELS in ports:
                yield from self._film(plan, film_latents, ports)

    def _film(self, plan: DrawingPlan, latents: Tensor, ports: Wanted) -> Generator[Drawn, None, None]:
        """Yields pixels and clips of a film. Pixels leave before they are encoded. The file is always made from its beginning."""
        clips = Clips(plan, plan.rate_hz, ports[VIDEO]) if VIDEO in ports else None
        size = plan.height * plan.width
        for number, frame in enumerate(self._painter.shown(latents)):
            skipped = max(ports.get(PIXELS, plan.frames * size) - number * size, 0)
            if skipped < size:
                yield TensorRows(PIXELS, frame.reshape(-1, 3)[skipped:])
            if clips is not None:
                yield from clips.with_frame(frame)


class Clips:
    """The file of a film, in messages. rate_hz: frames a second. first: first wanted frame. track: the sound. The wanted part begins with a
    key frame: earlier frames may come from another batch, and one level of one pixel would spoil all frames after it."""

    def __init__(self, plan: DrawingPlan, rate_hz: float, first: int, track: Track | None = None) -> None:
        kind = film_kind(plan.media_type)
        assert kind is not None  # `check_film` has checked it.
        self._kind, self._first, self._left, self._place = kind, first, plan.frames, 0
        self._writer = FilmWriter(kind, rate_hz, plan.frames, track)
        self._data, self._frames = bytearray(), 0

    def with_frame(self, frame: Frame) -> Iterator[Clip]:
        """Yields the clips that are complete with the next frame. A large clip waits for more frames, because each message must have a
        frame of its own: a message without a frame would come twice in a resumed session. Raises Failed if waiting cannot help."""
        self._left -= 1
        joins = self._first > 0 and self._place >= self._first and not self._data
        if joins:
            self._first = 0
        if piece := self._writer.write(frame, is_key=joins):
            self._data += piece.data
            self._frames += piece.frames
        count = -(-len(self._data) // MAX_CLIP_BYTES)
        if count > self._frames:
            if not self._left or count > MAX_HELD:
                raise Failed(f"{self._frames} frames of the film have {len(self._data)} bytes: ask for fewer pixels")
            return
        for number in range(count):
            part = bytes(self._data[number * MAX_CLIP_BYTES : (number + 1) * MAX_CLIP_BYTES])
            shown = self._frames - count + 1 if number == count - 1 else 1
            if self._place >= self._first:
                yield Clip(part, self._kind.media_type, shown, self._writer.codecs)
            self._place += shown
        self._data, self._frames = bytearray(), 0


def check_film(request: DrawRequest, model: str) -> None:
    """Raises BadRequest for a rate or a kind of file that is not made here. model: its name, for the text of the error."""
    if request.frames_per_second:
        check_rate(request.frames_per_second, "diffusion.frames_per_second")
    kind = film_kind(request.media_type)
    if kind is None:
        raise BadRequest("diffusion.media_type", f"{model} makes {told_kinds()}: ask for one of these or leave it out")
    if not kind.is_there:
        raise BadRequest("diffusion.media_type", f"FFmpeg has no {kind.encoder} here, so {kind.name} is not made: ask for {told_kinds()}")


def check_rate(rate_hz: float, field: str) -> None:
    """Raises BadRequest for a number of frames a second that no file can have, NaN among them."""
    if not MIN_RATE_HZ <= rate_hz <= MAX_RATE_HZ:
        raise BadRequest(field, f"films have {MIN_RATE_HZ:g} to {MAX_RATE_HZ:g} frames a second, {rate_hz:g} were asked for")


def decode_frames(vae: Any, latents: Tensor) -> Iterator[Tensor]:
    """Decodes each frame of [1, channels, frames, height, width] to [1, 3, frames, height, width], equal to the output of a causal VAE (Wan
    et al. 2025) for all frames together. The past of its convolutions is kept here, so several films can be decoded in turns."""
    if hasattr(getattr(vae, "_hf_hook", None), "pre_forward"):  # Like `decode`: fetch a VAE that is offloaded as a whole.
        vae._hf_hook.pre_forward(vae)
    past: list[Any] = [None] * vae._cached_conv_counts["decoder"]
    rows = vae.post_quant_conv(latents)
    for number in range(rows.shape[2]):
        frame = vae.decoder(rows[:, :, number : number + 1], feat_cache=past, feat_idx=[0], first_chunk=number == 0)
        if vae.config.patch_size is not None:
            frame = unpatchify(frame, patch_size=vae.config.patch_size)
        yield frame.clamp(-1.0, 1.0)


def _places(latents: Tensor) -> NDArray[np.float32]:
    """The latents as rows, one for each place: [frames * height * width, channels]."""
    places: NDArray[np.float32] = latents[0].permute(1, 2, 3, 0).flatten(0, 2).float().cpu().numpy()
    return places
