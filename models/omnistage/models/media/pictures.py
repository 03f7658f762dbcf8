"""A picture decoded, by Pillow, in the colours that a viewer shows: 8 bits a sample, sRGB, and how opaque each pixel is. Runs in the
decoding process."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from struct import error as StructError
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageChops, ImageCms, ImageFile, TiffImagePlugin, UnidentifiedImageError

from omnistage.models.media.hidden_work import check_hidden_work
from omnistage.models.media.terms import (
    BadMedia,
    Colour,
    MediaLimits,
    PicturePreprocessing,
    UnknownFormat,
    check_aspect,
    ground,
    smart_resize,
)

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
    shown = load_colours(image, file)
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


PHOTOMETRIC, BITS_PER_SAMPLE, SAMPLE_FORMAT, MIN_SAMPLE, LARGEST_SAMPLE = 262, 258, 339, 340, 341
"""Numbers of entries in a TIFF."""

STRAIGHT = {"La": "LA", "RGBa": "RGBA", "PA": "RGBA"}
"""By mode of Pillow: the only mode to which Pillow converts it in one step."""

KEY_BITS = {"L;2": 2, "L;4": 4}
"""By the form of samples in the file: their bits. Pillow scales samples to 8 bits, but not the grey that is transparent."""

PROFILE_BYTES = 4 << 20
"""Larger colour profiles are not used. Profiles of printers have two million bytes."""

PROFILE_MODES = {"RGB ": "RGB", "GRAY": "L", "CMYK": "CMYK"}
SAME_LEVELS = 3
"""A profile that differs from sRGB by no more levels is sRGB under another name: the picture keeps its bits, as in published processors."""


@dataclass(frozen=True, slots=True)
class ColoursAndOpacity:
    """A picture in two parts. colours: mode RGB. opacity: mode L, 255 for opaque; None if all pixels are opaque."""

    colours: Image.Image
    opacity: Image.Image | None

    def laid_on(self, background: Colour) -> Image.Image:
        """The picture on a ground of this colour, in mode RGB."""
        return self.colours if self.opacity is None else lay_on_ground(self.colours, self.opacity, background)


def lay_on_ground(colours: Image.Image, opacity: Image.Image, background: Colour) -> Image.Image:
    """The picture on a ground, as viewers and qwen-omni-utils lay it, before anything is resized: colours under transparent pixels never
    mix into the result."""
    ground = Image.new("RGB", colours.size, background)
    ground.paste(colours, mask=opacity)
    return ground


def load_colours(image: ImageFile.ImageFile, file: BinaryIO) -> ColoursAndOpacity:
    """The shown form of a picture that was opened from the file and not loaded yet. Raises BadMedia, or any error of Pillow."""
    tiles = list(image.tile)
    image.load()
    opacity = _opacity(image, str(tiles[0].args) if tiles else "", file)
    if image.format == "GIF" and tiles:
        opacity = _drawn_part(image, tiles[0].extents, opacity)
    return ColoursAndOpacity(_in_srgb(_base(image), image.info.get("icc_profile")), opacity)


def _opacity(image: Image.Image, stored: str, file: BinaryIO) -> Image.Image | None:
    """The opacity, mode L, 255 for opaque; None without transparency. stored: the form of samples in the file, in Pillow's words."""
    if not image.has_transparency_data:
        return None
    key: Any = image.info.get("transparency")
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) != key) * np.uint8(255))
    if image.mode == "RGB" and stored.startswith("RGB;16"):
        # Pillow keeps only the upper bytes of the samples: two colours are equal only if the lower bytes agree too.
        file.seek(0)
        lower = Image.open(file, formats=[str(image.format)])
        lower.tile = [tile._replace(args="RGB;16L") for tile in lower.tile]
        lower.load()
        upper_key, lower_key = ([value >> bits & 255 for value in key] for bits in (8, 0))
        return ImageChops.lighter(_key_opacity(image, upper_key), _key_opacity(lower, lower_key))
    if stored in KEY_BITS:
        max_value = (1 << KEY_BITS[stored]) - 1
        image.info["transparency"] = (key & max_value) * 255 // max_value
    straight = _straight(image)
    return (straight if straight.mode in ("LA", "RGBA") else straight.convert("RGBA")).getchannel("A")


def _straight(image: Image.Image) -> Image.Image:
    """The picture with colours that are not multiplied by its opacity."""
    return image.convert(STRAIGHT[image.mode]) if image.mode in STRAIGHT else image


def _key_opacity(image: Image.Image, key: list[int]) -> Image.Image:
    image.info["transparency"] = tuple(key)
    return image.convert("RGBA").getchannel("A")


def _drawn_part(image: Image.Image, box: tuple[int, int, int, int] | None, opacity: Image.Image | None) -> Image.Image | None:
    """The opacity with everything outside of `box`, the drawn part, transparent: the first picture of a GIF may be smaller than its screen,
    and Pillow fills the rest with a colour. None if all pixels are opaque."""
    if box is None or box == (0, 0, *image.size):
        return opacity
    part = Image.new("L", image.size, 0)
    part.paste(255, box)
    return part if opacity is None else ImageChops.darker(part, opacity)


def _base(image: Image.Image) -> Image.Image:
    """The picture in mode L, RGB or CMYK, without opacity. Greys of more than 8 bits are scaled: Pillow would make nearly all white."""
    if image.mode in ("L", "RGB", "CMYK"):
        return image
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        return _grey(image)
    straight = _straight(image)
    return straight.convert("L" if straight.mode in ("1", "LA") else "RGB")


def _grey(image: Image.Image) -> Image.Image:
    """The picture in mode L, scaled from greys of more than 8 bits a sample. Raises BadMedia for samples whose range is unknown."""
    tags = image.tag_v2 if isinstance(image, TiffImagePlugin.TiffImageFile) else {}
    if image.mode.startswith("I;16"):
        grey = _by_table(np.asarray(image), int(tags[BITS_PER_SAMPLE][0]) if tags else 16)
    else:
        low, high = (_number(tags.get(tag)) for tag in (MIN_SAMPLE, LARGEST_SAMPLE))
        if not low < high:
            raise BadMedia(
                "its samples are numbers without a range, and nothing says which of them is white: convert it to 8 or 16 bits a sample"
            )
        samples = np.asarray(image)
        if image.mode == "I" and tags.get(SAMPLE_FORMAT, (1,))[0] == 1:
            samples = samples.view(np.uint32)  # Pillow has only signed whole numbers of 32 bits.
        grey = _by_range(samples, low, high)
    # In some TIFFs the smallest sample is white: Pillow inverts samples of 8 bits and less, and no others.
    return Image.fromarray(255 - grey if tags.get(PHOTOMETRIC) == 0 else grey)


def _number(value: object) -> float:
    """The value of an entry of a TIFF; the first sample's value if each sample has its own. NaN if the value is missing or not finite."""
    first = value[0] if isinstance(value, tuple) and value else value
    number = float(first) if isinstance(first, int | float) else math.nan
    return number if math.isfinite(number) else math.nan


def _by_table(grey: NDArray[np.uint16], bits: int) -> NDArray[np.uint8]:
    """8-bit levels of samples of `bits` bits, by a table, which needs no memory for products."""
    top = (1 << bits) - 1
    table = (np.arange(top + 1, dtype=np.uint32) * 255 + top // 2) // top
    return table.astype(np.uint8)[grey]


def _by_range(samples: NDArray[np.generic], low: float, high: float) -> NDArray[np.uint8]:
    """8-bit levels of samples: `low` becomes 0, and `high` 255. A sample that is not a number becomes 0."""
    scaled = np.nan_to_num(samples.astype(np.float64), copy=False, nan=low, posinf=high, neginf=low)
    scaled -= low
    scaled *= 255 / (high - low)
    return np.rint(scaled, out=scaled).clip(0, 255, out=scaled).astype(np.uint8)


def _in_srgb(base: Image.Image, profile: bytes | None) -> Image.Image:
    """The picture in sRGB, mode RGB. profile: its ICC profile. Without a profile that fits and can be read, its numbers count as sRGB."""
    transform = None
    if profile and len(profile) <= PROFILE_BYTES:
        try:
            transform = _transform(profile, base.mode)
        except (OSError, ImageCms.PyCMSError):  # LittleCMS raises this for a profile that it cannot read, which is no fault of the pixels.
            transform = None
    converted = base if transform is None else ImageCms.applyTransform(base, transform)
    assert converted is not None
    return converted if converted.mode == "RGB" else converted.convert("RGB")


def _transform(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """The transform from a profile's colours to sRGB, for this mode; None if the profile is sRGB already, or is for another mode."""
    source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
    if PROFILE_MODES.get(source.profile.xcolor_space) != mode:
        return None
    transform = ImageCms.buildTransform(source, ImageCms.createProfile("sRGB"), mode, "RGB")
    if mode == "CMYK":
        return transform
    levels = np.linspace(0, 255, 256 if mode == "L" else 9).astype(np.uint8)
    # All greys, or all colours of 9 levels each.
    samples = Image.fromarray(levels[None] if mode == "L" else np.stack(np.meshgrid(levels, levels, levels), axis=-1).reshape(9, -1, 3))
    changes = ImageChops.difference(samples.convert("RGB"), ImageCms.applyTransform(samples, transform) or samples)
    return transform if max(high for _, high in changes.getextrema()) > SAME_LEVELS else None  # type: ignore[misc]
