"""The parts of a PNG beside its pixels: they are read where they change the picture, passed over where they do not, and never much work."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from helpers import media_files, picture_files
from omnistage.models.media.decoder import MediaDecoder
from omnistage.models.media.terms import BadMedia, MediaLimits, PicturePreprocessing

AS_IT_IS = PicturePreprocessing(factor=1, min_pixels=1, max_pixels=1 << 30)
XMP = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><d tiff:Orientation="6"/></x:xmpmeta>'
EXIF = b"Exif\0\0II*\0\x08\0\0\0\x01\0" + struct.pack("<HHIHH", 0x0112, 3, 1, 6, 0) + bytes(4)
RAW_EXIF = b"\nexif\n%8d\n%s\n" % (len(EXIF), EXIF.hex().encode())


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def text(name: bytes, keyword: bytes, words: bytes) -> bytes:
    """name: of a chunk of any of the three kinds; packed where the kind is."""
    how = {b"tEXt": b"\0", b"zTXt": b"\0\0", b"iTXt": b"\0\1\0\0\0"}[name]
    return chunk(name, keyword + how + (words if name == b"tEXt" else zlib.compress(words)))


def picture_with(seed: int, notes: bytes, behind: bytes = b"") -> bytes:
    data = media_files.picture(seed, 20, 30)
    return data[:33] + notes + data[33:-12] + behind + data[-12:]


MEBIBYTES = bytes(8 << 20)
MANY = {
    "profiles": chunk(b"iCCP", b"k\0\0" + zlib.compress(MEBIBYTES)) * 400,
    "profiles that fit": chunk(b"iCCP", b"k\0\0" + zlib.compress(MEBIBYTES[: 4 << 20])) * 800,
    **{f"{name.decode()} of cameras": text(name, b"XML:com.adobe.xmp", MEBIBYTES) * 400 for name in (b"zTXt", b"iTXt")},
    **{f"{name.decode()} of any keyword": text(name, b"prompt", MEBIBYTES) * 400 for name in (b"zTXt", b"iTXt")},
    "Exif": text(b"zTXt", b"Raw profile type exif", MEBIBYTES) * 400,
}


async def test_however_many_notes_there_are_they_are_little_work(seed: int) -> None:
    """Gigabytes of each kind, in less than a MiB of file: of the processor's time a tenth of what they took."""
    decoder = MediaDecoder(MediaLimits(picture_least_s=1.0))
    try:
        for name, notes in MANY.items():
            for data in (picture_with(seed, notes), picture_with(seed, b"", notes)):
                assert np.array_equal((await decoder.picture(data, AS_IT_IS)).pixels, media_files.pixels(seed, 20, 30)), name
    finally:
        await decoder.close()


ODD = {
    "long and packed": text(b"zTXt", b"workflow", b"node " * 1_900_000),
    "long, in any language": text(b"iTXt", b"workflow", b"node " * 1_900_000),
    "long": text(b"tEXt", b"workflow", b"node " * 1_900_000),
    "a long profile": chunk(b"iCCP", b"k\0\0" + zlib.compress(picture_files.rgb_profile(2.2) + bytes(20 << 20))),
    "a profile of nothing": chunk(b"iCCP", b""),
    "a profile without its packing": chunk(b"iCCP", b"k\0"),
    "a profile packed in another way": chunk(b"iCCP", b"k\0\7" + zlib.compress(picture_files.rgb_profile(2.2))),
    "a profile with another checksum": chunk(b"iCCP", b"k\0\0" + zlib.compress(picture_files.rgb_profile(2.2)))[:-1] + b"?",
    "a text with another checksum": text(b"tEXt", b"Title", b"word")[:-1] + b"?",
    "a text packed in another way": chunk(b"zTXt", b"XML:com.adobe.xmp\0\7" + zlib.compress(XMP)),
    "Exif with another checksum": chunk(b"eXIf", EXIF[6:])[:-1] + b"?",
    "a size that is cut off": chunk(b"pHYs", b"1"),
    "colours that are cut off": chunk(b"cHRM", b"1") + chunk(b"gAMA", b"1") + chunk(b"sRGB", b""),
    "one that nobody knows": chunk(b"abCd", b"1")[:-1] + b"?",
}


@pytest.mark.parametrize("where", ["in front", "behind"])
async def test_notes_that_are_long_or_broken_are_no_fault_of_a_picture(decoder: MediaDecoder, seed: int, where: str) -> None:
    for name, notes in ODD.items():
        data = picture_with(seed, notes) if where == "in front" else picture_with(seed, b"", notes)
        assert np.array_equal((await decoder.picture(data, AS_IT_IS)).pixels, media_files.pixels(seed, 20, 30)), name


@pytest.mark.parametrize(
    "note",
    [
        *[text(name, b"XML:com.adobe.xmp", XMP) for name in (b"tEXt", b"zTXt", b"iTXt")],
        *[text(name, b"Raw profile type exif", RAW_EXIF) for name in (b"tEXt", b"zTXt")],
        chunk(b"eXIf", EXIF[6:]),
    ],
    ids=lambda note: note[4:24].decode("latin-1").replace("\0", ""),
)
async def test_how_a_camera_was_held_is_read_wherever_it_is_noted(decoder: MediaDecoder, seed: int, note: bytes) -> None:
    """Among other notes, the first of its kind."""
    others = text(b"zTXt", b"prompt", b"a cat") * 3
    turned = np.asarray(Image.fromarray(media_files.pixels(seed, 20, 30)).transpose(Image.Transpose.ROTATE_270))
    assert np.array_equal((await decoder.picture(picture_with(seed, others + note + others), AS_IT_IS)).pixels, turned)


@pytest.mark.parametrize("name", [b"PLTE", b"tRNS"])
async def test_what_the_colours_are_made_of_has_its_checksum(decoder: MediaDecoder, seed: int, name: bytes) -> None:
    image = Image.fromarray(media_files.pixels(seed, 20, 30)).quantize(16)
    whole = media_files.encoded(image, "PNG", transparency=bytes(range(16)))
    at = whole.index(name)
    end = at + 4 + int.from_bytes(whole[at - 4 : at])
    broken = whole[:end] + bytes([whole[end] ^ 1]) + whole[end + 1 :]
    with pytest.raises(BadMedia):
        await decoder.picture(broken, AS_IT_IS)
    assert (await decoder.picture(whole, AS_IT_IS)).pixels.size
