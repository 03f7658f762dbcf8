"""Finds the type of an encoded file by its first bytes."""

from __future__ import annotations

LOOK_BYTES = 512
"""Bytes at the beginning of a file that are looked at."""

_MP4 = ("video/mp4", "audio/mp4")

_MARKS: tuple[tuple[int, bytes, tuple[str, ...]], ...] = (
    (0, b"\x89PNG\r\n\x1a\n", ("image/png",)),
    (0, b"\xff\xd8\xff", ("image/jpeg",)),
    (0, b"GIF8", ("image/gif", "video/gif")),
    (8, b"WEBP", ("image/webp",)),
    (0, b"BM", ("image/bmp",)),
    (0, b"II*\x00", ("image/tiff",)),
    (0, b"MM\x00*", ("image/tiff",)),
    (8, b"WAVE", ("audio/wav",)),
    (0, b"fLaC", ("audio/flac",)),
    (0, b"ID3", ("audio/mpeg",)),
    (8, b"AIFF", ("audio/aiff",)),
    (8, b"AIFC", ("audio/aiff",)),
    (0, b"caff", ("audio/x-caf",)),
    (0, b".snd", ("audio/basic",)),
    (0, b"#!AMR", ("audio/amr",)),
    (0, b"riff\x2e\x91\xcf\x11", ("audio/x-w64",)),
    (0, b"NIST_1A", ("audio/x-nist",)),
    (0, b"Creative Voice File", ("audio/x-voc",)),
    (0, b"\x0b\x77", ("audio/ac3",)),
    (0, b"OggS", ("audio/ogg", "video/ogg")),
    (8, b"AVI ", ("video/x-msvideo",)),
    (0, b"FLV\x01", ("video/x-flv",)),
    (0, b"\x30\x26\xb2\x75\x8e\x66\xcf\x11", ("video/x-ms-asf", "audio/x-ms-wma")),
    (0, b"\x00\x00\x01\xba", ("video/mpeg",)),
    (4, b"moov", ("video/quicktime", "audio/mp4")),
    (4, b"mdat", ("video/quicktime", "audio/mp4")),
)
"""Rows of (offset, bytes, media types that a file with these bytes at this offset may have). A container may hold sound alone."""

_BRANDS = {
    **dict.fromkeys((b"heic", b"heix", b"heim", b"heis", b"mif1"), ("image/heic",)),
    **dict.fromkeys((b"avif", b"avis"), ("image/avif",)),
    **dict.fromkeys((b"M4A ", b"M4B "), ("audio/mp4",)),
    b"qt  ": ("video/quicktime", "audio/mp4"),
}
"""Media types by the brand in the box `ftyp` (ISO 14496-12); every other brand is MP4."""


def media_types(start: bytes) -> tuple[str, ...]:
    """The media types that a file which begins with these bytes may have, the likeliest first; empty if the bytes fit no known type."""
    if start[4:8] == b"ftyp":
        return _BRANDS.get(start[8:12], _MP4)
    for offset, mark, types in _MARKS:
        if start[offset : offset + len(mark)] == mark:
            return types
    if start.startswith(b"\x1a\x45\xdf\xa3"):  # EBML; its document type stands in the header
        name = "webm" if b"webm" in start[:64] else "x-matroska"
        return (f"video/{name}", f"audio/{name}")
    return _of_frames(start)


def _of_frames(start: bytes) -> tuple[str, ...]:
    """The types of a file that begins with a frame of MPEG audio (layer 3 or 2), AAC in ADTS, or an MPEG transport stream; empty: none."""
    if len(start) > 1 and start[0] == 0xFF:
        if start[1] & 0xE0 == 0xE0 and start[1] & 0x06 in (0x02, 0x04):
            return ("audio/mpeg",)
        if start[1] & 0xF6 == 0xF0:
            return ("audio/aac",)
    if start[:1] == start[188:189] == b"\x47":
        return ("video/mp2t", "audio/mp2t")
    return ()
