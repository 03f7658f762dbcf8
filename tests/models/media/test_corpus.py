"""A corpus of files: what comes out of each is what FFmpeg's command plays, and what Pillow shows on white; a part is refused where it can
be told from the whole.

Nothing is resized or resampled here, so that the reference can be compared value by value: other tests ask about that.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from helpers import corpus, corpus_films, corpus_sounds, ffmpeg, lengths
from helpers.corpus import CorpusFile
from omnistage.models.media.decoder import MediaDecoder
from omnistage.models.media.results import DecodedFilm
from omnistage.models.media.terms import BadMedia, FilmPreprocessing, PicturePreprocessing, SoundPreprocessing

pytestmark = [ffmpeg.MISSING, pytest.mark.asyncio(loop_scope="module")]

SOUNDS, FILMS, PICTURES = (dict(each.cases()) for each in (corpus_sounds, corpus_films, corpus))
DRAWN_SOUNDS, DRAWN_FILMS, DRAWN_PICTURES = 14, 16, 10
ALL = 1 << 30
AS_STORED = PicturePreprocessing(factor=1, min_pixels=1, max_pixels=ALL)
ALL_FRAMES = FilmPreprocessing(
    factor=1, min_pixels=1, max_pixels=ALL, total_pixels=1 << 40, fps=1e6, min_frames=1, max_frames=1 << 20, frames_multiple=1
)
EDGE_S = 0.06
"""Codecs put silence before and after, and decoders take it away or not: two frames of most."""
LEFT_OUT = 64
"""Samples at the end: fewer than any codec has in a frame."""
EVEN = 0.5
"""The share of the time between two frames by which a frame of a film with an even rate may be off its place."""
CLOSE_S = 0.012
"""Times are rounded in files: those of a GIF to hundredths of a second."""
GAP_S = 0.1
"""FFmpeg's command fills gaps of more than this in a sound, if it is told to."""


async def test_the_corpus_is_large() -> None:
    assert len(SOUNDS) + len(FILMS) + len(PICTURES) >= 300


async def is_refused(sample: CorpusFile, decode: Callable[..., Awaitable[object]], *asked: object) -> bool:
    """Whether it was cut, and is refused as it must be then."""
    if sample.cut:
        with pytest.raises(BadMedia, match=r"cut off|damaged"):
            await decode(sample.file, *asked)
    return bool(sample.cut)


@lengths.some_or_all("case", SOUNDS, DRAWN_SOUNDS)
async def test_a_sound_is_heard_as_ffmpeg_plays_it(case: str, seed: int, shared_decoder: MediaDecoder) -> None:
    name = lengths.draw_of(case, SOUNDS, DRAWN_SOUNDS, "sounds")
    sample = SOUNDS[name](random.Random(f"{seed} {name}"))
    if await is_refused(sample, shared_decoder.sound):
        return
    wanted, rate_hz = ffmpeg.sound(sample.plain)
    if sample.then:
        wanted = np.concatenate([wanted, ffmpeg.sound(sample.then)[0]])
    heard = await shared_decoder.sound(sample.file, SoundPreprocessing(rate_hz))
    same_sound(heard.samples, wanted, rate_hz, sample.alike)


@lengths.some_or_all("case", FILMS, DRAWN_FILMS)
async def test_a_film_is_seen_and_heard_as_ffmpeg_plays_it(case: str, seed: int, shared_decoder: MediaDecoder) -> None:
    name = lengths.draw_of(case, FILMS, DRAWN_FILMS, "films")
    sample = FILMS[name](random.Random(f"{seed} {name}"))
    if await is_refused(sample, shared_decoder.film, ALL_FRAMES):
        return
    wanted = ffmpeg.frames(sample.plain, heard=sample.use_audio)
    if not sample.use_audio:
        same_frames(await shared_decoder.film(sample.file, ALL_FRAMES), wanted, sample)
        return
    heard, rate_hz = ffmpeg.sound(sample.plain, f"aresample=async=1:min_hard_comp={GAP_S}:first_pts=0")
    ask = replace(ALL_FRAMES, use_audio=True, rate_hz=rate_hz)
    film = await shared_decoder.film(sample.file, ask)
    assert film.sound is not None
    same_frames(film, wanted, sample)
    same_sound(film.sound.samples, heard, rate_hz, sample.alike)


@lengths.some_or_all("case", PICTURES, DRAWN_PICTURES)
async def test_a_picture_is_seen_as_pillow_shows_it_on_white(case: str, seed: int, shared_decoder: MediaDecoder) -> None:
    name = lengths.draw_of(case, PICTURES, DRAWN_PICTURES, "pictures")
    sample = PICTURES[name](random.Random(f"{seed} {name}"))
    if await is_refused(sample, shared_decoder.picture, AS_STORED):
        return
    seen = (await shared_decoder.picture(sample.file, AS_STORED)).pixels
    wanted = corpus.on_white(sample.plain)
    assert seen.shape == wanted.shape
    assert np.abs(seen.astype(int) - wanted).max() <= 255 * sample.alike


def same_sound(heard: NDArray[np.float32], wanted: NDArray[np.float32], rate_hz: int, alike: float) -> None:
    """Value by value where nothing was lost; else as long and the same values, as near as decoders are to each other."""
    if not alike:
        assert np.array_equal(heard, np.clip(wanted, -1, 1))
        return
    assert abs(len(heard) - len(wanted)) <= 2 * EDGE_S * rate_hz, (len(heard) / rate_hz, len(wanted) / rate_hz)
    late = later(heard, wanted, round(EDGE_S * rate_hz))
    heard, wanted = heard[max(late, 0) :], wanted[max(-late, 0) :]
    both = min(len(heard), len(wanted))
    assert both
    assert len(wanted) - both <= LEFT_OUT, "heard to its end"
    assert np.abs(heard[:both] - np.clip(wanted[:both], -1, 1)).mean() <= alike, late


def later(heard: NDArray[np.float32], wanted: NDArray[np.float32], most: int) -> int:
    """By how many samples the one comes later than the other: codecs begin with silence, which counts for one alone."""
    size = 1 << (len(heard) + len(wanted)).bit_length()
    alike = np.fft.irfft(np.fft.rfft(heard, size) * np.conj(np.fft.rfft(wanted, size)), size)
    near = np.concatenate([alike[-most:], alike[: most + 1]])
    return int(near.argmax()) - most


def same_frames(film: DecodedFilm, wanted: list[ffmpeg.Frame], sample: CorpusFile) -> None:
    """Each frame is the one that is shown at its place, in the shape in which it is shown. With its sound a film begins with that, if it
    comes first, and shows its first frame so often that sound and pictures are together to half a frame."""
    times = [frame.shown_at for frame in wanted]
    gap = (times[-1] - times[0]) / max(len(times) - 1, 1) or film.frame_s
    again = 0
    if sample.use_audio:
        again = len(film.frames) - len(wanted)
        assert abs(times[0] - again * gap) <= gap / 2 + EDGE_S, "sound and pictures are together"
    assert 0 <= len(film.frames) - len(wanted) - again <= sample.torn
    assert len(film.frames) * film.frame_s == pytest.approx(len(film.frames) * gap, rel=0.1, abs=gap), "lasts as long"
    _, height, width, _ = film.frames.shape
    high, wide, _ = wanted[0].pixels.shape
    assert width / height == pytest.approx(wide * wanted[0].aspect / high, rel=2 / min(height, width)), "as wide as it is shown"
    begin = times[0] - again * gap
    for number, seen in enumerate(film.frames[: len(film.frames) - sample.torn]):
        places = shown(times, gap, begin + number * film.frame_s, number - again)
        least = min(difference(seen, wanted[place], height, width) for place in places)
        assert least <= sample.alike, (number, least)


def shown(times: list[float], gap: float, moment: float, number: int) -> Iterator[int]:
    """The frame of that number, in a film with an even rate; else the one that is shown at that moment, or both of two that change just
    then."""
    off = max(abs(time - times[0] - place * gap) for place, time in enumerate(times)) / gap
    if off < EVEN + 0.05:
        yield min(max(number, 0), len(times) - 1)
    if off > EVEN - 0.05:
        for close in (-CLOSE_S, CLOSE_S):
            yield max((place for place, time in enumerate(times) if time <= moment + close), default=0)


def difference(seen: NDArray[np.uint8], wanted: ffmpeg.Frame, height: int, width: int) -> float:
    """The mean difference, as a share of full scale."""
    resized = np.asarray(Image.fromarray(wanted.pixels).resize((width, height), Image.Resampling.BICUBIC))
    return float(np.abs(resized.astype(int) - seen).mean() / 255)
