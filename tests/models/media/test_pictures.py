"""Pictures: the same bits as Transformers' own processor without torchvision makes of them, in every format; and colours of every kind as a
viewer shows them: profiles, ink, more bits than 8, smallest samples that are white."""

from __future__ import annotations

import io
import random
import struct
import zlib
from collections.abc import Callable
from typing import Any

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
from omnistage.models.media.terms import BadMedia, PicturePreprocessing

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
