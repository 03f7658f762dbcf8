"""Pictures: the same bits as Transformers' own processor without torchvision makes of them, in every format."""

from __future__ import annotations

import io
import random
import struct
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from transformers.image_utils import PILImageResampling, SizeDict, load_image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from helpers import media_files
from omnistage.models.media import terms
from omnistage.models.media.decoder import MediaDecoder
from omnistage.models.media.terms import BadMedia, PicturePreprocessing

LOSSLESS_AND_NOT: list[tuple[str, dict[str, Any]]] = [
    ("PNG", {}),
    ("JPEG", {"quality": 80}),
    ("JPEG", {"quality": 70, "progressive": True, "subsampling": 2}),
    ("WEBP", {"quality": 60}),
    ("WEBP", {"lossless": True}),
    ("GIF", {}),
    ("BMP", {}),
    ("TIFF", {"compression": "tiff_lzw"}),
    ("AVIF", {"speed": 10}),
]
MODES = ("L", "LA", "P", "RGBA", "1", "CMYK")
EXIF_ORIENTATION = 0x0112


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
        assert np.array_equal((await decoder.picture(data, ask)).pixels, expected(data, ask)), (form, options)
    for mode in MODES:
        size = (chance.randint(20, 300), chance.randint(20, 300))
        image = Image.fromarray(media_files.pixels(seed, *size)).convert(mode)
        data = media_files.encoded(image, "TIFF" if mode == "CMYK" else "PNG")
        assert np.array_equal((await decoder.picture(data, ask)).pixels, expected(data, ask)), mode


AS_IT_IS = PicturePreprocessing(factor=1, min_pixels=1, max_pixels=1 << 30)


async def test_greys_of_more_than_8_bits_are_scaled(decoder: MediaDecoder, seed: int) -> None:
    """The published processor makes them white."""
    grey = media_files.pixels(seed, 30, 50)[:, :, 0]
    for data in (
        media_files.encoded(Image.fromarray(grey.astype("<u2") * 257), "PNG"),
        media_files.encoded(Image.fromarray(grey.astype("<u2") * 257), "TIFF"),
        media_files.encoded(Image.fromarray(grey.astype(">u2") * 257), "TIFF"),
        tiff_of_12_bits(np.rint(grey * (4095 / 255)).astype(int)),
    ):
        pixels = (await decoder.picture(data, AS_IT_IS)).pixels
        assert np.array_equal(pixels, np.repeat(grey[:, :, None], 3, axis=2))
    near = media_files.encoded(Image.fromarray(np.array([[128, 129, 65535]], np.uint16)), "PNG")
    assert (await decoder.picture(near, AS_IT_IS)).pixels[0, :, 0].tolist() == [0, 1, 255]


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
            assert np.array_equal((await decoder.picture(data, AS_IT_IS)).pixels, upright), (form, orientation)


async def test_of_a_picture_that_moves_the_first_is_taken(decoder: MediaDecoder, seed: int) -> None:
    first, *rest = (Image.fromarray(media_files.pixels(seed + number, 30, 40)) for number in range(3))
    for form in ("PNG", "GIF", "WEBP"):
        data = media_files.encoded(first, form, save_all=True, append_images=rest, duration=100)
        assert np.array_equal((await decoder.picture(data, AS_IT_IS)).pixels, expected(data, AS_IT_IS))


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
