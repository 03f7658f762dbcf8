"""Pictures that are small in bytes or pixels and much work: refused before they are decoded, and what programs write is not; and the parts
of a PNG beside its pixels: read where they change the picture, passed over where they do not, and never much work."""

from __future__ import annotations

import io
import random
import struct
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

from helpers import media_files, picture_files
from helpers.decoding import decoding, pixels_of
from helpers.picture_files import chunk
from omnistage.models.media import hidden_work
from omnistage.models.media.decoder import MediaDecoder
from omnistage.models.media.hidden_work import check_hidden_work
from omnistage.models.media.terms import BadMedia, MediaLimits


def jpeg_of_scans(scans: int) -> bytes:
    """The last scan of a progressive JPEG again and again, until there are so many."""
    data = media_files.picture(1, 64, 64, "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:-2] + data[last:-2] * (scans - data.count(b"\xff\xda")) + b"\xff\xd9"


def jpeg_with(data: bytes) -> bytes:
    """Bytes behind its first two."""
    whole = media_files.picture(1, 64, 64, "JPEG")
    return whole[:2] + data + whole[2:]


def segments(count: int, marker: int, data: bytes) -> bytes:
    return jpeg_with((bytes([0xFF, marker]) + struct.pack(">H", len(data) + 2) + data) * (count - 4))


def exif_behind_an_end(count: int) -> bytes:
    return b"\xff\xd8\xff\xd9" + segments(count + 4, 0xE1, b"Exif\0\0")[2:]


def exif_behind_lengths(count: int) -> bytes:
    """Each within what would be a segment, if its marker had a length."""
    segment = b"\xff\xe1\0\x08Exif\0\0"
    hidden = b"".join(bytes([0xFF, marker]) + struct.pack(">H", len(segment) + 2) + segment for marker in (0xF0, 0xFD, 0xC8))
    return jpeg_with(hidden * (count // 3))


def png_of_chunks(count: int, name: bytes) -> bytes:
    whole = media_files.picture(1, 64, 64, "PNG")
    return whole[:33] + chunk(name, b"") * (count - 3) + whole[33:]


def gif_of_blocks(count: int, block: bytes) -> bytes:
    """In one comment, or each in an extension of its own."""
    whole = media_files.encoded(Image.new("P", (64, 64)), "GIF")
    flags = whole[10]
    at = 13 + (3 << (flags & 7) + 1 if flags & 128 else 0)
    before = b"!\xfe" + block * count + b"\0" if block[0] else (b"!\xf8" + block) * (count // 2)
    return whole[:at] + before + whole[at:]


def tiff_of_strips(count: int, order: str, large: bool) -> bytes:
    """One row each, all of them the same bytes."""
    place, entry, first = ("Q", "HHQQ", 16) if large else ("I", "HHII", 8)
    rows = {256: 3, 257: count, 258: 8, 259: 1, 262: 1, 273: 8, 277: 1, 278: 1, 279: 3}
    where, lengths = first, first + count * 4
    values = struct.pack(f"{order}{count}I", *[first] * count) + struct.pack(f"{order}{count}I", *[3] * count)
    many = {273: where, 279: lengths}
    table = b"".join(
        struct.pack(order + entry, tag, 4, count if tag in many else 1, many.get(tag, value << 32 if large and order == ">" else value))
        for tag, value in rows.items()
    )
    head = struct.pack(order + "HHHQ", 43, 8, 0, first + len(values)) if large else struct.pack(order + "HI", 42, first + len(values))
    mark = b"II" if order == "<" else b"MM"
    return mark + head + values + struct.pack(order + ("Q" if large else "H"), len(rows)) + table + bytes(struct.calcsize(place))


def bmp_of_runs(size: int) -> bytes:
    head = struct.pack("<IiiHHIIiiII", 40, 3000, 3000, 1, 8, 1, size, 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", 54 + 1024 + size, 0, 0, 54 + 1024) + head + bytes(1024) + b"\x01\x07" * (size // 2)


KINDS: dict[str, tuple[int, Callable[[int], bytes], str]] = {
    "scans": (hidden_work.JPEG_SCANS, jpeg_of_scans, "100 scans"),
    "segments": (hidden_work.JPEG_SEGMENTS, lambda count: segments(count, 0xE9, b"what"), "1000 segments"),
    "comments": (hidden_work.JPEG_SEGMENTS, lambda count: segments(count, 0xFE, b""), "1000 segments"),
    "segments of Exif": (hidden_work.JPEG_EXIF_SEGMENTS, lambda count: segments(count + 4, 0xE1, b"Exif\0\0"), "100 segments of Exif"),
    "Exif behind an end": (hidden_work.JPEG_EXIF_SEGMENTS, exif_behind_an_end, "100 segments of Exif"),
    "Exif that a length would hide": (hidden_work.JPEG_EXIF_SEGMENTS, exif_behind_lengths, "100 segments of Exif"),
    "fill": (hidden_work.JPEG_FILL_BYTES, lambda count: jpeg_with(b"\0" * count), "65536 bytes between"),
    "fill of marks": (hidden_work.JPEG_FILL_BYTES, lambda count: jpeg_with(b"\xff\xd0" * (count // 2)), "65536 bytes between"),
    "fill of bits": (hidden_work.JPEG_FILL_BYTES, lambda count: jpeg_with(b"\xff" * count), "65536 bytes between"),
    "chunks": (hidden_work.PNG_CHUNKS, lambda count: png_of_chunks(count, b"abCd"), "100000 chunks"),
    "chunks of pixels": (hidden_work.PNG_CHUNKS, lambda count: png_of_chunks(count, b"IDAT"), "100000 chunks"),
    "blocks": (hidden_work.GIF_BLOCKS, lambda count: gif_of_blocks(count, b"\1x"), "20000 blocks before"),
    "extensions": (hidden_work.GIF_BLOCKS, lambda count: gif_of_blocks(count, b"\0"), "20000 blocks before"),
    "strips": (hidden_work.TIFF_PIECES, lambda count: tiff_of_strips(count, "<", False), "65536 strips or tiles"),
    "strips, high byte first": (hidden_work.TIFF_PIECES, lambda count: tiff_of_strips(count, ">", False), "65536 strips or tiles"),
    "strips of a BigTIFF": (hidden_work.TIFF_PIECES, lambda count: tiff_of_strips(count, "<", True), "65536 strips or tiles"),
    "runs": (hidden_work.BMP_RUN_BYTES, bmp_of_runs, "8 MiB may be: convert it to PNG"),
}


@pytest.mark.parametrize("name", KINDS)
def test_more_parts_than_programs_write_are_refused(name: str) -> None:
    """Beside the bound, on both sides; runs of 5 percent."""
    most, made, told = KINDS[name]
    with pytest.raises(BadMedia, match=told):
        check_hidden_work(io.BytesIO(made(most + most // 20 + 10)))
    check_hidden_work(io.BytesIO(made(most - most // 20 - 2000 if name == "runs" else most - most // 20)))


async def test_they_are_refused_by_the_decoder_whatever_they_are_sent_as(decoder: MediaDecoder) -> None:
    good, bad = jpeg_of_scans(hidden_work.JPEG_SCANS), jpeg_of_scans(hidden_work.JPEG_SCANS + 1)
    assert (await decoder.picture(good)).pixels.size
    for call in (decoder.picture, decoder.sound, decoder.film):
        with pytest.raises(BadMedia, match="more than 100 scans, which no program writes: encode it anew"):
            await call(bad)


async def test_a_shape_is_refused_before_anything_is_decoded(decoder: MediaDecoder) -> None:
    """There is nothing to decode in it."""
    empty = picture_files.packed_png(49_000_000, 1, 8, 2, b"")
    with pytest.raises(BadMedia, match="49000000x1 pixels, more than 200 times longer one way than the other"):
        await decoder.picture(empty)


def test_bytes_of_any_kind_are_counted_to_an_end(seed: int) -> None:
    """Damaged heads, and heads with noise behind them: refused or let through, nothing else."""
    chance = random.Random(seed)
    heads = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"II*\0", b"MM\0*", b"II+\0", b"MM\0+\0\x08\0\0", b"BM")
    for _ in range(2000):
        data = chance.choice(heads) + chance.choice([b"\xff", b"\xff\xda", b"!", bytes([chance.randrange(256)])]) * chance.randrange(40)
        try:
            check_hidden_work(io.BytesIO(data + chance.randbytes(chance.randrange(200))))
        except BadMedia as error:
            assert "encode it anew" in str(error) or "convert it" in str(error)


async def test_a_picture_has_the_time_of_its_size() -> None:
    """The time is that of the processor: the rest of the machine's work, and the time by the clock, do not count."""
    slow = media_files.encoded(Image.new("RGB", (6000, 6000)), "PNG", compress_level=1)
    async with decoding(MediaLimits(picture_least_s=0.05, megapixel_s=0.1, picture_mebibyte_s=0.0)) as decoder:
        assert (await decoder.picture(slow)).pixels.size
    async with decoding(MediaLimits(picture_least_s=0.05, megapixel_s=0.0, picture_mebibyte_s=0.0)) as decoder:
        with pytest.raises(BadMedia, match="takes longer than any of its size should: encode it anew, or send a part of it"):
            await decoder.picture(slow)
        assert (await decoder.picture(media_files.picture(1))).pixels.size


# Notes of a PNG -------------------------------------------------------------------------------------------------------------------------

XMP = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><d tiff:Orientation="6"/></x:xmpmeta>'
EXIF = b"Exif\0\0II*\0\x08\0\0\0\x01\0" + struct.pack("<HHIHH", 0x0112, 3, 1, 6, 0) + bytes(4)
RAW_EXIF = b"\nexif\n%8d\n%s\n" % (len(EXIF), EXIF.hex().encode())


def text(name: bytes, keyword: bytes, words: bytes) -> bytes:
    """name: of a chunk of any of the three kinds; packed where the kind is."""
    how = {b"tEXt": b"\0", b"zTXt": b"\0\0", b"iTXt": b"\0\1\0\0\0"}[name]
    return chunk(name, keyword + how + (words if name == b"tEXt" else zlib.compress(words)))


def picture_with(seed: int, notes: bytes, behind: bytes = b"") -> bytes:
    data = media_files.picture(seed, 20, 30)
    return data[:33] + notes + data[33:-12] + behind + data[-12:]


PROFILE = picture_files.rgb_profile(2.2)
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
    async with decoding(MediaLimits(picture_least_s=1.0)) as decoder:
        for name, notes in MANY.items():
            for data in (picture_with(seed, notes), picture_with(seed, b"", notes)):
                assert np.array_equal(await pixels_of(decoder, data), media_files.pixels(seed, 20, 30)), name


ODD = {
    "long and packed": text(b"zTXt", b"workflow", b"node " * 1_900_000),
    "long, in any language": text(b"iTXt", b"workflow", b"node " * 1_900_000),
    "long": text(b"tEXt", b"workflow", b"node " * 1_900_000),
    "a long profile": chunk(b"iCCP", b"k\0\0" + zlib.compress(PROFILE + bytes(20 << 20))),
    "a profile of nothing": chunk(b"iCCP", b""),
    "a profile without its packing": chunk(b"iCCP", b"k\0"),
    "a profile packed in another way": chunk(b"iCCP", b"k\0\7" + zlib.compress(PROFILE)),
    "a profile with another checksum": chunk(b"iCCP", b"k\0\0" + zlib.compress(PROFILE))[:-1] + b"?",
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
        assert np.array_equal(await pixels_of(decoder, data), media_files.pixels(seed, 20, 30)), name


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
    assert np.array_equal(await pixels_of(decoder, picture_with(seed, others + note + others)), turned)


@pytest.mark.parametrize("name", [b"PLTE", b"tRNS"])
async def test_what_the_colours_are_made_of_has_its_checksum(decoder: MediaDecoder, seed: int, name: bytes) -> None:
    image = Image.fromarray(media_files.pixels(seed, 20, 30)).quantize(16)
    whole = media_files.encoded(image, "PNG", transparency=bytes(range(16)))
    at = whole.index(name)
    end = at + 4 + int.from_bytes(whole[at - 4 : at])
    broken = whole[:end] + bytes([whole[end] ^ 1]) + whole[end + 1 :]
    with pytest.raises(BadMedia):
        await pixels_of(decoder, broken)
    assert (await pixels_of(decoder, whole)).size
