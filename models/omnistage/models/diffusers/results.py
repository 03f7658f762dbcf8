"""Products of the results of whole calls: pictures, a film, or sound. The call's parameters show which; parts, whether a film has sound."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from diffusers import DiffusionPipeline
from numpy.typing import NDArray
from PIL.Image import Image
from torch import Tensor

from omnistage.models.diffusers.films import VIDEO, Clips, check_film
from omnistage.models.diffusers.pictures import IMAGE, check_kind, encode_picture, in_final_size, parameters
from omnistage.models.diffusers.plan import DrawingLimits, DrawingPlan
from omnistage.models.diffusers.sounds import AUDIO, check_sound
from omnistage.models.interface import BadRequest, Content, Drawn, DrawRequest, EncodedPicture, Failed, PortSpec, Sound, Wanted
from omnistage.models.media.film_file import Track
from omnistage.models.reports import LoadError
from omnistage.models.steps.session import Product

COUNTS = ("num_frames", "video_length")
"""The first of these that a pipeline has is the number of its film's frames."""
LENGTHS = ("audio_length_in_s", "audio_end_in_s", "audio_duration_s", "audio_duration", "duration")
"""The first of these that a pipeline has is the length of its sound in seconds."""
RATES = ("frame_rate", "fps")
SOUNDING = "sample_audio"
"""The parameter that decides whether a pipeline makes sound with its film, for pipelines that may be loaded without the parts for sound."""
USUAL_RATE_HZ = 16.0
"""Frames a second of a pipeline that states no rate: the rate of Wan."""
SOUND_RATES = ("output_sampling_rate", "sampling_rate", "sample_rate")
"""Names in the config of a VAE or vocoder: samples a second."""
MAX_CHANNELS = 2
"""The limit of channels of the sound of a film, in its file."""
USUAL_SECONDS, MAX_SECONDS = 5.0, 600.0
MAX_FRAMES = 1024
PIECE_S = 0.5
"""Seconds of a piece of sound."""


class Results(Product[DrawingPlan, Sequence[Any]], Protocol):
    """A product of whole calls; its latents are the call's results for a plan."""

    output_type: str
    """The output type that the pipeline is asked for."""

    def applied(self, limits: DrawingLimits) -> DrawingLimits:
        """The limits of the pipeline, changed for this product."""

    def arguments(self, plan: DrawingPlan) -> Mapping[str, Any]:
        """The arguments of the call, apart from the arguments that all products have."""

    def listed(self, output: Any) -> list[Any]:
        """All results in the return value of a call, in the order of the request. Raises TypeError for a value of another kind."""


def results_of(pipe: DiffusionPipeline, takes: Mapping[str, Any], model: str) -> Results:
    """The product of a pipeline. takes: parameters of its call. model: its name. Raises LoadError if it makes nothing from words."""
    if "prompt" not in takes:
        raise LoadError(f"{type(pipe).__name__} makes nothing from words: it cannot be served here")
    if count := next((name for name in COUNTS if name in takes), None):
        return WholeFilm(pipe, takes, model, count)
    if length := next((name for name in LENGTHS if name in takes), None):
        return WholeSound(pipe, takes, model, length)
    return WholePictures(model)


class WholePictures:
    """Pictures as the results of whole calls; implements `Results`."""

    ports = (PortSpec(IMAGE, Content.IMAGE),)
    output_type = "pil"

    def __init__(self, model: str) -> None:
        self._model = model

    def applied(self, limits: DrawingLimits) -> DrawingLimits:
        return limits

    def arguments(self, plan: DrawingPlan) -> Mapping[str, Any]:
        return {}

    def check(self, request: DrawRequest) -> None:
        check_kind(request, self._model)

    def items(self, plan: DrawingPlan) -> Mapping[str, int]:
        return {IMAGE: plan.results}

    def listed(self, output: Any) -> list[Any]:
        return list(_field(output, "images"))

    def decode(self, plan: DrawingPlan, latents: Sequence[Image], ports: Wanted) -> Generator[Drawn, None, None]:
        for number in range(ports.get(IMAGE, plan.results), plan.results):
            image, parameter_text = in_final_size(latents[number], plan), parameters(plan, number, self._model)
            yield EncodedPicture(encode_picture(image, plan.picture_type, parameter_text), plan.picture_type)


class WholeFilm:
    """Implements `Results`: one film, as a file that can be played while it comes. If the pipeline has a vocoder, the sound is in the file,
    and on a port of its own too. takes: parameters of the call. count: the parameter for the number of frames."""

    output_type = "pil"

    def __init__(self, pipe: DiffusionPipeline, takes: Mapping[str, Any], model: str, count: str) -> None:
        self._model, self._count = model, count
        names = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio")
        self._multiple = next((int(getattr(pipe, name)) for name in names if getattr(pipe, name, None)), 1)
        self._rate = next((name for name in RATES if name in takes), None)
        self._rate_hz = _number(takes[self._rate].default, USUAL_RATE_HZ) if self._rate else USUAL_RATE_HZ
        frames_by_seconds = 1 + self._multiple * round(USUAL_SECONDS * self._rate_hz / self._multiple)
        self._usual_frames = _number(takes[count].default, frames_by_seconds)
        self._sound = _sound_of_film(pipe)
        self._sound_argument = {SOUNDING: self._sound is not None} if SOUNDING in takes else {}
        self.ports = (PortSpec(VIDEO, Content.VIDEO), *([self._sound] if self._sound else []))

    def applied(self, limits: DrawingLimits) -> DrawingLimits:
        frames, multiple = int(self._usual_frames), self._multiple
        return replace(limits, frames=frames, frame_multiple=multiple, max_frames=MAX_FRAMES, max_results=1, rate_hz=self._rate_hz)

    def arguments(self, plan: DrawingPlan) -> Mapping[str, Any]:
        """The arguments, with the rate if the pipeline draws by it."""
        return {self._count: plan.frames, **({self._rate: plan.rate_hz} if self._rate else {}), **self._sound_argument}

    def check(self, request: DrawRequest) -> None:
        """Raises BadRequest for a request that does not fit a film, or asks for more than MAX_SECONDS of film with sound."""
        check_film(request, self._model)
        seconds = request.seconds or (request.frames or self._usual_frames) / (request.frames_per_second or self._rate_hz)
        if self._sound and seconds > MAX_SECONDS:
            field = "duration_s" if request.seconds else "frames_per_second" if request.frames_per_second else "frames"
            fault = f"{self._model} makes at most {MAX_SECONDS:g} s of film with sound, these are {seconds:g}"
            raise BadRequest(f"diffusion.{field}", f"{fault}: ask for fewer, or for more frames a second")

    def items(self, plan: DrawingPlan) -> Mapping[str, int]:
        """The number of items on each port. The sound is as long as the frames."""
        audio_items = {AUDIO: round(plan.frames / plan.rate_hz * self._sound.rate_hz)} if self._sound else {}
        return {VIDEO: plan.frames, **audio_items}

    def listed(self, output: Any) -> list[Any]:
        films = list(_field(output, "frames"))
        return list(zip(films, _field(output, "audio") if self._sound else [None] * len(films), strict=True))

    def decode(self, plan: DrawingPlan, latents: Sequence[tuple[Sequence[Image], Any]], ports: Wanted) -> Generator[Drawn, None, None]:
        """Yields clips, and then the samples of their frames, so that a reader of both waits for neither. latents: frames and sound."""
        ((frames, sound),) = latents
        if len(frames) != plan.frames:
            raise Failed(f"the pipeline made {len(frames)} frames, and {plan.frames} were asked for: ask for so many")
        rate_hz = round(self._sound.rate_hz) if self._sound else 0
        track = Track(_samples(sound, self._sound.width, self.items(plan)[AUDIO]), rate_hz) if self._sound else None
        clips = Clips(plan, plan.rate_hz, ports[VIDEO], track) if VIDEO in ports else None
        samples, place = (track.samples, ports[AUDIO]) if track and AUDIO in ports else (np.empty((0, 1), np.float32), 0)
        for number, frame in enumerate(frames, 1):
            if clips is not None:
                yield from clips.with_frame(np.asarray(frame.convert("RGB")))
            end = len(samples) * number // len(frames)
            if end > place and (number == len(frames) or end - place >= PIECE_S * rate_hz):
                yield Sound(samples[place:end])
                place = end


class WholeSound:
    """Implements `Results`: sound, no longer than the model's latents. takes: parameters of the call. length: its parameter for seconds."""

    output_type = "np"

    def __init__(self, pipe: DiffusionPipeline, takes: Mapping[str, Any], model: str, length: str) -> None:
        self._model, self._length = model, length
        self._rate_hz = _sound_rate_hz(pipe, ("vae", "vocoder"))
        self._channels = int(_config(pipe, "vae").get("audio_channels") or 1)
        latent_length = getattr(getattr(pipe, "transformer", None), "config", {}).get("sample_size")
        hop = getattr(getattr(pipe, "vae", None), "hop_length", None)
        stated_seconds = _number(getattr(pipe, "max_wav_duration", None), MAX_SECONDS)
        self._max_seconds = latent_length * hop / self._rate_hz if isinstance(latent_length, int) and hop else stated_seconds
        self._usual_seconds = min(_number(takes[length].default, USUAL_SECONDS), self._max_seconds)
        self.ports = (PortSpec(AUDIO, Content.AUDIO, rate_hz=self._rate_hz, width=self._channels),)

    def applied(self, limits: DrawingLimits) -> DrawingLimits:
        return replace(limits, seconds=self._usual_seconds, max_seconds=self._max_seconds, max_results=1)

    def arguments(self, plan: DrawingPlan) -> Mapping[str, Any]:
        return {self._length: plan.seconds}

    def check(self, request: DrawRequest) -> None:
        check_sound(request, self._model)

    def items(self, plan: DrawingPlan) -> Mapping[str, int]:
        return {AUDIO: round(plan.seconds * self._rate_hz)}

    def listed(self, output: Any) -> list[Any]:
        return list(_field(output, "audios"))

    def decode(self, plan: DrawingPlan, latents: Sequence[Any], ports: Wanted) -> Generator[Drawn, None, None]:
        """Yields the samples from the first wanted sample on, in pieces of PIECE_S. latents: the sound."""
        count, (sound,) = self.items(plan)[AUDIO], latents
        samples, piece = _samples(sound, self._channels, count), max(round(PIECE_S * self._rate_hz), 1)
        for place in range(ports.get(AUDIO, count), count, piece):
            yield Sound(samples[place : place + piece])


def _sound_of_film(pipe: DiffusionPipeline) -> PortSpec | None:
    """The port for the sound of a film; None without a vocoder. Raises LoadError for a vocoder with no rate or too many channels."""
    if getattr(pipe, "vocoder", None) is None:
        return None
    rate_hz, channels = _sound_rate_hz(pipe, ("vocoder", "audio_vae")), int(_config(pipe, "vocoder").get("out_channels") or 1)
    if channels > MAX_CHANNELS:
        raise LoadError(f"{type(pipe).__name__} makes films with {channels} channels of sound, and their files have {MAX_CHANNELS} at most")
    return PortSpec(AUDIO, Content.AUDIO, rate_hz=rate_hz, width=channels)


def _sound_rate_hz(pipe: DiffusionPipeline, parts: Sequence[str]) -> int:
    """The samples a second, from the first of these parts that states a rate. Raises LoadError if none does."""
    configs = [_config(pipe, part) for part in parts]
    rate_hz = next((config[name] for config in configs for name in SOUND_RATES if config.get(name) is not None), 0)
    if not isinstance(rate_hz, int) or rate_hz <= 0:
        raise LoadError(f"{type(pipe).__name__} does not say how many samples of its sound are a second: it cannot be served here")
    return rate_hz


def _config(pipe: DiffusionPipeline, part: str) -> Mapping[str, Any]:
    """The config of a part; empty if there is no such part."""
    config: Mapping[str, Any] = getattr(getattr(pipe, part, None), "config", {})
    return config


def _samples(sound: Any, channels: int, count: int) -> NDArray[np.float32]:
    """The sound that a pipeline made, [channels, samples] or [samples], as [count, channels]. Longer sound is cut and shorter sound ends in
    silence: a model makes whole latents. Raises Failed for another number of channels, and for values that are no numbers."""
    rows = np.atleast_2d(sound.float().cpu().numpy() if isinstance(sound, Tensor) else np.asarray(sound, np.float32))[:, :count]
    if len(rows) != channels:
        raise Failed(f"the pipeline made {len(rows)} channels of sound, and its parts say {channels}: it cannot be drawn")
    if not np.isfinite(rows).all():
        raise Failed("the pipeline makes no number of the sound: with these weights it cannot be drawn")
    return np.ascontiguousarray(np.pad(rows.clip(-1, 1).T, ((0, count - rows.shape[1]), (0, 0))))


def _field(output: Any, name: str) -> Any:
    """The results in a pipeline's return value. Raises TypeError if it has no field of that name."""
    results = getattr(output, name, None)
    if results is None:
        raise TypeError(f"the pipeline made {type(output).__name__}, which has no {name}")
    return results


def _number(default: Any, otherwise: float) -> float:
    """A parameter's default, if it is a number above 0; else `otherwise`."""
    return float(default) if isinstance(default, int | float) and default > 0 else float(otherwise)
