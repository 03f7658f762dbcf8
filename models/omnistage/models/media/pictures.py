"""A picture decoded, by Pillow. Runs in the decoding process."""

from __future__ import annotations

from struct import error as StructError
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageFile, UnidentifiedImageError

from omnistage.models.media import colours
from omnistage.models.media.errors import BadMedia, UnknownFormat
from omnistage.models.media.hidden_work import check_hidden_work
from omnistage.models.media.limits import MediaLimits
from omnistage.models.media.preprocessing import PicturePreprocessing, check_aspect, ground, smart_resize

FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
"""Formats that are read. Pillow knows more: some run other programs, some are hardly maintained."""

UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""The transposition that makes a picture upright, by its orientation in EXIF."""

Image.MAX_IMAGE_PIXELS = None  # our own limit is an error; Pillow's would only be a warning for some sizes


def open_checked(file: BinaryIO, limits: MediaLimits) -> ImageFile.ImageFile:
    """A picture that may be decoded, as far as its header and its parts show. Close the result. Raises BadMedia."""
    image = open_picture(file)
    if image is None:
        raise UnknownFormat(f"it is no picture in a format that is known here ({', '.join(FORMATS)}): convert it to PNG or JPEG")
    if image.width * image.height > limits.picture_pixels:
        raise BadMedia(
            f"it is {image.width}x{image.height} pixels, and at most {limits.picture_pixels / 1e6:g} million may be: make it smaller"
        )
    check_aspect(image.height, image.width)
    return image


def decode(file: BinaryIO, image: ImageFile.ImageFile, ask: PicturePreprocessing) -> NDArray[np.uint8]:
    """Decode a picture to [height, width, 3], or 4 with `alpha`. image: from `open_checked`. Raises BadMedia and errors of Pillow."""
    shown = colours.load_colours(image, file)
    if ask.alpha and not ask.background:
        picture = shown.colours.copy()
        picture.putalpha(255 if shown.opacity is None else shown.opacity)
    else:
        picture = shown.laid_on(ground(ask.background))
    if (turn := _turn(image)) is not None:
        picture = picture.transpose(turn)
    sizes = smart_resize(picture.height, picture.width, ask.factor, ask.min_pixels, ask.max_pixels)
    return resize_picture(picture.convert("RGBA") if ask.alpha else picture, *sizes)


def open_picture(file: BinaryIO) -> ImageFile.ImageFile | None:
    """A picture whose header has been read; None if the file is no picture. A picture that moves gives its first frame. Raises BadMedia for
    a picture of too many parts, some of which are read with the header."""
    check_hidden_work(file)
    file.seek(0)
    try:
        return Image.open(file, formats=FORMATS)
    except UnidentifiedImageError:
        return None


def _turn(image: Image.Image) -> Image.Transpose | None:
    """The transposition that makes the picture upright; None if it is upright, or no camera noted how it was held."""
    try:
        return UPRIGHT.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    except (ArithmeticError, LookupError, StructError, SyntaxError, TypeError, ValueError):
        return None  # Pillow raises these for broken notes. The pixels are whole, and nobody sees the notes.


def resize_picture(image: Image.Image, height: int, width: int) -> NDArray[np.uint8]:
    """Resize a picture of 8 bits a sample to [height, width, samples], bit for bit like Transformers' processors without torchvision."""
    return np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))
