"""Whose fault it is: what the sandbox or the machine refuses is never told as damage of the medium, and nothing is lost by the sandbox."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, PngImagePlugin
from structlog.testing import capture_logs

from helpers import media_files
from helpers.decoding import pixels_of
from omnistage.models.media.decoder import MediaDecoder
from omnistage.models.media.terms import BadMedia, DecoderBroken, DecoderFailed

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
        codecs = {"pixel_format": "yuvj420p" if codec == "mjpeg" else "yuv420p", "sound_codec": SOUND_CODECS.get(form, "aac")}
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


async def test_a_picture_in_lab_is_right(decoder: MediaDecoder, seed: int) -> None:
    image = Image.fromarray(media_files.pixels(seed, 30, 40)).convert("LAB")
    assert np.array_equal(await pixels_of(decoder, media_files.encoded(image, "TIFF")), np.asarray(image.convert("RGB")))


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
