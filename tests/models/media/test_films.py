"""Films: which frames are taken, that each is the picture that it was, and that they are shown and heard as their containers say: turned,
mirrored, as wide as they are, trimmed, and all streams on one clock."""

from __future__ import annotations

import io
import math
import random
from dataclasses import replace
from fractions import Fraction
from typing import Any

import av
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from transformers.image_utils import PILImageResampling, SizeDict
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from helpers import media_files
from helpers.corpus_films import with_matrix
from helpers.decoding import decoding
from omnistage.models.media.decoder import MediaDecoder
from omnistage.models.media.terms import BadMedia, FilmPreprocessing, MediaLimits, NoRoom, sample_frames

pytestmark = pytest.mark.asyncio(loop_scope="module")

ALL = FilmPreprocessing(
    factor=1, min_pixels=1, max_pixels=1 << 30, total_pixels=1 << 40, fps=1e6, min_frames=1, max_frames=1 << 20, frames_multiple=1
)
HEARD = replace(ALL, use_audio=True, rate_hz=48_000)
RATE_HZ = 10
MATRICES = {
    (1, 0, 0, 1): lambda one: one,
    (0, 1, -1, 0): lambda one: np.rot90(one, -1),
    (-1, 0, 0, -1): lambda one: np.rot90(one, 2),
    (0, -1, 1, 0): lambda one: np.rot90(one, 1),
    (-1, 0, 0, 1): np.fliplr,
    (1, 0, 0, -1): np.flipud,
    (0, 1, 1, 0): lambda one: one.swapaxes(0, 1),
    (0, -1, -1, 0): lambda one: np.rot90(one, 2).swapaxes(0, 1),
    (0.9999, 0.01, -0.01, 0.9999): lambda one: one,  # held by hand
    (2, 0, 0, -2): np.flipud,  # larger or smaller is nothing to a matrix of turns
    (0, 0, 0, 0): lambda one: one,
}

SMALL = FilmPreprocessing(min_pixels=4 * 784, max_pixels=16 * 784)
FORMATS = [
    *(("mp4", "libx264", "yuv420p"), ("mov", "mjpeg", "yuvj420p"), ("matroska", "libx264", "yuv420p"), ("webm", "libvpx-vp9", "yuv420p")),
    *(("webm", "libvpx", "yuv420p"), ("avi", "mpeg4", "yuv420p"), ("mpegts", "mpeg2video", "yuv420p"), ("mpegts", "libx264", "yuv420p")),
    *(("flv", "flv1", "yuv420p"), ("gif", "gif", "rgb8")),
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


async def test_frames_are_taken_as_the_published_processor_takes_them(seed: int) -> None:
    chance = random.Random(seed)
    for frames in [*range(2, 300), *(chance.randrange(300, 40_000) for _ in range(1000))]:
        rate_hz = chance.choice([10, 24_000 / 1001, 25, 29.97, 30, 60, chance.uniform(1, 120)])
        ours, theirs = sample_frames(frames, rate_hz, FilmPreprocessing()), published_sample(frames, rate_hz)
        if frames <= SINGLE_PRECISION:
            assert ours == theirs, (frames, rate_hz)
        else:
            assert np.abs(np.subtract(ours, theirs)).max() <= 1


async def test_every_format_gives_the_frames_that_were_to_be_taken(shared_decoder: MediaDecoder) -> None:
    for form, codec, pixel_format in FORMATS:
        data = media_files.film(0, 45, form=form, codec=codec, pixel_format=pixel_format, rate_hz=10, numbered=True)
        film = await shared_decoder.film(data, SMALL)
        wanted = sample_frames(45, 10, SMALL)
        assert len(wanted) == 8
        assert media_files.numbers(film.frames) == wanted, (form, codec)
        assert film.frame_s == pytest.approx(4.5 / 8, rel=0.01), (form, codec)


async def test_each_frame_has_the_bits_that_the_published_processor_makes_of_it(shared_decoder: MediaDecoder, seed: int) -> None:
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
        assert np.array_equal((await shared_decoder.film(data, ask)).frames, np.moveaxis(planes, 1, -1))


async def test_a_film_without_a_rate_is_sampled_by_time(shared_decoder: MediaDecoder) -> None:
    """Ten frames in the first second, then one for nine seconds, then ten in a second."""
    times = [100 * number for number in range(10)] + [10_000 + 100 * number for number in range(10)]
    film = await shared_decoder.film(media_files.film(0, 20, form="matroska", times=times, numbered=True), SMALL)
    mean_gap_s = 10.9 / 19
    assert film.frame_s == pytest.approx(20 * mean_gap_s / len(film.frames), rel=0.01)
    moments = [number * film.frame_s * 1000 for number in range(len(film.frames))]
    assert media_files.numbers(film.frames) == [max(n for n, time in enumerate(times) if time <= moment) for moment in moments]


async def test_a_film_of_few_frames_gives_an_even_number(shared_decoder: MediaDecoder) -> None:
    for frames, taken in {1: [0, 0], 2: [0, 1], 3: [0, 1], 4: [0, 1, 2, 3], 5: [0, 1, 2, 3]}.items():
        film = await shared_decoder.film(media_files.film(0, frames, numbered=True, rate_hz=30), SMALL)
        assert media_files.numbers(film.frames) == taken


async def test_the_sound_of_a_film_comes_with_it_when_asked_for(shared_decoder: MediaDecoder, seed: int) -> None:
    data = media_files.film(seed, 20, sound_s=2.0)
    asked = FilmPreprocessing(min_pixels=784, max_pixels=16 * 784, use_audio=True)
    film = await shared_decoder.film(data, asked)
    assert film.sound is not None
    only = media_files.film(seed, 0, codec="", sound_s=2.0)
    assert np.array_equal(film.sound.samples, (await shared_decoder.sound(only)).samples)
    assert (await shared_decoder.film(data, SMALL)).sound is None
    with pytest.raises(BadMedia, match="no sound in it: ask without use_audio"):
        await shared_decoder.film(media_files.film(seed, 20), asked)


# As containers say ------------------------------------------------------------------------------------------------------------------


def film(
    times: list[int],
    *,
    form: str = "matroska",
    codec: str = "mpeg4",
    unit: Fraction = Fraction(1, 1000),
    sound: tuple[int, ...] = (),
    aspect: Fraction | None = None,
    first: int = 0,
) -> bytes:
    """A numbered film whose frames are shown at these times, from the number `first` on. sound: the times, in milliseconds, of parts of a
    tenth of a second of a constant 0.5."""
    file = io.BytesIO()
    with av.open(file, "w", format=form) as container:
        video: Any = container.add_stream(codec, rate=RATE_HZ)
        video.height, video.width, video.pix_fmt = 48, 64, "yuvj420p" if codec == "mjpeg" else "yuv420p"
        if codec == "libx264":
            video.options = {"preset": "ultrafast"}
        video.codec_context.time_base = unit
        if aspect:
            video.codec_context.sample_aspect_ratio = aspect
        audio: Any = container.add_stream("pcm_s16le", rate=48_000, layout="mono") if sound else None
        for number, time in enumerate(times, start=first):
            shown = av.VideoFrame.from_ndarray(media_files.bars(number, 48, 64), format="rgb24")
            shown.pts, shown.time_base = time, unit
            container.mux(video.encode(shown))
        container.mux(video.encode())
        for time in sound:
            block = av.AudioFrame.from_ndarray(np.full((1, 4800), 16_384, np.int16), format="s16", layout="mono")
            block.sample_rate, block.time_base, block.pts = 48_000, Fraction(1, 48_000), time * 48
            container.mux(audio.encode(block))
        if audio is not None:
            container.mux(audio.encode())
    return file.getvalue()


def every(count: int, step: int = 100, begin: int = 0) -> list[int]:
    """Times of so many frames."""
    return [begin + step * number for number in range(count)]


def loud(sound: NDArray[np.float32]) -> list[tuple[float, float]]:
    """From which second to which it is not silent."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], np.abs(sound) > 0.1, [0]]).astype(int)))
    return [(float(begin) / 48_000, float(end) / 48_000) for begin, end in edges.reshape(-1, 2)]


async def test_a_camera_that_was_turned_or_mirrored_is_turned_back(shared_decoder: MediaDecoder, seed: int) -> None:
    data = media_files.film(seed, 3, 48, 80)
    stored = (await shared_decoder.film(data, ALL)).frames
    for matrix, turned in MATRICES.items():
        shown = (await shared_decoder.film(with_matrix(data, matrix), ALL)).frames
        assert np.array_equal(shown, [turned(one) for one in stored]), matrix


async def test_a_camera_that_was_held_askew_is_turned_in_its_own_frame(shared_decoder: MediaDecoder, seed: int) -> None:
    data = media_files.film(seed, 1, 48, 80)
    (stored,) = (await shared_decoder.film(data, ALL)).frames
    cosine, sine = np.cos(np.pi / 6), np.sin(np.pi / 6)
    (shown,) = (await shared_decoder.film(with_matrix(data, (cosine, sine, -sine, cosine)), ALL)).frames
    turned = np.asarray(Image.fromarray(stored).rotate(-30, Image.Resampling.BILINEAR))
    assert np.abs(shown.astype(int) - turned).mean() < 1


@pytest.mark.parametrize(("aspect", "width"), [(Fraction(2, 1), 128), (Fraction(3, 4), 48), (Fraction(1, 1), 64), (Fraction(1, 900), 64)])
async def test_a_film_is_as_wide_as_its_pixels_are(shared_decoder: MediaDecoder, aspect: Fraction, width: int) -> None:
    data = film(every(3), form="mov", aspect=aspect)
    assert (await shared_decoder.film(data, ALL)).frames.shape == (3, 48, width, 3)
    assert (await shared_decoder.film(with_matrix(data, (0, 1, -1, 0)), ALL)).frames.shape == (3, width, 48, 3)


async def test_the_room_for_a_film_is_counted_in_the_shape_in_which_it_is_shown(shared_decoder: MediaDecoder) -> None:
    data = film(every(2), form="mov", aspect=Fraction(2, 1))
    tight = FilmPreprocessing(factor=4, min_pixels=1, max_pixels=1 << 30, min_frames=2, room=(48 // 4) * (128 // 4) - 1)
    with pytest.raises(NoRoom):
        await shared_decoder.film(data, tight)


async def test_what_a_trimmed_film_leaves_out_is_not_shown_and_not_missed(shared_decoder: MediaDecoder) -> None:
    """As `ffmpeg -ss 4 -c copy` writes it: packets from the last whole picture on, and a list that says which are shown."""
    whole = film(every(60), form="mp4")
    cut = io.BytesIO()
    with av.open(io.BytesIO(whole), mode="r") as source, av.open(cut, "w", format="mp4") as container:
        stream = source.streams.video[0]
        copy = container.add_stream_from_template(stream)
        begin = round(4 / (stream.time_base or Fraction(1)))
        packets = [packet for packet in source.demux(stream) if packet.size]
        key = max(number for number, packet in enumerate(packets) if packet.is_keyframe and (packet.pts or 0) <= begin)
        for packet in packets[key:]:
            packet.pts, packet.dts, packet.stream = (packet.pts or 0) - begin, (packet.dts or 0) - begin, copy
            container.mux(packet)
    assert 40 > len(packets[:key]) > 30
    seen = await shared_decoder.film(cut.getvalue(), ALL)
    assert media_files.numbers(seen.frames) == list(range(40, 60))
    assert seen.frame_s == pytest.approx(0.1, rel=0.01)


@pytest.mark.parametrize("codec", ["mpeg4", "libx264", "mjpeg"])
async def test_frames_that_a_recorder_lost_leave_the_time_of_the_others(shared_decoder: MediaDecoder, codec: str) -> None:
    """An AVI has an empty packet for each, and tells no other times."""
    shown = [0, 1, 2, 6, 7, 10, 15, 16, 17, 18]
    seen = await shared_decoder.film(film(shown, form="avi", codec=codec, unit=Fraction(1, RATE_HZ)), ALL)
    assert media_files.numbers(seen.frames) == [
        max(place for place, time in enumerate(shown) if time <= number * seen.frame_s * RATE_HZ + 1e-6) for number in range(len(shown))
    ]
    assert seen.frame_s * len(shown) == pytest.approx((18 + 2) / RATE_HZ, rel=0.05)


async def test_sound_and_pictures_are_on_one_clock(shared_decoder: MediaDecoder) -> None:
    """The film begins with whichever comes first; before its first frame it shows that, before its sound it is silent."""
    for pictures_ms, sound_ms in ((0, 0), (0, 500), (700, 0), (1300, 1500), (90_000, 90_000)):
        data = film(every(8, begin=pictures_ms), sound=tuple(every(8, begin=sound_ms)))
        seen = await shared_decoder.film(data, HEARD)
        begin = min(pictures_ms, sound_ms)
        assert media_files.numbers(seen.frames) == [0] * ((pictures_ms - begin) // 100) + list(range(8)), (pictures_ms, sound_ms)
        assert seen.sound is not None
        late = (sound_ms - begin) / 1000
        (heard,) = loud(seen.sound.samples)
        assert heard == pytest.approx((late, late + 0.8), abs=0.002)
        assert media_files.numbers((await shared_decoder.film(data, ALL)).frames) == list(range(8))


async def test_a_gap_in_the_sound_of_a_film_is_silent(shared_decoder: MediaDecoder) -> None:
    seen = await shared_decoder.film(film(every(20), sound=(0, 100, 200, 1000, 1100)), HEARD)
    assert seen.sound is not None
    (first, second) = loud(seen.sound.samples)
    assert (*first, *second) == pytest.approx((0, 0.3, 1.0, 1.2), abs=0.002)


async def test_joined_films_of_a_format_that_has_no_place_for_them_are_refused(shared_decoder: MediaDecoder) -> None:
    """FFmpeg would show the times of both at once."""
    one = film(every(30))
    assert len((await shared_decoder.film(one, ALL)).frames) == 30
    with pytest.raises(BadMedia, match="its times go back in the middle, as where films were joined: send each of them by itself"):
        await shared_decoder.film(one + one, ALL)


async def test_silence_counts_for_the_limit_of_a_sound() -> None:
    async with decoding(MediaLimits(sound_s=5.0)) as decoder:
        for times in ((6000,), (0, 6000)):
            with pytest.raises(BadMedia, match="its sound lasts 6 s or more, and at most 5 s may be"):
                await decoder.film(film(every(70), sound=times), HEARD)


async def test_recordings_that_were_joined_are_seen_one_after_the_other(shared_decoder: MediaDecoder) -> None:
    """The clock of the second begins anew, or an hour later."""
    for begin in (0, 3_600_000):
        parts = film(every(8), form="mpegts", codec="libx264"), film(every(8, begin=begin), form="mpegts", codec="libx264", first=8)
        seen = await shared_decoder.film(b"".join(parts), ALL)
        assert media_files.numbers(seen.frames) == list(range(16))
        assert seen.frame_s == pytest.approx(0.1, rel=0.05)


async def test_of_several_films_the_one_that_is_meant_is_shown(shared_decoder: MediaDecoder) -> None:
    for meant in (0, 1):
        assert set(media_files.numbers((await shared_decoder.film(_two_films(meant), ALL)).frames)) == {meant + 1}


def _two_films(meant: int) -> bytes:
    """The first shows 1, the second 2."""
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as container:
        streams: list[Any] = [container.add_stream("mpeg4", rate=RATE_HZ) for _ in range(2)]
        for number, stream in enumerate(streams):
            stream.height, stream.width, stream.pix_fmt = 48, 64, "yuv420p"
            stream.disposition = av.stream.Disposition.default if number == meant else av.stream.Disposition(0)
        for _ in range(4):
            for number, stream in enumerate(streams, start=1):
                shown = av.VideoFrame.from_ndarray(media_files.bars(number, 48, 64), format="rgb24")
                container.mux(stream.encode(shown))
        for stream in streams:
            container.mux(stream.encode())
    return file.getvalue()


async def test_a_film_that_lists_more_than_is_there_was_cut_off(shared_decoder: MediaDecoder) -> None:
    """Also where so little is missing that sizes in headers could be a little wrong."""
    data = media_files.film(1, 30)
    at = data.index(b"moov") - 4
    size = int.from_bytes(data[at : at + 4])
    # The list in front of what it lists, as for the web: places move by its size.
    moov = _moved(data[at : at + size], size)
    film = data[: data.index(b"mdat") - 4] + moov + data[data.index(b"mdat") - 4 : at]
    assert len((await shared_decoder.film(film, ALL)).frames) == 30
    with pytest.raises(BadMedia, match=r"it lists 30 pieces, and 1 of them are missing: it was cut off, send all of it"):
        await shared_decoder.film(film[:-5], ALL)


def _moved(moov: bytes, by: int) -> bytes:
    """With places in the file that are so much further behind."""
    table = moov.index(b"stco") + 8
    count = int.from_bytes(moov[table : table + 4])
    places = [int.from_bytes(moov[table + 4 * index + 4 : table + 4 * index + 8]) + by for index in range(count)]
    return moov[: table + 4] + b"".join(place.to_bytes(4) for place in places) + moov[table + 4 + 4 * count :]
