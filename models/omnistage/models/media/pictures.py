"""A picture decoded, by Pillow. Runs in the decoding process."""

from __future__ import annotations

from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from omnistage.models.media.errors import BadMedia, UnknownFormat
from omnistage.models.media.limits import MediaLimits
from omnistage.models.media.preprocessing import PicturePreprocessing, smart_resize

FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
"""Pillow knows more: some run other programs, some are scarcely looked after."""

Image.MAX_IMAGE_PIXELS = None  # the limit is ours, and an error where Pillow's would be a warning


def decoded(file: BinaryIO, ask: PicturePreprocessing, limits: MediaLimits) -> NDArray[np.uint8]:
    """[height, width, 3]. Raises BadMedia, or whatever Pillow raises for what is damaged."""
    image = opened(file)
    if image is None:
        raise UnknownFormat(f"it is no picture in a format that is known here ({', '.join(FORMATS)}): convert it to PNG or JPEG")
    with image:
        if image.width * image.height > limits.picture_pixels:
            raise BadMedia(
                f"it is {image.width}x{image.height} pixels, and at most {limits.picture_pixels / 1e6:g} million may be: make it smaller"
            )
        ImageOps.exif_transpose(image, in_place=True)
        sizes = smart_resize(image.height, image.width, ask.factor, ask.min_pixels, ask.max_pixels)
        return resized(image if image.mode == "RGB" else image.convert("RGB"), *sizes)


def opened(file: BinaryIO) -> Image.Image | None:
    """A picture of which the header has been read, None for what is no picture. Of a picture that moves it is the first frame."""
    file.seek(0)
    try:
        return Image.open(file, formats=FORMATS)
    except UnidentifiedImageError:
        return None


def resized(image: Image.Image, height: int, width: int) -> NDArray[np.uint8]:
    """[height, width, 3] of an RGB picture, as Transformers' processors without torchvision do it: to the bit."""
    return np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))
