"""The format of a file that was sent as something else. Runs in the decoding process."""

from __future__ import annotations

from typing import BinaryIO

from omnistage.models.media import containers, pictures
from omnistage.models.media.limits import MediaLimits

HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
AVIF_BRANDS = (b"avif", b"avis")


def advice(file: BinaryIO, limits: MediaLimits) -> str | None:
    """The format of a file that was sent as another kind, and how to send it; None if its format is not found."""
    file.seek(0)
    head = file.read(12)
    if head[4:8] == b"ftyp" and head[8:] in HEIF_BRANDS:
        return "it is a picture in HEIF, which is not known here: convert it to JPEG"
    is_avif = head[4:8] == b"ftyp" and head[8:] in AVIF_BRANDS
    if (picture := pictures.open_picture(file)) is not None:
        with picture:
            return f"it is a picture ({picture.format}): send it as image/*"
    if is_avif:
        return "it is a picture in AVIF that is damaged: send all of it, or encode it anew"
    if (container := containers.open_container(file, limits)) is not None:
        with container:
            if containers.video_stream(container) is not None:
                return f"it is a film ({container.format.name}): send it as video/*"
            return f"it is a sound ({container.format.name}): send it as audio/*"
    return None
