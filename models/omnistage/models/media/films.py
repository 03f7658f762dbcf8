"""A film decoded by FFmpeg. The file is read once for the times of its frames, which headers state wrongly or not at all, then decoded
frame by frame. Runs in the decoding process.

From a film with an even rate the frames with the numbers of `sample_frames` are taken, in the order in which they are shown. From other
films those frames are taken that are shown at the same number of evenly spaced moments. A frame is shown upright, as wide as it is meant
to be, and on a ground where it is transparent, by what the container states, which is read as FFmpeg's command and players do."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, BinaryIO

import numpy as np
from av.sidedata.sidedata import Type
from numpy.typing import NDArray
from PIL import Image

from omnistage.models.media import containers, sounds
from omnistage.models.media.pictures import lay_on_ground, resize_picture
from omnistage.models.media.results import BoundedFile
from omnistage.models.media.terms import (
    BadMedia,
    Colour,
    FilmPreprocessing,
    MediaLimits,
    UnknownFormat,
    check_room,
    ground,
    sample_frames,
    smart_resize,
)

USUAL_RATE_HZ = 25.0
"""The rate of frames if a file says nothing about time."""

CLOSE = 0.01
"""The rate in the header is used if it differs from the measured rate by less than this part, because times in a file are rounded."""

BACK_S = 1
"""Seconds. A smaller step back in time is a mistake of the program that wrote the file."""

COMPLETE = 0.9
"""The part of the wanted frames that must be decoded: a film with fewer is damaged."""


@dataclass(frozen=True, slots=True)
class Times:
    """When the frames of a film are shown. shown: the moments, rising, in ticks of `unit` seconds. are_stated: whether the frames state
    them; else they follow from the order of frames. rate_hz: frames a second in the header, or 0. sound_end_s: when the sound ends."""

    shown: list[int]
    are_stated: bool
    unit: Fraction
    rate_hz: float
    sound_end_s: float

    @property
    def gap(self) -> float:
        """The ticks from one frame to the next, on the average."""
        if len(self.shown) > 1 and self.shown[-1] > self.shown[0]:
            return (self.shown[-1] - self.shown[0]) / (len(self.shown) - 1)
        return float(1 / (self.unit * Fraction(self.rate_hz or USUAL_RATE_HZ)))


@dataclass(frozen=True, slots=True)
class FramePlan:
    """The frames to take. moments: when each is shown, rising, in ticks. frame_s: seconds of the film for each frame taken."""

    moments: Sequence[int]
    frame_s: float


@dataclass(frozen=True, slots=True)
class FilmSamples:
    """The contents of the output: frames, which together have this shape, then `samples` samples of sound. frame_s: as in FramePlan."""

    shape: tuple[int, int, int, int]
    frame_s: float
    samples: int


def decode(file: BinaryIO, ask: FilmPreprocessing, limits: MediaLimits, output: BoundedFile) -> FilmSamples:
    """Decode the film: put its frames, and the samples of its sound if asked for, into `output`. Raises BadMedia, or errors of FFmpeg."""
    sound_begin_s = _first_heard(file, limits) if ask.use_audio else None
    with _open(file, limits) as container:
        stream = _stream(container, limits)
        containers.check_listed(container, file)
        times = _times(container, stream, ask, limits)
        first_frame_s = float(times.shown[0] * times.unit)
        begin_s = first_frame_s if sound_begin_s is None else min(first_frame_s, sound_begin_s)
        moments = _shown_from(times, begin_s, limits)
        # A file need not state its size: then the fewest possible tokens are assumed.
        height, width = stream.height or 1, round((stream.width or 1) * pixel_aspect(stream)) or 1
        sound_s = max(times.sound_end_s - begin_s, 0.0) if ask.use_audio else 0.0
        ask = ask.fit_film(height, width, sound_s)
        plan = plan_frames(moments, times.unit, times.rate_hz, ask)
        check_room(ask.tokens(len(plan.moments), height, width, sound_s), ask.room)
    with _open(file, limits) as container:
        stream = _stream(container, limits)
        containers.checked_decoder(stream, containers.VIDEO_DECODERS, limits)
        sound_stream = containers.sound_stream(container) if ask.use_audio else None
        decoded = _decode_frames(container, stream, sound_stream, None if times.are_stated else times.shown)
        shape = _put_frames(_frames_at(decoded, plan.moments), pixel_aspect(stream), len(plan.moments), ask, limits, output)
    if sound_begin_s is None:
        return FilmSamples(shape, plan.frame_s, 0)
    with _open(file, limits) as container:
        samples = sounds.track(container, ask, limits, quiet_s=sound_begin_s - begin_s, film=containers.video_stream(container))
    output.put(samples)
    return FilmSamples(shape, plan.frame_s, len(samples))


def _first_heard(file: BinaryIO, limits: MediaLimits) -> float:
    """The moment of the first sample of the film's sound, in seconds on the clock of the file. Raises BadMedia if there is none."""
    with _open(file, limits) as container:
        stream = containers.sound_stream(container)
        if stream is None:
            raise BadMedia("there is no sound in it: ask without use_audio")
        containers.checked_decoder(stream, containers.AUDIO_DECODERS, limits)
        first = next(containers.frames(container, stream, containers.video_stream(container)), None)
        if first is None:
            raise BadMedia("its sound has no samples: ask without use_audio")
        return float(first.time or 0.0)


def _open(file: BinaryIO, limits: MediaLimits) -> Any:
    container = containers.open_container(file, limits)
    if container is None:
        raise UnknownFormat("it is no film in a format that is known here, or it is damaged at its beginning: convert it to MP4 or WebM")
    return container


def _stream(container: Any, limits: MediaLimits) -> Any:
    """The stream of the film. Raises BadMedia if there is none, or its header states too many pixels a frame."""
    stream = containers.video_stream(container)
    if stream is None:
        raise BadMedia("there are no pictures in it: if it is a sound, send it as audio/*")
    _check_pixels(stream.width, stream.height, limits)
    return stream


def _times(container: Any, stream: Any, ask: FilmPreprocessing, limits: MediaLimits) -> Times:
    """When the frames are shown. Reads all of the file and decodes none of it. Frames that are never shown do not count: those that an edit
    list leaves out, or a recorder lost. Raises BadMedia for a film beyond the limits."""
    moments: list[int | None] = []
    orders: list[int | None] = []
    sound_end_s = 0.0
    sound_streams = [containers.sound_stream(container)] if ask.use_audio else []
    for packet in containers.packets(container, stream, *sound_streams):
        if not packet.size or packet.is_discard:
            continue
        if packet.stream_index != stream.index:
            sound_end_s = max(sound_end_s, float(((packet.pts or 0) + (packet.duration or 0)) * packet.time_base))
            continue
        moments.append(packet.pts)
        orders.append(packet.dts)
        _check_goes_on(orders, stream.time_base)
        _check_frames(len(moments), limits)
        if packet.dts is not None and orders[0] is not None:
            _check_seconds(float(abs(packet.dts - orders[0]) * stream.time_base), limits)
    if not moments:
        raise BadMedia("it has no frames: send a film that lasts")
    rate_hz = float(stream.average_rate or 0)
    stated = [] if container.format.name in containers.UNTOLD else [(True, moments)]
    for are_stated, times in (*stated, (False, orders)):
        sorted_moments = sorted(moment for moment in times if moment is not None)
        if len(sorted_moments) == len(times):
            return Times(sorted_moments, are_stated, stream.time_base, rate_hz, sound_end_s)
    return Times(list(range(len(moments))), False, 1 / Fraction(rate_hz or USUAL_RATE_HZ), rate_hz, sound_end_s)


def _check_goes_on(orders: list[int | None], unit: Fraction) -> None:
    """Raises BadMedia if the last of the times, in ticks of `unit` seconds, goes back so far that another film begins. In formats where
    this does no harm, `containers.packets` has moved the times."""
    before, last = [None, *orders[-2:]][-2:]
    if before is not None and last is not None and (before - last) * unit > BACK_S:
        raise BadMedia("its times go back in the middle, as where films were joined: send each of them by itself")


def _shown_from(times: Times, begin_s: float, limits: MediaLimits) -> list[int]:
    """The moments from begin_s (seconds) on at which frames are shown, in ticks. The first frame is repeated for the time before it."""
    first, gap = times.shown[0], times.gap
    wait_s = float(first * times.unit) - begin_s
    _check_seconds(float((times.shown[-1] - first) * times.unit) + wait_s, limits)
    repeats = round(wait_s / float(gap * times.unit))
    _check_frames(len(times.shown) + repeats, limits)
    return [round(first - gap * number) for number in range(repeats, 0, -1)] + times.shown


def plan_frames(times: list[int], unit: Fraction, rate_hz: float, ask: FilmPreprocessing) -> FramePlan:
    """Choose the frames to take. times: when each frame is shown, rising, in ticks of `unit` seconds. rate_hz: frames per second by the
    header, 0 if it states none."""
    frames = len(times)
    gap = (times[-1] - times[0]) / (frames - 1) if frames > 1 else 0.0
    frame_hz = float(1 / (gap * unit)) if gap else rate_hz or USUAL_RATE_HZ
    is_even = all(abs(time - times[0] - number * gap) <= gap / 2 for number, time in enumerate(times))
    if is_even and rate_hz and abs(rate_hz / frame_hz - 1) < CLOSE:
        frame_hz = rate_hz
    numbers = sample_frames(frames, frame_hz, ask)
    frame_s = frames / frame_hz / len(numbers)
    if is_even:
        return FramePlan([times[number] for number in numbers], frame_s)
    # The film lasts one gap longer than from its first moment to its last.
    step = Fraction(times[-1] - times[0]) * frames / (frames - 1) / len(numbers)
    shown_numbers = [bisect.bisect_right(times, times[0] + index * step) - 1 for index in range(len(numbers))]
    return FramePlan([times[number] for number in shown_numbers], frame_s)


def _decode_frames(container: Any, stream: Any, sound_stream: Any, order: Sequence[int] | None) -> Iterator[tuple[int, Any]]:
    """Yields each decoded frame after the moment when it is shown, in ticks. order: the moments, if the frames do not state theirs."""
    for number, frame in enumerate(containers.frames(container, stream, sound_stream)):
        if order is not None:
            yield order[min(number, len(order) - 1)], frame
        elif frame.pts is not None:
            yield frame.pts, frame


def _frames_at(decoded: Iterable[tuple[int, Any]], moments: Sequence[int]) -> Iterator[Any]:
    """Yields for each of the moments (ticks, rising) the frame that is shown then; holds one frame at a time. Moments after the last frame
    get the last frame. Raises BadMedia if more than a tenth of the moments come after it."""
    shown = None
    shown_at = yielded = 0
    for moment, frame in decoded:
        while shown is not None and yielded < len(moments) and moment > moments[yielded]:
            yield shown
            yielded += 1
        if yielded == len(moments):
            return
        shown, shown_at = frame, moment
    reached = 0 if shown is None else bisect.bisect_right(moments, shown_at)
    if reached < COMPLETE * len(moments):
        raise BadMedia(f"{reached} of the {len(moments)} frames wanted of it can be decoded: it is damaged, encode it anew")
    for _ in range(yielded, len(moments)):
        yield shown


def _put_frames(
    shown: Iterable[Any], aspect: float, count: int, ask: FilmPreprocessing, limits: MediaLimits, output: BoundedFile
) -> tuple[int, int, int, int]:
    """Put `count` frames into `output`, resized; returns the shape of all of them. aspect: width of a shown pixel / its height."""
    height = width = 0
    for frame in shown:
        _check_pixels(frame.width, frame.height, limits)
        picture, size = shown_picture(frame, aspect, ground(ask.background))
        if not height:
            height, width = smart_resize(*size, ask.factor, ask.min_pixels, ask.frame_pixels(count))
            output.expect(count * height * width * 3)
        output.put(resize_picture(picture, height, width), begin=False)
    return count, height, width, 3


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


MIN_TURN = math.tan(math.radians(1.0))
"""The tangent of one degree. A smaller rotation is ignored: the camera was held a little askew."""

FINEST_ASPECT = 200
"""The largest ratio of the sides of a pixel: a larger ratio in a file is a mistake."""


def pixel_aspect(stream: Any) -> float:
    """The width of a shown pixel divided by its height; 1 if the film states no such number, or an impossible one."""
    aspect = float(stream.sample_aspect_ratio or 1)
    return aspect if 1 / FINEST_ASPECT <= aspect <= FINEST_ASPECT else 1.0


def shown_picture(frame: Any, aspect: float, background: Colour) -> tuple[Image.Image, tuple[int, int]]:
    """The frame's stored pixels, turned upright, and the height and width at which to show them. aspect: width of a shown pixel divided
    by its height. background: the colour under transparent pixels."""
    pixels = _lay_on(frame, background)
    shown = pixels.shape[0], max(round(pixels.shape[1] * aspect), 1)
    (across_right, across_down), (along_right, along_down) = _matrix(frame)
    # Rows stay rows, at most mirrored.
    if abs(across_down) <= MIN_TURN * abs(across_right) and abs(along_right) <= MIN_TURN * abs(along_down):
        return Image.fromarray(_flip(pixels, along_down, across_right)), shown
    # Rows become columns.
    if abs(across_right) <= MIN_TURN * abs(across_down) and abs(along_down) <= MIN_TURN * abs(along_right):
        return Image.fromarray(_flip(pixels.swapaxes(0, 1), across_down, along_right)), shown[::-1]
    sine, cosine = across_down / math.hypot(across_down, along_down), across_right / math.hypot(across_right, along_right)
    clockwise = math.degrees(math.atan2(sine, cosine))
    return Image.fromarray(pixels).rotate(-clockwise, Image.Resampling.BILINEAR), shown


def _matrix(frame: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """The directions of one step across the stored picture and of one step down, each as (right, down) in the shown picture."""
    side_entry = frame.side_data.get(Type.DISPLAYMATRIX)
    if side_entry is None:
        return (1, 0), (0, 1)
    a, b, _, c, d, *_ = (int(value) for value in np.frombuffer(bytes(side_entry), np.int32))
    if a == c == 0 or b == d == 0:
        return (1, 0), (0, 1)  # all pixels on one line, which nobody means
    return (a, b), (c, d)


def _flip(pixels: NDArray[np.uint8], down: int, right: int) -> NDArray[np.uint8]:
    """The pixels, upside down if `down` is negative, and mirrored if `right` is negative."""
    return np.ascontiguousarray(pixels[:: -1 if down < 0 else 1, :: -1 if right < 0 else 1])


def _lay_on(frame: Any, background: Colour) -> NDArray[np.uint8]:
    """The frame's pixels in RGB, [height, width, 3]; transparent pixels lie on the background."""
    if not (frame.format.has_palette or any(component.is_alpha for component in frame.format.components)):
        return np.asarray(frame.to_ndarray(format="rgb24", threads=1))
    rgba = Image.fromarray(frame.to_ndarray(format="rgba", threads=1))
    return np.asarray(lay_on_ground(rgba.convert("RGB"), rgba.getchannel("A"), background))
