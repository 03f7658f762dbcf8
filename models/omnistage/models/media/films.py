"""A film decoded, by FFmpeg: read once for the times of its frames, which headers tell wrong or not at all, then decoded, frame by frame.

Which frames are taken: of a film with an even rate those with the numbers that `sampled_frames` says, in the order in which they are shown.
Of one without, those that are shown at the same number of evenly spaced moments.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from omnistage.models.media import containers, sounds
from omnistage.models.media.errors import BadMedia, UnknownFormat
from omnistage.models.media.limits import MediaLimits
from omnistage.models.media.output import Output
from omnistage.models.media.pictures import resized
from omnistage.models.media.preprocessing import FilmPreprocessing, check_room, sampled_frames, smart_resize

USUAL_RATE_HZ = 25.0
"""Of frames, where a file says nothing about time."""

CLOSE = 0.01
"""The rate in the header counts where it is so close to the one that was found: times in a file are rounded."""

COMPLETE = 0.9
"""Of the frames that a file says it has, so many must be there: else it was cut off on its way."""


@dataclass(frozen=True, slots=True)
class Plan:
    """moments: of the frames to be taken, rising, in the unit of the stream; or their numbers, if `timed` is false, where a file has no
    times. frame_s: seconds of the film per frame taken."""

    moments: Sequence[int]
    timed: bool
    frame_s: float


@dataclass(frozen=True, slots=True)
class Made:
    """Shape of the frames and number of samples that were put out, one behind the other; frame_s as in Plan."""

    shape: tuple[int, int, int, int]
    frame_s: float
    samples: int


def decode(file: BinaryIO, ask: FilmPreprocessing, limits: MediaLimits, output: Output) -> Made:
    """Puts out the frames, and the samples of the sound if asked for. Raises BadMedia, or whatever FFmpeg raises for what is damaged."""
    with _opened(file, limits) as container:
        if ask.use_audio and not container.streams.audio:
            raise BadMedia("there is no sound in it: ask without use_audio")
        stream = _stream(container, limits)
        height, width = stream.height or 1, stream.width or 1  # A file may not say: then as few tokens as there may be.
        sound_s = containers.declared_s(container, container.streams.audio[0]) if ask.use_audio else 0.0
        ask = ask.fitting(height, width, sound_s)
        plan = _plan(container, stream, ask, limits)
        check_room(ask.tokens(len(plan.moments), height, width, sound_s), ask.room)
    with _opened(file, limits) as container:
        stream = _stream(container, limits)
        containers.checked_decoder(stream, containers.VIDEO_DECODERS, limits)
        shape = _frames(_shown(_decoded(container, stream, plan.timed), plan.moments), len(plan.moments), ask, limits, output)
    if not ask.use_audio:
        return Made(shape, plan.frame_s, 0)
    with _opened(file, limits) as container:
        samples = sounds.track(container, ask, limits)
    output.put(samples)
    return Made(shape, plan.frame_s, len(samples))


def _opened(file: BinaryIO, limits: MediaLimits) -> Any:
    container = containers.opened(file, limits)
    if container is None:
        raise UnknownFormat("it is no film in a format that is known here, or it is damaged at its beginning: convert it to MP4 or WebM")
    return container


def _stream(container: Any, limits: MediaLimits) -> Any:
    """Its film, as far as the header tells within the limits."""
    stream = containers.video_stream(container)
    if stream is None:
        raise BadMedia("there are no pictures in it: if it is a sound, send it as audio/*")
    _check_pixels(stream.width, stream.height, limits)
    _check_frames(stream.frames, limits)
    _check_seconds(containers.declared_s(container, stream), limits)
    return stream


def _plan(container: Any, stream: Any, ask: FilmPreprocessing, limits: MediaLimits) -> Plan:
    """Reads all of the file and decodes nothing of it."""
    times: list[int] = []
    frames = 0
    for packet in container.demux(stream):
        if not packet.size or packet.is_discard:
            continue
        frames += 1
        _check_frames(frames, limits)
        if packet.pts is not None:
            times.append(packet.pts)
            _check_seconds(float(abs(packet.pts - times[0]) * stream.time_base), limits)
    if not frames:
        raise BadMedia("it has no frames: send a film that lasts")
    if frames < COMPLETE * stream.frames:
        raise BadMedia(f"it says that it has {stream.frames} frames, and {frames} are there: it was cut off, send all of it")
    rate_hz = float(stream.average_rate or 0)
    if len(times) < frames:
        numbers = sampled_frames(frames, rate_hz or USUAL_RATE_HZ, ask)
        return Plan(numbers, False, frames / (rate_hz or USUAL_RATE_HZ) / len(numbers))
    return planned(sorted(times), stream.time_base, rate_hz, ask)


def planned(times: list[int], unit: Fraction, rate_hz: float, ask: FilmPreprocessing) -> Plan:
    """times: when each frame is shown, rising, in units of so many seconds. rate_hz: frames per second as the header says, 0 if it does
    not."""
    frames = len(times)
    gap = (times[-1] - times[0]) / (frames - 1) if frames > 1 else 0.0
    found_hz = float(1 / (gap * unit)) if gap else rate_hz or USUAL_RATE_HZ
    even = all(abs(time - times[0] - number * gap) <= gap / 2 for number, time in enumerate(times))
    if even and rate_hz and abs(rate_hz / found_hz - 1) < CLOSE:
        found_hz = rate_hz
    numbers = sampled_frames(frames, found_hz, ask)
    frame_s = frames / found_hz / len(numbers)
    if even:
        return Plan([times[number] for number in numbers], True, frame_s)
    spread = Fraction(times[-1] - times[0]) * frames / (frames - 1) / len(numbers)
    at = [bisect.bisect_right(times, times[0] + number * spread) - 1 for number in range(len(numbers))]
    return Plan([times[number] for number in at], True, frame_s)


def _decoded(container: Any, stream: Any, timed: bool) -> Iterator[tuple[int, Any]]:
    """When each frame is shown, or its number, and the frame."""
    for number, frame in enumerate(container.decode(stream)):
        if not timed:
            yield number, frame
        elif frame.pts is not None:
            yield frame.pts, frame


def _shown(decoded: Iterable[tuple[int, Any]], moments: Sequence[int]) -> Iterator[Any]:
    """The frame that is shown at each of the moments; holds one at a time."""
    shown = None
    shown_at = taken = 0
    for moment, frame in decoded:
        while shown is not None and taken < len(moments) and moment > moments[taken]:
            yield shown
            taken += 1
        if taken == len(moments):
            return
        shown, shown_at = frame, moment
    there = 0 if shown is None else bisect.bisect_right(moments, shown_at)
    if there < COMPLETE * len(moments):
        raise BadMedia(f"{there} of the {len(moments)} frames wanted of it can be decoded: it is damaged, encode it anew")
    for _ in range(taken, len(moments)):
        yield shown


def _frames(shown: Iterable[Any], count: int, ask: FilmPreprocessing, limits: MediaLimits, output: Output) -> tuple[int, int, int, int]:
    """Puts out each frame, resized; returns the shape of all of them."""
    height = width = 0
    for frame in shown:
        _check_pixels(frame.width, frame.height, limits)
        picture = Image.fromarray(upright(frame.to_ndarray(format="rgb24", threads=1), frame.rotation))
        if not height:
            height, width = smart_resize(picture.height, picture.width, ask.factor, ask.min_pixels, ask.frame_pixels(count))
            output.expect(count * height * width * 3)
        output.put(resized(picture, height, width), begin=False)
    return count, height, width, 3


def upright(pixels: NDArray[np.uint8], degrees: int) -> NDArray[np.uint8]:
    """As a camera that was held otherwise says that it is to be shown: turned by so many degrees, counter-clockwise."""
    return np.ascontiguousarray(np.rot90(pixels, round(degrees / 90)))


def _check_pixels(width: int, height: int, limits: MediaLimits) -> None:
    if width * height > limits.film_pixels:
        raise BadMedia(
            f"its frames have {width}x{height} pixels, and at most {limits.film_pixels / 1e6:g} million may be: make them smaller"
        )


def _check_frames(frames: int, limits: MediaLimits) -> None:
    if frames > limits.film_frames:
        raise BadMedia(f"it has {frames} frames or more, and at most {limits.film_frames} may be: send a part of it")


def _check_seconds(seconds: float, limits: MediaLimits) -> None:
    if seconds > limits.film_s:
        raise BadMedia(f"it lasts {seconds:.0f} s or more, and at most {limits.film_s:g} s may be: send a part of it")
