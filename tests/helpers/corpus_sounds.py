"""Sounds of the corpus: formats, and what headers of theirs say that is not so."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from helpers import ffmpeg, media_files
from helpers.corpus import CorpusFile, Maker, cut, cut_in_fragment

ANY = (8_000, 11_025, 16_000, 22_050, 44_100, 48_000)
HIGH = (32_000, 44_100, 48_000)
OPUS = (48_000,)


@dataclass(frozen=True, slots=True)
class SoundForm:
    """words: of ffmpeg, up to the file. tells: whether a part of it can be told from the whole. seeks: cannot be made in a pipe. unplayed:
    FFmpeg 5.1 cannot play what it wrote into one. packed: loses something, and decoders may differ a little."""

    words: tuple[str, ...]
    rates: tuple[int, ...] = ANY
    tells: bool = False
    seeks: bool = False
    unplayed: bool = False
    packed: bool = True


def _wav(codec: str, *more: str, packed: bool = False) -> SoundForm:
    return SoundForm(("-c:a", codec, *more, "-f", "wav"), tells=True, packed=packed)


FORMS = {
    **{f"wav-{codec}": _wav(f"pcm_{codec}") for codec in ("u8", "s16le", "s24le", "s32le", "f32le", "f64le", "mulaw", "alaw")},
    **{f"wav-{codec}": _wav(codec, packed=True) for codec in ("adpcm_ms", "adpcm_ima_wav")},
    "rf64": replace(_wav("pcm_s16le", "-rf64", "always"), unplayed=True),
    "w64": SoundForm(("-c:a", "pcm_s16le", "-f", "w64"), tells=True, unplayed=True, packed=False),
    **{
        f"aiff-{codec}": SoundForm(("-c:a", f"pcm_{codec}", "-f", "aiff"), tells=True, unplayed=True, packed=False)
        for codec in ("s16be", "s24be", "f32be")
    },
    "au": SoundForm(("-c:a", "pcm_s16be", "-f", "au"), tells=True, packed=False),
    "caf": SoundForm(("-c:a", "pcm_s16be", "-f", "caf"), tells=True, packed=False),
    "flac": SoundForm(("-c:a", "flac", "-f", "flac"), tells=True, packed=False),
    "mp3-cbr": SoundForm(("-c:a", "libmp3lame", "-b:a", "64k", "-f", "mp3"), tells=True),
    "mp3-vbr": SoundForm(("-c:a", "libmp3lame", "-q:a", "5", "-f", "mp3"), tells=True),
    "mp3-no-xing": SoundForm(("-c:a", "libmp3lame", "-q:a", "2", "-write_xing", "0", "-f", "mp3")),
    "ogg-vorbis": SoundForm(("-c:a", "libvorbis", "-f", "ogg"), tells=True),
    "ogg-opus": SoundForm(("-c:a", "libopus", "-f", "ogg"), OPUS, tells=True),
    "ogg-flac": SoundForm(("-c:a", "flac", "-f", "ogg"), tells=True, packed=False),
    "adts": SoundForm(("-c:a", "aac", "-f", "adts")),
    "m4a": SoundForm(("-c:a", "aac", "-f", "ipod"), tells=True, seeks=True),
    "m4a-faststart": SoundForm(("-c:a", "aac", "-movflags", "faststart", "-f", "ipod"), tells=True, seeks=True),
    "m4a-fragmented": SoundForm(("-c:a", "aac", "-movflags", "frag_keyframe+empty_moov", "-f", "mp4"), tells=True),
    "m4a-alac": SoundForm(("-c:a", "alac", "-f", "ipod"), tells=True, seeks=True, packed=False),
    "mov-pcm": SoundForm(("-c:a", "pcm_s16le", "-f", "mov"), tells=True, seeks=True, packed=False),
    "mka-aac": SoundForm(("-c:a", "aac", "-f", "matroska"), tells=True),
    "mka-flac": SoundForm(("-c:a", "flac", "-f", "matroska"), tells=True, packed=False),
    "webm-opus": SoundForm(("-c:a", "libopus", "-f", "webm"), OPUS, tells=True),
    "webm-vorbis": SoundForm(("-c:a", "libvorbis", "-f", "webm"), tells=True),
    "ac3": SoundForm(("-c:a", "ac3", "-f", "ac3"), HIGH),
    "eac3": SoundForm(("-c:a", "eac3", "-f", "eac3"), HIGH),
    "mp2": SoundForm(("-c:a", "mp2", "-f", "mp2"), HIGH),
    "ts-aac": SoundForm(("-c:a", "aac", "-f", "mpegts"), HIGH),
    "ts-mp2": SoundForm(("-c:a", "mp2", "-f", "mpegts"), HIGH),
    "wma": SoundForm(("-c:a", "wmav2", "-f", "asf"), HIGH, tells=True, seeks=True),
    "flv-aac": SoundForm(("-c:a", "aac", "-f", "flv"), HIGH, seeks=True),
}
JOINS = ("mp3-cbr", "mp3-vbr", "mp3-no-xing", "adts", "ac3", "eac3", "mp2", "ts-aac", "ts-mp2", "ogg-vorbis", "ogg-opus")
"""The forms that can be joined by `cat`: each part has all that a decoder needs."""
APART = ("mp3-cbr", "mp3-vbr", "mp3-no-xing", "ogg-vorbis", "ogg-opus")
"""Those of them where FFmpeg's command keeps the silence that encoders put around each part, or leaves out samples. The noise of the
others goes on from one part to the next."""
RIFFS = ("wav-u8", "wav-s16le", "wav-s24le", "wav-f32le", "wav-mulaw", "wav-adpcm_ms")
XINGS = ("mp3-cbr", "mp3-vbr")
TAGGED = (*JOINS[:6], "flac")
PLACEHOLDERS = (0, 0xFFFFFFFF, 0x7FFFFFFF, 0x7FFFF000, 0x7FFF0000, 2_000_000_000, 0xFFFFFFFF - 36, 0x80000000)
ALIGNED = 8
"""Where samples end between two places at which chunks may begin, nothing but their length tells what is a sample."""
LOSS = 0.01
"""The allowed mean difference, as a share of full scale: two decoders of one stream are far closer, and another sound is far from it."""


def cases() -> Iterator[tuple[str, Maker]]:
    """Each by a name that can be read."""
    for name, form in FORMS.items():
        for feature, make in FEATURES.items():
            yield f"sound-{name}-{feature}", partial(make, form)
        if not form.seeks:
            yield f"sound-{name}-pipe", partial(_pipe, form)
    for names, lies in ((RIFFS, RIFF_LIES), (("aiff-s16be", "aiff-f32be"), FORM_LIES), (("au",), AU_LIES), (("caf",), CAF_LIES)):
        for name in names:
            for lie, tell in lies.items():
                yield f"sound-{name}-{lie}", partial(_lie, FORMS[name], tell)
    for name in JOINS:
        yield f"sound-{name}-joined", partial(_joined, FORMS[name], name in APART)
    for name in XINGS:
        yield f"sound-{name}-xing-few", partial(_lie, FORMS[name], partial(_xing, times=0.4))
        yield f"sound-{name}-xing-many", partial(_lie, FORMS[name], partial(_xing, times=1.05))
    for name in TAGGED:
        yield f"sound-{name}-id3", partial(_lie, FORMS[name], _id3)


def _content(form: SoundForm, chance: random.Random, quiet_s: float = 0.0) -> tuple[bytes, int, int]:
    """Samples in 32-bit floats, their rate and channels."""
    rate_hz, channels = chance.choice(form.rates), chance.choice((1, 2))
    loud = media_files.samples(chance.getrandbits(32), chance.uniform(0.8, 2.0), rate_hz, channels)
    silence = np.zeros((round(quiet_s * rate_hz), channels), np.float32)
    both = np.concatenate([silence, loud]).astype("<f4")
    return both[: len(both) // ALIGNED * ALIGNED].tobytes(), rate_hz, channels


def _file(form: SoundForm, content: tuple[bytes, int, int], *, pipe: bool = False) -> bytes:
    data, rate_hz, channels = content
    return ffmpeg.made(
        *("-f", "f32le", "-ar", str(rate_hz), "-ac", str(channels), "-i", "pipe:0", *form.words, "pipe:1" if pipe else "{out}"), data=data
    )


def _sample(form: SoundForm, file: bytes) -> CorpusFile:
    return CorpusFile(file, file, alike=LOSS if form.packed else 0.0)


def _plain(form: SoundForm, chance: random.Random) -> CorpusFile:
    return _sample(form, _file(form, _content(form, chance)))


def _quiet(form: SoundForm, chance: random.Random) -> CorpusFile:
    """A guess of the length by the first packets is far too long."""
    return _sample(form, _file(form, _content(form, chance, quiet_s=chance.uniform(2, 5))))


def _cut(form: SoundForm, chance: random.Random) -> CorpusFile:
    file = cut(_file(form, _content(form, chance)), chance, tells=form.tells)
    if "frag_keyframe+empty_moov" in form.words:
        file = cut_in_fragment(file)
    return replace(_sample(form, file), cut=form.tells, torn=not form.tells)


def _odd(form: SoundForm, chance: random.Random) -> CorpusFile:
    """One byte behind the end."""
    sample = _plain(form, chance)
    return replace(sample, file=sample.file + b"\0")


FEATURES: dict[str, Callable[[SoundForm, random.Random], CorpusFile]] = {"plain": _plain, "quiet-start": _quiet, "cut": _cut, "odd": _odd}


def _pipe(form: SoundForm, chance: random.Random) -> CorpusFile:
    """Whoever writes into a pipe cannot go back to say how long it became."""
    content = _content(form, chance)
    piped = _file(form, content, pipe=True)
    return replace(_sample(form, _file(form, content) if form.unplayed else piped), file=piped)


def _joined(form: SoundForm, apart: bool, chance: random.Random) -> CorpusFile:
    one, rate_hz, channels = _content(form, chance)
    two = media_files.samples(chance.getrandbits(32), chance.uniform(0.5, 1.5), rate_hz, channels).astype("<f4").tobytes()
    files = [_file(form, (part, rate_hz, channels)) for part in (one, two)]
    sample = _sample(form, b"".join(files))
    return replace(sample, plain=files[0], then=files[1]) if apart else sample


def _lie(form: SoundForm, tell: Callable[[bytes, random.Random], bytes], chance: random.Random) -> CorpusFile:
    """The reference decodes the file that does not lie."""
    sample = _plain(form, chance)
    return replace(sample, file=tell(sample.file, chance))


def _at(file: bytes, place: int, value: bytes) -> bytes:
    return file[:place] + value + file[place + len(value) :]


def _riff_sizes(file: bytes, chance: random.Random, size: int | None = None) -> bytes:
    """Both sizes are placeholders, as they are when a pipe is written, or the outer one is wrong by what stands before the samples."""
    size = chance.choice(PLACEHOLDERS) if size is None else size
    data = file.index(b"data") + 4
    outer = size if chance.random() < 0.5 else min(size + data - 4, 0xFFFFFFFF)
    return _at(_at(file, 4, struct.pack("<I", outer)), data, struct.pack("<I", size))


def _riff_random(file: bytes, chance: random.Random) -> bytes:
    """Nobody knows this placeholder; a file of a gigabyte cannot be meant."""
    return _riff_sizes(file, chance, chance.randrange(1 << 30, 1 << 32))


def _riff_data_only(file: bytes, chance: random.Random) -> bytes:
    """The outer size was mended afterwards, the inner one forgotten."""
    return _at(file, file.index(b"data") + 4, struct.pack("<I", chance.choice((0, 0xFFFFFFFF))))


def _riff_before(file: bytes, chance: random.Random) -> bytes:
    """A chunk that nobody knows stands before the samples."""
    body = chance.randbytes(2 * chance.randrange(1, 200))
    whole = file[:12] + b"junk" + struct.pack("<I", len(body)) + body + file[12:]
    return _at(whole, 4, struct.pack("<I", len(whole) - 8))


def _riff_behind(file: bytes, chance: random.Random) -> bytes:
    body = chance.randbytes(2 * chance.randrange(1, 200))
    file += b"\0" * (len(file) % 2)
    whole = file + b"LIST" + struct.pack("<I", len(body)) + body
    return _at(whole, 4, struct.pack("<I", len(whole) - 8))


def _garbage_behind(file: bytes, chance: random.Random) -> bytes:
    """Not counted by any size."""
    return file + b"\0" * (len(file) % 2) + chance.randbytes(chance.randrange(8, 300))


RIFF_LIES = {
    "placeholders": _riff_sizes,
    "random-size": _riff_random,
    "inner-size": _riff_data_only,
    "chunk-before": _riff_before,
    "chunk-behind": _riff_behind,
    "garbage-behind": _garbage_behind,
}


def _form_sizes(file: bytes, chance: random.Random) -> bytes:
    size, inner = chance.choice((0, 0xFFFFFFFF, 0x7FFFFFFF)), file.index(b"SSND") + 4
    return _at(_at(file, 4, struct.pack(">I", size)), inner, struct.pack(">I", size))


def _au_size(file: bytes, chance: random.Random) -> bytes:
    return _at(file, 8, struct.pack(">I", chance.choice((0, 0xFFFFFFFF, 0x7FFFFFFF, chance.randrange(1 << 30, 1 << 32)))))


def _caf_size(file: bytes, _: random.Random) -> bytes:
    """Apple's own way to say that it is not known: -1, of the last chunk."""
    return _at(file, file.index(b"data") + 4, struct.pack(">q", -1))


FORM_LIES = {"placeholders": _form_sizes, "garbage-behind": _garbage_behind}
AU_LIES = {"placeholders": _au_size}
CAF_LIES = {"placeholders": _caf_size}


def _xing(file: bytes, _: random.Random, times: float) -> bytes:
    """Another number of frames than there are."""
    at = max(file.find(b"Xing"), file.find(b"Info")) + 8
    return _at(file, at, struct.pack(">I", round(struct.unpack_from(">I", file, at)[0] * times)))


def _id3(file: bytes, chance: random.Random) -> bytes:
    """A tag in front, with a picture for all that anybody knows."""
    body = chance.randbytes(chance.randrange(100, 2000))
    title = b"PRIV" + struct.pack(">I", len(body)) + b"\0\0" + body
    size = len(title)
    return b"ID3\x03\0\0" + bytes(size >> shift & 0x7F for shift in (21, 14, 7, 0)) + title + file
