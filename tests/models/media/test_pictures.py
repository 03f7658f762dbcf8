"""Pictures: the same bits as Transformers' own processor without torchvision makes of them, in every format. Transparent pixels lie on
white, or on the colour that was asked for."""

from __future__ import annotations

import io
import random
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageCms
from transformers.image_utils import PILImageResampling, SizeDict, load_image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from helpers import lengths, media_files, picture_files
from helpers.decoding import AS_IT_IS, pixels_of
from omnistage.models.media import terms
from omnistage.models.media.decoder import MediaDecoder
from omnistage.models.media.terms import BadMedia, FilmPreprocessing, PicturePreprocessing

LOSSLESS_AND_NOT: list[tuple[str, dict[str, Any]]] = [
    *(("PNG", {}), ("GIF", {}), ("BMP", {}), ("TIFF", {"compression": "tiff_lzw"}), ("AVIF", {"speed": 10}), ("JPEG", {"quality": 80})),
    *(("JPEG", {"quality": 70, "progressive": True, "subsampling": 2}), ("WEBP", {"quality": 60}), ("WEBP", {"lossless": True})),
]
MODES = ("L", "LA", "P", "RGBA", "1", "CMYK")
EXIF_ORIENTATION = 0x0112
SRGB_PRIMARIES = ((0.43607, 0.22249, 0.01392), (0.38515, 0.71687, 0.09708), (0.14307, 0.06061, 0.71410))
GREYS = np.array([[0, 1, 10, 100, 200, 255]], np.uint8)
PROFILE = picture_files.rgb_profile(2.2)


def expected(data: bytes, ask: PicturePreprocessing) -> NDArray[np.uint8]:
    """[height, width, 3], by Transformers alone."""
    with Image.open(io.BytesIO(data)) as image:
        planes = np.moveaxis(np.array(load_image(image)), -1, 0)
    size = SizeDict(shortest_edge=ask.min_pixels, longest_edge=ask.max_pixels)
    resized = Qwen2VLImageProcessorPil().resize(planes, size, PILImageResampling.BICUBIC, factor=ask.factor)
    return np.moveaxis(resized, 0, -1)


async def test_every_format_size_and_mode_has_the_bits_of_the_published_processor(decoder: MediaDecoder, seed: int) -> None:
    chance = random.Random(seed)
    ask = PicturePreprocessing(max_pixels=200 * 28 * 28)
    for form, options in LOSSLESS_AND_NOT:
        data = media_files.picture(seed, chance.randint(20, 700), chance.randint(20, 700), form, **options)
        assert np.array_equal(await pixels_of(decoder, data, ask), expected(data, ask)), (form, options)
    for mode in MODES:
        size = (chance.randint(20, 300), chance.randint(20, 300))
        image = Image.fromarray(media_files.pixels(seed, *size)).convert(mode)
        data = media_files.encoded(image, "TIFF" if mode == "CMYK" else "PNG")
        assert np.array_equal(await pixels_of(decoder, data, ask), expected(data, ask)), mode


async def test_greys_of_more_than_8_bits_are_scaled(decoder: MediaDecoder, seed: int) -> None:
    """The published processor makes them white."""
    grey = media_files.pixels(seed, 30, 50)[:, :, 0]
    for data in (
        media_files.encoded(Image.fromarray(grey.astype("<u2") * 257), "PNG"),
        media_files.encoded(Image.fromarray(grey.astype("<u2") * 257), "TIFF"),
        media_files.encoded(Image.fromarray(grey.astype(">u2") * 257), "TIFF"),
        tiff_of_12_bits(np.rint(grey * (4095 / 255)).astype(int)),
    ):
        assert np.array_equal(await pixels_of(decoder, data), np.repeat(grey[:, :, None], 3, axis=2))
    near = media_files.encoded(Image.fromarray(np.array([[128, 129, 65535]], np.uint16)), "PNG")
    assert (await pixels_of(decoder, near))[0, :, 0].tolist() == [0, 1, 255]


def tiff_of_12_bits(grey: NDArray[Any]) -> bytes:
    """Grey, in one strip, two samples in three bytes; of an even width."""
    height, width = grey.shape
    first, second = grey[:, ::2], grey[:, 1::2]
    packed = np.stack([first >> 4, (first & 15) << 4 | second >> 8, second & 255], axis=2).astype(np.uint8).tobytes()
    entries = {256: width, 257: height, 258: 12, 259: 1, 262: 1, 273: 8, 277: 1, 278: height, 279: len(packed)}
    table = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in entries.items())
    return struct.pack("<2sHI", b"II", 42, 8 + len(packed)) + packed + struct.pack("<H", len(entries)) + table + bytes(4)


@pytest.mark.parametrize("dtype", ["float32", "int32"])
async def test_samples_without_a_range_are_refused(decoder: MediaDecoder, dtype: str) -> None:
    data = media_files.encoded(Image.fromarray(np.eye(30, dtype=dtype)), "TIFF")
    with pytest.raises(BadMedia, match="numbers without a range, and nothing says which of them is white: convert it to 8 or 16 bits"):
        await decoder.picture(data)


async def test_a_camera_that_was_turned_is_turned_back(decoder: MediaDecoder, seed: int) -> None:
    upright = media_files.pixels(seed, 30, 50)
    turned = {1: upright, 2: upright[:, ::-1], 3: upright[::-1, ::-1], 4: upright[::-1], 5: upright.swapaxes(0, 1)}
    turned |= {6: np.rot90(upright, 1), 7: np.rot90(upright, 2).swapaxes(0, 1), 8: np.rot90(upright, -1)}
    for orientation, pixels in turned.items():
        image = Image.fromarray(np.ascontiguousarray(pixels))
        exif = image.getexif()
        exif[EXIF_ORIENTATION] = orientation
        for form, options in (("PNG", {}), ("TIFF", {}), ("WEBP", {"lossless": True})):
            data = media_files.encoded(image, form, exif=exif, **options)
            assert np.array_equal(await pixels_of(decoder, data), upright), (form, orientation)


async def test_of_a_picture_that_moves_the_first_is_taken(decoder: MediaDecoder, seed: int) -> None:
    first, *rest = (Image.fromarray(media_files.pixels(seed + number, 30, 40)) for number in range(3))
    for form in ("PNG", "GIF", "WEBP"):
        data = media_files.encoded(first, form, save_all=True, append_images=rest, duration=100)
        assert np.array_equal(await pixels_of(decoder, data), expected(data, AS_IT_IS))


@pytest.mark.parametrize("most", [1, 2, 10, 64, 200, 2048])
def test_no_picture_grows_beyond_what_is_allowed(most: int, seed: int) -> None:
    """However much longer it is one way than the other; and what is allowed is no less than it needs to be."""
    chance, grown = random.Random(seed), 0
    for factor in (28, 32):
        least = terms.grown_to(most, factor)
        for _ in range(3000):
            height = int(2 ** chance.uniform(0, 8))
            width = int(height * chance.uniform(1, 200))
            height, width = chance.sample([height, width], 2)
            rows, columns = terms.smart_resize(height, width, factor, least, most * factor**2)
            is_grown = round(height / factor) * round(width / factor) * factor**2 < least
            grown = max(grown, rows * columns // factor**2 if is_grown else 0)
    assert most // 2 <= grown <= most


def test_sizes_are_those_of_the_published_formula(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(3000):
        height, width = (int(2 ** chance.uniform(0, 13)) for _ in range(2))
        least = chance.choice([56 * 56, 128 * 784, 1])
        sizes = (chance.choice([28, 28, 14, 32]), least, least + chance.choice([784, 1280 * 784, 16384 * 784]))
        if max(height, width) / min(height, width) > 200:
            with pytest.raises(BadMedia, match="200 times longer"):
                terms.smart_resize(height, width, *sizes)
        else:
            assert terms.smart_resize(height, width, *sizes) == smart_resize(height, width, *sizes)


# Colours --------------------------------------------------------------------------------------------------------------------------------


def in_srgb(linear: NDArray[Any]) -> NDArray[Any]:
    """Levels of 0 to 255, of light of 0 to 1. By the formula of the standard."""
    linear = np.clip(linear, 0, 1)
    return 255 * np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "TIFF", "WEBP", "AVIF"])
async def test_colours_of_another_profile_are_shown_as_they_were_meant(decoder: MediaDecoder, form: str) -> None:
    """Telephones write Display P3: a colour there is another mixture of a screen's."""
    flat = np.full((16, 16, 3), (180, 90, 60), np.uint8)
    light = (np.array([180, 90, 60]) / 255) ** 2.2 @ np.array(picture_files.DISPLAY_P3) @ np.linalg.inv(np.array(SRGB_PRIMARIES))
    made = await pixels_of(decoder, media_files.encoded(Image.fromarray(flat), form, icc_profile=PROFILE, quality=100))
    assert np.abs(made[8, 8] - in_srgb(light)).max() <= (2 if form in ("PNG", "TIFF") else 4)
    assert np.abs(made[8, 8].astype(int) - (180, 90, 60)).max() > 8


async def test_profiles_of_greys_and_of_ink(decoder: MediaDecoder) -> None:
    grey = media_files.encoded(Image.fromarray(GREYS), icc_profile=picture_files.grey_profile(1.0))
    made, meant = (await pixels_of(decoder, grey))[0, :, 0], in_srgb(GREYS[0] / 255)
    assert np.abs(made - meant)[2:].max() <= 1, "in the darkest two LittleCMS is coarse"
    ink = Image.fromarray(np.array([[[0, 0, 0, 0], [255, 0, 0, 0]]], np.uint8), "CMYK")
    with_profile = media_files.encoded(ink, "TIFF", icc_profile=picture_files.cmyk_profile())
    white, black = (await pixels_of(decoder, with_profile))[0]
    assert white.min() >= 253 and black.max() <= 2, "by its profile any ink is black"
    assert (await pixels_of(decoder, media_files.encoded(ink, "TIFF")))[0].tolist() == [[255] * 3, [0, 255, 255]]


async def test_transparency_of_a_picture_with_a_profile_stays(decoder: MediaDecoder) -> None:
    image = Image.new("RGBA", (4, 4), (180, 90, 60, 0))
    image.paste((180, 90, 60, 255), (0, 0, 2, 4))
    opaque = media_files.encoded(image.convert("RGB"), icc_profile=PROFILE)
    made = await pixels_of(decoder, media_files.encoded(image, icc_profile=PROFILE))
    assert made[0, 0].tolist() == (await pixels_of(decoder, opaque))[0, 0].tolist() and made[0, 3].tolist() == [255] * 3


@lengths.drawn_cells(
    2,
    "profile",
    [
        pytest.param(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes(), id="sRGB"),
        pytest.param(b"no profile at all", id="broken"),
        pytest.param(PROFILE[:300], id="cut off"),
        pytest.param(picture_files.cmyk_profile(), id="of ink"),
        pytest.param(picture_files.grey_profile(1.0), id="of greys"),
        pytest.param(PROFILE + bytes(5 << 20), id="endless"),
    ],
)
async def test_a_profile_that_says_nothing_changes_nothing(decoder: MediaDecoder, seed: int, profile: bytes) -> None:
    """Nor is the picture blamed. One of sRGB leaves the bits of the published processor."""
    image = Image.fromarray(media_files.pixels(seed, 20, 30))
    assert np.array_equal(await pixels_of(decoder, media_files.encoded(image, icc_profile=profile)), np.asarray(image))


async def test_long_notes_of_a_program_that_draws_are_no_fault_of_a_picture(decoder: MediaDecoder, seed: int) -> None:
    """Three MiB of how it was drawn, packed."""
    data = media_files.picture(seed, 20, 30)
    chunk = picture_files.chunk(b"zTXt", b"workflow\0\0" + zlib.compress(b"node " * 600_000))
    assert np.array_equal(await pixels_of(decoder, data[:33] + chunk + data[33:]), media_files.pixels(seed, 20, 30))


async def test_broken_notes_of_a_camera_are_no_fault_of_a_picture(decoder: MediaDecoder, seed: int) -> None:
    expected = media_files.pixels(seed, 20, 30)
    orientation = struct.pack("<HHI", 0x0112, 3, 1)
    for exif in (b"", b"II*\0", b"nonsense" + b"Exif\0\0nonsense" * 3, b"II*\0\x08\0\0\0\x01\0" + orientation, b"MM\0*" + b"\xff" * 40):
        for form in ("PNG", "JPEG", "WEBP"):
            lossless = {"lossless": True} if form == "WEBP" else {}
            made = await pixels_of(decoder, media_files.picture(seed, 20, 30, form, exif=b"Exif\0\0" + exif, **lossless))
            assert form == "JPEG" or np.array_equal(made, expected), exif


async def test_ink_of_a_jpeg_is_not_inverted(decoder: MediaDecoder) -> None:
    """Photoshop writes it upside down, and Pillow does so, too."""
    image = Image.new("RGB", (16, 16), (200, 40, 30)).convert("CMYK")
    made = await pixels_of(decoder, media_files.encoded(image, "JPEG", quality=100))
    assert np.abs(made.astype(int) - (200, 40, 30)).max() <= 4


def grey_tiff(samples: NDArray[Any], *, photometric: int = 1, form: int = 1, **limits: tuple[str, float]) -> bytes:
    """form: 1 whole, 2 with a sign, 3 floating. limits: `least` and `largest`."""
    entries = {258: ("H", [samples.itemsize * 8]), 262: ("H", [photometric]), 277: ("H", [1]), 339: ("H", [form])}
    named = {340 + (name == "largest"): (kind, [value]) for name, (kind, value) in limits.items()}
    return picture_files.tiff(samples.shape[1], samples.shape[0], samples.tobytes(), {**entries, **named})


async def test_smallest_samples_that_are_white(decoder: MediaDecoder) -> None:
    for samples in (GREYS, GREYS.astype("<u2") * 257):
        assert (await pixels_of(decoder, grey_tiff(samples, photometric=0)))[0, :, 0].tolist() == (255 - GREYS[0]).tolist()
    two = grey_tiff(GREYS.astype("<f4"), photometric=0, form=3, least=("f", 0), largest=("f", 255))
    assert (await pixels_of(decoder, two))[0, :, 0].tolist() == (255 - GREYS[0]).tolist()


async def test_numbers_with_a_range_are_scaled(decoder: MediaDecoder) -> None:
    for samples, form, kind, low, high in (
        (GREYS / np.float32(255), 3, "f", 0, 1),
        (GREYS * np.float32(-2), 3, "d", -510, 0),
        (GREYS.astype("<i4") * 1000 - 5000, 2, "i", -5000, 250_000),
        (GREYS.astype("<u4") * 16_843_009, 1, "I", 0, (1 << 32) - 1),
    ):
        data = grey_tiff(samples, form=form, least=(kind, low), largest=(kind, high))
        expected = 255 - GREYS[0] if low == -510 else GREYS[0]
        assert (await pixels_of(decoder, data))[0, :, 0].tolist() == expected.tolist(), (form, kind)
    holes = grey_tiff(np.array([[np.nan, np.inf, -np.inf, 0.5]], "<f4"), form=3, least=("f", 0), largest=("f", 1))
    assert (await pixels_of(decoder, holes))[0, :, 0].tolist() == [0, 255, 0, 128]


@pytest.mark.parametrize("limits", [(1, 1), (2, 1), (0, float("nan")), (0, float("inf"))])
async def test_a_range_that_is_none_is_told(decoder: MediaDecoder, limits: tuple[float, float]) -> None:
    data = grey_tiff(GREYS.astype("<f4"), form=3, least=("f", limits[0]), largest=("f", limits[1]))
    with pytest.raises(BadMedia, match="numbers without a range"):
        await decoder.picture(data)


async def test_other_ways_to_say_a_colour(decoder: MediaDecoder, seed: int) -> None:
    """As Pillow makes RGB of them outside of the process that decodes."""
    image = Image.fromarray(media_files.pixels(seed, 20, 30))
    to_lab = ImageCms.buildTransform(ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB"), "RGB", "LAB")
    lab = ImageCms.applyTransform(image, to_lab)
    assert lab is not None
    deep = (np.asarray(image) * np.uint16(257)).tobytes()
    sixteen = picture_files.tiff(30, 20, deep, {258: ("H", [16] * 3), 262: ("H", [2]), 277: ("H", [3])})
    others = (lab, *map(image.convert, ("YCbCr", "CMYK", "1", "P")))
    for data in (*(media_files.encoded(each, "TIFF") for each in others), sixteen):
        with Image.open(io.BytesIO(data)) as there:
            expected = np.asarray(there.convert("RGB"))
        assert np.array_equal(await pixels_of(decoder, data), expected)


SIDE = 7_000
"""49 million pixels, and 50 may be."""
LARGE: dict[str, Callable[[], bytes]] = {
    "colours of which one is transparent": lambda: picture_files.png(SIDE, SIDE, 8, 2, bytes(SIDE * SIDE * 3), tRNS=bytes(6)),
    "greys of which one is transparent": lambda: picture_files.png(SIDE, SIDE, 16, 0, bytes(SIDE * SIDE * 2), tRNS=bytes(2)),
    "a profile": lambda: picture_files.png(SIDE, SIDE, 8, 6, bytes(SIDE * SIDE * 4), iCCP=b"p\0\0" + zlib.compress(PROFILE)),
}


@lengths.one_or_all("kind", LARGE)
async def test_the_largest_picture_of_a_kind_has_room(decoder: MediaDecoder, seed: int, kind: str) -> None:
    """The process may have that much memory: all that is made on the way is a few times the picture."""
    data = LARGE[lengths.draw(kind, LARGE, seed)]()
    assert (await decoder.picture(data, PicturePreprocessing(max_pixels=16 * 784))).pixels.min() == 255


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
