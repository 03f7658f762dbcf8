"""Files of pictures, sounds and films, made from a seed: noise over slow waves, so that no two frames are alike and codecs have work."""

from __future__ import annotations

import io
from fractions import Fraction
from typing import Any

import av
import numpy as np
import soundfile
from numpy.typing import NDArray
from PIL import Image

BARS = 8


def pixels(seed: int, height: int = 60, width: int = 80) -> NDArray[np.uint8]:
    """[height, width, 3]."""
    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[0:height, 0:width]
    waves = [np.sin(rows / rng.uniform(3, 20) + columns / rng.uniform(3, 20) + rng.uniform(0, 6)) for _ in range(3)]
    noise = rng.integers(-20, 21, (height, width, 3))
    return np.clip(np.stack(waves, axis=-1) * 100 + 128 + noise, 0, 255).astype(np.uint8)


def samples(seed: int, seconds: float = 1.0, rate_hz: int = 16_000, channels: int = 1) -> NDArray[np.float32]:
    """[n, channels]: two tones and some noise, within -0.8..0.8."""
    rng = np.random.default_rng(seed)
    at = np.arange(round(seconds * rate_hz))[:, None] / rate_hz
    tones = sum(0.3 * np.sin(2 * np.pi * rng.uniform(80, 800, channels) * at) for _ in range(2))
    return (tones + rng.uniform(-0.1, 0.1, (len(at), channels))).astype(np.float32)


def picture(seed: int, height: int = 60, width: int = 80, form: str = "PNG", **options: Any) -> bytes:
    """form: as Pillow calls it; options: of its `save`."""
    return encoded(Image.fromarray(pixels(seed, height, width)), form, **options)


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def sound(
    seed: int, seconds: float = 1.0, rate_hz: int = 16_000, channels: int = 1, form: str = "WAV", subtype: str | None = None
) -> bytes:
    """form, subtype: as libsndfile calls them."""
    return written(samples(seed, seconds, rate_hz, channels), rate_hz, form, subtype)


def written(sound: NDArray[np.floating], rate_hz: int, form: str = "WAV", subtype: str | None = None) -> bytes:
    """A file of any samples, [n] or [n, channels]."""
    file = io.BytesIO()
    soundfile.write(file, sound, rate_hz, format=form, subtype=subtype)
    return file.getvalue()


def film(
    seed: int,
    frames: int = 20,
    height: int = 48,
    width: int = 64,
    rate_hz: int = 10,
    *,
    form: str = "mp4",
    codec: str = "libx264",
    pixel_format: str = "yuv420p",
    sound_s: float = 0.0,
    sound_codec: str = "aac",
    sound_rate_hz: int = 48_000,
    times: list[int] | None = None,
    numbered: bool = False,
) -> bytes:
    """form, codecs, pixel_format: as FFmpeg calls them; no codec: no pictures. sound_s: seconds of a track, 0 for none. times: of the
    frames, in milliseconds, for a film without a rate. numbered: each frame shows its number, which `numbers` reads; else it is noise."""
    file = io.BytesIO()
    with av.open(file, "w", format=form) as container:
        video: Any = _video(container, codec, rate_hz, height, width, pixel_format) if codec else None
        audio: Any = container.add_stream(sound_codec, rate=sound_rate_hz, layout="mono") if sound_s else None
        if video is not None and times is not None:
            video.codec_context.time_base = Fraction(1, 1000)
        for number in range(frames if video is not None else 0):
            shown = bars(number, height, width) if numbered else pixels(seed + number, height, width)
            frame = av.VideoFrame.from_ndarray(shown, format="rgb24")
            if times is not None:
                frame.pts, frame.time_base = times[number], Fraction(1, 1000)
            container.mux(video.encode(frame))
        if video is not None:
            container.mux(video.encode())
        if audio is not None:
            block = av.AudioFrame.from_ndarray(samples(seed, sound_s, sound_rate_hz).T.copy(), format="fltp", layout="mono")
            block.sample_rate = sound_rate_hz
            container.mux(audio.encode(block))
            container.mux(audio.encode())
    return file.getvalue()


def numbers(frames: NDArray[np.uint8]) -> list[int]:
    """Which frames these are of a numbered film, whatever codecs and resizing did to them; up to 2^BARS - 1."""
    bars = np.array_split(frames.mean(axis=(1, 3)), BARS, axis=1)
    return [sum(int(bar[index].mean() > 127) << place for place, bar in enumerate(bars)) for index in range(len(frames))]


def bars(number: int, height: int, width: int) -> NDArray[np.uint8]:
    """The number in binary, the lowest digit on the left: white for one, black for zero."""
    row = np.concatenate(
        [np.full(len(bar), 255 * (number >> place & 1)) for place, bar in enumerate(np.array_split(np.arange(width), BARS))]
    )
    return np.broadcast_to(row[None, :, None], (height, width, 3)).astype(np.uint8)


def _video(container: Any, codec: str, rate_hz: int, height: int, width: int, pixel_format: str) -> Any:
    stream = container.add_stream(codec, rate=rate_hz)
    stream.height, stream.width, stream.pix_fmt = height, width, pixel_format
    if codec == "libx264":
        stream.options = {"preset": "ultrafast"}
    return stream
