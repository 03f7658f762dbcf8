"""Reads a checkpoint's settings for preparing pictures and films, and turns sound into the spectrograms that an encoder takes.

Settings are read as Transformers reads them, from files of any of its versions: version 5 writes all parts of a processor into
`processor_config.json`, older versions write one file for each part. A missing value has Transformers' default. If two files disagree, the
value that Transformers uses is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import WhisperFeatureExtractor

from omnistage.models.checkpoint.files import BadCheckpoint, Config, json_object
from omnistage.models.encoders.encoder import Normalization, VisionSizes

FILE = "preprocessor_config.json"
FILM_FILE = "video_preprocessor_config.json"
TOGETHER = "processor_config.json"
"""The file of all parts of a processor: if it has a part, the part's own file is not read."""

MIN_PIXELS, MAX_PIXELS = 56 * 56, 28 * 28 * 1280
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""The defaults of Transformers."""

RESCALED, BICUBIC = 1 / 255, 3
FILM_MIN_SQUARES, FILM_MAX_SQUARES = 128, 768
"""Bounds of one frame of a film, in squares of `VisionSizes.film_square`, as the published processors have them in their code. The film's
own file is not read for them."""

FILM_RATE_HZ = 2.0
"""Number of frames that are used of each second of a film, as in the published processors."""


@dataclass(frozen=True, slots=True)
class PictureSettings:
    """How pictures and films are prepared. min_pixels, max_pixels: bounds of the number of pixels of a resized picture. film_min_pixels,
    film_max_pixels: of a resized frame of a film. colours: normalization of the values."""

    min_pixels: int
    max_pixels: int
    colours: Normalization
    film_min_pixels: int
    film_max_pixels: int


def read_pictures(directory: Path, vision: VisionSizes) -> PictureSettings:
    """Read the settings of a checkpoint. vision: how the model cuts frames. Raises BadCheckpoint for a file that does not fit the model."""
    values = processor_part(directory, "image_processor", FILE)
    if values is None:
        raise BadCheckpoint(f"{directory} has neither {FILE} nor {TOGETHER} with an 'image_processor': give the whole folder")
    colours = _colours(values, vision)
    films = processor_part(directory, "video_processor", FILM_FILE)
    if films is not None and _colours(films, vision) != colours:
        raise BadCheckpoint(f"{films.place}: films have another 'image_mean' or 'image_std' than pictures, which is not supported")
    min_pixels = _pixels(values, "min_pixels", "shortest_edge", MIN_PIXELS)
    max_pixels = _pixels(values, "max_pixels", "longest_edge", MAX_PIXELS)
    # A user who loads a processor with other limits and saves it has them in this file too, and Transformers then uses them for all
    # pictures.
    path = directory / "tokenizer_config.json"
    tokenizer_config = Config(json_object(path) if path.is_file() else {}, str(path))
    square = vision.film_square**2
    settings = PictureSettings(
        tokenizer_config.value("min_pixels", int, min_pixels),
        tokenizer_config.value("max_pixels", int, max_pixels),
        colours,
        tokenizer_config.value("min_pixels", int, FILM_MIN_SQUARES * square),
        tokenizer_config.value("max_pixels", int, FILM_MAX_SQUARES * square),
    )
    for min_pixels, max_pixels in ((settings.min_pixels, settings.max_pixels), (settings.film_min_pixels, settings.film_max_pixels)):
        if not 1 <= min_pixels <= max_pixels:
            problem = (
                f"'min_pixels' is {min_pixels} and 'max_pixels' {max_pixels}: both must be above 0, and the first no more than the second"
            )
            raise BadCheckpoint(f"{values.place}, or {path}: {problem}")
    return settings


def processor_part(directory: Path, part: str, file: str) -> Config | None:
    """A checkpoint's values for one part of its processor; None: it has none. part: key in the file of all parts. file: the part's own
    file."""
    path = directory / TOGETHER
    if path.is_file() and (together := Config(json_object(path), str(path))).has(part):
        return together.section(part)
    path = directory / file
    return Config(json_object(path), str(path)) if path.is_file() else None


def _colours(values: Config, vision: VisionSizes) -> Normalization:
    """The normalization of colours. Raises BadCheckpoint if the checkpoint wants pictures prepared in a way that is not supported."""
    for name, expected in (("patch_size", vision.patch_size), ("temporal_patch_size", vision.frames), ("merge_size", vision.merge)):
        if (value := values.value(name, int, expected)) != expected:
            raise BadCheckpoint(f"{values.place}: {name!r} is {value}, the model was made for {expected}")
    for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if not values.value(name, bool, True):
            raise BadCheckpoint(f"{values.place}: {name!r} is false, which is not supported")
    if abs(values.value("rescale_factor", float, RESCALED) - RESCALED) > 1e-9 or values.value("resample", int, BICUBIC) != BICUBIC:
        raise BadCheckpoint(f"{values.place}: only 'resample' {BICUBIC} and 'rescale_factor' 1/255 are supported")
    mean = values.values("image_mean", float) if values.has("image_mean") else MEAN
    std = values.values("image_std", float) if values.has("image_std") else STD
    if len(mean) != vision.channels or len(std) != vision.channels or min(std) <= 0:
        raise BadCheckpoint(f"{values.place}: 'image_mean' and 'image_std' must be {vision.channels} numbers each, the latter above 0")
    return Normalization(mean, std)


def _pixels(values: Config, name: str, edge: str, default: int) -> int:
    """A bound in pixels. Older configs have it as `name`, newer configs in the object `size`, as `edge` or as `name`; `edge` wins. default:
    returned if the config has none of them."""
    if values.has(name) or not values.has("size"):
        return values.value(name, int, default)
    size = values.section("size")
    key = name if size.has(name) and not size.has(edge) else edge
    return size.value(key, int)


PUBLISHED = {"sampling_rate": 16_000, "hop_length": 160, "n_fft": 400}
"""Numbers of samples: in a second, from one frame to the next, and in a window. All encoders here were trained with these numbers."""

USUAL_BINS = 80
"""Number of mel bins by default, as in Transformers."""


class Spectrograms:
    """Log-mel spectrograms, made by Transformers' own extractor, of each sound as the published processor makes them of a sound alone."""

    def __init__(self, directory: Path, mel_bins: int, *, adds_silence: bool) -> None:
        """directory: the checkpoint. mel_bins: bins that the model was made for. adds_silence: whether silence follows a sound: the
        processor of Qwen2.5-Omni adds it up to 300 s, that of Qwen3-Omni adds none. Without silence the sound is mirrored at its end, and a
        rest that is shorter than a frame is dropped. Raises BadCheckpoint."""
        values = processor_part(directory, "feature_extractor", FILE)
        if values is None:
            raise BadCheckpoint(f"{directory} has neither {FILE} nor {TOGETHER} with a 'feature_extractor': give the whole folder")
        if (bins := values.value("feature_size", int, USUAL_BINS)) != mel_bins:
            raise BadCheckpoint(f"{values.place}: {bins} mel bins, the model was made for {mel_bins}")
        for name, published in PUBLISHED.items():
            if (value := values.value(name, int, published)) != published:
                raise BadCheckpoint(f"{values.place}: {name!r} is {value}, and only the published {published} is supported")
        if values.value("dither", float, 0.0):
            raise BadCheckpoint(f"{values.place}: 'dither' is not 0: a sound would be another one each time")
        self.extractor = WhisperFeatureExtractor(mel_bins, **PUBLISHED)  # type: ignore[no-untyped-call]
        self.sample_rate_hz, self._adds_silence = PUBLISHED["sampling_rate"], adds_silence

    def frames(self, samples: int) -> int:
        """Number of frames of a sound with this many samples."""
        hop = int(self.extractor.hop_length)
        return -(-samples // hop) if self._adds_silence else samples // hop

    def __call__(self, samples: NDArray[np.float32]) -> torch.Tensor:
        """The spectrogram of one sound, float32 [frames, mel_bins]. samples: [n], at `sample_rate_hz`.

        Where silence follows, the extractor gets a little of it, which gives the same frames as much of it."""
        hop, frames = int(self.extractor.hop_length), self.frames(len(samples))
        if self._adds_silence:
            silence_frames = int(self.extractor.n_fft) // hop + 1
            samples = np.pad(samples, (0, (frames + silence_frames) * hop - len(samples)))
        features = self.extractor(samples, sampling_rate=self.sample_rate_hz, truncation=False, padding="do_not_pad", return_tensors="np")
        return torch.from_numpy(np.ascontiguousarray(features["input_features"][0, :, :frames].T))
