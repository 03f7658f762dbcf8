"""The bad-media table: each is a typed error that says what to do, with bounded memory and time, and the next medium is decoded. Whose
fault it is: what the sandbox or the machine refuses is never told as damage of the medium, and nothing is lost by the sandbox."""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from PIL import Image, PngImagePlugin
from structlog.testing import capture_logs

from helpers import lengths, media_files, picture_files
from helpers.decoding import decoding
from omnistage.models.media.decoder import MediaDecoder
from omnistage.models.media.terms import BadMedia, DecoderBroken, DecoderFailed, FilmPreprocessing, MediaLimits

Kind = Literal["picture", "sound", "film"]
"""Methods of the decoder."""

PEAK_BYTES = 600 << 20
"""No bad medium here may take more, libraries included; most are far below. A picture of 50 million pixels would take 150 MiB and more."""


def png(width: int, height: int, rows: bytes = b"") -> bytes:
    """A PNG with a header that says what it likes."""
    return picture_files.packed_png(width, height, 8, 2, zlib.compress(rows, 9))


def long_flac(seconds: int) -> bytes:
    """Silence: some kilobytes."""
    return media_files.written(np.zeros(seconds * 8000, np.int16), 8000, "FLAC")


def flac_of_unknown_length(seconds: int) -> bytes:
    """Its header says nothing of how long it lasts: 36 bits of the first block."""
    data = long_flac(seconds)
    at = data.index(b"fLaC") + 8 + 13
    return data[:at] + bytes([data[at] & 0xF0]) + bytes(4) + data[at + 5 :]


def not_a_number() -> bytes:
    sound = media_files.samples(0)
    sound[500] = np.nan
    return media_files.written(sound, 16_000, "WAV", "FLOAT")


def shorter_than_its_header(film: bytes, seconds: int) -> bytes:
    """A Matroska whose header says another duration, in milliseconds as a float of 8 bytes."""
    at = film.index(b"\x44\x89\x88") + 3
    return film[:at] + struct.pack(">d", seconds * 1000.0) + film[at + 8 :]


def moving(frames: int, seconds: int) -> bytes:
    """A film of so many frames over that time, whatever its header says."""
    return media_files.film(0, frames, form="matroska", times=[1000 * seconds * number // frames for number in range(frames)])


def bad_media() -> dict[str, tuple[Kind, bytes, str]]:
    """By name: sent as what, the bytes, and what the error says."""
    wide = media_files.encoded(Image.new("L", (20_000, 5_000)), "JPEG")
    avif = media_files.picture(1, form="AVIF").replace(b"ispe", b"none")
    long = shorter_than_its_header(moving(20, 3 * 3600), 1)
    return {
        "no bytes": ("picture", b"", "no bytes"),
        "random bytes as a picture": ("picture", random.Random(1).randbytes(5000), "no picture in a format that is known"),
        "random bytes as a sound": ("sound", random.Random(1).randbytes(5000), "no sound in a format that is known"),
        "random bytes as a film": ("film", random.Random(1).randbytes(5000), "no film in a format that is known"),
        "JPEG cut off": ("picture", media_files.picture(1, 200, 300, "JPEG")[:3000], "damaged .*truncated.*: send all of it"),
        "PNG cut off": ("picture", media_files.picture(1)[:2000], "damaged .*truncated.*: send all of it"),
        "PNG of 100 million pixels": ("picture", png(10_000, 10_000), "10000x10000 pixels, and at most 50 million may be"),
        "PNG that says more than it has": ("picture", png(6000, 6000), "damaged"),
        "PNG bomb": ("picture", png(30_000, 30_000, bytes(1 << 22)), "30000x30000 pixels"),
        "JPEG of 100 million pixels": ("picture", wide, "20000x5000 pixels, and at most 50 million may be: make it smaller"),
        "a strip": ("picture", media_files.picture(1, 2, 600), "more than 200 times longer"),
        "PostScript": ("picture", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no picture in a format that is known"),
        "HEIF": ("picture", b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(100), "HEIF.*convert it to JPEG"),
        "a sound as a picture": ("picture", media_files.sound(1), r"it is a sound \(wav\): send it as audio/\*"),
        "a film as a picture": ("picture", media_files.film(1, 4), r"it is a film \(.*mp4.*\): send it as video/\*"),
        "a picture as a sound": ("sound", media_files.picture(1), r"it is a picture \(PNG\): send it as image/\*"),
        "a film as a sound": ("sound", media_files.film(1, 4, sound_s=0.4), r"it is a film, not a sound: send it as video/\*"),
        "a picture as a film": ("film", media_files.picture(1, form="JPEG"), r"it is a picture \(JPEG\): send it as image/\*"),
        "a sound as a film": ("film", media_files.sound(1), r"no pictures in it: if it is a sound, send it as audio/\*"),
        "sound of 0 s": ("sound", media_files.sound(1, 0.0), "no samples, or was cut off before the first: send all of a sound that lasts"),
        "sound of 3 h": ("sound", long_flac(3 * 3600), "lasts 3.. s or more, and at most 300 s may be: send a part of it"),
        "sound of an hour that does not say so": ("sound", flac_of_unknown_length(3600), "lasts 3.. s or more, and at most 300 s may be"),
        "sound with a rate of its own": ("sound", media_files.sound(1, 0.01, 400_000), "400000 samples per second, and at most 192000"),
        "sound with many channels": ("sound", media_files.sound(1, 0.1, channels=64), "64 channels, and at most 32"),
        "sound that is no number": ("sound", not_a_number(), "no numbers: encode it anew"),
        "AVIF without its end": ("picture", media_files.picture(1, 300, 300, "AVIF")[:-1000], "cut off, send all of it"),
        "AVIF damaged": ("picture", avif, "in AVIF that is damaged: send all of it"),
        "Ogg cut off": ("sound", media_files.sound(1, 2.0, form="OGG")[:6000], "it was cut off, send all of it"),
        "film without frames": ("film", media_files.film(1, 0, form="matroska", codec="", sound_s=1.0), "no pictures in it"),
        "film of 3 h": ("film", moving(20, 3 * 3600), r"lasts \d{4,} s or more, and at most 600 s may be: send a part of it"),
        "film of 3 h that says 1 s": ("film", long, "lasts .* s or more, and at most 600 s may be"),
    }


def halves() -> dict[str, tuple[Kind, bytes]]:
    """Files that say how long they are, and of which half came."""
    sounds = {form: media_files.sound(1, form=form) for form in ("WAV", "AIFF", "AU", "W64", "RF64")}
    sounds["MKA"] = media_files.film(1, 0, codec="", form="matroska", sound_s=1.0)
    films = {form: media_files.film(1, 60, form=form, sound_s=6.0) for form in ("mp4", "matroska", "mov")}
    films["webm"] = media_files.film(1, 60, form="webm", codec="libvpx-vp9")
    films["avi"] = media_files.film(1, 60, form="avi", codec="mpeg4")
    pictures = {form: media_files.picture(1, 300, 300, form) for form in ("AVIF", "WEBP")}
    whole: list[tuple[Kind, dict[str, bytes]]] = [("sound", sounds), ("film", films), ("picture", pictures)]
    return {name: (kind, data[: len(data) // 2]) for kind, files in whole for name, data in files.items()}


def of_unknown_length() -> dict[str, tuple[Kind, bytes]]:
    """Files as they come out of a pipe, and one with more behind it than it says."""
    sound, film = media_files.sound(1), media_files.film(1, 20, form="matroska")
    at = film.index(b"\x18\x53\x80\x67") + 4
    return {
        "WAV of the largest size": ("sound", sound[:4] + b"\xff" * 4 + sound[8:]),
        "WAV of no size": ("sound", sound[:4] + bytes(4) + sound[8:]),
        "Matroska that was live": ("film", film[:at] + b"\x01" + b"\xff" * 7 + film[at + 8 :]),
        "MP4 with something behind it": ("film", media_files.film(1, 20) + b"\xff" * 100),
    }


@pytest.fixture(scope="module")
def good() -> dict[Kind, bytes]:
    return {"picture": media_files.picture(2), "sound": media_files.sound(2), "film": media_files.film(2, 4)}


def peak_bytes(pid: int) -> int:
    """The most address space that a process has had."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmPeak:")[2].split()[0]) << 10


async def test_the_table_of_bad_media(decoder: MediaDecoder, good: dict[Kind, bytes]) -> None:
    for name, (what, data, reason) in bad_media().items():
        with pytest.raises(BadMedia, match=reason):
            await getattr(decoder, what)(data)
            pytest.fail(f"{name} was taken")
        await getattr(decoder, what)(good[what])
    (pid,) = decoder.pids
    assert peak_bytes(pid) < PEAK_BYTES


async def test_half_of_a_file_that_says_how_long_it_is_is_refused(decoder: MediaDecoder) -> None:
    for name, (what, data) in halves().items():
        with pytest.raises(BadMedia, match=rf"it says that it has \d+ bytes, and {len(data)} are there: it was cut off, send all of it"):
            await getattr(decoder, what)(data)
            pytest.fail(f"{name} was taken")


async def test_a_file_that_does_not_say_how_long_it_is_is_taken(decoder: MediaDecoder) -> None:
    for what, data in of_unknown_length().values():
        await getattr(decoder, what)(data)


async def test_small_things_are_taken(decoder: MediaDecoder) -> None:
    assert (await decoder.picture(media_files.picture(1, 1, 1))).pixels.shape == (56, 56, 3)
    assert (await decoder.sound(media_files.written(np.zeros(1), 16_000))).samples.shape == (1,)


async def test_a_film_of_more_frames_or_larger_ones_than_may_be_is_refused(good: dict[Kind, bytes]) -> None:
    film = media_files.film(1, 20)
    for limits, reason in [
        (MediaLimits(film_frames=19), "20 frames or more, and at most 19 may be"),
        (MediaLimits(film_pixels=64 * 48 - 1), "64x48 pixels, and at most .* million may be"),
        (MediaLimits(film_bytes=len(film) - 1), f"{len(film)} bytes, and at most {len(film) - 1} may be"),
        (MediaLimits(result_bytes=1 << 20), "MiB would come out of it, and at most 1 MiB may"),
    ]:
        async with decoding(limits) as decoder:
            with pytest.raises(BadMedia, match=reason):
                await decoder.film(film)
            await decoder.picture(good["picture"])


async def test_a_playlist_reads_no_file_of_this_machine(decoder: MediaDecoder, tmp_path: Path) -> None:
    secret, segment = tmp_path / "secret.mp4", tmp_path / "secret.ts"
    secret.write_bytes(media_files.film(1, 20, sound_s=1.0))
    segment.write_bytes(media_files.film(1, 20, form="mpegts"))
    segments = "#EXTM3U\n#EXT-X-VERSION:3\n#EXT-X-TARGETDURATION:2\n#EXTINF:2.0,\n{}\n#EXT-X-ENDLIST\n"
    for text in [
        segments.format(segment),
        segments.format(f"file://{segment}"),
        f"ffconcat version 1.0\nfile {secret}\n",
        f"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nm=video 9 RTP/AVP 96\na=control:{secret}\n",
        f"<MPD><Period><AdaptationSet><Representation><BaseURL>{secret}</BaseURL></Representation></AdaptationSet></Period></MPD>",
    ]:
        for call in (decoder.film, decoder.sound):
            with pytest.raises(BadMedia, match="in a format that is known"):
                await call(text.encode())


async def test_bytes_damaged_anywhere_are_decoded_or_refused(decoder: MediaDecoder, seed: int) -> None:
    """Nothing else happens, and the decoder goes on."""
    chance = random.Random(seed)
    whole: list[tuple[Kind, bytes]] = [
        *(("picture", media_files.picture(seed, form=form)) for form in ("PNG", "JPEG", "WEBP", "GIF", "TIFF", "AVIF")),
        *(("sound", media_files.sound(seed, 0.3, form=form)) for form in ("WAV", "FLAC", "OGG", "MP3")),
        *(("film", media_files.film(seed, 6, form=form, sound_s=0.6)) for form in ("mp4", "matroska", "mpegts", "avi")),
    ]
    for _ in range(150):
        what, data = chance.choice(whole)
        damaged = bytearray(data)
        for _ in range(chance.choice([1, 3, 30])):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        if chance.random() < 0.3:
            del damaged[chance.randrange(len(damaged)) :]
        try:
            await getattr(decoder, what)(bytes(damaged), *([FilmPreprocessing(use_audio=True)] if what == "film" else []))
        except BadMedia as error:
            assert str(error)
    for what, data in whole:
        await getattr(decoder, what)(data)


@lengths.long_form(
    "models/media/test_bad_media.py::test_a_film_of_more_frames_or_larger_ones_than_may_be_is_refused",
    unkept="all frames of a film may be more than there is memory",
)
async def test_a_film_is_never_held_as_a_whole(seed: int) -> None:
    """Neither its file of a gigabyte, which is refused unread, nor its frames, which would be more than there is memory."""
    data = media_files.film(seed, 150, 720, 1280, numbered=True, rate_hz=50, codec="mpeg4")
    limits = MediaLimits(memory_bytes=390 << 20)
    assert limits.memory_bytes < 150 * 720 * 1280 * 3
    async with decoding(limits) as decoder:
        film = await decoder.film(data, FilmPreprocessing(min_pixels=4 * 784, max_pixels=16 * 784))
        assert media_files.numbers(film.frames) == [25 * number for number in range(6)]
        with tempfile.TemporaryFile() as file:
            file.truncate(1 << 30)
            with pytest.raises(BadMedia, match="1073741824 bytes, and at most 536870912 may be: send a part of it"):
                await decoder.film(file.fileno())


# Faults that are not of the medium ------------------------------------------------------------------------------------------------------


FORMS = ("PNG", "TIFF", "GIF", "WEBP", "BMP", "JPEG", "AVIF")
MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "I", "F")
FILMS = (("mp4", "libx264"), ("matroska", "ffv1"), ("webm", "libvpx-vp9"), ("avi", "mpeg4"), ("mpegts", "mpeg2video"), ("mov", "mjpeg"))
SOUND_CODECS = {"webm": "libopus", "mpegts": "mp2", "avi": "mp3"}
EXIF_ORIENTATION = 0x0112

RUN = """
import hashlib, json, os, sys, warnings
from dataclasses import asdict
from pathlib import Path
from omnistage.models.media import child
from omnistage.models.media.confinement import confine
from omnistage.models.media.results import BoundedFile
from omnistage.models.media.terms import FilmPreprocessing, MediaLimits, PicturePreprocessing, SoundPreprocessing

warnings.simplefilter("ignore")
folder, confined = Path(sys.argv[1]), sys.argv[2] == "confined"
asks = {"image": PicturePreprocessing(), "audio": SoundPreprocessing(), "video": FilmPreprocessing(use_audio=True)}
files = [(name, (folder / name).open("rb"), os.memfd_create("result")) for name in sorted(os.listdir(folder))]
limits, now, reached = MediaLimits(), None, []

def watched(event, arguments):
    if event in ("open", "import", "os.listdir", "ctypes.dlopen", "subprocess.Popen") and not isinstance(arguments[0], int):
        reached.append(f"{now}: {event} {arguments[0]}")

child.load()
assert not confined or confine()
sys.addaudithook(watched)
for now, file, result in files:
    kind = now.partition("-")[0]
    said = child.answer({"kind": kind, "ask": asdict(asks[kind])}, file, BoundedFile(result, limits.result_bytes), limits)
    os.lseek(result, 0, os.SEEK_SET)
    made = hashlib.sha256()
    while data := os.read(result, 1 << 20):
        made.update(data)
    print(json.dumps([now, said, made.hexdigest()]))
print(json.dumps(reached))
"""


def pictures(seed: int) -> dict[str, bytes]:
    """Pictures of every format in every mode that it has, and with the notes that libraries look at."""
    image = Image.fromarray(media_files.pixels(seed, 30, 40))
    found = {}
    for form in FORMS:
        for mode in MODES:
            try:
                found[f"{mode}.{form}"] = media_files.encoded(image.convert("RGB").convert(mode), form)
            except (OSError, KeyError, ValueError):
                continue  # This format has no such mode.
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = 6
    exif.get_ifd(0x8769)[0x9003] = "2020:01:01 00:00:00"
    found |= {f"turned.{form}": media_files.encoded(image, form, exif=exif) for form in ("PNG", "JPEG", "WEBP", "AVIF", "TIFF")}
    found |= {f"{how}.TIFF": media_files.encoded(image, "TIFF", compression=how) for how in ("tiff_lzw", "tiff_deflate", "jpeg", "zstd")}
    words = PngImagePlugin.PngInfo()
    words.add_text("a", "word", zip=True)
    words.add_itxt("another", "\u20ac", zip=True)
    found["words.PNG"] = media_files.encoded(image, "PNG", pnginfo=words, transparency=(1, 2, 3))
    found["two.MPO"] = media_files.encoded(image, "MPO", save_all=True, append_images=[image])
    return found


def everything(seed: int) -> dict[str, bytes]:
    """By its kind and name: whole, cut off, and sent as another kind."""
    whole = {f"image-{name}": data for name, data in pictures(seed).items()}
    for form in ("WAV", "FLAC", "OGG", "MP3", "AIFF", "AU", "CAF", "W64"):
        whole[f"audio-{form}"] = media_files.sound(seed, 0.1, form=form)
    for form, codec in FILMS:
        codecs: dict[str, Any] = {
            "pixel_format": "yuvj420p" if codec == "mjpeg" else "yuv420p",
            "sound_codec": SOUND_CODECS.get(form, "aac"),
        }
        whole[f"video-{form}"] = media_files.film(seed, 4, form=form, codec=codec, sound_s=0.4, **codecs)
    whole["audio-M4A"] = media_files.film(seed, 0, codec="", sound_s=0.2)
    cut = {f"{name}-cut": data[: len(data) // 2] for name, data in whole.items()}
    other = {"image": "audio", "audio": "video", "video": "image"}
    wrong = {f"{other[name.partition('-')[0]]}-{name}": data for name, data in whole.items()}
    return whole | cut | wrong


def test_the_sandbox_costs_no_medium_anything(tmp_path: Path, seed: int) -> None:
    """Whatever is decoded, and whatever is refused and why, is the same in the sandbox as outside of it, where nothing is opened or loaded
    either once decoding has begun."""
    media = everything(seed)
    for name, data in media.items():
        (tmp_path / name).write_bytes(data)
    one_thread = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    free, confined = (
        subprocess.run([sys.executable, "-c", RUN, tmp_path, how], capture_output=True, text=True, check=True, env=one_thread).stdout
        for how in ("free", "confined")
    )
    *answers, reached = map(json.loads, free.splitlines())
    assert confined.splitlines()[:-1] == free.splitlines()[:-1]
    assert reached == []
    told = {name: said for name, said, _ in answers}
    assert told.keys() == media.keys()
    assert not [name for name, said in told.items() if "broken" in said or "short" in said]
    refused = {name for name, said in told.items() if name.count("-") == 1 and "bad" in said}
    assert refused == {"image-I.TIFF", "image-F.TIFF"}  # Without a range.


LIBRARY = """
import errno, os, socket
from pathlib import Path

def wrapped():
    try:
        open("/etc/hostname")
    except OSError as error:
        raise ValueError("its header is strange") from error

def module():
    import antigravity

def fails(error):
    raise error

does = [
    lambda: None,
    lambda: open("/etc/hostname"), module, socket.socket, os.fork, wrapped,
    lambda: fails(RuntimeError("cannot start: " + os.strerror(errno.EACCES))), lambda: fails(OSError(errno.ENOSYS, "not here")),
    lambda: fails(OSError(errno.ENOSPC, "no space left")), lambda: fails(OSError(errno.EMFILE, "too many open files")),
]

class ResampleStream:
    def __init__(self, rate, *arguments, **options):
        does[rate - 8000]()
        fails(ValueError("the samples are odd"))
"""
"""A library in place of the one that resamples, which is called in the middle of a sound. The rate of the sound decides what the function
does."""

REFUSED, SHORT = range(8001, 8008), range(8008, 8010)


async def test_what_the_sandbox_refuses_or_the_machine_lacks_is_no_fault_of_the_medium(
    decoder: MediaDecoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "soxr.py").write_text(LIBRARY)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    with capture_logs() as logs:
        for rate_hz in REFUSED:
            with pytest.raises(DecoderBroken, match=r"^this server cannot decode a medium because of a fault of its own: try another"):
                await decoder.sound(media_files.sound(1, 0.1, rate_hz))
        for rate_hz in SHORT:
            with pytest.raises(DecoderFailed, match=r"^this server is short of something .*: ask again later"):
                await decoder.sound(media_files.sound(1, 0.1, rate_hz))
    assert [line["event"] for line in logs] == ["media.refused_call"] * len(REFUSED) + ["media.short"] * len(SHORT)
    assert all("__init__ (soxr.py:" in line["calls"] for line in logs)
    with pytest.raises(BadMedia, match=r"it is damaged \(the samples are odd\)"):
        await decoder.sound(media_files.sound(1, 0.1, 8000))
    assert len((await decoder.sound(media_files.sound(1, 0.1, 16_000))).samples)
