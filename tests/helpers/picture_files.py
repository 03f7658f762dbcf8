"""Files of pictures as no encoder here writes them: every depth and colour key of PNG, GIFs smaller than their screen, TIFFs, profiles."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence

XYZ_WHITE = (0.9642, 1.0, 0.8249)
DISPLAY_P3 = ((0.51512, 0.24120, -0.00105), (0.29198, 0.69225, 0.04189), (0.15710, 0.06657, 0.78407))
"""X, Y and Z of its red, green and blue."""


def png(width: int, height: int, depth: int, colour_type: int, data: bytes, **chunks: bytes) -> bytes:
    """data: the rows, without what filters they have. chunks: others before them, in this order, by name."""
    row = len(data) // height
    rows = b"".join(b"\0" + data[start : start + row] for start in range(0, len(data), row))
    return packed_png(width, height, depth, colour_type, zlib.compress(rows, 1), **chunks)


def packed_png(width: int, height: int, depth: int, colour_type: int, packed: bytes, **chunks: bytes) -> bytes:
    """As `png`. packed: whatever stands in the place of its packed rows."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour_type, 0, 0, 0)
    named = {"IHDR": header, **chunks, "IDAT": packed, "IEND": b""}
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(name.encode(), each) for name, each in named.items())


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def gif(screen: tuple[int, int], box: tuple[int, int, int, int], indices: Sequence[int], transparent: int | None = None) -> bytes:
    """A GIF with the colours 0: green, 1: 20 40 60 (hexadecimal). box: left, top, width and height of the one picture in it."""
    control = b"" if transparent is None else b"\x21\xf9\x04\x01\0\0" + bytes([transparent, 0])
    codes = [code for index in indices for code in (4, index)]  # Begun anew before each: codes stay three bits long.
    bits = "".join(f"{code:03b}"[::-1] for code in (*codes, 5))
    packed = bytes(int(bits[start : start + 8][::-1], 2) for start in range(0, len(bits), 8))
    head = b"GIF89a" + struct.pack("<HHBBB", *screen, 0x80, 0, 0) + bytes.fromhex("00ff00204060")
    return head + control + b"\x2c" + struct.pack("<HHHHB", *box, 0) + b"\x02" + bytes([len(packed)]) + packed + b"\0;"


def tiff(width: int, height: int, data: bytes, entries: Mapping[int, tuple[str, Sequence[float]]]) -> bytes:
    """In one strip, little endian. entries: by number, their type as `struct` writes it (B, H, I, i, f, d) and their values."""
    own: dict[int, tuple[str, Sequence[float]]] = {256: ("I", [width]), 257: ("I", [height]), 259: ("H", [1]), 278: ("I", [height])}
    types = {"B": 1, "H": 3, "I": 4, "i": 9, "f": 11, "d": 12}
    table, more, behind = b"", b"", 8 + len(data) + len(data) % 2
    all_entries = {**own, 273: ("I", [8]), 279: ("I", [len(data)]), **entries}
    end = behind + 2 + 12 * len(all_entries) + 4
    for tag, (kind, values) in sorted(all_entries.items()):
        packed = struct.pack(f"<{len(values)}{kind}", *values)
        value = packed.ljust(4, b"\0") if len(packed) <= 4 else struct.pack("<I", end + len(more))
        more += b"" if len(packed) <= 4 else packed + bytes(len(packed) % 2)
        table += struct.pack("<HHI", tag, types[kind], len(values)) + value
    return (
        struct.pack("<2sHI", b"II", 42, behind)
        + data.ljust(behind - 8, b"\0")
        + struct.pack("<H", len(all_entries))
        + table
        + bytes(4)
        + more
    )


def rgb_profile(gamma: float, primaries: Sequence[Sequence[float]] = DISPLAY_P3) -> bytes:
    """An ICC profile by matrix and curves."""
    curves = [(f"{name}TRC", _gamma(gamma)) for name in "rgb"]
    return _profile(b"RGB ", b"XYZ ", [*((f"{name}XYZ", _xyz(*each)) for name, each in zip("rgb", primaries, strict=True)), *curves])


def grey_profile(gamma: float) -> bytes:
    return _profile(b"GRAY", b"XYZ ", [("kTRC", _gamma(gamma))])


def cmyk_profile() -> bytes:
    """By a table of two places an axis: paper is white, and any ink makes all of it black."""
    table = b"".join(b"\xff\x80\x80" if place == 0 else b"\0\x80\x80" for place in range(16))
    head = b"mft1\0\0\0\0" + bytes([4, 3, 2, 0]) + b"".join(_fixed(float(place in (0, 4, 8))) for place in range(9))
    same = bytes(range(256))
    return _profile(b"CMYK", b"Lab ", [("A2B0", head + same * 4 + table + same * 3)])


def _profile(space: bytes, connection: bytes, tags: Sequence[tuple[str, bytes]]) -> bytes:
    tags = [("wtpt", _xyz(*XYZ_WHITE)), *tags]
    table, body, start = b"", b"", 132 + 12 * len(tags)
    for name, data in tags:
        padded = data + bytes(-len(data) % 4)
        table += struct.pack(">4sII", name.encode(), start + len(body), len(padded))
        body += padded
    size = start + len(body)
    head = struct.pack(">I4xI4s4s4s12x4s", size, 0x02400000, b"mntr", space, connection, b"acsp").ljust(68, b"\0")
    return (head + b"".join(map(_fixed, XYZ_WHITE))).ljust(128, b"\0") + struct.pack(">I", len(tags)) + table + body


def _fixed(value: float) -> bytes:
    return struct.pack(">i", round(value * 65536))


def _xyz(*values: float) -> bytes:
    return b"XYZ \0\0\0\0" + b"".join(map(_fixed, values))


def _gamma(value: float) -> bytes:
    return b"curv\0\0\0\0" + struct.pack(">IH", 1, round(value * 256))
