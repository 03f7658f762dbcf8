"""Builds what turns media into rows, with the encoders of a family."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from omnistage.models.common.encoders.encoder import AudioEncoder, MediaSizes, VisionEncoder
from omnistage.models.common.encoders.features import MediumExtent, Pixels
from omnistage.models.common.encoders.patches import Normalization, grid_of, patches_of
from omnistage.models.common.encoders.pictures import FILM_RATE_HZ, PictureSettings
from omnistage.models.common.encoders.queue import EncoderQueue
from omnistage.models.common.encoders.reader import MediaPreprocessing, PictureEncoding, SoundEncoding
from omnistage.models.common.encoders.spectrograms import Spectrograms
from omnistage.models.common.worker import Worker
from omnistage.models.media.preprocessing import FilmPreprocessing, PicturePreprocessing, SoundPreprocessing


def preprocessing_of(
    config: MediaSizes, pictures: PictureSettings, rate_hz: int, most_rows: int, context: int, film_fps: float = 0.0
) -> MediaPreprocessing:
    """The settings for preparing media for a model. rate_hz: samples in a second for its sound encoder. most_rows, context: see
    `MediaPreprocessing.within`. film_fps: see ThinkerOptions."""
    factor = config.vision.patch_size * config.vision.merge
    film = FilmPreprocessing(
        factor=factor,
        min_pixels=pictures.film_min_pixels,
        max_pixels=pictures.film_max_pixels,
        fps=FILM_RATE_HZ,
        frames_multiple=config.vision.frames,
        rate_hz=rate_hz,
        sound_tokens_hz=config.audio.rows_hz,
        film_fps=film_fps,
    )
    picture = PicturePreprocessing(factor, pictures.min_pixels, pictures.max_pixels)
    return MediaPreprocessing(picture, SoundPreprocessing(rate_hz), film).within(most_rows, context)


def rows_of(extent: MediumExtent, config: MediaSizes) -> int:
    """Number of rows of a prompt that a medium takes, with the two marks around the sound of a film."""
    picture_rows = 0 if extent.grid is None else extent.grid.patches // config.vision.unit
    return picture_rows + extent.sound + 2 * bool(picture_rows and extent.sound)


def encoding_of_pictures(
    worker: Worker, encoder: VisionEncoder, colours: Normalization, *, most_patches: int, together: bool
) -> PictureEncoding:
    """The encoding of pictures and films. A piece in its queue is the frames of one patch, or a whole picture. most_patches: largest number
    of patches in a pass with several pieces. together: whether several pieces may share a pass."""
    encode, config = picture_pass(encoder, colours), encoder.config
    queue = EncoderQueue[Pixels](worker, encode, lambda pixels: grid_of(pixels, config).patches, most_size=most_patches, together=together)
    return PictureEncoding(queue, config.frames, lambda pixels: grid_of(pixels, config))


def encoding_of_sounds(
    worker: Worker, encoder: AudioEncoder, spectrograms: Spectrograms, *, most_frames: int, together: bool
) -> SoundEncoding:
    """The encoding of sounds. most_frames: largest number of spectrogram frames in a pass with several pieces. together: whether several
    pieces may share a pass."""
    queue = EncoderQueue[torch.Tensor](worker, sound_pass(encoder), len, most_size=most_frames, together=together)
    least_ms = encoder.config.least_ms
    return SoundEncoding(queue, encoder.pieces, spectrograms, lambda samples: encoder.rows(spectrograms.frames(samples)), least_ms)


def picture_pass(encoder: VisionEncoder, colours: Normalization) -> Callable[[Sequence[Pixels], Callable[[], None]], list[torch.Tensor]]:
    """The function that runs a pass for an EncoderQueue of pictures: it turns pieces into rows, which it copies to the CPU."""

    def encode(pieces: Sequence[Pixels], between: Callable[[], None]) -> list[torch.Tensor]:
        patches = torch.cat([patches_of(piece, encoder.config, colours) for piece in pieces])
        grids = [grid_of(piece, encoder.config) for piece in pieces]
        return [rows.cpu() for rows in encoder.encode(patches.to(encoder.device, encoder.dtype), grids, between)]

    return encode


def sound_pass(encoder: AudioEncoder) -> Callable[[Sequence[torch.Tensor], Callable[[], None]], list[torch.Tensor]]:
    """The function that runs a pass for an EncoderQueue of sound: it turns pieces into rows, which it copies to the CPU."""

    def encode(pieces: Sequence[torch.Tensor], between: Callable[[], None]) -> list[torch.Tensor]:
        return [rows.cpu() for rows in encoder.encode([piece.to(encoder.device, encoder.dtype) for piece in pieces], between)]

    return encode
