"""A picture decoded, by Pillow. Runs in the decoding process."""

from __future__ import annotations

from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, TiffImagePlugin, UnidentifiedImageError

from omnistage.models.media.errors import BadMedia, UnknownFormat
from omnistage.models.media.limits import MediaLimits
from omnistage.models.media.preprocessing import PicturePreprocessing, smart_resize

FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
"""Pillow knows more: some run other programs, some are scarcely looked after."""

BITS_PER_SAMPLE = 258
"""The number of that entry in a TIFF."""

Image.MAX_IMAGE_PIXELS = None  # the limit is ours, and an error where Pillow's would be a warning


def decoded(file: BinaryIO, ask: PicturePreprocessing, limits: MediaLimits) -> NDArray[np.uint8]:
    """[height, width, 3], or 4 with `alpha`. Raises BadMedia, or whatever Pillow raises for what is damaged."""
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
        return resized(_rgb(image, ask.alpha), *sizes)


def opened(file: BinaryIO) -> Image.Image | None:
    """A picture of which the header has been read, None for what is no picture. Of a picture that moves it is the first frame."""
    file.seek(0)
    try:
        return Image.open(file, formats=FORMATS)
    except UnidentifiedImageError:
        return None


def _rgb(image: Image.Image, alpha: bool) -> Image.Image:
    """Of 8 bits a sample. Pillow would cut off greys of more bits at 255, where nearly all of them are white."""
    mode = "RGBA" if alpha else "RGB"
    if image.mode == mode:
        return image
    if image.mode.startswith("I;16"):
        return Image.fromarray(_scaled(np.asarray(image), _grey_bits(image))).convert(mode)
    if image.mode in ("I", "F"):
        raise BadMedia(
            "its samples are numbers without a range, and nothing says which of them is white: convert it to 8 or 16 bits a sample"
        )
    return image.convert(mode)


def _grey_bits(image: Image.Image) -> int:
    """Of a sample in 16 bits: a TIFF may have 12 of them."""
    return int(image.tag_v2[BITS_PER_SAMPLE][0]) if isinstance(image, TiffImagePlugin.TiffImageFile) else 16


def _scaled(grey: NDArray[np.uint16], bits: int) -> NDArray[np.uint8]:
    """By a table, which needs no memory for products."""
    top = (1 << bits) - 1
    table = (np.arange(top + 1, dtype=np.uint32) * 255 + top // 2) // top
    return table.astype(np.uint8)[grey]


def resized(image: Image.Image, height: int, width: int) -> NDArray[np.uint8]:
    """[height, width, samples] of a picture of 8 bits a sample, as Transformers' processors without torchvision do it: to the bit."""
    return np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))
