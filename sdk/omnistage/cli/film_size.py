"""Finds width and height of a film in the head of its file, a WebM or MP4 as our servers send it."""

from __future__ import annotations

from collections.abc import Iterator

MP4 = ((b"moov", 0), (b"trak", 0), (b"mdia", 0), (b"minf", 0), (b"stbl", 0), (b"stsd", 8))
"""The path to the description of a film: names of boxes, each inside the one before, and how many bytes come before its inner boxes."""
SIDES_AT = 24
"""Offset of width and height in a sample entry of a film."""

SEGMENT, TRACKS, TRACK, VIDEO, WIDTH, HEIGHT = 0x18538067, 0x1654AE6B, 0xAE, 0xE0, 0xB0, 0xBA


def size_of(data: bytes) -> tuple[int, int] | None:
    """Width and height in pixels of a film whose file begins with these bytes; None if these bytes do not contain them."""
    return _of_mp4(data) if data[4:8] == b"ftyp" else _of_webm(data)


def _of_mp4(data: bytes) -> tuple[int, int] | None:
    """Width and height in pixels from the beginning of an MP4; None if it does not say."""
    for name, before in MP4:
        inner = next((body for its_name, body in _boxes(data) if its_name == name), None)
        if inner is None:
            return None
        data = inner[before:]
    for _, entry in _boxes(data):
        sides = entry[SIDES_AT : SIDES_AT + 4]
        if len(sides) == 4:
            return int.from_bytes(sides[:2], "big"), int.from_bytes(sides[2:], "big")
    return None


def _boxes(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield name and content of each box of MP4 in these bytes, one after the other."""
    at = 0
    while at + 8 <= len(data) and (size := int.from_bytes(data[at : at + 4], "big")) >= 8:
        yield data[at + 4 : at + 8], data[at + 8 : at + size]
        at += size


def _of_webm(data: bytes) -> tuple[int, int] | None:
    """Width and height in pixels from the beginning of a WebM; None if it does not say."""
    for name in (SEGMENT, TRACKS, TRACK, VIDEO):
        inner = next((body for its_name, body, _ in _elements(data) if its_name == name), None)
        if inner is None:
            return None
        data = inner
    sides = {name: int.from_bytes(body, "big") for name, body, is_whole in _elements(data) if is_whole}
    return (sides[WIDTH], sides[HEIGHT]) if WIDTH in sides and HEIGHT in sides else None


def _elements(data: bytes) -> Iterator[tuple[int, bytes, bool]]:
    """Yields (its name as a number, its content, whether the content is complete) for each EBML element in these bytes. An element of
    unknown length ends with the bytes."""
    at = 0
    while at + 2 <= len(data) and data[at]:
        name_bytes = 9 - data[at].bit_length()
        name, at = int.from_bytes(data[at : at + name_bytes], "big"), at + name_bytes
        if at >= len(data) or not data[at]:
            return
        size_bytes = 9 - data[at].bit_length()
        all_ones = (1 << 7 * size_bytes) - 1
        size, at = int.from_bytes(data[at : at + size_bytes], "big") & all_ones, at + size_bytes
        end = len(data) if size == all_ones else at + size
        yield name, data[at:end], end <= len(data)
        at = end
