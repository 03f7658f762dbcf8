"""Turns the user's pictures, sounds and films into parts of a message. Nothing is decoded here: a file's first bytes tell its type."""

from __future__ import annotations

import io
import mimetypes
import os
import re
import select
from base64 import b64decode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from os import PathLike, fspath, fstat
from pathlib import Path
from stat import S_ISFIFO, S_ISREG
from typing import Any, TypeVar
from urllib.parse import unquote, unquote_to_bytes

import numpy as np
from numpy.typing import NDArray

from omnistage.client.about import Encoded as Encoded
from omnistage.client.about import ImageLike as ImageLike
from omnistage.client.about import PillowImage as PillowImage
from omnistage.client.about import Readable as Readable
from omnistage.client.answer import Audio
from omnistage.client.errors import BadRequestError
from omnistage.client.files import Film, wav_bytes
from omnistage.client.routers import MAX_MESSAGE_BYTES
from omnistage.client.upload import MIN_BYTES, Upload
from omnistage.v1 import stage_pb2

KINDS = {"image": "picture", "audio": "sound", "video": "film"}
"""The words of errors for the kinds of media."""

FIRST_BYTE_LIMIT_S = 60.0
"""Seconds to wait until somebody writes into a pipe that the caller names as a file."""

ORIENTATION = 0x0112
"""The number of the EXIF tag."""
WRITTEN_AS = {"RGBa": "RGBA", "La": "LA", "PA": "RGBA", "RGBX": "RGB", "HSV": "RGB", "YCbCr": "RGB"}
"""Modes of Pillow images that are converted before they are written, and the mode that each becomes."""
ONLY_IN_TIFF = ("CMYK", "LAB", "F")
"""Modes of Pillow images that PNG lacks."""

MAX_OWN_FILE_BYTES = MAX_MESSAGE_BYTES // 2
"""A larger file is written anew, perhaps in fewer bytes."""
WHITE_IS_ZERO = 262
"""The number of the TIFF tag that says 0 if the smallest value is white."""
MAX_LEVEL = 255

MAX_CHANNELS = 32
MAX_RATE_HZ = 1_000_000

LOUDEST = 64.0
"""The largest sample that is accepted in floating point, where full scale is 1. Recordings may be a little above full scale; larger samples
are integers that were never divided by their full scale."""


@dataclass(frozen=True, slots=True)
class Video:
    """A film. use_audio: the model also hears the film, and a film without sound is refused; by default the model only sees it."""

    source: Encoded
    use_audio: bool = False


AudioLike = Encoded | Audio | tuple[NDArray[Any] | list[Any], float]
"""A tuple is (samples, rate): [n] or [n, channels] of uint8, int16, int32 or floating point with full scale 1, and a whole number of Hz."""
VideoLike = Encoded | Video | Film
MediaLike = ImageLike | AudioLike | VideoLike

Images = ImageLike | Sequence[ImageLike]
Audios = AudioLike | Sequence[AudioLike]
Videos = VideoLike | Sequence[VideoLike]
"""As Images and Audios: one medium, or several."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Medium:
    """One medium of a request. part: a part of a message with its bytes, or an Upload if it is streamed. field: the caller's name for it,
    such as images[0]. name: the name of its file and a space; empty: it has no file name."""

    part: stage_pb2.Part | Upload
    field: str
    name: str = ""

    def refused(self, description: str) -> BadRequestError:
        """The error for a medium that a server refuses. description: what is wrong with it."""
        return BadRequestError.of(self.field, f"{self.name.rstrip()}: {description}" if self.name else description)


def is_one(source: object) -> bool:
    """Whether `source` is a single medium and not several. A tuple (samples, rate) is one. An object of a wrong type counts as one."""
    if isinstance(source, str | bytes | bytearray | memoryview | PathLike | Audio | Video | Film | Medium | np.ndarray | Mapping):
        return True
    if isinstance(source, tuple) and len(source) == 2 and any(isinstance(one, Real | np.ndarray) for one in source):
        return True
    return hasattr(source, "read") or hasattr(source, "save") or not isinstance(source, Iterable)


def is_none(sources: object) -> bool:
    """Whether `sources` is None or has no medium."""
    return sources is None or (isinstance(sources, tuple | list) and not sources)


def to_part(source: object, kind: str, field: str) -> stage_pb2.Part:
    """Read a medium into a part of a message. source: a MediaLike. kind: image, audio or video. field: the caller's name for it.

    It may block and use the processor: do not call it on an event loop. Raises BadRequestError if the source is no medium of that kind,
    cannot be read, is empty, or is larger than a request."""
    return _read(source, kind, field)[0]


def _read(source: object, kind: str, field: str) -> tuple[stage_pb2.Part, str]:
    """Do the work of `to_part`. Returns the part, and `name` as in Medium."""
    for form, its_kind in ((Video, "video"), (Film, "video"), (Audio, "audio")):
        if isinstance(source, form) and kind != its_kind:
            raise BadRequestError.of(field, f"is {_a(its_kind)}, not {_a(kind)}")
    file, use_audio = _file_of(source)
    data, name, named_type = _encode(file, kind, field)
    if not data:
        advice = "; if it was written or read before, file.seek(0) goes to its beginning" if hasattr(file, "seek") else ""
        raise BadRequestError.of(field, f"{name}is empty{advice}")
    if len(data) > MAX_MESSAGE_BYTES:
        raise _too_large(field, name, f"is {_mib(len(data))}")
    media_type = _media_type(data, named_type, kind, field, name)
    return stage_pb2.Part(media=stage_pb2.Media(data=data, media_type=media_type, use_audio=use_audio)), name


def _file_of(source: object) -> tuple[object, bool]:
    """Returns (the source to read, `use_audio` of a film, False for others)."""
    if isinstance(source, Film):
        return source.data, False
    return (source.source, source.use_audio) if isinstance(source, Video) else (source, False)


def to_medium(source: object, kind: str, field: str) -> Medium:
    """Read a medium as `to_part` does, or prepare it for streaming if it is bytes or a file of more than MIN_BYTES. This reads only the
    beginning of a medium that is streamed."""
    if isinstance(source, Medium):
        return source
    # For another kind than video `_read` refuses a Video and a Film.
    file, use_audio = _file_of(source) if kind == "video" else (source, False)
    content: Path | bytes
    if isinstance(file, bytes | bytearray | memoryview) and memoryview(file).nbytes > MIN_BYTES:
        content, name, named_type = bytes(file), "", None
        size, head = len(content), content[:LOOK_BYTES]
    elif isinstance(file, str | PathLike) and os.path.isfile(file):  # noqa: PTH113  # Also False for a text that cannot be a path.
        content, name, named_type = Path(file), f"{file} ", mimetypes.guess_type(Path(file).name)[0]
        size, head = _read_or_refuse(field, str(content), partial(_look, content))
    else:
        size = 0  # Media of other forms are never streamed.
    if size <= MIN_BYTES:
        part, name = _read(source, kind, field)
        return Medium(part, field, name)
    return Medium(Upload(content, size, _media_type(head, named_type, kind, field, name), use_audio, field), field, name)


def _look(path: Path) -> tuple[int, bytes]:
    """The size of a file in bytes, and its first LOOK_BYTES."""
    with path.open("rb") as file:
        return fstat(file.fileno()).st_size, file.read(LOOK_BYTES)


def _encode(source: object, kind: str, field: str) -> tuple[bytes, str, str | None]:
    """Returns (the bytes of a medium as a file, `name` as in Medium, the media type that the file's name or the source stands for). The
    type is None if unknown. Raises BadRequestError."""
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source), "", None
    if isinstance(source, str) and source[:5].lower() == "data:":
        return *_of_data_url(source, field), None
    if isinstance(source, str) and (url := re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", source)):
        advice = "give the path of the file itself" if url[1].lower() == "file" else "fetch it first, and give its bytes or its path"
        raise BadRequestError.of(field, f"{source[:200]} is a URL, and neither client nor servers fetch anything: {advice}")
    if isinstance(source, str | PathLike):
        if not fspath(source):  # An empty path would mean the folder that this process is in.
            raise BadRequestError.of(field, "is an empty path; give that of a file, or leave it out")
        path = Path(source)
        data = _read_or_refuse(field, str(path), lambda: _read_path(path, field))
        return data, f"{path} ", mimetypes.guess_type(path.name)[0]
    if kind == "audio" and (sound := _wav_of(source, field)) is not None:
        return sound, "", "audio/wav"
    if kind == "image" and hasattr(source, "save"):
        return _picture_file(source, field), "", "image/png"
    if hasattr(source, "read"):
        return _read_file(source, field)
    type_name = "an array" if isinstance(source, np.ndarray) else type(source).__name__
    raise BadRequestError.of(field, f"is {'None' if source is None else type_name}; give {_forms(kind)}")


def _read_path(path: Path, field: str) -> bytes:
    """The bytes of a file, or of a pipe once somebody writes into it. Raises OSError, and BadRequestError if there are too many."""
    with open(path, "rb", opener=_open_at_once) as file:
        status = fstat(file.fileno())
        if S_ISFIFO(status.st_mode):
            _await_first_byte(file.fileno())
        os.set_blocking(file.fileno(), True)
        if S_ISREG(status.st_mode) and status.st_size > MAX_MESSAGE_BYTES:
            raise _too_large(field, f"{path} ", f"is {_mib(status.st_size)}")
        return _read_all(file.read, field, f"{path} ")


def _open_at_once(path: str, flags: int) -> int:
    """Open a file without waiting. Python's own open of a pipe waits until a writer opens it."""
    return os.open(path, flags | os.O_NONBLOCK)


def _await_first_byte(pipe: int) -> None:
    """Wait for the first byte, or for the end of the pipe. Raises TimeoutError."""
    poller = select.poll()
    poller.register(pipe, select.POLLIN)
    if not poller.poll(FIRST_BYTE_LIMIT_S * 1000):
        raise TimeoutError(f"it is a pipe, and for {FIRST_BYTE_LIMIT_S:g} s nobody has written into it")


def _read_file(source: Any, field: str) -> tuple[bytes, str, str | None]:
    """Read an open file from its present position to its end; it stays open. Returns the same three values as `_encode`."""
    path = getattr(source, "name", None)
    path = fspath(path) if isinstance(path, str | PathLike) else ""
    name = f"{path} " if path else ""
    data = _read_or_refuse(field, path or "this file", lambda: _read_all(source.read, field, name))
    return data, name, mimetypes.guess_type(path)[0]


def _read_all(read: Callable[[int], object], field: str, name: str) -> bytes:
    """Read to the end. read: returns the next bytes, at most as many as its argument says. name: as in Medium. Raises BadRequestError if
    `read` returns anything but bytes, or if there are too many of them."""
    pieces, size = list[bytes](), 0
    while size <= MAX_MESSAGE_BYTES:
        piece = read(MAX_MESSAGE_BYTES + 1 - size)
        if not isinstance(piece, bytes | bytearray | memoryview):
            raise BadRequestError.of(field, f"{name}reads {type(piece).__name__}, not bytes; open it with 'rb'")
        if not piece:
            return b"".join(pieces)
        pieces.append(bytes(piece))
        size += len(piece)
    raise _too_large(field, name, "is more")


def _read_or_refuse(field: str, name: str, read: Callable[[], T]) -> T:
    """Return the result of `read`. Raises BadRequestError in place of an error of the system or of the file object."""
    try:
        return read()
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise BadRequestError.of(field, f"cannot read {name}: {reason}") from error


def _of_data_url(url: str, field: str) -> tuple[bytes, str]:
    """The bytes of a data: URL (RFC 2397), and "", the `name` of a medium without a file. The media type in the URL is not used."""
    head, comma, body = url[5:].partition(",")
    if not comma:
        raise BadRequestError.of(field, "is a data: URL without a comma; data:image/png;base64,... is one")
    if not head.lower().endswith(";base64"):
        return unquote_to_bytes(body), ""
    return of_base64(unquote(body), field), ""


def of_base64(text: object, field: str) -> bytes:
    """The bytes of a text in base64, also in the alphabet for URLs, with or without padding and line breaks. Raises BadRequestError."""
    if isinstance(text, bytes | bytearray):
        text = text.decode("ascii", "replace")
    if not isinstance(text, str):
        raise BadRequestError.of(field, f"is {type(text).__name__}, not text in base64")
    try:
        packed = re.sub(r"\s", "", text).rstrip("=").replace("-", "+").replace("_", "/")
        return b64decode(packed + "=" * (-len(packed) % 4), validate=True)
    except ValueError as error:
        raise BadRequestError.of(field, f"is not base64: {error}") from None


def _wav_of(source: object, field: str) -> bytes | None:
    """The bytes of a WAV file if `source` is a tuple (samples, rate); None for any other source."""
    if isinstance(source, Audio):
        source = (source.samples, source.sample_rate)
    if isinstance(source, np.ndarray):
        raise BadRequestError.of(field, "is samples without a rate; give both: (samples, 16000)")
    if not isinstance(source, tuple) or len(source) != 2:
        return None
    unread_samples, rate = source
    if isinstance(unread_samples, Real) and isinstance(rate, np.ndarray | list):
        raise BadRequestError.of(field, "has the rate first, as SciPy reads it; give samples, then rate: (samples, 16000)")
    if not isinstance(unread_samples, list) and not hasattr(unread_samples, "__array__"):
        return None
    rate_hz = _rate_hz(rate, field)
    try:
        samples = np.asarray(unread_samples)
    except (TypeError, ValueError, RuntimeError) as error:  # NumPy cannot read all tensors of other libraries.
        raise BadRequestError.of(field, f"is no array of samples: {error}") from error
    if samples.ndim not in (1, 2) or (samples.ndim == 2 and not 0 < samples.shape[1] <= MAX_CHANNELS):
        raise BadRequestError.of(field, f"is samples of shape {samples.shape}; give [n], or [n, channels]")
    if not len(samples):
        raise BadRequestError.of(field, "is empty")
    return wav_bytes(_scale_samples(samples, field).reshape(len(samples), -1), rate_hz)


def _rate_hz(rate: Any, field: str) -> int:
    """The sample rate as an int, from a whole number of any type. Raises BadRequestError."""
    is_number = isinstance(rate, int | float | np.integer | np.floating) and not isinstance(rate, bool)
    if not is_number or not 0 < rate <= MAX_RATE_HZ or rate != int(rate):
        raise BadRequestError.of(field, f"has the rate {rate!r}; give samples a second, such as (samples, 16000)")
    return int(rate)


def _scale_samples(samples: NDArray[Any], field: str) -> NDArray[Any]:
    """The same samples in a type for our WAV files: int16, int32 or float32. uint8 becomes int16; its zero is 128, as in WAV files of 8
    bits. Raises BadRequestError."""
    kind = samples.dtype.newbyteorder("=")
    if kind == np.uint8:
        return (samples.astype(np.int16) - 128) << 8
    if samples.dtype.kind == "f":
        loudest = np.abs(samples).max()  # NaN if a sample is NaN.
        if not np.isfinite(loudest):
            raise BadRequestError.of(field, "has samples that are no numbers")
        if loudest > LOUDEST:
            fault = f"has a sample of {loudest:g}, and full scale is 1: divide all by 32768 if they were of 16 bits"
            raise BadRequestError.of(field, fault)
        return samples.astype(np.float32, copy=False)
    loudest = max(int(samples.max()), -int(samples.min())) if kind == np.int32 else 0
    if 0 < loudest < 1 << 15:  # They fit into 16 bits, so they were perhaps never scaled to 32.
        raise BadRequestError.of(field, f"is at most {loudest} of the 2147483648 of int32: give int16 if they were of 16 bits")
    if kind not in (np.int16, np.int32):
        raise BadRequestError.of(field, f"is samples of {samples.dtype}; give uint8, int16, int32, or floating point with full scale 1")
    return samples


def _own_file(image: Any) -> bytes | None:
    """The bytes of the file that a Pillow image was opened from; None if the image may differ from it: if its pixels were loaded, if it
    shows another frame, or if its size, mode or orientation was changed."""
    # An image has tiles until its pixels are loaded. `tell` is the number of the frame that it shows.
    try:
        file = image.fp if image.tile and image.tell() == 0 else None
        if file is None:
            return None
        place = file.tell()
        file.seek(0)
        data = bytes(file.read(MAX_OWN_FILE_BYTES + 1))
        file.seek(place)
        opened = type(image)(io.BytesIO(data))
        is_same = (opened.size, opened.mode) == (image.size, image.mode)
        if (exif := getattr(image, "_exif", None)) is not None:
            is_same = is_same and opened.getexif().get(ORIENTATION) == exif.get(ORIENTATION)
    except (AttributeError, OSError, ValueError, TypeError, SyntaxError, EOFError):  # No file, a closed one, or a class of its own.
        return None
    return data if is_same and len(data) <= MAX_OWN_FILE_BYTES and media_types(data[:LOOK_BYTES]) else None


def _check_is_known(image: Any, field: str) -> None:
    """Raises BadRequestError for a loaded image in which Pillow no longer tells what its file shows."""
    # Pillow keeps the transparent colour in 16 bits although it has rounded the pixels to 8.
    transparent = image.info.get("transparency") if hasattr(image, "info") else None
    is_rounded = image.mode == "RGB" and isinstance(transparent, tuple) and max(transparent) > MAX_LEVEL
    is_inverse = image.mode.startswith("I;16") and getattr(image, "tag_v2", {}).get(WHITE_IS_ZERO, 1) == 0
    if is_rounded or is_inverse:
        fact = "which colour is transparent" if is_rounded else "that black and white are exchanged"
        raise BadRequestError.of(field, f"is an image of a file with 16 bits that Pillow has read without {fact}: give the file itself")


def _picture_file(image: Any, field: str) -> bytes:
    """The bytes of a file of a Pillow image. An image that was opened and not loaded yet is its own file, with all that is in it. Others
    have every pixel unchanged, as PNG with little compression, for speed, or as TIFF for modes that PNG lacks; the orientation in their
    EXIF data is kept, the rest of that data is not. Raises BadRequestError."""
    if (original := _own_file(image)) is not None:
        return original
    file = io.BytesIO()
    if 0 in getattr(image, "size", ()):
        raise BadRequestError.of(field, f"is a picture of {image.size[0]} by {image.size[1]} pixels: it is empty")
    try:
        if hasattr(image, "load"):
            image.load()  # Pillow turns a TIFF that lies on its side while it loads the pixels, and then changes the EXIF data.
        _check_is_known(image, field)
        exif = image.getexif() if hasattr(image, "getexif") else {}
        if image.mode in WRITTEN_AS:
            image = image.convert(WRITTEN_AS[image.mode])
        is_tiff = image.mode in ONLY_IN_TIFF
        # Without `raw` a TIFF is compressed like the file that the image comes from, perhaps with loss.
        options: dict[str, Any] = {"compression": "raw"} if is_tiff else {"compress_level": 1}
        if ORIENTATION in exif:
            options["exif"] = type(exif)()
            options["exif"][ORIENTATION] = exif[ORIENTATION]
        image.save(file, "TIFF" if is_tiff else "PNG", **options)
    except (OSError, ValueError, TypeError) as error:
        raise BadRequestError.of(field, f"cannot be written as a file: {error}; image.convert('RGB') can") from error
    return file.getvalue()


def _media_type(data: bytes, named_type: str | None, kind: str, field: str, name: str) -> str:
    """The media type that the first bytes of a file show, or else `named_type`, the type by the file's name. Raises BadRequestError if
    there is neither, or the type is not of `kind`. name: of the file, for errors."""
    types = media_types(data[:LOOK_BYTES]) or ((named_type,) if named_type is not None else ())
    if not types:
        raise BadRequestError.of(field, f"{name}is of no known type; give an encoded file, such as {_FILES[kind]}")
    for media_type in types:
        if media_type.startswith(f"{kind}/"):
            return media_type
    raise BadRequestError.of(field, f"{name}is {types[0]}, not {_a(kind)}")


_FILES = {"image": "PNG or JPEG", "audio": "WAV, FLAC or MP3", "video": "MP4 or WebM"}


def _forms(kind: str) -> str:
    """The forms of objects that are accepted for media of a kind, in words."""
    others = {
        "image": ", or an image of Pillow (Image.fromarray makes one)",
        "audio": ", or (samples, rate_hz)",
        "video": ", or a Video of one of these",
    }
    return f"a path, bytes or an open file{others[kind]}"


def _a(kind: str) -> str:
    return f"a {KINDS[kind]}"


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"


def _too_large(field: str, name: str, fault: str) -> BadRequestError:
    rule = f"a request holds at most {MAX_MESSAGE_BYTES >> 20} MiB. Send a smaller or shorter one."
    return BadRequestError.of(field, f"{name}{fault}; {rule}")


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
    # A frame of MPEG audio begins with 11 bits of 1; the bits of 0x06 are its layer: 0x02 is layer 3, 0x04 layer 2. A frame of ADTS begins
    # with 12 bits of 1, and its layer is 0. A transport stream has packets of 188 bytes, each of which begins with 0x47.
    if len(start) > 1 and start[0] == 0xFF:
        if start[1] & 0xE0 == 0xE0 and start[1] & 0x06 in (0x02, 0x04):
            return ("audio/mpeg",)
        if start[1] & 0xF6 == 0xF0:
            return ("audio/aac",)
    if start[:1] == start[188:189] == b"\x47":
        return ("video/mp2t", "audio/mp2t")
    return ()
