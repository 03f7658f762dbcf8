"""Sounds: the same samples as Transformers' `load_audio` gives, and right by themselves."""

from __future__ import annotations

import base64

import numpy as np
import pytest
from numpy.typing import NDArray
from transformers.audio_utils import load_audio

from helpers import media_files
from omnistage.models.media.decoder import MediaDecoder
from omnistage.models.media.terms import BadMedia, SoundPreprocessing

EXACT = [
    ("WAV", "PCM_16", 16_000, 1),
    ("WAV", "FLOAT", 48_000, 2),
    ("WAV", "PCM_U8", 8_000, 1),
    ("WAV", "PCM_24", 44_100, 6),
    ("FLAC", "PCM_16", 44_100, 2),
    ("FLAC", "PCM_24", 48_000, 1),
    ("WAV", "ULAW", 8_000, 1),
    ("WAV", "PCM_32", 16_000, 1),
    ("AU", "DOUBLE", 16_000, 2),
    ("CAF", "ALAC_16", 24_000, 1),
    ("RF64", "PCM_16", 16_000, 1),
    ("AIFF", "PCM_16", 11_025, 1),
    ("W64", "PCM_16", 96_000, 1),
]
LOSSY = [
    ("OGG", "VORBIS", 22_050, 1),
    ("OGG", "OPUS", 48_000, 2),
    ("MP3", None, 44_100, 2),
]
FFMPEG = [
    ("mp4", "aac", 48_000),
    ("adts", "aac", 44_100),
    ("matroska", "aac", 22_050),
    ("webm", "libopus", 48_000),
    ("mov", "alac", 44_100),
    ("avi", "libmp3lame", 32_000),
    ("mpegts", "mp2", 48_000),
    ("ac3", "ac3", 48_000),
]


async def test_what_loses_nothing_has_the_bits_of_the_published_loader(decoder: MediaDecoder, seed: int) -> None:
    for number, (form, subtype, source_hz, channels) in enumerate(EXACT):
        rate_hz = (16_000, 24_000)[number % 3 == 2]
        data = media_files.sound(seed, 1.3, source_hz, channels, form, subtype)
        sound = await decoder.sound(data, SoundPreprocessing(rate_hz))
        assert np.array_equal(sound.samples, published(data, rate_hz)), (form, subtype)
        assert sound.rate_hz == rate_hz


async def test_what_loses_something_is_as_the_published_loader_has_it(decoder: MediaDecoder, seed: int) -> None:
    """Other decoders round otherwise."""
    for form, subtype, source_hz, channels in LOSSY:
        data = media_files.sound(seed, 1.3, source_hz, channels, form, subtype)
        assert (await decoder.sound(data)).samples == pytest.approx(published(data, 16_000), abs=1e-5), (form, subtype)


async def test_sound_above_full_scale_keeps_its_shape(decoder: MediaDecoder, seed: int) -> None:
    for source_hz in (16_000, 44_100):
        data = media_files.written(media_files.samples(seed, 1.0, source_hz) * 6, source_hz, "WAV", "FLOAT")
        samples = (await decoder.sound(data)).samples
        assert np.abs(samples).max() > 1.5
        assert np.array_equal(samples, published(data, 16_000))


async def test_whole_numbers_in_floats_are_refused_with_what_to_do(decoder: MediaDecoder, seed: int) -> None:
    for form, subtype in [("WAV", "FLOAT"), ("AU", "DOUBLE")]:
        data = media_files.written(media_files.samples(seed) * 32768, 16_000, form, subtype)
        with pytest.raises(BadMedia, match=r"a sample of it is .*, and full scale is 1: divide all by 32768"):
            await decoder.sound(data)


def published(data: bytes, rate_hz: int) -> NDArray[np.float32]:
    """The samples that Transformers makes of a file."""
    samples: NDArray[np.float32] = load_audio(base64.b64encode(data).decode(), rate_hz, backend="soundfile")
    return samples


async def test_what_ffmpeg_reads_is_the_sound_that_was_written(decoder: MediaDecoder, seed: int) -> None:
    """Codecs lose something and put silence before and after."""
    original = media_files.samples(seed, 2.0)[:, 0]
    for form, codec, source_hz in FFMPEG:
        data = media_files.film(seed, 0, form=form, codec="", sound_codec=codec, sound_s=2.0, sound_rate_hz=source_hz)
        samples = (await decoder.sound(data)).samples
        assert abs(len(samples) - len(original)) <= 4096, (form, codec)
        alike = np.correlate(samples, original[4000:12_000], "valid").max() / np.sum(original[4000:12_000] ** 2)
        assert alike == pytest.approx(1.0, abs=0.2), (form, codec)


async def test_a_tone_keeps_its_height_and_the_mean_is_taken_of_the_channels(decoder: MediaDecoder) -> None:
    for rate_hz in (8_000, 44_100, 192_000):
        at = np.arange(rate_hz) / rate_hz
        left = 0.5 * np.sin(2 * np.pi * 1234.0 * at)
        data = media_files.written(np.stack([left, np.zeros_like(left)], axis=1), rate_hz)
        samples = (await decoder.sound(data)).samples
        assert samples.shape == (16_000,)
        inside = np.arange(1000, 15_000)
        assert samples[inside] == pytest.approx(0.25 * np.sin(2 * np.pi * 1234.0 * inside / 16_000), abs=2e-4)
