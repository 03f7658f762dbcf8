"""The display of a frame of a film: upright, as wide as it is meant to be, and on a ground where it is transparent.

This module reads what a container states about it as FFmpeg's command and players do."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from av.sidedata.sidedata import Type
from numpy.typing import NDArray
from PIL import Image

from omnistage.models.media.colours import lay_on_ground
from omnistage.models.media.preprocessing import Colour

STRAIGHT = math.tan(math.radians(1.0))
"""The tangent of one degree. A smaller rotation is ignored: the camera was held a little askew."""

FINEST_ASPECT = 200
"""The largest ratio of the sides of a pixel: a larger ratio in a file is a mistake."""


def pixel_aspect(stream: Any) -> float:
    """The width of a shown pixel divided by its height; 1 if the film states no such number, or an impossible one."""
    aspect = float(stream.sample_aspect_ratio or 1)
    return aspect if 1 / FINEST_ASPECT <= aspect <= FINEST_ASPECT else 1.0


def picture(frame: Any, aspect: float, background: Colour) -> tuple[Image.Image, tuple[int, int]]:
    """The frame's stored pixels, turned upright, and the height and width at which to show them. aspect: width of a shown pixel divided
    by its height. background: the colour under transparent pixels."""
    pixels = _lay_on(frame, background)
    shown = pixels.shape[0], max(round(pixels.shape[1] * aspect), 1)
    across, along = _matrix(frame)
    if abs(across[1]) <= STRAIGHT * abs(across[0]) and abs(along[0]) <= STRAIGHT * abs(along[1]):
        return Image.fromarray(_flip(pixels, along[1], across[0])), shown
    if abs(across[0]) <= STRAIGHT * abs(across[1]) and abs(along[1]) <= STRAIGHT * abs(along[0]):
        return Image.fromarray(_flip(pixels.swapaxes(0, 1), across[1], along[0])), shown[::-1]
    clockwise = math.degrees(math.atan2(across[1] / math.hypot(across[1], along[1]), across[0] / math.hypot(across[0], along[0])))
    return Image.fromarray(pixels).rotate(-clockwise, Image.Resampling.BILINEAR), shown


def _matrix(frame: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """The directions of one step across the stored picture and of one step down, each as (right, down) in the shown picture."""
    side_entry = frame.side_data.get(Type.DISPLAYMATRIX)
    if side_entry is None:
        return (1, 0), (0, 1)
    a, b, _, c, d, *_ = (int(value) for value in np.frombuffer(bytes(side_entry), np.int32))
    if not (a or c) or not (b or d):
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
