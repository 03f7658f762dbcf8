"""The limits of the cost of one medium, checked by its headers before anything is decoded, and while it is decoded, because headers lie."""

from __future__ import annotations

from dataclasses import dataclass

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
