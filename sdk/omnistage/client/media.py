"""Pictures and sounds that go with a prompt: bytes or a path, made into `omnistage.v1.Media`."""

from __future__ import annotations

import mimetypes
from os import PathLike
from pathlib import Path

from omnistage.client.errors import BadRequestError
from omnistage.v1 import stage_pb2

MediaLike = bytes | str | PathLike[str]
"""Encoded media (a PNG, a WAV ...): the bytes themselves, or the path of a file."""

SIGNATURES: tuple[tuple[int, bytes, str], ...] = (
    (0, b"\x89PNG\r\n\x1a\n", "image/png"),
    (0, b"\xff\xd8\xff", "image/jpeg"),
    (0, b"GIF8", "image/gif"),
    (8, b"WEBP", "image/webp"),
    (8, b"WAVE", "audio/wav"),
    (0, b"fLaC", "audio/flac"),
    (0, b"OggS", "audio/ogg"),
    (0, b"ID3", "audio/mpeg"),
    (0, b"\xff\xfb", "audio/mpeg"),
    (0, b"\xff\xf3", "audio/mpeg"),
    (4, b"ftyp", "video/mp4"),
)


def to_media(source: MediaLike, family: str) -> stage_pb2.Media:
    """Read `source` and name its type. family: image or audio. Raises BadRequestError if it is empty, unreadable or of another family."""
    if isinstance(source, bytes):
        data, suffix_type = source, None
    else:
        try:
            data = Path(source).read_bytes()
        except OSError as error:
            raise BadRequestError.of(f"{family}s", f"cannot read {source}: {error.strerror or error}") from error
        suffix_type = mimetypes.guess_type(str(source))[0]
    if not data:
        raise BadRequestError.of(f"{family}s", "is empty")
    media_type = sniff(data) or suffix_type
    if media_type is None:
        raise BadRequestError.of(f"{family}s", "is of no known type; give an encoded file such as PNG, JPEG, WAV or FLAC")
    if not media_type.startswith(f"{family}/"):
        raise BadRequestError.of(f"{family}s", f"is {media_type}, not {family}/*")
    return stage_pb2.Media(data=data, media_type=media_type)


def sniff(data: bytes) -> str | None:
    """The media type that the first bytes show, None if they show nothing."""
    for offset, signature, media_type in SIGNATURES:
        if data[offset : offset + len(signature)] == signature:
            return media_type
    return None
