"""Colours of every kind as a viewer shows them: profiles, ink, more bits than 8, smallest samples that are white."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageCms

from helpers import lengths, media_files, picture_files
from omnistage.models.media.decoder import MediaDecoder
from omnistage.models.media.terms import BadMedia, PicturePreprocessing

AS_IT_IS = PicturePreprocessing(factor=1, min_pixels=1, max_pixels=1 << 30)
SRGB_PRIMARIES = ((0.43607, 0.22249, 0.01392), (0.38515, 0.71687, 0.09708), (0.14307, 0.06061, 0.71410))
GREYS = np.array([[0, 1, 10, 100, 200, 255]], np.uint8)


async def pixels_of(decoder: MediaDecoder, data: bytes) -> NDArray[np.uint8]:
    return (await decoder.picture(data, AS_IT_IS)).pixels


def in_srgb(linear: NDArray[Any]) -> NDArray[Any]:
    """Levels of 0 to 255, of light of 0 to 1. By the formula of the standard."""
    linear = np.clip(linear, 0, 1)
    return 255 * np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "TIFF", "WEBP", "AVIF"])
async def test_colours_of_another_profile_are_shown_as_they_were_meant(decoder: MediaDecoder, form: str) -> None:
    """Telephones write Display P3: a colour there is another mixture of a screen's."""
    flat = np.full((16, 16, 3), (180, 90, 60), np.uint8)
    profile = picture_files.rgb_profile(2.2)
    light = (np.array([180, 90, 60]) / 255) ** 2.2 @ np.array(picture_files.DISPLAY_P3) @ np.linalg.inv(np.array(SRGB_PRIMARIES))
    made = await pixels_of(decoder, media_files.encoded(Image.fromarray(flat), form, icc_profile=profile, quality=100))
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
    opaque = media_files.encoded(image.convert("RGB"), icc_profile=picture_files.rgb_profile(2.2))
    made = await pixels_of(decoder, media_files.encoded(image, icc_profile=picture_files.rgb_profile(2.2)))
    assert made[0, 0].tolist() == (await pixels_of(decoder, opaque))[0, 0].tolist() and made[0, 3].tolist() == [255] * 3


@lengths.drawn_cells(
    2,
    "profile",
    [
        pytest.param(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes(), id="sRGB"),
        pytest.param(b"no profile at all", id="broken"),
        pytest.param(picture_files.rgb_profile(2.2)[:300], id="cut off"),
        pytest.param(picture_files.cmyk_profile(), id="of ink"),
        pytest.param(picture_files.grey_profile(1.0), id="of greys"),
        pytest.param(picture_files.rgb_profile(2.2) + bytes(5 << 20), id="endless"),
    ],
)
async def test_a_profile_that_says_nothing_changes_nothing(decoder: MediaDecoder, seed: int, profile: bytes) -> None:
    """Nor is the picture blamed. One of sRGB leaves the bits of the published processor."""
    image = Image.fromarray(media_files.pixels(seed, 20, 30))
    assert np.array_equal(await pixels_of(decoder, media_files.encoded(image, icc_profile=profile)), np.asarray(image))


async def test_long_notes_of_a_program_that_draws_are_no_fault_of_a_picture(decoder: MediaDecoder, seed: int) -> None:
    """Three MiB of how it was drawn, packed."""
    data = media_files.picture(seed, 20, 30)
    note = b"workflow\0\0" + zlib.compress(b"node " * 600_000)
    chunk = struct.pack(">I", len(note)) + b"zTXt" + note + struct.pack(">I", zlib.crc32(b"zTXt" + note))
    assert np.array_equal(await pixels_of(decoder, data[:33] + chunk + data[33:]), media_files.pixels(seed, 20, 30))


async def test_broken_notes_of_a_camera_are_no_fault_of_a_picture(decoder: MediaDecoder, seed: int) -> None:
    expected = media_files.pixels(seed, 20, 30)
    orientation = struct.pack("<HHI", 0x0112, 3, 1)
    for exif in (
        b"Exif\0\0",
        b"Exif\0\0II*\0",
        b"Exif\0\0nonsense" * 4,
        b"Exif\0\0II*\0\x08\0\0\0\x01\0" + orientation,
        b"Exif\0\0MM\0*" + b"\xff" * 40,
    ):
        for form in ("PNG", "JPEG", "WEBP"):
            data = media_files.picture(seed, 20, 30, form, exif=exif, **({"lossless": True} if form == "WEBP" else {}))
            made = await pixels_of(decoder, data)
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
    lab = ImageCms.applyTransform(
        image, ImageCms.buildTransform(ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB"), "RGB", "LAB")
    )
    assert lab is not None
    deep = (np.asarray(image) * np.uint16(257)).tobytes()
    sixteen = picture_files.tiff(30, 20, deep, {258: ("H", [16] * 3), 262: ("H", [2]), 277: ("H", [3])})
    for data in (
        media_files.encoded(image.convert("YCbCr"), "TIFF"),
        media_files.encoded(lab, "TIFF"),
        media_files.encoded(image.convert("CMYK"), "TIFF"),
        media_files.encoded(image.convert("1"), "TIFF"),
        media_files.encoded(image.convert("P"), "TIFF"),
        sixteen,
    ):
        with Image.open(io.BytesIO(data)) as there:
            expected = np.asarray(there.convert("RGB"))
        assert np.array_equal(await pixels_of(decoder, data), expected)


SIDE = 7_000
"""49 million pixels, and 50 may be."""
LARGE: dict[str, Callable[[], bytes]] = {
    "colours of which one is transparent": lambda: picture_files.png(SIDE, SIDE, 8, 2, bytes(SIDE * SIDE * 3), tRNS=bytes(6)),
    "greys of which one is transparent": lambda: picture_files.png(SIDE, SIDE, 16, 0, bytes(SIDE * SIDE * 2), tRNS=bytes(2)),
    "a profile": lambda: picture_files.png(
        *(SIDE, SIDE, 8, 6, bytes(SIDE * SIDE * 4)), iCCP=b"p\0\0" + zlib.compress(picture_files.rgb_profile(2.2))
    ),
}


@lengths.one_or_all("kind", LARGE)
async def test_the_largest_picture_of_a_kind_has_room(decoder: MediaDecoder, seed: int, kind: str) -> None:
    """The process may have that much memory: all that is made on the way is a few times the picture."""
    data = LARGE[lengths.draw(kind, LARGE, seed)]()
    assert (await decoder.picture(data, PicturePreprocessing(max_pixels=16 * 784))).pixels.min() == 255
