"""The products of the toy film maker: pictures in layers and films, from its latents, and sound."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from omnistage.models.interface import (
    MAX_CLIP_BYTES,
    BadRequest,
    Clip,
    Content,
    Drawn,
    DrawRequest,
    EncodedPicture,
    PortSpec,
    Sound,
    Wanted,
)
from omnistage.models.toy import formulas
from omnistage.models.toy.files import png

NAME = "toy-film"
IMAGE, VIDEO, AUDIO = "image", "video", "audio"
STILL, FILM, SOUND = "image/png", "video/x-grey8", "audio/x-pcm16"
"""The types that a request may name. A film is one byte for each pixel of each frame, without a header."""

MAX_SIDE, MAX_FRAMES, MAX_SECONDS = 256, 64, 10

Latent = NDArray[np.int64]
"""[planes, height, width]."""


@dataclass(frozen=True, slots=True)
class ToyScene:
    """A request with its defaults filled in. width, height: in pixels. steer: the number that each step adds, see formulas.steer."""

    request: DrawRequest
    width: int
    height: int
    steps: int
    steer: int

    @property
    def planes(self) -> int:
        """Planes of the latent: frames of the film, or pictures."""
        return self.request.frames or self.request.results


def check_most(field: str, value: float, maximum: float) -> None:
    if value > maximum:
        raise BadRequest(f"diffusion.{field}", f"{NAME} makes at most {maximum}")


@dataclass(frozen=True, slots=True)
class ToyPictures:
    """Implements `Product`: one or more pictures, each in layers."""

    ports = (PortSpec(IMAGE, Content.IMAGE),)
    media_type = STILL

    def check(self, request: DrawRequest) -> None:
        check_most("width", request.width, MAX_SIDE)
        check_most("height", request.height, MAX_SIDE)

    def items(self, scene: ToyScene) -> Mapping[str, int]:
        return {IMAGE: scene.request.results * max(scene.request.layers, 1)}

    def decode(self, scene: ToyScene, latent: Latent, ports: Wanted) -> Generator[Drawn, None, None]:
        count, layers = self.items(scene)[IMAGE], max(scene.request.layers, 1)
        for number in range(ports.get(IMAGE, count), count):
            result, layer = divmod(number, layers)
            yield EncodedPicture(png(formulas.layer(latent[result], layer)), STILL, layer)


@dataclass(frozen=True, slots=True)
class ToyFilm:
    """Implements `Product`: a film. cut: returns how many frames the next piece has."""

    cut: Callable[[], int]
    ports = (PortSpec(VIDEO, Content.VIDEO),)
    media_type = FILM

    def check(self, request: DrawRequest) -> None:
        check_most("width", request.width, MAX_SIDE)
        check_most("height", request.height, MAX_SIDE)
        check_most("frames", request.frames, MAX_FRAMES)
        if request.layers or request.results > 1:
            raise BadRequest("diffusion.frames", "one film at a time, without layers: leave results and layers out")

    def items(self, scene: ToyScene) -> Mapping[str, int]:
        return {VIDEO: scene.request.frames}

    def decode(self, scene: ToyScene, latent: Latent, ports: Wanted) -> Generator[Drawn, None, None]:
        limit, frames = MAX_CLIP_BYTES // (scene.height * scene.width), scene.request.frames
        frame = ports.get(VIDEO, frames)
        while frame < frames:
            part = latent[frame : frame + min(self.cut(), limit)].astype(np.uint8)
            frame += len(part)
            yield Clip(part.tobytes(), FILM, len(part))


@dataclass(frozen=True, slots=True)
class Noise:
    """Implements `Product`: sound. cut: returns how many thousand samples the next piece has."""

    cut: Callable[[], int]
    ports = (PortSpec(AUDIO, Content.AUDIO, rate_hz=formulas.SAMPLE_RATE_HZ, width=1),)
    media_type = SOUND

    def check(self, request: DrawRequest) -> None:
        check_most("duration_s", request.seconds, MAX_SECONDS)

    def items(self, scene: ToyScene) -> Mapping[str, int]:
        return {AUDIO: round(scene.request.seconds * formulas.SAMPLE_RATE_HZ)}

    def decode(self, scene: ToyScene, latent: Latent, ports: Wanted) -> Generator[Drawn, None, None]:
        samples = self.items(scene)[AUDIO]
        sample = ports.get(AUDIO, samples)
        while sample < samples:
            count = min(1000 * self.cut(), samples - sample)
            yield Sound(formulas.film_sound(scene.request.seed, scene.steer, sample, count))
            sample += count
