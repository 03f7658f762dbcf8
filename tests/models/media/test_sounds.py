"""Sounds: the same samples as Transformers' `load_audio` gives, and right by themselves."""

from __future__ import annotations

import base64

import numpy as np
import pytest
from transformers.audio_utils import load_audio

from helpers import media_files
from omnistage.models.media.decoder import MediaDecoder
from omnistage.models.media.preprocessing import SoundPreprocessing

LIBSNDFILE = [
    ("WAV", "PCM_16", 16_000, 1),
    ("WAV", "FLOAT", 48_000, 2),
    ("WAV", "PCM_U8", 8_000, 1),
    ("WAV", "PCM_24", 44_100, 6),
    ("FLAC", "PCM_16", 44_100, 2),
    ("OGG", "VORBIS", 22_050, 1),
    ("OGG", "OPUS", 48_000, 2),
    ("MP3", None, 44_100, 2),
    ("AIFF", "PCM_16", 11_025, 1),
    ("W64", "PCM_16", 96_000, 1),
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


async def test_what_libsndfile_reads_has_the_bits_of_the_published_loader(decoder: MediaDecoder, seed: int) -> None:
    for number, (form, subtype, source_hz, channels) in enumerate(LIBSNDFILE):
        rate_hz = (16_000, 24_000)[number % 3 == 2]
        data = media_files.sound(seed, 1.3, source_hz, channels, form, subtype)
        sound = await decoder.sound(data, SoundPreprocessing(rate_hz))
        words = base64.b64encode(data).decode()
        assert np.array_equal(sound.samples, np.clip(load_audio(words, rate_hz, backend="soundfile"), -1, 1)), (form, subtype)
        assert sound.rate_hz == rate_hz


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
