"""Sounds and films as files, and answers in notebooks.

A `SoundEncoder` turns sound into the bytes of a file, piece by piece as the sound comes: WAV with the standard library, FLAC, Ogg Vorbis,
Ogg Opus and MP3 with libsndfile. A notebook gets HTML that holds the text, a player of the sound and the pictures, so that they stay in
the notebook's file."""

from __future__ import annotations

import struct
from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omnistage.client.errors import NotAvailableError, RequestError

PCM, FLOAT = 1, 3
"""Tags of the sample format in the head."""

UNKNOWN_WAV_BYTES = (1 << 32) - 1
"""The length in the head of a file whose end is not known yet. Players then read to the end of the file."""


def to_pcm16(samples: NDArray[np.float32]) -> bytes:
    """float32 samples of any shape, full scale 1, as little-endian 16 bit integers; louder samples are clipped. Exact for sound that
    came as 16 bit."""
    pcm: bytes = np.clip(np.rint(samples * 32768.0), -32768, 32767).astype("<i2").tobytes()
    return pcm


def wav_head(dtype: np.dtype[Any], channels: int, sample_rate_hz: int, samples: int | None) -> bytes:
    """The head of a file. dtype: the type of the samples that follow it, int16, int32 or float32. samples: their number in each channel;
    None: not known yet."""
    width = dtype.itemsize
    size = UNKNOWN_WAV_BYTES if samples is None else samples * channels * width
    tag = PCM if dtype.kind == "i" else FLOAT
    # After the tag: channels, samples a second, bytes a second, bytes of a sample of all channels, bits of a sample.
    form = struct.pack("<HHIIHH", tag, channels, sample_rate_hz, sample_rate_hz * channels * width, channels * width, 8 * width)
    chunks = [(b"fmt ", form)]
    if tag == FLOAT:  # Then the format has the length of an extension, which is 0, and a chunk says the number of samples.
        count = UNKNOWN_WAV_BYTES if samples is None else samples
        chunks = [(b"fmt ", form + b"\0\0"), (b"fact", struct.pack("<I", min(count, UNKNOWN_WAV_BYTES)))]
    body = b"WAVE" + b"".join(name + struct.pack("<I", len(content)) + content for name, content in chunks) + b"data"
    total_bytes = len(body) + 4 + size  # 4: the size of the data, as a number after `body`.
    return b"RIFF" + struct.pack("<I", min(total_bytes, UNKNOWN_WAV_BYTES)) + body + struct.pack("<I", min(size, UNKNOWN_WAV_BYTES))


def wav_bytes(samples: NDArray[Any], sample_rate_hz: int) -> bytes:
    """The bytes of a file with these samples, int16, int32 or float32 [samples, channels], unchanged."""
    data = samples.astype(samples.dtype.newbyteorder("<"), copy=False).tobytes()
    return wav_head(samples.dtype, samples.shape[1], sample_rate_hz, len(samples)) + data


Samples = NDArray[np.float32]

ENCODINGS = ("pcm16", "float32")
"""The types of samples in chunks of sound and in WAV files."""

INSTALL_SOUNDFILE = "pip install 'soundfile>=0.14', which omnistage[cli] has; .wav needs nothing."


MP3_KBIT_S = ((32_000, 32, 320, 64), (16_000, 8, 160, 64), (0, 8, 64, 32))
"""Rows of (least sample rate in Hz; at such rates: the lowest bit rate in kbit/s, the highest, and the one that we use)."""


@dataclass(frozen=True, slots=True)
class SoundFormat:
    """A kind of sound file. container, subtype: libsndfile's names for it; empty for WAV. rates_hz: the sample rates that such a file can
    have; empty: any rate."""

    name: str
    container: str = ""
    subtype: str = ""
    rates_hz: tuple[int, ...] = ()

    @property
    def is_wav(self) -> bool:
        """Whether this is WAV, which the standard library can write, with unchanged samples."""
        return not self.container

    def options(self, sample_rate_hz: int) -> dict[str, Any]:
        """Options for libsndfile. An MP3 gets a constant bit rate: a file from a pipe does not say its length, and readers such as
        libsndfile then compute it from the size of the first frame. A frame at our bit rates has room for the length, which
        `SoundEncoder.head` adds."""
        if self.container != "MP3":
            return {}
        _, lowest_kbit_s, highest_kbit_s, our_kbit_s = next(row for row in MP3_KBIT_S if sample_rate_hz >= row[0])
        # libsndfile takes a bit rate as a level: 0 is the highest rate, 1 the lowest.
        return {"bitrate_mode": "CONSTANT", "compression_level": (highest_kbit_s - our_kbit_s) / (highest_kbit_s - lowest_kbit_s)}

    def check(self, sample_rate_hz: int = 0, encoding: str = "pcm16") -> None:
        """Raises RequestError for a rate or an encoding that such a file cannot have, NotAvailableError if this machine cannot write such
        files. sample_rate_hz: 0: not known yet."""
        if encoding not in ENCODINGS:
            raise RequestError(f"encoding {encoding!r}: there is none of that name", hint=f"Give {' or '.join(ENCODINGS)}.")
        if encoding != "pcm16" and not self.is_wav:
            raise RequestError(f"{self.name} does not hold samples as {encoding}", hint="Write a file that ends in .wav, or leave it out.")
        if self.rates_hz and sample_rate_hz and sample_rate_hz not in self.rates_hz:
            fault = f"cannot have {sample_rate_hz} samples a second, only {', '.join(map(str, self.rates_hz))}"
            raise RequestError(f"{self.name} {fault}", hint="Ask for one of these sample rates.")
        if not self.is_wav:
            library = _libsndfile(self.name)
            if not library.check_format(self.container, self.subtype):
                version = library.__libsndfile_version__
                raise NotAvailableError(f"{self.name}: libsndfile {version} cannot write it, 1.1 and later can", hint=INSTALL_SOUNDFILE)


FORMATS = {
    ".wav": SoundFormat("WAV"),
    ".flac": SoundFormat("FLAC", "FLAC", "PCM_16"),
    ".ogg": SoundFormat("Ogg Vorbis", "OGG", "VORBIS"),
    ".opus": SoundFormat("Opus", "OGG", "OPUS", (8000, 12000, 16000, 24000, 48000)),
    ".mp3": SoundFormat("MP3", "MP3", "MPEG_LAYER_III", (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000)),
}
"""Kinds of files, by the ending of the name."""


def format_of(path: str | PathLike[str]) -> SoundFormat:
    """The kind of file for a name that ends in a key of FORMATS, or for such an ending alone. Raises RequestError for other names."""
    name = fspath(path)
    suffix = name.lower() if name.lower() in FORMATS else PurePath(name).suffix.lower()
    if suffix not in FORMATS:
        *names, last = (one.name for one in FORMATS.values())
        hint = f"Give a name that ends in {any_of(FORMATS)}."
        raise RequestError(f"{name}: only {', '.join(names)} and {last} can be written", hint=hint)
    return FORMATS[suffix]


def channels_of(samples: Samples) -> int:
    """The number of channels: 1 for samples [n], else that of samples [n, channels]."""
    return 1 if samples.ndim == 1 else samples.shape[1]


def any_of(suffixes: Iterable[str]) -> str:
    """The endings in words: ".wav, .flac or .mp3"."""
    *others, last = suffixes
    return f"{', '.join(others)} or {last}" if others else last


def _libsndfile(name: str) -> Any:
    """The package soundfile. name: the kind of file that needs it, for the error. Raises NotAvailableError."""
    try:
        import soundfile  # A program that writes only WAV, or nothing, does not need the package.
    except ImportError as error:
        raise NotAvailableError(f"{name} needs a package that is not installed: soundfile", hint=INSTALL_SOUNDFILE) from error
    except OSError as error:  # The package is installed, but the library that it needs is missing.
        raise NotAvailableError(f"{name} needs libsndfile, which does not load: {error}", hint=INSTALL_SOUNDFILE) from error
    return soundfile


class SoundEncoder:
    """Turns sound into the bytes of a file, for callers who send or store the bytes themselves. At any moment the bytes so far can be
    played as a file.

    kind: an ending, such as .mp3, or a name that has one. sample_rate_hz: of the samples and of the file. encoding: of the samples in a
    WAV file, pcm16 or float32. channels: as `channels_of` gives it. Raises RequestError if no such file can be written,
    NotAvailableError if this machine cannot write it."""

    def __init__(self, kind: str | PathLike[str], sample_rate_hz: int, encoding: str = "pcm16", channels: int = 1) -> None:
        form = format_of(kind)
        form.check(sample_rate_hz, encoding)
        self._file: _Wav | _Libsndfile = (
            _Wav(sample_rate_hz, np.dtype("<i2" if encoding == "pcm16" else "<f4"), channels)
            if form.is_wav
            else _Libsndfile(form, sample_rate_hz, channels)
        )

    def encode(self, samples: Samples) -> bytes:
        """Take the next samples, and return the next bytes of the file, perhaps none yet. samples: float32 [n], or [n, channels], full
        scale 1; louder ones are clipped, except in a WAV file of float32."""
        return self._file.encode(samples)

    def finish(self) -> bytes:
        """The last bytes of the file; call it once, when no more sound comes."""
        return self._file.finish()

    @property
    def head(self) -> bytes:
        """The beginning of the file with facts that are known only at the end, such as the length. Write it over the old beginning if the
        file can seek. A file that keeps the old beginning can be played too, an MP3 with a moment of silence before and after the sound;
        but libsndfile cannot read such a FLAC."""
        return self._file.head


class _Wav:
    """Writes WAV. Until `finish` the head of the file says that the length is unknown."""

    def __init__(self, sample_rate_hz: int, dtype: np.dtype[Any], channels: int) -> None:
        self._rate_hz, self._dtype, self._channels = sample_rate_hz, dtype, channels
        self._samples = 0
        self._has_begun = False

    @property
    def head(self) -> bytes:
        return wav_head(self._dtype, self._channels, self._rate_hz, self._samples)

    def encode(self, samples: Samples) -> bytes:
        head = b"" if self._has_begun else wav_head(self._dtype, self._channels, self._rate_hz, None)
        self._has_begun = True
        self._samples += len(samples)
        return head + (to_pcm16(samples) if self._dtype.kind == "i" else samples.astype(self._dtype).tobytes())

    def finish(self) -> bytes:
        return b"" if self._has_begun else self.encode(np.empty(0, np.float32))


class _Libsndfile:
    """Writes one file with libsndfile, which corrects the beginning of the file when it is closed."""

    def __init__(self, form: SoundFormat, sample_rate_hz: int, channels: int) -> None:
        self._sink = _Sink()
        self._exact = form.subtype == "PCM_16"
        self._file = _libsndfile(form.name).SoundFile(
            self._sink, "w", sample_rate_hz, channels, form.subtype, format=form.container, **form.options(sample_rate_hz)
        )

    @property
    def head(self) -> bytes:
        return bytes(self._sink.head)

    def encode(self, samples: Samples) -> bytes:
        # Converted here, because libsndfile's own conversion to 16 bit lets loud samples wrap around.
        self._file.write(np.frombuffer(to_pcm16(samples), "<i2").reshape(samples.shape) if self._exact else np.clip(samples, -1, 1))
        return self._sink.take_new()

    def finish(self) -> bytes:
        self._file.close()
        return self._sink.take_new()


HEAD_BYTES = 4096
"""Bytes of the beginning that are kept: libsndfile corrects only a block of 38 bytes in FLAC, the first frame in MP3."""


class _Sink:
    """The file object that libsndfile writes to. `take_new` returns the new bytes. `head` is a copy of the beginning, in which libsndfile
    may correct bytes that were already taken."""

    def __init__(self) -> None:
        self.head = bytearray()
        self._new = bytearray()
        self._size = 0  # bytes of the whole file
        self._place = 0  # the present position in the file

    def take_new(self) -> bytes:
        """The bytes that were appended since the last call."""
        new, self._new = bytes(self._new), bytearray()
        return new

    def write(self, data: Any) -> int:
        """Write at the present position; returns the number of bytes. Bytes after the old end are new; others correct `head`."""
        block = bytes(data)
        self._new += block[max(self._size - self._place, 0) :]
        if self._place < HEAD_BYTES:
            self.head[self._place : self._place + len(block)] = block
            del self.head[HEAD_BYTES:]
        self._place += len(block)
        self._size = max(self._size, self._place)
        return len(block)

    def seek(self, offset: int, whence: int = 0) -> int:
        self._place = offset + (0, self._place, self._size)[whence]  # SEEK_SET, SEEK_CUR, SEEK_END
        return self._place

    def tell(self) -> int:
        return self._place

    def read(self, size: int = -1) -> bytes:
        """Always empty: the file is only written."""
        return b""


FILM_KINDS = {".webm": "WebM", ".mp4": "MP4"}
"""The kind of file that each ending stands for. A film of another kind may have any name."""

FILM_MEDIA_TYPES = {ending: f"video/{name.lower()}" for ending, name in FILM_KINDS.items()}
"""The media type of each of these kinds."""


def check_film_ending(path: str | PathLike[str], media_type: str) -> None:
    """Raises RequestError if the name of a file does not fit a film of this type."""
    ending = Path(path).suffix.lower()
    fit = next((one for one, its_type in FILM_MEDIA_TYPES.items() if its_type == media_type), ending)
    if ending != fit:
        other_type = f", or ask for media_type={FILM_MEDIA_TYPES[ending]!r}" if ending in FILM_KINDS else ""
        raise RequestError(f"{path}: this film is {media_type}", hint=f"Give a name that ends in {fit}{other_type}.")


@dataclass(frozen=True, slots=True, repr=False)
class Film:
    """A film as the bytes of a file. media_type: such as video/webm or video/mp4. frames: number of frames. A `Film` can also be sent to a
    model, among `videos`."""

    data: bytes
    media_type: str
    frames: int

    def save(self, path: str | PathLike[str]) -> None:
        """Write a file whose ending fits the type: .webm or .mp4. Raises RequestError for another ending, OSError."""
        check_film_ending(path, self.media_type)
        Path(path).write_bytes(self.data)

    def _repr_html_(self) -> str:
        """A player, for a notebook."""
        return films_html([(self.media_type, self.data)])

    def __repr__(self) -> str:
        return f"Film({self.media_type}, {self.frames} frames, {len(self.data)} bytes)"


LONGEST_SHOWN_S = 600.0
"""The most seconds of sound in a player. At 24,000 samples a second a millisecond takes 48 bytes, and a third more as base64."""

MAX_PICTURE_BYTES = 32 << 20
"""The most bytes of all pictures that are shown together."""

MAX_FILM_BYTES = 32 << 20
"""The most bytes of all films that are shown together."""

SHOWN_FILM_TYPES = ("video/webm", "video/mp4")
SHOWN_PICTURE_TYPES = ("image/png", "image/jpeg", "image/webp")


def sound_html(samples: NDArray[np.float32], sample_rate_hz: int) -> str:
    """HTML of a player with the sound as a WAV of 16 bit. samples: float32 [n] or [n, channels], full scale 1. If the sound is longer than
    `LONGEST_SHOWN_S`, the player has only its beginning, and a text says so."""
    shown = samples[: round(LONGEST_SHOWN_S * sample_rate_hz)]
    wav = wav_head(np.dtype("<i2"), channels_of(samples), sample_rate_hz, len(shown)) + to_pcm16(shown)
    html = f'<audio controls src="{_data_url("audio/wav", wav)}"></audio>'
    if len(shown) < len(samples):
        whole_s = len(samples) / sample_rate_hz
        html += f"<div>The first {LONGEST_SHOWN_S / 60:g} of {whole_s / 60:.1f} minutes; <code>save</code> writes all.</div>"
    return html


def pictures_html(encoded: Iterable[tuple[str, bytes]]) -> str:
    """HTML of pictures: those of types that browsers show, as far as they fit into `MAX_PICTURE_BYTES`, and the number of the others.
    encoded: (media type, bytes) of each."""
    elements = _elements('<img src="{}">', encoded, SHOWN_PICTURE_TYPES, MAX_PICTURE_BYTES)
    count = elements.count("")
    sentence = f"<div>{count} more in <code>pictures</code>, too large to be shown, or of another type.</div>" if count else ""
    return "".join(elements) + sentence


def films_html(encoded: Iterable[tuple[str, bytes]]) -> str:
    """HTML of players of films. A film that is too large for the rest of `MAX_FILM_BYTES`, or of a type that browsers do not show, becomes
    a sentence. encoded: (media type, bytes) of each."""
    fault = "too large to be shown, or of another type"
    sentence = f"<div>One more in <code>videos</code>, {fault}; its <code>save</code> writes it.</div>"
    elements = _elements('<video controls loop src="{}"></video>', encoded, SHOWN_FILM_TYPES, MAX_FILM_BYTES)
    return "".join(element or sentence for element in elements)


def _elements(form: str, encoded: Iterable[tuple[str, bytes]], types: Sequence[str], room_bytes: int) -> list[str]:
    """The HTML element of each medium; empty for one of another type, or too large for what is left of `room_bytes`. form: an element with
    {} in place of the URL. encoded: (media type, bytes) of each."""
    elements = []
    for media_type, data in encoded:
        is_shown = media_type in types and len(data) <= room_bytes
        room_bytes -= len(data) if is_shown else 0
        elements.append(form.format(_data_url(media_type, data)) if is_shown else "")
    return elements


def text_html(text: str) -> str:
    """HTML of a text with its spaces and line breaks."""
    from html import escape  # The module's table of names is only for notebooks.

    return f'<div style="white-space: pre-wrap">{escape(text)}</div>'


def _data_url(media_type: str, data: bytes) -> str:
    return f"data:{media_type};base64,{b64encode(data).decode('ascii')}"
