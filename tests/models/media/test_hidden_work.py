"""Pictures that are small in bytes or pixels and much work: refused before they are decoded, and what programs write is not."""

from __future__ import annotations

import io
import random
import struct
import zlib
from collections.abc import Callable

import pytest
from PIL import Image

from helpers import media_files
from omnistage.models.media import hidden_work
from omnistage.models.media.decoder import MediaDecoder
from omnistage.models.media.hidden_work import check_hidden_work
from omnistage.models.media.terms import BadMedia, MediaLimits


def jpeg_of_scans(scans: int) -> bytes:
    """The last scan of a progressive JPEG again and again, until there are so many."""
    data = media_files.picture(1, 64, 64, "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:-2] + data[last:-2] * (scans - data.count(b"\xff\xda")) + b"\xff\xd9"


def jpeg_with(count: int, marker: int, data: bytes) -> bytes:
    whole = media_files.picture(1, 64, 64, "JPEG")
    segment = bytes([0xFF, marker]) + struct.pack(">H", len(data) + 2) + data
    return whole[:2] + segment * (count - 4) + whole[2:]


def exif_behind_an_end(count: int) -> bytes:
    return b"\xff\xd8\xff\xd9" + jpeg_with(count + 4, 0xE1, b"Exif\0\0")[2:]


def exif_behind_lengths(count: int) -> bytes:
    """Each within what would be a segment, if its marker had a length."""
    whole = media_files.picture(1, 64, 64, "JPEG")
    segment = b"\xff\xe1\0\x08Exif\0\0"
    hidden = b"".join(bytes([0xFF, marker]) + struct.pack(">H", len(segment) + 2) + segment for marker in (0xF0, 0xFD, 0xC8))
    return whole[:2] + hidden * (count // 3) + whole[2:]


def jpeg_filled(count: int, fill: bytes) -> bytes:
    whole = media_files.picture(1, 64, 64, "JPEG")
    return whole[:2] + fill * (count // len(fill)) + whole[2:]


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


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
    "segments": (hidden_work.JPEG_SEGMENTS, lambda count: jpeg_with(count, 0xE9, b"what"), "1000 segments"),
    "comments": (hidden_work.JPEG_SEGMENTS, lambda count: jpeg_with(count, 0xFE, b""), "1000 segments"),
    "segments of Exif": (hidden_work.JPEG_EXIF_SEGMENTS, lambda count: jpeg_with(count + 4, 0xE1, b"Exif\0\0"), "100 segments of Exif"),
    "Exif behind an end": (hidden_work.JPEG_EXIF_SEGMENTS, exif_behind_an_end, "100 segments of Exif"),
    "Exif that a length would hide": (hidden_work.JPEG_EXIF_SEGMENTS, exif_behind_lengths, "100 segments of Exif"),
    "fill": (hidden_work.JPEG_FILL_BYTES, lambda count: jpeg_filled(count, b"\0"), "65536 bytes between"),
    "fill of marks": (hidden_work.JPEG_FILL_BYTES, lambda count: jpeg_filled(count, b"\xff\xd0"), "65536 bytes between"),
    "fill of bits": (hidden_work.JPEG_FILL_BYTES, lambda count: jpeg_filled(count, b"\xff"), "65536 bytes between"),
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
    header = struct.pack(">IIBBBBB", 49_000_000, 1, 8, 2, 0, 0, 0)
    empty = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")
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
    decoder = MediaDecoder(MediaLimits(picture_least_s=0.05, megapixel_s=0.1, picture_mebibyte_s=0.0))
    try:
        assert (await decoder.picture(slow)).pixels.size
    finally:
        await decoder.close()
    decoder = MediaDecoder(MediaLimits(picture_least_s=0.05, megapixel_s=0.0, picture_mebibyte_s=0.0))
    try:
        with pytest.raises(BadMedia, match="takes longer than any of its size should: encode it anew, or send a part of it"):
            await decoder.picture(slow)
        assert (await decoder.picture(media_files.picture(1))).pixels.size
    finally:
        await decoder.close()
