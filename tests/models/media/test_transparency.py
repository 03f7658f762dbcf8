"""Transparent pixels lie on white, or on the colour that was asked for: in every format, as a page shows them."""

from __future__ import annotations

import io
import struct
from dataclasses import replace
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from helpers import lengths, media_files, picture_files
from helpers.decoding import AS_IT_IS, pixels_of
from omnistage.models.media.decoder import MediaDecoder
from omnistage.models.media.terms import FilmPreprocessing, PicturePreprocessing

BACKGROUND = (30, 200, 90)
ON_GREEN = replace(AS_IT_IS, background=BACKGROUND)


def stickers(seed: int) -> Image.Image:
    """RGBA, opaque, transparent and in between; colours hide under what is transparent."""
    rng = np.random.default_rng(seed)
    image = Image.fromarray(media_files.pixels(seed, 24, 32)).convert("RGBA")
    image.putalpha(Image.fromarray(rng.choice(np.array([0, 0, 255, 255, 90], np.uint8), (24, 32))))
    return image


def on(image: Image.Image, colour: tuple[int, int, int]) -> NDArray[np.uint8]:
    ground = Image.new("RGBA", image.size, (*colour, 255))
    return np.asarray(Image.alpha_composite(ground, image.convert("RGBA")).convert("RGB"))


def files_of(image: Image.Image) -> dict[str, bytes]:
    premultiplied = np.asarray(image).astype(np.uint16)
    premultiplied[..., :3] = premultiplied[..., :3] * premultiplied[..., 3:] // 255
    multiplied = {258: ("H", [8, 8, 8, 8]), 262: ("H", [2]), 277: ("H", [4]), 338: ("H", [1])}
    multiplied_grey = {258: ("H", [8, 8]), 262: ("H", [1]), 277: ("H", [2]), 338: ("H", [1])}
    encoded = media_files.encoded
    return {
        "RGBA PNG": encoded(image),
        "LA PNG": encoded(image.convert("LA")),
        "palette PNG": encoded(image.quantize(17)),
        "RGBA PNG of 16 bits": picture_files.png(*image.size, 16, 6, (np.asarray(image) * np.uint16(257)).astype(">u2").tobytes()),
        "GIF": encoded(image, "GIF"),
        "WebP": encoded(image, "WEBP", lossless=True, exact=True),
        "AVIF": encoded(image, "AVIF", quality=90, speed=10),
        "TIFF": encoded(image, "TIFF"),
        "grey TIFF": encoded(image.convert("LA"), "TIFF"),
        "palette TIFF": encoded(image.convert("P").convert("PA"), "TIFF"),
        "TIFF, multiplied": picture_files.tiff(*image.size, premultiplied.astype(np.uint8).tobytes(), multiplied),
        "grey TIFF, multiplied": picture_files.tiff(*image.size, premultiplied[..., [0, 3]].astype(np.uint8).tobytes(), multiplied_grey),
        "BMP with masks": bmp_with_masks(image),
    }


def bmp_with_masks(image: Image.Image) -> bytes:
    width, height = image.size
    data = np.asarray(image)[:, :, [2, 1, 0, 3]].tobytes()
    header = struct.pack("<IiiHHIIiiIIIIIII", 56, width, -height, 1, 32, 3, len(data), 0, 0, 0, 0, 0xFF0000, 0xFF00, 0xFF, 0xFF000000, 0)
    return struct.pack("<2sIII", b"BM", 14 + len(header) + len(data), 0, 14 + len(header)) + header + data


async def test_every_format_lies_on_white_or_on_the_colour_that_is_asked_for(decoder: MediaDecoder, seed: int) -> None:
    image = stickers(seed)
    for name, data in files_of(image).items():
        with Image.open(io.BytesIO(data)) as there:
            straight = there.convert("LA").convert("RGBA") if there.mode == "La" else there.convert("RGBA")
        assert straight.getchannel("A").getextrema() == (0, 255), name
        if name in ("RGBA PNG", "RGBA PNG of 16 bits", "WebP", "TIFF", "BMP with masks"):
            assert np.array_equal(np.asarray(straight), np.asarray(image)), name
        for ask, colour in ((AS_IT_IS, (255, 255, 255)), (ON_GREEN, BACKGROUND)):
            assert np.array_equal(await pixels_of(decoder, data, ask), on(straight, colour)), (name, colour)


async def test_it_is_laid_down_before_it_is_resized(decoder: MediaDecoder, seed: int) -> None:
    """Colours that hide under transparency are mixed into nothing. qwen-omni-utils does the same, and then resizes."""
    image = stickers(seed)
    asked = PicturePreprocessing(max_pixels=4 * 784)
    flat = Image.fromarray(on(image, (255, 255, 255)))
    expected = await pixels_of(decoder, media_files.encoded(flat), asked)
    assert np.array_equal(await pixels_of(decoder, media_files.encoded(image), asked), expected)
    hidden = np.asarray(image).copy()
    hidden[hidden[..., 3] == 0] = (255, 0, 0, 0)
    assert np.array_equal(await pixels_of(decoder, media_files.encoded(Image.fromarray(hidden)), asked), expected)


def key(*values: int) -> bytes:
    return struct.pack(f">{len(values)}H", *values)


@lengths.drawn_cells(
    4,
    ("depth", "colour_type", "data", "transparent", "expected"),
    [
        (1, 0, b"\x40", key(0), [BACKGROUND, (255,) * 3]),
        (1, 0, b"\x40", key(1), [(0,) * 3, BACKGROUND]),
        (2, 0, b"\x1b", key(2), [(0,) * 3, (85,) * 3, BACKGROUND, (255,) * 3]),
        (4, 0, b"\x3f", key(3), [BACKGROUND, (255,) * 3]),
        (8, 0, b"\x03\xff", key(3), [BACKGROUND, (255,) * 3]),
        (16, 0, b"\x01\x03\x01\x04\xff\xff", key(0x0103), [BACKGROUND, (1,) * 3, (255,) * 3]),
        (8, 2, b"\1\2\3\1\2\4", key(1, 2, 3), [BACKGROUND, (1, 2, 4)]),
        (16, 2, b"\1\2\3\4\5\6" + b"\1\2\3\5\5\6" + b"\x80" * 6, key(0x0102, 0x0304, 0x0506), [BACKGROUND, (1, 3, 5), (128,) * 3]),
        (4, 3, b"\x01", b"\0", [BACKGROUND, (255, 0, 0)]),
        (8, 3, b"\0\1", b"\xff\0", [(0,) * 3, BACKGROUND]),
    ],
)
async def test_a_colour_of_a_png_that_stands_for_nothing(
    decoder: MediaDecoder, depth: int, colour_type: int, data: bytes, transparent: bytes, expected: list[Any]
) -> None:
    palette = {"PLTE": b"\0\0\0\xff\0\0"} if colour_type == 3 else {}
    file = picture_files.png(len(expected), 1, depth, colour_type, data, **palette, tRNS=transparent)
    assert (await pixels_of(decoder, file, ON_GREEN))[0].tolist() == [list(pixel) for pixel in expected]


@pytest.mark.parametrize(("transparent", "first"), [(None, (0, 255, 0)), (1, (0, 255, 0)), (0, BACKGROUND)])
async def test_around_the_first_picture_of_a_gif_there_is_nothing(
    decoder: MediaDecoder, transparent: int | None, first: tuple[int, int, int]
) -> None:
    second = BACKGROUND if transparent == 1 else (0x20, 0x40, 0x60)
    data = picture_files.gif((4, 2), (1, 0, 2, 1), [0, 1], transparent)
    expected = [[BACKGROUND, first, second, BACKGROUND], [BACKGROUND] * 4]
    assert (await pixels_of(decoder, data, ON_GREEN)).tolist() == [[list(pixel) for pixel in row] for row in expected]


async def test_who_keeps_transparency_gets_it_unless_a_ground_is_named(decoder: MediaDecoder, seed: int) -> None:
    image = stickers(seed)
    kept = replace(AS_IT_IS, alpha=True)
    assert np.array_equal(await pixels_of(decoder, media_files.encoded(image), kept), np.asarray(image))
    laid = await pixels_of(decoder, media_files.encoded(image), replace(ON_GREEN, alpha=True))
    assert np.array_equal(laid[..., :3], on(image, BACKGROUND)) and (laid[..., 3] == 255).all()
    opaque = await pixels_of(decoder, media_files.picture(seed, 24, 32), kept)
    assert np.array_equal(opaque[..., :3], media_files.pixels(seed, 24, 32)) and (opaque[..., 3] == 255).all()


@pytest.mark.parametrize(
    ("form", "codec", "pixel_format"),
    [
        *(("gif", "gif", ""), ("mov", "png", "rgba"), ("mov", "prores_ks", "yuva444p10le")),
        *(("webm", codec, "yuva420p") for codec in ("libvpx", "libvpx-vp9")),
    ],
)
async def test_frames_of_a_film_lie_on_it_too(decoder: MediaDecoder, seed: int, form: str, codec: str, pixel_format: str) -> None:
    """A GIF that is sent as a film is a film, and so are those of programs that cut."""
    image = Image.new("RGBA", (64, 48), (0, 0, 255, 255))
    image.paste((255, 0, 0, 0), (0, 0, 32, 48))
    if codec == "gif":
        later = [Image.new("RGBA", (64, 48), (255, number, 0, 0)) for number in range(3)]
        for number, each in enumerate(later):
            each.paste((0, number, 255, 255), (32, 0, 64, 48))
        data = media_files.encoded(image, "GIF", save_all=True, append_images=later, duration=100, disposal=2)
    else:
        data = transparent_film(image, form, codec, pixel_format)
    for background, colour in ((None, (255, 255, 255)), (BACKGROUND, BACKGROUND)):
        film = await decoder.film(data, FilmPreprocessing(factor=4, min_pixels=1, max_pixels=64 * 48, background=background))
        for frame in film.frames:
            assert np.abs(frame[8:-8, 8:24].astype(int) - colour).max() <= 4
            assert np.abs(frame[8:-8, 40:-8].astype(int) - (0, 0, 255)).max() <= 12


def transparent_film(image: Image.Image, form: str, codec: str, pixel_format: str) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format=form) as container:
        alone = {"auto-alt-ref": "0"} if codec == "libvpx" else {}
        stream: Any = container.add_stream(codec, rate=10, options=alone)
        stream.width, stream.height, stream.pix_fmt = *image.size, pixel_format
        for _ in range(4):
            frame = av.VideoFrame.from_ndarray(np.asarray(image), format="rgba")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()
