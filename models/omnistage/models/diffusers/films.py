"""Films as what comes of a drawing: frames that leave while the VAE still decodes, as a file that can be played while it comes."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify
from numpy.typing import NDArray
from torch import Tensor

from omnistage.models.diffusers.painter import Canvas, Painter
from omnistage.models.diffusers.plan import Plan
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
    Rows,
    Wanted,
)
from omnistage.models.media.webm import MEDIA_TYPE as WEBM
from omnistage.models.media.webm import encode_webm

VIDEO, LATENTS, PIXELS = "video", "latents", "pixels"
Frame = NDArray[np.uint8]
"""[height, width, 3], RGB."""


class FilmPainter(Painter):
    """A loop of films. Latents: [1, channels, frames, height, width], of a causal VAE."""

    def frames(self, plan: Plan) -> int:
        """Of the latents: the first is one frame of the film, each other one some together."""
        return 1 + (plan.frames - 1) // int(self.pipe.vae_scale_factor_temporal)

    def grid_places(self, plan: Plan) -> int:
        """Of one frame of the latents."""
        side = int(self.pipe.vae_scale_factor_spatial)
        return plan.height // side * (plan.width // side)

    def values(self, plan: Plan) -> int:
        return self.channels * self.frames(plan) * self.grid_places(plan)

    def product(self, model: str) -> Films:
        return Films(self, model)

    def finished(self, canvas: Canvas) -> Tensor:
        """Its latents after the last step, float32."""
        return canvas.latents

    @abstractmethod
    def decoded(self, latents: Tensor) -> Iterator[Tensor]:
        """[1, 3, frames, height, width], -1 to 1: what the VAE makes of the latents, one after the other, as soon as it is there."""

    def shown(self, latents: Tensor) -> Iterator[Frame]:
        """Raises Failed for a film that is no number: it would be flat, and pass for a film."""
        for part in self.decoded(latents):
            if not torch.isfinite(part).all():
                raise Failed("the VAE makes no number of the film: with these weights it cannot be drawn")
            made = self.pipe.video_processor.postprocess_video(part, output_type="np")[0]
            yield from (made * 255).round().astype(np.uint8)


class Films:
    """Implements `Result`. model: its name, for what is told."""

    def __init__(self, painter: FilmPainter, model: str) -> None:
        self._painter, self._model = painter, model

    @property
    def ports(self) -> tuple[PortSpec, ...]:
        """Rows of latents are places of the VAE's grid, row by row from the top, one frame after the other; those of pixels are pixels."""
        return (
            PortSpec(VIDEO, Content.VIDEO),
            PortSpec(LATENTS, Content.TENSOR, width=self._painter.channels, element_type=ElementType.FLOAT32),
            PortSpec(PIXELS, Content.TENSOR, width=3, element_type=ElementType.UINT8),
        )

    def check(self, request: DrawRequest) -> None:
        check_film(request, self._model)

    def items(self, plan: Plan) -> Mapping[str, int]:
        places = self._painter.frames(plan) * self._painter.grid_places(plan)
        return {VIDEO: plan.frames, LATENTS: places, PIXELS: plan.frames * plan.height * plan.width}

    def first(self, plan: Plan, wanted: Wanted) -> int:
        counts = self.items(plan)
        return int(all(wanted[port] >= count for port, count in counts.items() if port in wanted))

    def preview(self, canvas: Canvas) -> Sequence[Preview]:
        return []

    def decode(self, plan: Plan, latents: Sequence[Canvas], wanted: Wanted) -> Generator[Drawn, None, None]:
        for canvas in latents:
            made = self._painter.finished(canvas)
            if LATENTS in wanted:
                yield Rows(LATENTS, _places(made)[wanted[LATENTS] :])
            if VIDEO in wanted or PIXELS in wanted:
                yield from self._film(plan, made, wanted)

    def _film(self, plan: Plan, latents: Tensor, wanted: Wanted) -> Generator[Drawn, None, None]:
        rows, size = deque[Rows](), plan.height * plan.width

        def frames() -> Iterator[Frame]:
            """Each once; its pixels wait in `rows`."""
            for number, frame in enumerate(self._painter.shown(latents)):
                skipped = max(wanted.get(PIXELS, plan.frames * size) - number * size, 0)
                if skipped < size:
                    rows.append(Rows(PIXELS, frame.reshape(-1, 3)[skipped:]))
                yield frame

        pieces = clips(frames(), plan.rate_hz, wanted[VIDEO]) if VIDEO in wanted else (None for _ in frames())
        for piece in pieces:
            while rows:
                yield rows.popleft()
            if piece is not None:
                yield piece


def check_film(request: DrawRequest, model: str) -> None:
    """Raises BadRequest for a request of something else than a film. model: its name."""
    if request.seconds:
        raise BadRequest("diffusion.duration_s", f"{model} makes films and no sound: leave it out, and give frames")
    if request.media_type not in ("", WEBM):
        raise BadRequest("diffusion.media_type", f"{model} makes {WEBM}: ask for that or leave it out")


def clips(frames: Iterable[Frame], rate_hz: float, first: int) -> Generator[Clip, None, None]:
    """Pieces of a file of the frames, from that one on. Encoded from its beginning also for who has some of it: a file is one stream.
    Raises Failed for frames so large that a piece of one does not fit into a message."""
    place = 0
    for data, count in encode_webm(frames, rate_hz):
        for part, shown in _parts(data, count):
            if place >= first:
                yield Clip(part, WEBM, shown)
            place += shown


def decoded_in_turn(vae: Any, latents: Tensor) -> Iterator[Tensor]:
    """[1, 3, frames, height, width] of each frame of [1, channels, frames, height, width]: what a causal VAE (Wan et al. 2025) makes of
    them together. The past of its convolutions is kept here and not in the VAE, so several films can be decoded in turns."""
    if hasattr(getattr(vae, "_hf_hook", None), "pre_forward"):  # As its `decode` does: where whole models are elsewhere, it is fetched.
        vae._hf_hook.pre_forward(vae)
    past: list[Any] = [None] * vae._cached_conv_counts["decoder"]
    rows = vae.post_quant_conv(latents)
    for number in range(rows.shape[2]):
        made = vae.decoder(rows[:, :, number : number + 1], feat_cache=past, feat_idx=[0], first_chunk=number == 0)
        if vae.config.patch_size is not None:
            made = unpatchify(made, patch_size=vae.config.patch_size)
        yield made.clamp(-1.0, 1.0)


def _places(latents: Tensor) -> NDArray[np.float32]:
    """[frames * height * width, channels]."""
    places: NDArray[np.float32] = latents[0].permute(1, 2, 3, 0).flatten(0, 2).float().cpu().numpy()
    return places


def _parts(data: bytes, frames: int) -> Generator[tuple[bytes, int], None, None]:
    """Of a piece that may be too long for one message, with its frames. Raises Failed for frames so large that one does not fit."""
    count = -(-len(data) // MAX_CLIP_BYTES)
    if count > frames:
        raise Failed(f"{frames} frames of the film have {len(data)} bytes: ask for fewer pixels")
    for number in range(count):
        part = data[number * MAX_CLIP_BYTES : (number + 1) * MAX_CLIP_BYTES]
        yield part, frames - count + 1 if number == count - 1 else 1
