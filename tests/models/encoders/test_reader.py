"""The queue of an encoder, in which media take turns, share passes within bounds, and fail alone; and media of requests that are read once
and kept, whatever the sizes of a family: here patches of 10 pixels, and 4 rows a second of sound."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from helpers import media_files
from omnistage.models.conversation import Media
from omnistage.models.encoders.encoder import Features, Grid, MediumExtent, Pixels
from omnistage.models.encoders.reader import FILM_SHARE, EncoderQueue, MediaPreprocessing, MediaReader, PictureEncoding, SoundEncoding
from omnistage.models.media.decoder import MediaDecoder
from omnistage.models.media.terms import BadMedia, FilmPreprocessing, NoRoom, PicturePreprocessing, SoundPreprocessing
from omnistage.models.memory import LruCache
from omnistage.models.worker import Worker


class Bad(Exception):
    """A piece that cannot be encoded."""


class Doubling:
    """An encoder of numbers: a row is twice its number; a number below zero cannot be encoded. passes: what each one had."""

    def __init__(self) -> None:
        self.passes: list[list[int]] = []
        self.may_go = threading.Event()
        self.begun = threading.Event()

    def __call__(self, pieces: Sequence[int], between: Callable[[], None]) -> list[torch.Tensor]:
        self.passes.append(list(pieces))
        self.begun.set()
        assert self.may_go.wait(60)
        between()
        if min(pieces) < 0:
            raise Bad(str(min(pieces)))
        return [torch.tensor([[2 * piece]]) for piece in pieces]


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    made = Worker("encoder", 1)
    yield made
    await made.close()


def queue_of(worker: Worker, encode: Doubling, *, most_size: int = 3, together: bool = True) -> EncoderQueue[int]:
    return EncoderQueue(worker, encode, lambda piece: 1, most_size=most_size, together=together)


async def all_of(queue: EncoderQueue[int], encode: Doubling, *media: Sequence[int]) -> list[list[int] | BaseException]:
    """The results of media that wait while the first piece of the first one is computed."""
    tasks = [asyncio.create_task(queue.rows(pieces)) for pieces in media]
    await asyncio.to_thread(encode.begun.wait, 60)
    encode.may_go.set()
    made = await asyncio.gather(*tasks, return_exceptions=True)
    return [each if isinstance(each, BaseException) else [int(rows) for rows in each] for each in made]


@pytest.mark.parametrize("together", [True, False])
async def test_media_take_turns_and_share_passes_only_where_that_is_exact(worker: Worker, together: bool) -> None:
    encode = Doubling()
    long, short, other = [1, 2, 3, 4], [10], [20, 21]
    made = await all_of(queue_of(worker, encode, together=together), encode, long, short, other)
    assert made == [[2, 4, 6, 8], [20], [40, 42]]
    if together:
        assert encode.passes == [[1, 10, 20], [2, 21, 3], [4]]
    else:
        assert encode.passes == [[1], [10], [20], [2], [21], [3], [4]], "a long one holds nobody up"


async def test_a_pass_is_bounded(worker: Worker) -> None:
    encode = Doubling()
    await all_of(queue_of(worker, encode, most_size=2), encode, [1, 2], [3], [4])
    assert [len(pieces) for pieces in encode.passes] == [2, 2]


async def test_one_that_fails_fails_alone(worker: Worker) -> None:
    """And the next good one works."""
    encode = Doubling()
    queue = queue_of(worker, encode)
    good, bad, other = await all_of(queue, encode, [1, 2], [-1, 5], [3])
    assert good == [2, 4] and other == [6] and isinstance(bad, Bad)
    assert encode.passes[1:4] == [[1], [-1], [3]] and all(5 not in pieces for pieces in encode.passes)
    assert [int(rows) for rows in await queue.rows([7])] == [14]


async def test_what_nobody_waits_for_is_given_up(worker: Worker) -> None:
    encode = Doubling()
    queue = queue_of(worker, encode, together=False)
    left = asyncio.create_task(queue.rows([1, 2, 3]))
    await asyncio.to_thread(encode.begun.wait, 60)
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    encode.may_go.set()
    assert [int(rows) for rows in await queue.rows([8])] == [16]
    assert encode.passes == [[1], [8]], "no other piece was begun"


# Media that are read --------------------------------------------------------------------------------------------------------------------


SIDE, RATE_HZ, HOP = 10, 8000, 1000
"""The side of a patch, which is a row; the rate of sound; and the samples of a frame of its spectrogram, two of which are a row."""


def grid_of(pixels: Pixels) -> Grid:
    frames, height, width, _ = pixels.shape
    return Grid(-(-frames // 2), height // SIDE, width // SIDE)


def rows_of(extent: MediumExtent) -> int:
    return (extent.grid.patches if extent.grid else 0) + extent.sound


class Averages:
    """A row is the mean of a patch, or of two frames of sound. passes: of pictures."""

    def __init__(self) -> None:
        self.passes = 0

    def see(self, pieces: Sequence[Pixels], between: Callable[[], None]) -> list[torch.Tensor]:
        self.passes += 1
        between()
        return [torch.full((grid_of(piece).patches, 1), float(piece.mean())) for piece in pieces]

    def hear(self, pieces: Sequence[torch.Tensor], between: Callable[[], None]) -> list[torch.Tensor]:
        between()
        return [torch.stack([pair.mean(0) for pair in piece.split(2) if len(pair) == 2]) for piece in pieces]


def spectrogram(samples: NDArray[np.float32]) -> torch.Tensor:
    return torch.from_numpy(samples[: len(samples) // HOP * HOP].reshape(-1, HOP)).abs().mean(1, keepdim=True)


@pytest.fixture
def encoder() -> Averages:
    return Averages()


@pytest.fixture
async def reader(worker: Worker, encoder: Averages) -> AsyncIterator[MediaReader]:
    preprocessing = MediaPreprocessing(
        PicturePreprocessing(SIDE, min_pixels=100, max_pixels=100_000),
        SoundPreprocessing(RATE_HZ),
        FilmPreprocessing(factor=SIDE, min_pixels=100, max_pixels=100_000, rate_hz=RATE_HZ, sound_tokens_hz=4.0),
    )
    made = MediaReader(
        MediaDecoder(),
        preprocessing.within(most_rows=200, context=1000),
        PictureEncoding(EncoderQueue(worker, encoder.see, lambda piece: grid_of(piece).patches, most_size=500, together=True), 2, grid_of),
        SoundEncoding(
            EncoderQueue(worker, encoder.hear, len, most_size=100, together=True),
            partial(torch.split, split_size_or_sections=8),
            spectrogram,
            lambda samples: samples // (2 * HOP),
            least_ms=250,
        ),
        rows_of,
        LruCache[Features](10_000),
        b"weights",
    )
    yield made
    await made.close()


async def features(reader: MediaReader, kind: str, data: bytes, room: int = 1000, scope: str = "") -> Features:
    medium = reader.medium(Media(kind, data), data, hashlib.sha256(data).digest(), scope=scope, client="one")
    return await reader.features(medium, room)


async def test_a_picture_is_read_once_for_all_who_ask_in_a_scope(reader: MediaReader, encoder: Averages, seed: int) -> None:
    data = media_files.picture(seed, 60, 80)
    same = await asyncio.gather(*(features(reader, "image/png", data) for _ in range(5)))
    assert encoder.passes == 1 and same[0].extent == MediumExtent(Grid(1, 6, 8)) and same[0].rows.shape == (48, 1)
    assert all(each is same[0] for each in same)
    assert await features(reader, "image/png", data) is same[0] and encoder.passes == 1
    other = await features(reader, "image/png", data, scope="other")
    assert encoder.passes == 2 and torch.equal(other.rows, same[0].rows) and other.digest != same[0].digest


async def test_a_bad_picture_is_read_once_for_all_who_ask_meanwhile(reader: MediaReader, seed: int) -> None:
    """Another picture, said to have the same digest, would be read if the second one were."""
    pictures = (b"no picture", media_files.picture(seed, 60, 80))
    media = [reader.medium(Media("image/png", data), data, bytes(32), scope="", client="one") for data in pictures]
    first, second = await asyncio.gather(*(reader.features(medium, 1000) for medium in media), return_exceptions=True)
    assert isinstance(first, BadMedia) and isinstance(second, BadMedia) and str(first) == str(second)


async def test_what_there_is_no_room_for_is_refused_for_that_request_alone(reader: MediaReader, seed: int) -> None:
    data = media_files.picture(seed, 60, 80)
    for _ in range(2):  # Before it was read, and when its rows are there.
        with pytest.raises(NoRoom, match="takes 48 tokens, and the conversation has room for 47"):
            await features(reader, "image/png", data, room=47)
        assert len((await features(reader, "image/png", data, room=48)).rows) == 48


async def test_sound_becomes_rows_in_pieces_and_one_that_is_too_short_is_told_what_to_do(reader: MediaReader, seed: int) -> None:
    heard = await features(reader, "audio/wav", media_files.sound(seed, 5.0, RATE_HZ))
    assert heard.extent == MediumExtent(sound=20) and heard.rows.shape == (20, 1)
    with pytest.raises(BadMedia, match="the sound lasts 200 ms, too short to hear anything: send 250 ms or more"):
        await features(reader, "audio/wav", media_files.sound(seed, 0.2, RATE_HZ))
    assert len((await features(reader, "audio/wav", media_files.sound(seed, 0.25, RATE_HZ))).rows) == 1


async def test_sizes_are_those_that_the_context_has_room_for(reader: MediaReader, seed: int) -> None:
    """A picture becomes no more rows than one medium may, and a film with its sound leaves some of the context to others."""
    large = await features(reader, "image/png", media_files.picture(seed, 600, 800))
    assert 150 < len(large.rows) <= 200
    film = await features(reader, "video/mp4", media_files.film(seed, 40, rate_hz=4))
    assert film.extent.grid is not None and 0 < rows_of(film.extent) <= 200 < 1000 * FILM_SHARE and film.extent.seconds > 0
