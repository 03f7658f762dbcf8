"""A corpus of media files: every format with every lie of a header and every feature of a container that goes with it. This file has the
pictures: formats, kinds of samples, and how a camera was held. corpus_sounds and corpus_films have the others.

A feature is one function; the products of tables make the cases, and the seed of a test their sizes, rates and contents.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from PIL import Image, ImageCms

from helpers import ffmpeg, media_files


@dataclass(frozen=True, slots=True)
class CorpusFile:
    """file: as somebody sends it. plain: what a reference is to decode: the same file, or one that shows the same and does not lie. then:
    what comes after it, if that is a file of its own. cut: the end of the file is missing and something in it tells, so that it has to be
    refused. torn: nothing tells, and the last of what is there may be in part. alike: how far values may be from those of the reference on
    the average, of full scale; 0: no bit may differ."""

    file: bytes
    plain: bytes
    then: bytes = b""
    cut: bool = False
    torn: bool = False
    alike: float = 0.0
    use_audio: bool = False


Maker = Callable[[random.Random], CorpusFile]


def cut(file: bytes, chance: random.Random, *, tells: bool) -> bytes:
    """Without its end. Where nothing tells that, enough is left for any decoder to begin."""
    return file[: round(len(file) * chance.uniform(0.05 if tells else 0.5, 0.97))]


def cut_in_fragment(file: bytes) -> bytes:
    """A cut MP4 up to the first bytes of its last fragment: between two fragments nothing would tell that more should follow."""
    samples = file.rfind(b"mdat")
    return file if samples < 0 else file[: samples + 10]


ORIENTATION = 0x0112
"""The number of that entry in EXIF."""

MODES: dict[str, tuple[str, ...]] = {
    "PNG": ("1", "L", "LA", "P", "P-clear", "P-tRNS", "RGB", "RGB-tRNS", "L-tRNS", "RGBA", "I;16"),
    "GIF": ("1", "L", "P", "P-clear", "RGB"),
    "WEBP": ("L", "RGB", "RGBA", "P-clear"),
    "TIFF": ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "I;16"),
    "BMP": ("1", "L", "P", "RGB", "RGBA"),
    "JPEG": ("L", "RGB", "CMYK"),
    "AVIF": ("L", "RGB", "RGBA"),
}
DEEP = ("rgb48be", "rgba64be", "gray16be", "ya16be")
"""The pixel formats of 16 bits a sample: Pillow writes none of them, ffmpeg does."""
UPRIGHTS = ("JPEG", "PNG", "TIFF", "WEBP")
OPTIONS: dict[str, list[dict[str, object]]] = {
    "TIFF": [{}, {"compression": "tiff_lzw"}, {"compression": "tiff_adobe_deflate"}, {"compression": "packbits"}],
    "JPEG": [{"quality": 90}, {"progressive": True}, {"subsampling": 0}],
    "WEBP": [{"lossless": True}, {"quality": 80}],
}
CUTS = ("PNG", "JPEG", "WEBP", "TIFF", "AVIF", "BMP")
ROUNDED = 0.004
"""One of 255 steps: what is half transparent is rounded."""


def cases() -> Iterator[tuple[str, Maker]]:
    """Each by a name that can be read."""
    for form, modes in MODES.items():
        for mode in modes:
            yield f"picture-{form.lower()}-{mode}", partial(_plain, form, mode)
    for pixel_format in DEEP:
        yield f"picture-png-{pixel_format}", partial(_deep, pixel_format)
    for form in UPRIGHTS:
        for orientation in range(1, 9):
            yield f"picture-{form.lower()}-orientation-{orientation}", partial(_held, form, orientation)
    for form in CUTS:
        yield f"picture-{form.lower()}-cut", partial(_cut, form)
    for form in ("PNG", "JPEG", "WEBP", "TIFF"):
        yield f"picture-{form.lower()}-profile", partial(_profiled, form)


def on_white(file: bytes) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """The reference: upright, and where it is transparent there is white behind it."""
    with Image.open(io.BytesIO(file)) as stored:
        stored.load()  # turns a TIFF by itself, and forgets how it was held
        orientation = stored.getexif().get(ORIENTATION, 1)
        image: Image.Image = stored.copy()
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image).astype(float) / 257 + 0.5).astype(np.uint8))
    if image.mode in ("RGB", "L", "1", "P", "LA", "PA", "RGBA"):
        seen = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", seen.size, "white"), seen)
    turned = _TURNS[orientation]
    rgb = np.asarray(image.convert("RGB"))
    return np.ascontiguousarray(turned(rgb))


_TURNS: dict[int, Callable[..., np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]] = {
    1: lambda rgb: rgb,
    2: lambda rgb: rgb[:, ::-1],
    3: lambda rgb: rgb[::-1, ::-1],
    4: lambda rgb: rgb[::-1],
    5: lambda rgb: rgb.transpose(1, 0, 2),
    6: lambda rgb: np.rot90(rgb, -1),
    7: lambda rgb: rgb[::-1, ::-1].transpose(1, 0, 2),
    8: lambda rgb: np.rot90(rgb, 1),
}
"""The meaning of each number in EXIF."""


def _image(mode: str, chance: random.Random) -> tuple[Image.Image, dict[str, object]]:
    """A picture in such samples, and what is to be said when it is written."""
    height, width = chance.randint(20, 70), chance.randint(20, 70)
    rgb = Image.fromarray(media_files.pixels(chance.getrandbits(32), height, width))
    alpha = Image.fromarray(media_files.pixels(chance.getrandbits(32), height, width)[:, :, 0])
    kind, _, clear = mode.partition("-")
    if kind == "I;16":
        return Image.fromarray(np.asarray(rgb.convert("L")).astype(np.uint16) * 257 + 13), {}
    if kind == "LAB":
        to_lab = ImageCms.buildTransform(ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB"), "RGB", "LAB")
        lab = ImageCms.applyTransform(rgb, to_lab)
        assert lab is not None
        return lab, {}
    if kind in ("RGBA", "LA"):
        rgb.putalpha(alpha)
    image = rgb.convert("P", palette=Image.Palette.ADAPTIVE, colors=16) if kind == "P" else rgb.convert(kind)
    if not clear:
        return image, {}
    if kind == "P":
        return image, {"transparency": bytes(chance.randrange(256) for _ in range(16)) if clear == "tRNS" else chance.randrange(16)}
    place = chance.randrange(width), chance.randrange(height)
    return image, {"transparency": image.getpixel(place)}


def _sample(file: bytes) -> CorpusFile:
    return CorpusFile(file, file, alike=ROUNDED)


def _plain(form: str, mode: str, chance: random.Random) -> CorpusFile:
    image, said = _image(mode, chance)
    return _sample(media_files.encoded(image, form, **said, **chance.choice(OPTIONS.get(form, [{}]))))


def _deep(pixel_format: str, chance: random.Random) -> CorpusFile:
    image, _ = _image("RGBA", chance)
    words = ("-f", "png_pipe", "-i", "pipe:0", "-pix_fmt", pixel_format, "-c:v", "png", "-f", "image2", "{out}")
    return _sample(ffmpeg.made(*words, data=media_files.encoded(image), name="deep.png"))


def _held(form: str, orientation: int, chance: random.Random) -> CorpusFile:
    image, _ = _image("RGB", chance)
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return _sample(media_files.encoded(image, form, exif=exif, **chance.choice(OPTIONS.get(form, [{}]))))


def _cut(form: str, chance: random.Random) -> CorpusFile:
    image, _ = _image("RGB", chance)
    file = cut(media_files.encoded(image, form), chance, tells=True)
    return CorpusFile(file, file, cut=True)


def _profiled(form: str, chance: random.Random) -> CorpusFile:
    """With a profile of colours that changes none."""
    image, _ = _image("RGB", chance)
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    return _sample(media_files.encoded(image, form, icc_profile=profile, **chance.choice(OPTIONS.get(form, [{}]))))
