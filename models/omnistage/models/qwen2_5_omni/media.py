"""Media of a request, from the bytes that were sent to the rows that stand for them in a prompt.

bytes --decode (another process)--> pixels, samples --pieces--> encoder (a thread of its own) --> rows, kept by the digest of all of it
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from omnistage.models.common.encoders.features import FeatureCache, Features
from omnistage.models.common.encoders.queue import EncoderQueue
from omnistage.models.common.worker import Worker
from omnistage.models.conversation import Media, Streamed
from omnistage.models.media.decoded import Sound
from omnistage.models.media.decoder import MediaDecoder, Source
from omnistage.models.media.errors import BadMedia, NoRoom
from omnistage.models.media.preprocessing import Colour, FilmPreprocessing, PicturePreprocessing, SoundPreprocessing, check_room
from omnistage.models.media.turns import Turns
from omnistage.models.qwen2_5_omni.audio import AudioEncoder, rows_of_frames
from omnistage.models.qwen2_5_omni.config import ThinkerConfig
from omnistage.models.qwen2_5_omni.patches import Normalization, Pixels, grid_of, patches_of
from omnistage.models.qwen2_5_omni.processor import FILM_RATE_HZ, PictureSettings, Spectrograms
from omnistage.models.qwen2_5_omni.prompt import Extent
from omnistage.models.qwen2_5_omni.vision import VisionEncoder

SOUND_CHUNKS = 8
"""Chunks of sound that are one piece."""

FILMS, OTHERS = 4, 16
"""Films, and pictures and sounds, that are read at once, from decoding to the last row: so much is held of their pixels and samples."""

FILM_SHARE = 0.75
"""Of the context, that one film with its sound may take: questions and an answer need some."""

MAX_WAITING = 256
"""Media of either that wait for that."""


@dataclass(frozen=True, slots=True)
class Medium:
    """One medium of a request. kind: image, audio or video. preprocessing: how it is prepared. digest: of everything that its rows are made
    from. client: who asks."""

    kind: str
    source: Source
    preprocessing: PicturePreprocessing | SoundPreprocessing | FilmPreprocessing
    digest: bytes
    client: str


@dataclass(slots=True)
class _Reading:
    """Of a medium, by one request, for all that ask for it meanwhile. refusal: why nobody can have it."""

    done: asyncio.Event = field(default_factory=asyncio.Event)
    refusal: str = ""


class MediaPreprocessing:
    """How media of each kind are prepared. most_rows: that one medium may become, its sound not counted. context: of the model; a film with
    its sound takes FILM_SHARE of it at most."""

    def __init__(self, config: ThinkerConfig, pictures: PictureSettings, rate_hz: int, most_rows: int, context: int) -> None:
        factor = config.vision.patch_size * config.vision.merge
        most = most_rows * factor**2
        self._picture = PicturePreprocessing(factor, min(pictures.min_pixels, most), min(pictures.max_pixels, most))
        self._sound = SoundPreprocessing(rate_hz)
        self._film = FilmPreprocessing(
            factor=factor,
            min_pixels=min(pictures.film_min_pixels, most),
            max_pixels=min(pictures.film_max_pixels, most),
            total_pixels=min(most, int(context * FILM_SHARE) * factor**2),
            fps=FILM_RATE_HZ,
            frames_multiple=config.vision.frames,
            rate_hz=rate_hz,
            most_tokens=int(context * FILM_SHARE),
        )

    def of(
        self, kind: str, *, use_audio: bool = False, background: Colour | None = None
    ) -> PicturePreprocessing | SoundPreprocessing | FilmPreprocessing:
        """kind: image, audio or video. use_audio: of a film, its sound too. background: what is transparent lies on it; None: white."""
        if kind == "image":
            return replace(self._picture, background=background)
        return self._sound if kind == "audio" else replace(self._film, use_audio=use_audio, background=background)


class MediaReader:
    """Reads media for one model. digest: of what the rows of equal bytes also depend on: weights, settings."""

    def __init__(
        self,
        config: ThinkerConfig,
        decoder: MediaDecoder,
        preprocessing: MediaPreprocessing,
        spectrograms: Spectrograms,
        pictures: EncoderQueue[Pixels],
        sounds: EncoderQueue[torch.Tensor],
        cache: FeatureCache,
        digest: bytes,
    ) -> None:
        self._config, self._decoder, self._preprocessing, self._spectrograms = config, decoder, preprocessing, spectrograms
        self._pictures, self._sounds, self._cache, self._digest = pictures, sounds, cache, digest
        self._read_now: dict[bytes, _Reading] = {}
        self._films, self._others = Turns(FILMS, MAX_WAITING), Turns(OTHERS, MAX_WAITING)

    async def close(self) -> None:
        await self._decoder.close()

    def medium(self, part: Media | Streamed, source: Source, sha256: bytes, *, scope: str, client: str) -> Medium:
        """What a part of a request is here. sha256: of its bytes. scope: nothing that is kept is used for a request of another one."""
        ask, own = self._preprocessing.of(part.kind, use_audio=part.use_audio, background=part.background), scope.encode()
        known = (self._digest, len(own).to_bytes(8, "big"), own, f"{part.kind} {ask} ".encode(), sha256)
        return Medium(part.kind, source, ask, hashlib.sha256(b"".join(known)).digest(), client)

    def most_bytes(self, kind: str) -> int:
        """That one medium may have: image, audio or video."""
        return self._decoder.limits.of(kind)[0]

    async def features(self, medium: Medium, most_rows: int) -> Features:
        """The rows of a medium. most_rows: that there is room for. What several requests ask for at once is read once. Clients take turns,
        and no picture or sound waits for a film. Raises BadMedia, DecoderFull or DecoderFailed."""
        while (found := self._cache.found(medium.digest)) is None:
            if (other := self._read_now.get(medium.digest)) is not None:
                await other.done.wait()
                if other.refusal:
                    raise BadMedia(other.refusal)
                continue
            self._read_now[medium.digest] = this = _Reading()
            try:
                async with (self._films if medium.kind == "video" else self._others).taken(medium.client):
                    read = await self._read(medium, most_rows)
                self._cache.keep(read)
                return read
            except NoRoom:
                raise  # Another conversation may have it.
            except BadMedia as error:
                this.refusal = str(error)
                raise
            finally:
                del self._read_now[medium.digest]
                this.done.set()
        _check_room(found.extent, self._config, most_rows)
        return found

    async def _read(self, medium: Medium, most_rows: int) -> Features:
        digest = medium.digest
        match ask := medium.preprocessing:
            case PicturePreprocessing():
                picture = await self._decoder.picture(medium.source, ask, client=medium.client)
                return await self._seen(picture.pixels[None], 0.0, None, digest, most_rows)
            case FilmPreprocessing():
                film = await self._decoder.film(medium.source, replace(ask, room=most_rows), client=medium.client)
                seconds = self._config.vision.frames * ask.told_frame_s(len(film.frames), film.frame_s)
                return await self._seen(film.frames, seconds, film.sound, digest, most_rows)
            case _:
                sound = await self._decoder.sound(medium.source, ask, client=medium.client)
                extent = Extent(sound=self._heard_rows(sound))
                _check_room(extent, self._config, most_rows)
                return Features(extent, await self._joined(await self._heard(sound)), digest)

    async def _seen(self, frames: Pixels, seconds: float, sound: Sound | None, digest: bytes, most_rows: int) -> Features:
        vision = self._config.vision
        extent = Extent(grid_of(frames, vision), seconds, 0 if sound is None else self._heard_rows(sound))
        _check_room(extent, self._config, most_rows)
        rows = await self._pictures.rows([frames[first : first + vision.frames] for first in range(0, len(frames), vision.frames)])
        return Features(extent, await self._joined(rows if sound is None else rows + await self._heard(sound)), digest)

    def _heard_rows(self, sound: Sound) -> int:
        rows = rows_of_frames(self._spectrograms.frames(len(sound.samples)))
        if not rows:
            raise BadMedia(
                f"the sound lasts {len(sound.samples) / sound.rate_hz * 1000:.0f} ms, too short to hear anything: send 40 ms or more"
            )
        return rows

    async def _joined(self, rows: list[torch.Tensor]) -> torch.Tensor:
        """On a thread: those of a long film are hundreds of megabytes."""
        return await self._pictures.worker.run(partial(torch.cat, rows))

    async def _heard(self, sound: Sound) -> list[torch.Tensor]:
        spectrogram = await self._sounds.worker.run(lambda: self._spectrograms(sound.samples))
        return await self._sounds.rows(torch.split(spectrogram, SOUND_CHUNKS * self._config.audio.chunk))


def rows_of(extent: Extent, config: ThinkerConfig) -> int:
    """Rows of a prompt that a medium takes."""
    seen = 0 if extent.grid is None else extent.grid.patches // config.vision.unit
    return seen + extent.sound + 2 * bool(seen and extent.sound)


def _check_room(extent: Extent, config: ThinkerConfig, most_rows: int) -> None:
    check_room(rows_of(extent, config), most_rows)


def picture_queue(
    worker: Worker, encoder: VisionEncoder, colours: Normalization, *, most_patches: int, together: bool
) -> EncoderQueue[Pixels]:
    """A piece is the frames of one patch, a whole picture. most_patches: of a pass that has more than one."""
    encode, config = picture_pass(encoder, colours), encoder.config
    return EncoderQueue(worker, encode, lambda pixels: grid_of(pixels, config).patches, most_size=most_patches, together=together)


def sound_queue(worker: Worker, encoder: AudioEncoder, *, most_frames: int, together: bool) -> EncoderQueue[torch.Tensor]:
    """A piece is some chunks of a spectrogram. most_frames: of a pass that has more than one."""
    return EncoderQueue(worker, sound_pass(encoder), len, most_size=most_frames, together=together)


def picture_pass(encoder: VisionEncoder, colours: Normalization) -> Callable[[Sequence[Pixels], Callable[[], None]], list[torch.Tensor]]:
    """What an EncoderQueue of pictures runs. Rows on the CPU."""

    def encode(pieces: Sequence[Pixels], between: Callable[[], None]) -> list[torch.Tensor]:
        patches = torch.cat([patches_of(piece, encoder.config, colours) for piece in pieces])
        grids = [grid_of(piece, encoder.config) for piece in pieces]
        return [rows.cpu() for rows in encoder.encode(patches.to(encoder.device, encoder.dtype), grids, between)]

    return encode


def sound_pass(encoder: AudioEncoder) -> Callable[[Sequence[torch.Tensor], Callable[[], None]], list[torch.Tensor]]:
    """What an EncoderQueue of sound runs. Rows on the CPU."""

    def encode(pieces: Sequence[torch.Tensor], between: Callable[[], None]) -> list[torch.Tensor]:
        return [rows.cpu() for rows in encoder.encode([piece.to(encoder.device, encoder.dtype) for piece in pieces], between)]

    return encode
