"""Reads the media of a request: from the received bytes to the rows that stand for them in a prompt.

bytes --decode (another process)--> pixels, samples --pieces--> encoder (a thread of its own) --> rows, kept by a hash of all input

Encoders do not run in the steps of the engine, but on a thread of their own, which encodes pieces of several media in one pass. A medium is
cut into pieces that do not see each other (the frames of a film, chunks of sound). Waiting media take turns, piece by piece, and every pass
is bounded, so a long medium delays nobody for long.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from omnistage.models.conversation import Media, Streamed
from omnistage.models.encoders.encoder import (
    AudioEncoder,
    Features,
    Grid,
    MediumExtent,
    Normalization,
    Pixels,
    VisionEncoder,
    grid_of,
    patches_of,
)
from omnistage.models.encoders.preparing import FILM_RATE_HZ, PictureSettings, Spectrograms
from omnistage.models.encoders.prompt import ThinkerSizes
from omnistage.models.media.decoder import MediaDecoder, Source, media_places
from omnistage.models.media.results import DecodedSound
from omnistage.models.media.terms import (
    BadMedia,
    Colour,
    FilmPreprocessing,
    NoRoom,
    PicturePreprocessing,
    Preprocessing,
    SoundPreprocessing,
    check_room,
    grown_to,
)
from omnistage.models.memory import LruCache
from omnistage.models.worker import Worker

FILMS, OTHERS = 4, 16
"""Number of films, and of pictures and sounds, that may be read at once, which bounds the pixels and samples in memory."""

FILM_SHARE = 0.75
"""Part of the context that one film with its sound may take, because the question and the answer need the rest."""

MAX_WAITING = 256
"""Number of films, and of pictures and sounds, that may wait to be read."""


@dataclass(frozen=True, slots=True)
class RequestMedium:
    """One medium of a request. kind: image, audio or video. source: its bytes or a file. preprocessing: how the medium is prepared. digest:
    hash of everything from which its rows are made. client: name of the client that sent it."""

    kind: str
    source: Source
    preprocessing: Preprocessing
    digest: bytes
    client: str


@dataclass(slots=True)
class _Reading:
    """A medium that one request is reading now. done: set at the end; other requests for the same medium wait for it. refusal: why the
    medium cannot be read for anybody; empty: no such reason."""

    done: asyncio.Event = field(default_factory=asyncio.Event)
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class PictureEncoding:
    """How pictures and films become rows. queue: encodes pieces of `frames` frames, as many as a patch has. grid: returns the Grid of
    frames."""

    queue: EncoderQueue[Pixels]
    frames: int
    grid: Callable[[Pixels], Grid]


@dataclass(frozen=True, slots=True)
class SoundEncoding:
    """How sound becomes rows. queue: encodes pieces of spectrograms. pieces: cuts a spectrogram into pieces for the queue. spectrogram:
    makes float32 [frames, bins] from samples [n]. rows: returns the number of rows for a number of samples. least_ms: milliseconds of the
    shortest sound with a row."""

    queue: EncoderQueue[torch.Tensor]
    pieces: Callable[[torch.Tensor], Sequence[torch.Tensor]]
    spectrogram: Callable[[NDArray[np.float32]], torch.Tensor]
    rows: Callable[[int], int]
    least_ms: int


@dataclass(frozen=True, slots=True)
class MediaPreprocessing:
    """How media of each kind are prepared."""

    picture: PicturePreprocessing
    sound: SoundPreprocessing
    film: FilmPreprocessing

    def of(self, kind: str, *, use_audio: bool = False, background: Colour | None = None) -> Preprocessing:
        """How a medium of this kind (image, audio or video) is prepared. use_audio: for a film, whether its sound is included. background:
        colour behind transparent parts; None: white."""
        if kind == "image":
            return replace(self.picture, background=background)
        return self.sound if kind == "audio" else replace(self.film, use_audio=use_audio, background=background)

    def within(self, most_rows: int, context: int) -> MediaPreprocessing:
        """The same settings with bounds: one medium has at most `most_rows` rows without its sound, and a film with its sound takes at most
        FILM_SHARE of the model's `context` rows."""
        picture, film, film_rows = self.picture, self.film, int(context * FILM_SHARE)
        picture_pixels, film_pixels = most_rows * picture.factor**2, most_rows * film.factor**2
        min_pixels = min(picture.min_pixels, grown_to(most_rows, picture.factor))
        bounded_picture = replace(picture, min_pixels=min_pixels, max_pixels=min(picture.max_pixels, picture_pixels))
        bounded_film = replace(
            film,
            min_pixels=min(film.min_pixels, grown_to(most_rows, film.factor)),
            max_pixels=min(film.max_pixels, film_pixels),
            total_pixels=min(film_pixels, film_rows * film.factor**2),
            most_tokens=film_rows,
        )
        return replace(self, picture=bounded_picture, film=bounded_film)


class MediaReader:
    """Reads media for one model. rows_of: returns the number of rows of a prompt that a medium takes. cache: keeps features. digest: hash
    of weights and settings: everything on which rows depend apart from the medium's own bytes. `_read_now`: by digest of the medium."""

    def __init__(
        self,
        decoder: MediaDecoder,
        preprocessing: MediaPreprocessing,
        pictures: PictureEncoding,
        sounds: SoundEncoding,
        rows_of: Callable[[MediumExtent], int],
        cache: LruCache[Features],
        digest: bytes,
    ) -> None:
        self._decoder, self._preprocessing, self._pictures, self._sounds = decoder, preprocessing, pictures, sounds
        self.rows_of, self._cache, self._digest = rows_of, cache, digest
        self._read_now: dict[bytes, _Reading] = {}
        self._film_places, self._other_places = media_places(FILMS, MAX_WAITING), media_places(OTHERS, MAX_WAITING)

    async def close(self) -> None:
        await self._decoder.close()

    def medium(self, part: Media | Streamed, source: Source, sha256: bytes, *, scope: str, client: str) -> RequestMedium:
        """The medium of a part of a request. sha256: hash of its bytes. scope: kept rows are used only for requests of the same scope."""
        ask, scope_bytes = self._preprocessing.of(part.kind, use_audio=part.use_audio, background=part.background), scope.encode()
        hash_parts = (self._digest, len(scope_bytes).to_bytes(8, "big"), scope_bytes, f"{part.kind} {ask} ".encode(), sha256)
        return RequestMedium(part.kind, source, ask, hashlib.sha256(b"".join(hash_parts)).digest(), client)

    def most_bytes(self, kind: str) -> int:
        """Largest number of bytes of one medium of this kind (image, audio or video)."""
        return self._decoder.limits.of(kind)[0]

    async def features(self, medium: RequestMedium, most_rows: int) -> Features:
        """The rows of a medium. most_rows: how many rows more the prompt may have. A medium that several requests want at once is read
        once. Clients take turns, and no picture or sound waits for a film. Raises BadMedia, DecoderFull or DecoderFailed."""
        while (features := self._cache.find(medium.digest)) is None:
            if (earlier_reading := self._read_now.get(medium.digest)) is not None:
                await earlier_reading.done.wait()
                if earlier_reading.refusal:
                    raise BadMedia(earlier_reading.refusal)
                continue
            self._read_now[medium.digest] = own_reading = _Reading()
            places = self._film_places if medium.kind == "video" else self._other_places
            try:
                async with places.hold(medium.client):
                    features = await self._read(medium, most_rows)
                self._cache.keep(medium.digest, features)
                return features
            except NoRoom:
                raise  # Another conversation may have room for it.
            except BadMedia as error:
                own_reading.refusal = str(error)
                raise
            finally:
                del self._read_now[medium.digest]
                own_reading.done.set()
        self._check_room(features.extent, most_rows)
        return features

    async def _read(self, medium: RequestMedium, most_rows: int) -> Features:
        """Decode and encode a medium; see `features`."""
        digest = medium.digest
        match ask := medium.preprocessing:
            case PicturePreprocessing():
                picture = await self._decoder.picture(medium.source, ask, client=medium.client)
                return await self._encode_frames(picture.pixels[None], 0.0, None, digest, most_rows)
            case FilmPreprocessing():
                film = await self._decoder.film(medium.source, replace(ask, room=most_rows), client=medium.client)
                seconds = self._pictures.frames * ask.told_frame_s(len(film.frames), film.frame_s)
                return await self._encode_frames(film.frames, seconds, film.sound, digest, most_rows)
            case _:
                sound = await self._decoder.sound(medium.source, ask, client=medium.client)
                extent = MediumExtent(sound=self._count_sound_rows(sound))
                self._check_room(extent, most_rows)
                return Features(extent, await self._join(await self._encode_sound(sound)), digest)

    async def _encode_frames(self, frames: Pixels, seconds: float, sound: DecodedSound | None, digest: bytes, most_rows: int) -> Features:
        """Encode a picture, or a film and its sound (None: it has none). seconds: duration of the frames of one piece; 0 for a picture."""
        piece_frames = self._pictures.frames
        extent = MediumExtent(self._pictures.grid(frames), seconds, 0 if sound is None else self._count_sound_rows(sound))
        self._check_room(extent, most_rows)
        rows = await self._pictures.queue.rows([frames[first : first + piece_frames] for first in range(0, len(frames), piece_frames)])
        if sound is not None:
            rows = rows + await self._encode_sound(sound)
        return Features(extent, await self._join(rows), digest)

    def _count_sound_rows(self, sound: DecodedSound) -> int:
        """Number of rows that a sound becomes. Raises BadMedia if the sound is too short for a row."""
        rows = self._sounds.rows(len(sound.samples))
        if not rows:
            lasts_ms, least_ms = len(sound.samples) / sound.rate_hz * 1000, self._sounds.least_ms
            raise BadMedia(f"the sound lasts {lasts_ms:.0f} ms, too short to hear anything: send {least_ms} ms or more")
        return rows

    async def _join(self, rows: list[torch.Tensor]) -> torch.Tensor:
        """Join rows to one tensor, on a thread: the rows of a long film are hundreds of megabytes."""
        return await self._pictures.queue.worker.run(partial(torch.cat, rows))

    async def _encode_sound(self, sound: DecodedSound) -> list[torch.Tensor]:
        """Encode a sound. Returns the rows of each of its pieces."""
        spectrogram = await self._sounds.queue.worker.run(partial(self._sounds.spectrogram, sound.samples))
        return await self._sounds.queue.rows(self._sounds.pieces(spectrogram))

    def _check_room(self, extent: MediumExtent, most_rows: int) -> None:
        check_room(self.rows_of(extent), most_rows)


Slice = TypeVar("Slice")
"""A part of a medium that the other parts do not see: the frames of one patch, some chunks of sound."""

Pass = Callable[[Sequence[Slice], Callable[[], None]], list[torch.Tensor]]
"""Computes the rows of some pieces, in order. It calls its second argument between layers; an error of that call ends the pass."""


class _GivenUp(Exception):
    """The pass is pointless: nobody waits any more for a medium of it."""


@dataclass(eq=False, slots=True)
class _Encoding(Generic[Slice]):
    """A medium that is being encoded. pieces: the pieces that are in no pass yet. count: number of all its pieces. done: gets the result.
    rows: of the finished pieces, in order. unwanted: whether nobody waits for the result any more."""

    pieces: deque[Slice]
    count: int
    done: asyncio.Future[list[torch.Tensor]]
    rows: list[torch.Tensor] = field(default_factory=list)
    unwanted: bool = False


class EncoderQueue(Generic[Slice]):
    """Encodes media in passes over their pieces. encode: runs a pass on the worker's thread. size: returns the size of a piece, in patches
    or in frames of a spectrogram. most_size: largest size of a pass with several pieces. together: whether several pieces may share a pass,
    because a trial found that this changes no bit."""

    def __init__(self, worker: Worker, encode: Pass[Slice], size: Callable[[Slice], int], *, most_size: int, together: bool) -> None:
        self.worker, self._encode, self._size = worker, encode, size
        self._most_size, self._together = most_size, together
        self._waiting: deque[_Encoding[Slice]] = deque()
        self._running: asyncio.Task[None] | None = None

    async def rows(self, pieces: Sequence[Slice]) -> list[torch.Tensor]:
        """The rows of one medium, [rows, width] for each piece. If the caller is cancelled, a pass with pieces of other media is finished,
        and no further piece of this medium is begun."""
        medium = _Encoding(deque(pieces), len(pieces), asyncio.get_running_loop().create_future())
        self._waiting.append(medium)
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        try:
            return await medium.done
        except asyncio.CancelledError:
            medium.unwanted = True
            raise

    async def _run(self) -> None:
        """Run passes until no medium waits."""
        try:
            while batch := self._take():
                await self._pass(batch)
        finally:
            self._running = None

    def _take(self) -> list[tuple[_Encoding[Slice], Slice]]:
        """The pieces of the next pass, each with its medium: one piece of each medium in turn, until the pass is full; empty: none wait."""
        batch = list[tuple[_Encoding[Slice], Slice]]()
        batch_size = 0
        while self._waiting:
            medium = self._waiting[0]
            if medium.unwanted or not medium.pieces:
                self._waiting.popleft()
                continue
            size = self._size(medium.pieces[0])
            if batch and (batch_size + size > self._most_size or not self._together):
                break
            batch.append((medium, medium.pieces.popleft()))
            batch_size += size
            self._waiting.rotate(-1)
        return batch

    async def _pass(self, batch: Sequence[tuple[_Encoding[Slice], Slice]]) -> None:
        """Encode pieces of some media in one pass. If that fails, encode each piece by itself; a medium whose piece fails gets the
        error."""
        try:
            results = await self.worker.run(partial(self._compute, batch))
        except _GivenUp:
            return
        except Exception as error:  # The error belongs to the task that waits for one of these media.
            first_medium, _ = batch[0]
            if len(batch) > 1:
                for medium_and_piece in batch:
                    await self._pass([medium_and_piece])
            elif not first_medium.done.done():
                first_medium.unwanted = True
                first_medium.done.set_exception(error)
            return
        for (medium, _), rows in zip(batch, results, strict=True):
            medium.rows.append(rows)
            if len(medium.rows) == medium.count and not medium.done.done():
                medium.done.set_result(medium.rows)

    def _compute(self, batch: Sequence[tuple[_Encoding[Slice], Slice]]) -> list[torch.Tensor]:
        """Run a pass, on the worker's thread. Raises _GivenUp between two layers if no medium of the pass is wanted any more."""

        def between() -> None:
            self.worker.activity.step()
            if all(medium.unwanted for medium, _ in batch):
                raise _GivenUp

        with torch.inference_mode():
            return self._encode([piece for _, piece in batch], between)


def preprocessing_of(
    config: ThinkerSizes, pictures: PictureSettings, rate_hz: int, most_rows: int, context: int, film_fps: float = 0.0
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


def rows_of(extent: MediumExtent, config: ThinkerSizes) -> int:
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
