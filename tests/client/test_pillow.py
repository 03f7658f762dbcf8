"""Images of Pillow as pictures of a request: each is seen as its file is, whatever was done to it before."""

from __future__ import annotations

import io
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps, ImageSequence

from helpers import picture_files
from omnistage.client import BadRequestError
from omnistage.client.media import to_part

PNG = b"\x89PNG\r\n\x1a\n" + bytes(8)
WAV = b"RIFF" + bytes(4) + b"WAVEfmt "
MP4 = bytes(4) + b"ftypisom" + bytes(8)

PIXELS = np.random.default_rng(5).integers(0, 256, (20, 30, 3), np.uint8)


def test_a_picture_of_pillow_arrives_with_every_pixel_and_the_way_it_is_turned() -> None:
    image = Image.fromarray(PIXELS)
    for mode in ("RGB", "RGBA", "L", "P", "1", "I;16"):
        given = Image.fromarray(PIXELS[..., 0].astype(np.uint16) * 257) if mode == "I;16" else image.convert(mode)
        media = to_part(given, "image", "images[0]").media
        assert media.media_type == "image/png"
        back = Image.open(io.BytesIO(media.data))
        assert np.array_equal(np.asarray(back), np.asarray(given))
    camera = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(camera, "JPEG", exif=exif)
    opened = Image.open(camera)
    back = Image.open(io.BytesIO(to_part(opened, "image", "images[0]").media.data))
    assert (np.array_equal(np.asarray(back), np.asarray(opened)), back.getexif()[0x0112]) == (True, 6)


STATES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "just opened": lambda image: image,
    "loaded": lambda image: (image.load(), image)[1],
    "with its EXIF data read": lambda image: (image.getexif(), image)[1],
    "loaded with its EXIF data read before": lambda image: (image.getexif(), image.load(), image)[2],
    "sent before": lambda image: (to_part(image, "image", "x"), image)[1],
    "a copy": lambda image: image.copy(),
    "at its first frame again": lambda image: next(ImageSequence.Iterator(image)),
    "from another process": lambda image: pickle.loads(pickle.dumps(image)),
}


FORMS: dict[str, dict[str, Any]] = {"TIFF": {}, "PNG": {}, "WEBP": {"lossless": True}, "JPEG": {"quality": 95}, "MPO": {}}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("state", STATES)
def test_an_image_of_pillow_is_seen_as_its_file_is_in_any_state(form: str, state: str, seed: int) -> None:
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = random.Random(seed).randrange(1, 9)
    Image.fromarray(PIXELS).save(file, form, exif=exif, **FORMS[form])
    expected = ImageOps.exif_transpose(Image.open(file))
    given = STATES[state](Image.open(io.BytesIO(file.getvalue())))
    seen = ImageOps.exif_transpose(Image.open(io.BytesIO(to_part(given, "image", "x").media.data)))
    assert np.array_equal(np.asarray(seen), np.asarray(expected)), exif[0x0112]


def test_an_opened_image_is_its_file_until_it_is_changed(tmp_path: Path) -> None:
    path = tmp_path / "cat.jpg"
    Image.fromarray(np.kron(PIXELS, np.ones((8, 8, 1), np.uint8))).save(path, exif=Image.Exif())
    sent = lambda image: to_part(image, "image", "x").media.data  # noqa: E731
    with Image.open(path) as image:
        assert sent(image) == sent(image) == path.read_bytes()
        assert image.size == (240, 160) and np.asarray(image).shape == (160, 240, 3), "it can still be used"
        assert sent(image) != path.read_bytes(), "it was loaded"
    with Image.open(path) as image:
        image.draft("RGB", (120, 80))
        assert Image.open(io.BytesIO(sent(image))).size == image.size != (240, 160)
    with Image.open(path) as image:
        image.getexif()[0x0112] = 6
        assert Image.open(io.BytesIO(sent(image))).getexif()[0x0112] == 6


@pytest.mark.parametrize("name", ["a transparent colour of 16 bits", "white is zero"])
def test_what_pillow_forgets_when_it_loads_is_asked_for_as_a_file(name: str, tmp_path: Path) -> None:
    if name == "white is zero":
        path = tmp_path / "x.tiff"
        Image.fromarray(PIXELS[..., 0].astype(np.uint16) * 257).save(path, tiffinfo={262: 0})
    else:
        path = tmp_path / "x.png"
        data = (PIXELS.astype(">u2") * 257).tobytes()
        path.write_bytes(picture_files.png(30, 20, 16, 2, data, tRNS=np.array((257, 514, 771), ">u2").tobytes()))
    image = Image.open(path)
    assert to_part(image, "image", "x").media.data == path.read_bytes()
    image.load()
    with pytest.raises(BadRequestError, match="give the file itself"):
        to_part(image, "image", "x")


@pytest.mark.parametrize("mode", ["CMYK", "LAB", "YCbCr", "HSV", "RGBa", "La", "PA", "F"])
def test_a_picture_of_pillow_in_other_colours_arrives_as_it_is(mode: str) -> None:
    """Also where PNG has no words for them, and turned as it was."""
    image = Image.fromarray(np.dstack([PIXELS, PIXELS[..., :1]]), "RGBA")
    if mode == "LAB":
        given = Image.frombytes("LAB", image.size, PIXELS.tobytes())
    else:
        given = image.convert({"RGBa": "RGBA", "La": "LA", "PA": "P", "F": "L"}.get(mode, "RGB")).convert(mode)
    given.getexif()[0x0112] = 6
    given.getexif()[0x010F] = "who made it"
    back = Image.open(io.BytesIO(to_part(given, "image", "images[0]").media.data))
    assert 0x010F not in back.getexif()
    plain = {"RGBa": "RGBA", "La": "LA", "PA": "RGBA", "CMYK": "CMYK", "LAB": "LAB", "F": "F"}.get(mode, "RGB")
    assert back.mode == plain
    upright, expected = ImageOps.exif_transpose(back), ImageOps.exif_transpose(given)
    assert upright.size == (20, 30)
    assert np.array_equal(np.asarray(upright), np.asarray(expected if mode == plain else expected.convert(plain)))
