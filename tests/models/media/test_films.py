"""Films: which frames are taken, and that each is the picture that it was."""

from __future__ import annotations

import io
import math
import random

import av
import numpy as np
import pytest
import torch
from transformers.image_utils import PILImageResampling, SizeDict
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from helpers import media_files
from omnistage.models.media.decoder import MediaDecoder
from omnistage.models.media.terms import BadMedia, FilmPreprocessing, sample_frames

SMALL = FilmPreprocessing(min_pixels=4 * 784, max_pixels=16 * 784)
FORMATS = [
    ("mp4", "libx264", "yuv420p"),
    ("mov", "mjpeg", "yuvj420p"),
    ("matroska", "libx264", "yuv420p"),
    ("webm", "libvpx-vp9", "yuv420p"),
    ("webm", "libvpx", "yuv420p"),
    ("avi", "mpeg4", "yuv420p"),
    ("mpegts", "mpeg2video", "yuv420p"),
    ("mpegts", "libx264", "yuv420p"),
    ("flv", "flv1", "yuv420p"),
    ("gif", "gif", "rgb8"),
]
SINGLE_PRECISION = 16_384
"""Frames up to which Transformers' sampling has the accuracy to tell one from the next."""


def published_sample(frames: int, rate_hz: float) -> list[int]:
    """The frames that `Qwen2VLVideoProcessor.sample_frames` takes for 2 frames a second; its own class needs torchvision. It may return one
    too many."""
    most = math.floor(min(768, frames) / 2) * 2
    count = math.floor(min(max(frames / rate_hz * 2.0, 4), most, frames) / 2) * 2
    taken: list[int] = torch.arange(0, frames, frames / count).int().tolist()
    return taken[:count]


def test_frames_are_taken_as_the_published_processor_takes_them(seed: int) -> None:
    chance = random.Random(seed)
    for frames in [*range(2, 300), *(chance.randrange(300, 40_000) for _ in range(1000))]:
        rate_hz = chance.choice([10, 24_000 / 1001, 25, 29.97, 30, 60, chance.uniform(1, 120)])
        ours, theirs = sample_frames(frames, rate_hz, FilmPreprocessing()), published_sample(frames, rate_hz)
        if frames <= SINGLE_PRECISION:
            assert ours == theirs, (frames, rate_hz)
        else:
            assert np.abs(np.subtract(ours, theirs)).max() <= 1


async def test_every_format_gives_the_frames_that_were_to_be_taken(decoder: MediaDecoder) -> None:
    for form, codec, pixel_format in FORMATS:
        data = media_files.film(0, 45, form=form, codec=codec, pixel_format=pixel_format, rate_hz=10, numbered=True)
        film = await decoder.film(data, SMALL)
        wanted = sample_frames(45, 10, SMALL)
        assert len(wanted) == 8
        assert media_files.numbers(film.frames) == wanted, (form, codec)
        assert film.frame_s == pytest.approx(4.5 / 8, rel=0.01), (form, codec)


async def test_each_frame_has_the_bits_that_the_published_processor_makes_of_it(decoder: MediaDecoder, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(4):
        height, width = (2 * chance.randint(24, 150) for _ in range(2))
        frames = chance.randint(4, 40)
        ask = FilmPreprocessing(total_pixels=chance.choice([2000 * 784, 300 * 784]), max_pixels=300 * 784)
        data = media_files.film(seed, frames, height, width, rate_hz=8)
        with av.open(io.BytesIO(data), mode="r") as container:
            decoded = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        taken = sample_frames(frames, 8, ask)
        share = min(ask.max_pixels, ask.total_pixels * 2 // len(taken))
        size = SizeDict(shortest_edge=ask.min_pixels, longest_edge=max(share, int(ask.min_pixels * 1.05)))
        resize = Qwen2VLImageProcessorPil().resize
        planes = np.stack([resize(np.moveaxis(decoded[one], -1, 0), size, PILImageResampling.BICUBIC, factor=28) for one in taken])
        assert np.array_equal((await decoder.film(data, ask)).frames, np.moveaxis(planes, 1, -1))


async def test_a_film_without_a_rate_is_sampled_by_time(decoder: MediaDecoder) -> None:
    """Ten frames in the first second, then one for nine seconds, then ten in a second."""
    times = [100 * number for number in range(10)] + [10_000 + 100 * number for number in range(10)]
    film = await decoder.film(media_files.film(0, 20, form="matroska", times=times, numbered=True), SMALL)
    mean_gap_s = 10.9 / 19
    assert film.frame_s == pytest.approx(20 * mean_gap_s / len(film.frames), rel=0.01)
    moments = [number * film.frame_s * 1000 for number in range(len(film.frames))]
    assert media_files.numbers(film.frames) == [max(n for n, time in enumerate(times) if time <= moment) for moment in moments]


async def test_a_film_of_few_frames_gives_an_even_number(decoder: MediaDecoder) -> None:
    for frames, taken in {1: [0, 0], 2: [0, 1], 3: [0, 1], 4: [0, 1, 2, 3], 5: [0, 1, 2, 3]}.items():
        film = await decoder.film(media_files.film(0, frames, numbered=True, rate_hz=30), SMALL)
        assert media_files.numbers(film.frames) == taken


async def test_the_sound_of_a_film_comes_with_it_when_asked_for(decoder: MediaDecoder, seed: int) -> None:
    data = media_files.film(seed, 20, sound_s=2.0)
    asked = FilmPreprocessing(min_pixels=784, max_pixels=16 * 784, use_audio=True)
    film = await decoder.film(data, asked)
    assert film.sound is not None
    only = media_files.film(seed, 0, codec="", sound_s=2.0)
    assert np.array_equal(film.sound.samples, (await decoder.sound(only)).samples)
    assert (await decoder.film(data, SMALL)).sound is None
    with pytest.raises(BadMedia, match="no sound in it: ask without use_audio"):
        await decoder.film(media_files.film(seed, 20), asked)
