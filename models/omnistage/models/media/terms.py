"""The terms on which a medium is decoded: what a caller asks for, the limits of its cost, and the errors of a medium and of the process
that decodes it. The stage and the decoding process share them.

Limits are checked by the headers of a file before anything is decoded, and while it is decoded, because headers lie. The preprocessing
that a caller asks for limits the size of the result; two of its formulas are those of Qwen2-VL."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self


class BadMedia(ValueError):
    """The medium cannot be used. The text says what is wrong with it and what to do, and names no field: the caller knows that."""


class NoRoom(BadMedia):
    """A medium has more tokens than its conversation has room for; another conversation may take it."""


class UnknownFormat(BadMedia):
    """A medium is in none of the formats that can be decoded for its kind."""


class DecoderFull(RuntimeError):
    """No more media may wait for a process: ask again later or elsewhere."""


class DecoderFailed(RuntimeError):
    """No process that decodes could be started or given the medium, or the machine was short of something. The text says why. The medium is
    not to blame: ask again later or elsewhere."""


class DecoderBroken(RuntimeError):
    """The system refused the decoding process something that this medium needs. The medium is not to blame; asking again is of no use."""


_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """The limits of one medium.

    picture_bytes, sound_bytes, film_bytes: sizes of files. picture_pixels: pixels of a picture as it is stored. sound_s: seconds of a
    sound, also in a film; the feature extractor of a Whisper-like encoder is built for so long a sound. sound_rate_hz, sound_channels: its
    samples per second and channels. film_s, film_frames, film_pixels: seconds and frames of a film, and pixels of one frame as stored.
    result_bytes: size of the decoded result. memory_bytes: address space of the decoding process, libraries included. picture_time_s,
    sound_time_s, film_time_s: seconds of decoding by the clock. picture_least_s, megapixel_s, picture_mebibyte_s: seconds of processor time
    for a picture of any size, for each million pixels and for each MiB more: at least five times what the slowest format takes on a core of
    today. sound_least_s, sound_mebibyte_s: the same for sounds.
    """

    picture_bytes: int = 64 * _MIB
    picture_pixels: int = 50_000_000
    picture_time_s: float = 20.0
    picture_least_s: float = 3.0
    megapixel_s: float = 0.5
    picture_mebibyte_s: float = 0.1
    sound_bytes: int = 128 * _MIB
    sound_s: float = 300.0
    sound_rate_hz: int = 192_000
    sound_channels: int = 32
    sound_time_s: float = 60.0
    sound_least_s: float = 15.0
    sound_mebibyte_s: float = 0.35
    film_bytes: int = 512 * _MIB
    film_s: float = 600.0
    film_frames: int = 40_000
    film_pixels: int = 10_000_000
    film_time_s: float = 120.0
    result_bytes: int = 512 * _MIB
    memory_bytes: int = 2048 * _MIB

    def picture_cpu_s(self, size: int, pixels: int) -> float:
        """Seconds of processor time that a picture of `size` bytes and `pixels` pixels may take."""
        return self.picture_least_s + self.megapixel_s * pixels / 1e6 + self.picture_mebibyte_s * size / _MIB

    def sound_cpu_s(self, size: int) -> float:
        """Seconds of processor time that a sound of `size` bytes may take."""
        return self.sound_least_s + self.sound_mebibyte_s * size / _MIB

    def of(self, kind: str) -> tuple[int, float]:
        """The limits of a file of a kind, image, audio or video: the bytes that it may have, and the seconds that its decoding may take."""
        return {
            "image": (self.picture_bytes, self.picture_time_s),
            "audio": (self.sound_bytes, self.sound_time_s),
            "video": (self.film_bytes, self.film_time_s),
        }[kind]


FACTOR = 28
"""Sides of a resized picture are multiples of this: 14 pixels of a patch, 2 patches merged."""

Colour = tuple[int, int, int]
"""Red, green and blue, 0 to 255 each, of sRGB."""
WHITE: Colour = (255, 255, 255)
"""The ground of transparent pictures by default: pages show them so, and so do Qwen's own tools."""

MAX_ASPECT = 200
UNBOUNDED = 1 << 40
FLOOR_SHARE = 1.05


@dataclass(frozen=True, slots=True)
class PicturePreprocessing:
    """The result has min_pixels to max_pixels pixels, and sides that are multiples of `factor`: see `smart_resize`. background: the colour
    under transparent pixels; None: white. alpha: add opacity after the colours; background None is then no ground."""

    factor: int = FACTOR
    min_pixels: int = 4 * FACTOR * FACTOR
    max_pixels: int = 1280 * FACTOR * FACTOR
    alpha: bool = False
    background: Colour | None = None


@dataclass(frozen=True, slots=True)
class SoundPreprocessing:
    """The sound becomes mono at rate_hz."""

    rate_hz: int = 16_000


@dataclass(frozen=True, slots=True)
class FilmPreprocessing:
    """The frames and sound of a film. fps: frames per second, but at least min_frames, at most max_frames, a multiple of frames_multiple.

    min_pixels, max_pixels, factor, background: as for a picture, for each frame. total_pixels: limit for all frames together, where
    frames_multiple frames count as one, as in tokens; frames share it evenly, but each keeps at least min_pixels. use_audio:
    include the sound of the film, at rate_hz.

    A token is factor * factor pixels of frames_multiple frames, and a second of sound is sound_tokens_hz tokens. most_tokens: a film that
    would have more tokens gives smaller or fewer frames. room: a film that still has more tokens is refused before it is decoded. film_fps:
    frames per second that the model is told of each film; 0: the real ones."""

    factor: int = FACTOR
    min_pixels: int = 128 * FACTOR * FACTOR
    max_pixels: int = 768 * FACTOR * FACTOR
    total_pixels: int = 24_576 * FACTOR * FACTOR
    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    frames_multiple: int = 2
    use_audio: bool = False
    rate_hz: int = 16_000
    sound_tokens_hz: float = 25.0
    most_tokens: int = UNBOUNDED
    room: int = UNBOUNDED
    background: Colour | None = None
    film_fps: float = 0.0

    def tokens(self, frames: int, height: int, width: int, sound_s: float) -> int:
        """The number of tokens of `frames` frames of height by width stored pixels, and of sound_s seconds of sound."""
        rows, columns = smart_resize(height, width, self.factor, self.min_pixels, self.frame_pixels(frames))
        picture_tokens = -(-frames // self.frames_multiple) * (rows // self.factor) * (columns // self.factor)
        return picture_tokens + int(sound_s * self.sound_tokens_hz)

    def fit_film(self, height: int, width: int, sound_s: float) -> Self:
        """The same preprocessing with frames so small, and then so few, that a film of this size and sound has at most most_tokens."""
        picture_tokens = max(self.most_tokens - int(sound_s * self.sound_tokens_hz), 1)
        smaller = replace(self, total_pixels=min(self.total_pixels, picture_tokens * self.factor**2))
        counts = range(self.max_frames, self.frames_multiple, -self.frames_multiple)
        fits = (count for count in counts if smaller.tokens(count, height, width, 0.0) <= picture_tokens)
        return replace(smaller, max_frames=next(fits, self.frames_multiple))

    def frame_pixels(self, frames: int) -> int:
        """The limit of pixels of each frame of `frames`, as in Transformers with `cap_pixels_per_frame` (Qwen2VLVideoProcessor)."""
        share = self.total_pixels * self.frames_multiple // frames
        return max(min(self.max_pixels, share), int(self.min_pixels * FLOOR_SHARE))

    def told_frame_s(self, frames: int, frame_s: float) -> float:
        """The seconds from one frame to the next that the model is given: 1 / fps, as the published processor counts if it is told fps. A
        slow or long film gives fewer frames than fps asks for: then the model gets the real seconds, `frame_s`."""
        if self.film_fps:
            return 1 / self.film_fps
        # In these seconds fps would give at least one step of frames_multiple more.
        return frame_s if frames * frame_s * self.fps >= frames + self.frames_multiple else 1 / self.fps


def ground(background: Sequence[int] | None) -> Colour:
    """The colour under transparent pixels: `background`, or white."""
    red, green, blue = background or WHITE
    return red, green, blue


Preprocessing = PicturePreprocessing | SoundPreprocessing | FilmPreprocessing


def check_room(tokens: int, room: int) -> None:
    """Raises NoRoom if a medium has more tokens than there is room for."""
    if tokens > room:
        raise NoRoom(f"it takes {tokens} tokens, and the conversation has room for {max(room, 0)}: send less, or a smaller or shorter one")


def check_aspect(height: int, width: int) -> None:
    """Raises BadMedia for a picture with one side more than MAX_ASPECT times the other."""
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise BadMedia(f"it is {width}x{height} pixels, more than {MAX_ASPECT} times longer one way than the other: send a part of it")


def smart_resize(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Height and width to which a picture is resized: multiples of `factor`, about the same aspect, min_pixels to max_pixels pixels.

    The formula of Qwen2-VL (`smart_resize` in Transformers' `models/qwen2_vl`), rounding included. Raises BadMedia for a picture that is
    more than 200 times longer than wide: the formula is not made for it.
    """
    check_aspect(height, width)
    rows, columns = (round(side / factor) * factor for side in (height, width))
    if rows * columns > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        rows, columns = (max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width))
    elif rows * columns < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        rows, columns = (math.ceil(side * grow / factor) * factor for side in (height, width))
    return rows, columns


def grown_to(max_squares: int, factor: int) -> int:
    """The largest `min_pixels` with which no picture grows to more than `max_squares` of `factor` by `factor` pixels.

    A picture of N squares, A times longer than wide, has sides of sqrt(N A) and sqrt(N / A), of which each is rounded up. So it grows to
    fewer than (sqrt(N A) + 1) (sqrt(N / A) + 1) squares. N is the solution for which these are `max_squares`, at the longest aspect."""
    sides = math.sqrt(MAX_ASPECT) + 1 / math.sqrt(MAX_ASPECT)
    return max(int(((math.sqrt(sides**2 + 4 * (max_squares - 1)) - sides) / 2 * factor) ** 2), 1)


def sample_frames(frames: int, rate_hz: float, ask: FilmPreprocessing) -> list[int]:
    """The numbers of the frames to take from a film of `frames` frames at rate_hz: evenly from the first on, `fps` a second.

    It follows `Qwen2VLVideoProcessor.sample_frames` of Transformers, in whole numbers: that function rounds in single precision, and for
    some lengths returns one frame more than it meant to. A film with fewer frames than frames_multiple, for which that function divides by
    zero, gives its last frame more than once."""
    step = ask.frames_multiple
    max_count = min(ask.max_frames, frames) // step * step
    count = math.floor(min(max(frames / rate_hz * ask.fps, ask.min_frames), max_count) / step) * step
    if not count:
        return [min(index, frames - 1) for index in range(step)]
    return [index * frames // count for index in range(count)]
