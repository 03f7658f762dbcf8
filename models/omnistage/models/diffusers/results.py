"""What whole calls of a pipeline return, as products: pictures, a film or sound. Which one, its parameters say."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from diffusers import DiffusionPipeline
from numpy.typing import NDArray
from PIL.Image import Image

from omnistage.models.diffusers.films import VIDEO, Clips, check_film
from omnistage.models.diffusers.output import encoded, parameters
from omnistage.models.diffusers.pictures import IMAGE, check_kind
from omnistage.models.diffusers.plan import Limits, Plan
from omnistage.models.diffusers.sounds import AUDIO, check_sound
from omnistage.models.errors import LoadError
from omnistage.models.interface import (
    Content,
    Drawn,
    DrawRequest,
    Failed,
    Picture,
    PortSpec,
    Sound,
    Wanted,
)
from omnistage.models.steps.product import Product

COUNTS = ("num_frames", "video_length")
"""The first of them that a pipeline has is how many frames its film has."""
LENGTHS = ("audio_length_in_s", "audio_end_in_s", "audio_duration_s", "audio_duration", "duration")
"""The same of the seconds of its sound."""
RATES = ("frame_rate", "fps")
USUAL_RATE_HZ = 16.0
"""Frames a second of a pipeline that does not say; that of Wan."""
SOUND_RATES = ("sampling_rate", "sample_rate")
"""Of a VAE or vocoder: samples a second."""
USUAL_SECONDS, MAX_SECONDS = 5.0, 600.0
USUAL_FRAMES, MAX_FRAMES = 16, 1024
PIECE_S = 0.5
"""Of sound."""


class Results(Product[Plan, Sequence[Any]], Protocol):
    """A product of whole calls; latents are what the call returned for a plan."""

    output_type: str
    """For the pipeline."""

    def applied(self, limits: Limits) -> Limits:
        """The limits of the pipeline with its own."""

    def arguments(self, plan: Plan) -> Mapping[str, Any]:
        """For the call, beside those that all products have."""

    def listed(self, output: Any) -> list[Any]:
        """All results of a call, in the order in which they were asked for. Raises TypeError for an output of something else."""


def results_of(pipe: DiffusionPipeline, takes: Mapping[str, Any], model: str) -> Results:
    """Of a pipeline. takes: parameters of its call. model: its name, for what is told. Raises LoadError for one that makes nothing from
    words."""
    if "prompt" not in takes:
        raise LoadError(f"{type(pipe).__name__} makes nothing from words: it cannot be served here")
    if count := next((name for name in COUNTS if name in takes), None):
        return WholeFilm(pipe, takes, model, count)
    if length := next((name for name in LENGTHS if name in takes), None):
        return WholeSound(pipe, takes, model, length)
    return WholePictures(model)


class WholePictures:
    """Implements `Results`."""

    ports = (PortSpec(IMAGE, Content.IMAGE),)
    output_type = "pil"

    def __init__(self, model: str) -> None:
        self._model = model

    def applied(self, limits: Limits) -> Limits:
        return limits

    def arguments(self, plan: Plan) -> Mapping[str, Any]:
        return {}

    def check(self, request: DrawRequest) -> None:
        check_kind(request, self._model)

    def items(self, plan: Plan) -> Mapping[str, int]:
        return {IMAGE: plan.results}

    def listed(self, output: Any) -> list[Any]:
        return list(_field(output, "images"))

    def decode(self, plan: Plan, latents: Sequence[Image], wanted: Wanted) -> Generator[Drawn, None, None]:
        for number in range(wanted.get(IMAGE, plan.results), plan.results):
            yield Picture(encoded(latents[number], plan.picture_type, parameters(plan, number, self._model)), plan.picture_type)


class WholeFilm:
    """Implements `Results`: one film, as a file that can be played while it comes. count: the parameter of its frames."""

    ports = (PortSpec(VIDEO, Content.VIDEO),)
    output_type = "pil"

    def __init__(self, pipe: DiffusionPipeline, takes: Mapping[str, Any], model: str, count: str) -> None:
        self._model, self._count = model, count
        names = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio")
        self._multiple = next((int(getattr(pipe, name)) for name in names if getattr(pipe, name, None)), 1)
        self._usual = _number(takes[count].default, USUAL_FRAMES)
        self._rate = next((name for name in RATES if name in takes), None)
        self._rate_hz = _number(takes[self._rate].default, USUAL_RATE_HZ) if self._rate else USUAL_RATE_HZ

    def applied(self, limits: Limits) -> Limits:
        frames, multiple = int(self._usual), self._multiple
        return replace(limits, frames=frames, frame_multiple=multiple, max_frames=MAX_FRAMES, max_results=1, rate_hz=self._rate_hz)

    def arguments(self, plan: Plan) -> Mapping[str, Any]:
        """The rate also where the pipeline draws by it."""
        return {self._count: plan.frames, **({self._rate: plan.rate_hz} if self._rate else {})}

    def check(self, request: DrawRequest) -> None:
        check_film(request, self._model)

    def items(self, plan: Plan) -> Mapping[str, int]:
        return {VIDEO: plan.frames}

    def listed(self, output: Any) -> list[Any]:
        return list(_field(output, "frames"))

    def decode(self, plan: Plan, latents: Sequence[Sequence[Image]], wanted: Wanted) -> Generator[Drawn, None, None]:
        (frames,) = latents
        if len(frames) != plan.frames:
            raise Failed(f"the pipeline made {len(frames)} frames, and {plan.frames} were asked for: ask for so many")
        clips = Clips(plan, plan.rate_hz, wanted.get(VIDEO, plan.frames))
        for frame in frames:
            yield from clips.with_frame(np.asarray(frame.convert("RGB")))


class WholeSound:
    """Implements `Results`: sound of a length, at most as long as the model's latents where they say it. length: the parameter of its
    seconds."""

    output_type = "np"

    def __init__(self, pipe: DiffusionPipeline, takes: Mapping[str, Any], model: str, length: str) -> None:
        self._model, self._length = model, length
        vae, vocoder = (getattr(getattr(pipe, name, None), "config", {}) for name in ("vae", "vocoder"))
        self._rate_hz = next((int(config[name]) for config in (vae, vocoder) for name in SOUND_RATES if config.get(name)), 0)
        if not self._rate_hz:
            raise LoadError(f"{type(pipe).__name__} does not say how many samples of its sound are a second: it cannot be served here")
        self._channels = int(vae.get("audio_channels") or 1)
        inner = getattr(getattr(pipe, "transformer", None), "config", {}).get("sample_size")
        hop = getattr(getattr(pipe, "vae", None), "hop_length", None)
        said = _number(getattr(pipe, "max_wav_duration", None), MAX_SECONDS)
        self._most = inner * hop / self._rate_hz if isinstance(inner, int) and hop else said
        self._usual = min(_number(takes[length].default, USUAL_SECONDS), self._most)
        self.ports = (PortSpec(AUDIO, Content.AUDIO, rate_hz=self._rate_hz, width=self._channels),)

    def applied(self, limits: Limits) -> Limits:
        return replace(limits, seconds=self._usual, max_seconds=self._most, max_results=1)

    def arguments(self, plan: Plan) -> Mapping[str, Any]:
        return {self._length: plan.seconds}

    def check(self, request: DrawRequest) -> None:
        check_sound(request, self._model)

    def items(self, plan: Plan) -> Mapping[str, int]:
        return {AUDIO: round(plan.seconds * self._rate_hz)}

    def listed(self, output: Any) -> list[Any]:
        return list(_field(output, "audios"))

    def decode(self, plan: Plan, latents: Sequence[NDArray[np.float32]], wanted: Wanted) -> Generator[Drawn, None, None]:
        """[channels, samples] or [samples]. What is longer than was asked for is cut, what is shorter ends in silence: a model makes whole
        latents."""
        count, (made,) = self.items(plan)[AUDIO], latents
        samples = np.atleast_2d(np.asarray(made, np.float32))[:, :count].clip(-1, 1).T
        samples = np.pad(samples, ((0, count - len(samples)), (0, 0)))
        piece = max(round(PIECE_S * self._rate_hz), 1)
        for place in range(wanted.get(AUDIO, count), count, piece):
            yield Sound(np.ascontiguousarray(samples[place : place + piece]))


def _field(output: Any, name: str) -> Any:
    made = getattr(output, name, None)
    if made is None:
        raise TypeError(f"the pipeline made {type(output).__name__}, which has no {name}")
    return made


def _number(usual: Any, otherwise: float) -> float:
    """A parameter's default, where it is one."""
    return float(usual) if isinstance(usual, int | float) and usual > 0 else float(otherwise)
