"""Films of the corpus: formats, and what their containers say of how they are to be shown."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from helpers import ffmpeg, media_files
from helpers.corpus import CorpusFile, Maker, cut, cut_in_fragment

H264 = ("-c:v", "libx264", "-preset", "ultrafast", "-threads", "1")
LIKE = 0.02
"""The allowed mean difference, as a share of full scale: two versions of a library convert colours, and two versions of another decode
sound."""

SCALED = 0.06
"""Where FFmpeg scales, too, in its own way."""
TILTED = 0.08
"""Where it turns by odd angles, in brightness and colours of other sizes; another angle is farther from it than twice that."""


@dataclass(frozen=True, slots=True)
class FilmForm:
    """words: of ffmpeg, up to the file. sound: its codec. tells: whether a part can be told from the whole. seeks: cannot be made in a
    pipe. of: what its container can say."""

    words: tuple[str, ...]
    sound: str = ""
    tells: bool = True
    seeks: bool = False
    of: frozenset[str] = frozenset()


def _form(
    codec: str, container: str, sound: str = "", *of: str, tells: bool = True, seeks: bool = False, words: tuple[str, ...] = ()
) -> FilmForm:
    coding = H264 if codec == "libx264" else ("-c:v", codec)
    return FilmForm((*coding, *words, "-f", container), sound, tells, seeks, frozenset(of))


MP4 = ("matrix", "edits", "shape", "late", "cover")
MKV = ("shape", "late", "several", "varied")
FORMS = {
    "mp4-h264": _form("libx264", "mp4", "aac", *MP4, "varied", "colour", seeks=True, words=("-bf", "2")),
    "mp4-faststart": _form("libx264", "mp4", "aac", *MP4, seeks=True, words=("-movflags", "faststart")),
    "mp4-fragmented": _form("libx264", "mp4", "aac", "matrix", "shape", words=("-movflags", "frag_keyframe+empty_moov", "-g", "5")),
    "mp4-mpeg4": _form("mpeg4", "mp4", "aac", *MP4, seeks=True),
    "mp4-hevc": _form(
        "libx265",
        "mp4",
        "",
        "matrix",
        "edits",
        seeks=True,
        words=("-preset", "ultrafast", "-x265-params", "log-level=none:pools=none:frame-threads=1"),
    ),
    "mp4-av1": _form("libaom-av1", "mp4", "", "edits", seeks=True, words=("-cpu-used", "8", "-threads", "1", "-g", "8")),
    "mov-mjpeg": _form("mjpeg", "mov", "pcm_s16le", *MP4, seeks=True),
    "mov-prores": _form("prores", "mov", "pcm_s16le", *MP4, seeks=True),
    "mov-png": _form("png", "mov", "pcm_s16le", *MP4, seeks=True),
    "3gp-h263": _form("h263", "3gp", "aac", "matrix", seeks=True, words=("-s", "128x96")),
    "mkv-h264": _form("libx264", "matroska", "aac", *MKV, "colour", words=("-bf", "2")),
    "mkv-ffv1": _form("ffv1", "matroska", "flac", *MKV, "colour"),
    "mkv-vp9": _form("libvpx-vp9", "matroska", "libopus", *MKV, words=("-cpu-used", "8", "-deadline", "realtime")),
    "mkv-mpeg2": _form("mpeg2video", "matroska", "ac3", *MKV),
    "webm-vp8": _form("libvpx", "webm", "libvorbis", *MKV, words=("-cpu-used", "8", "-deadline", "realtime")),
    "webm-vp9": _form("libvpx-vp9", "webm", "libopus", *MKV, words=("-cpu-used", "8", "-deadline", "realtime")),
    "avi-mpeg4": _form("mpeg4", "avi", "libmp3lame", "dropped", "shape", seeks=True),
    "avi-h264": _form("libx264", "avi", "libmp3lame", "dropped", seeks=True, words=("-bf", "0")),
    "avi-mjpeg": _form("mjpeg", "avi", "pcm_s16le", "dropped", seeks=True),
    "avi-raw": _form("rawvideo", "avi", "pcm_s16le", "dropped", seeks=True, words=("-pix_fmt", "yuv420p")),
    "ts-h264": _form("libx264", "mpegts", "aac", "late", "sizes", "joined", "shape", tells=False),
    "ts-mpeg2": _form("mpeg2video", "mpegts", "mp2", "late", "joined", "shape", tells=False),
    "flv-flv1": _form("flv1", "flv", "libmp3lame", "late", tells=False),
    "flv-h264": _form("libx264", "flv", "aac", "late", tells=False),
    "mpg-mpeg1": _form("mpeg1video", "mpeg", "mp2", tells=False),
    "mpg-mpeg2": _form("mpeg2video", "mpeg", "mp2", "shape", tells=False),
    "ogv-theora": _form("libtheora", "ogg", "libvorbis", tells=False),
    "wmv-wmv2": _form("wmv2", "asf", "wmav2", tells=True, seeks=True),
    "gif": _form("gif", "gif", tells=False),
}
EVEN = (10, 12, 15, 24, 25, 30)


@dataclass(frozen=True, slots=True)
class FilmedScene:
    """The content of a film: pictures in raw bytes, at an even rate."""

    pixels: bytes
    frames: int
    height: int
    width: int
    rate_hz: int

    @property
    def seconds(self) -> float:
        return self.frames / self.rate_hz


def cases() -> Iterator[tuple[str, Maker]]:
    """Each by a name that can be read."""
    for name, form in FORMS.items():
        for feature, (needs, make) in FEATURES.items():
            audible = form.sound or feature not in AUDIBLE
            if needs <= form.of and audible and not (feature == "live" and form.seeks):
                yield f"film-{name}-{feature}", partial(make, form)


def _scene(chance: random.Random, frames: int = 0) -> FilmedScene:
    """Waves that move, of no symmetry."""
    frames, rate_hz = frames or chance.randint(8, 20), chance.choice(EVEN)
    height, width = (2 * chance.randint(24, 40) for _ in range(2))
    picture = media_files.pixels(chance.getrandbits(32), height, width)
    picture[: height // 4, : width // 4] = 255
    moved = [np.roll(picture, (number, 2 * number), axis=(0, 1)) for number in range(frames)]
    return FilmedScene(np.stack(moved).tobytes(), frames, height, width, rate_hz)


def _tone(chance: random.Random, seconds: float) -> str:
    """The sound beside the pictures, as a source that ffmpeg reads."""
    hz = chance.randint(200, 800)
    return f"aevalsrc=0.3*sin({hz}*2*PI*t)+0.2*sin({hz}*2*PI*t*t):s=48000:d={seconds:.3f}"


def _file(
    form: FilmForm,
    scene: FilmedScene,
    *words: str,
    sound: tuple[str, ...] = (),
    shift: tuple[str, ...] = (),
    after: tuple[str, ...] = (),
    pipe: bool = False,
) -> bytes:
    """words, after: of the output, before and behind those of the form. sound: inputs that are heard. shift: of the pictures' input."""
    raw = ("-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{scene.width}x{scene.height}", "-r", str(scene.rate_hz))
    heard = (*sound, "-map", "0:v", "-map", "1:a", "-c:a", form.sound) if sound else ()
    usual = () if "-pix_fmt" in words or {"gif", "png", "prores"} & set(form.words) else ("-pix_fmt", _pixel_format(form))
    out = "pipe:1" if pipe else "{out}"
    return ffmpeg.made(*raw, *shift, "-i", "pipe:0", *heard, *usual, *words, *form.words, *after, "-strict", "-2", out, data=scene.pixels)


def _pixel_format(form: FilmForm) -> str:
    return "yuvj420p" if "mjpeg" in form.words else "yuv420p"


def _sample(file: bytes, *, use_audio: bool = False) -> CorpusFile:
    return CorpusFile(file, file, alike=LIKE, use_audio=use_audio)


def _tones(chance: random.Random, seconds: float) -> tuple[str, ...]:
    return ("-f", "lavfi", "-i", _tone(chance, seconds))


def _plain(form: FilmForm, chance: random.Random) -> CorpusFile:
    return _sample(_file(form, _scene(chance)))


def _heard(form: FilmForm, chance: random.Random) -> CorpusFile:
    scene = _scene(chance)
    return _sample(_file(form, scene, sound=_tones(chance, scene.seconds)), use_audio=True)


def _live(form: FilmForm, chance: random.Random) -> CorpusFile:
    return _sample(_file(form, _scene(chance), pipe=True))


def _cut(form: FilmForm, chance: random.Random) -> CorpusFile:
    file = cut(_file(form, _scene(chance, frames=30), "-g", "5"), chance, tells=form.tells)
    if "frag_keyframe+empty_moov" in form.words:
        file = cut_in_fragment(file)
    return replace(_sample(file), cut=form.tells, torn=not form.tells)


def _delayed_sound(form: FilmForm, chance: random.Random) -> CorpusFile:
    scene = _scene(chance)
    late = ("-itsoffset", f"{chance.uniform(0.3, 1.5):.2f}", *_tones(chance, scene.seconds))
    return _sample(_file(form, scene, sound=late), use_audio=True)


def _delayed_picture(form: FilmForm, chance: random.Random) -> CorpusFile:
    scene = _scene(chance)
    shift = ("-itsoffset", f"{chance.uniform(0.3, 1.5):.2f}")
    return _sample(_file(form, scene, sound=_tones(chance, scene.seconds + 1.5), shift=shift), use_audio=True)


def _late(form: FilmForm, chance: random.Random) -> CorpusFile:
    """A part of a recording that goes on for hours."""
    return _sample(_file(form, _scene(chance), "-output_ts_offset", str(chance.randint(100, 20_000))))


def _trimmed(form: FilmForm, chance: random.Random, *, middle: bool, heard: bool) -> CorpusFile:
    """Without encoding: packets before the first that is shown stay in the file, and an edit list says where it begins."""
    scene = _scene(chance, frames=30)
    sound = _tones(chance, scene.seconds) if heard else ()
    whole = _file(form, scene, "-g", "8", sound=sound)
    begin = scene.seconds * chance.uniform(0.2, 0.5)
    length = ("-t", f"{scene.seconds * 0.3:.3f}") if middle else ()
    container = form.words[-1]
    file = ffmpeg.remade(whole, "-ss", f"{begin:.3f}", "-i", "{in}", *length, "-c", "copy", "-map", "0", "-f", container, "{out}")
    return _sample(file, use_audio=heard)


def with_matrix(file: bytes, matrix: tuple[float, float, float, float]) -> bytes:
    """An MP4 with another display matrix in the header of its first track."""
    at = file.index(b"tkhd") + 4
    at += 40 if file[at] == 0 else 52
    a, b, c, d = (round(value * 65_536) for value in matrix)
    return file[:at] + struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30) + file[at + 36 :]


def _turned(form: FilmForm, chance: random.Random) -> CorpusFile:
    matrix = chance.choice([(0, 1, -1, 0), (-1, 0, 0, -1), (0, -1, 1, 0)])
    return _sample(with_matrix(_file(form, _scene(chance)), matrix))


def _mirrored(form: FilmForm, chance: random.Random) -> CorpusFile:
    """A camera that looks at its owner; also turned."""
    matrix = chance.choice([(-1, 0, 0, 1), (1, 0, 0, -1), (0, 1, 1, 0), (0, -1, -1, 0)])
    return _sample(with_matrix(_file(form, _scene(chance)), matrix))


def _tilted(form: FilmForm, chance: random.Random) -> CorpusFile:
    angle = math.radians(chance.choice([5, 12, 45, 100, 200, 300]))
    matrix = (math.cos(angle), math.sin(angle), -math.sin(angle), math.cos(angle))
    return replace(_sample(with_matrix(_file(form, _scene(chance)), matrix)), alike=TILTED)


def _shape(form: FilmForm, chance: random.Random, *, matrix: bool = False) -> CorpusFile:
    """Pixels that are wider than high, or higher."""
    file = _file(form, _scene(chance), "-vf", f"setsar={chance.choice(['4/3', '2/1', '8/9', '16/11', '1/2', '64/45'])}")
    return _sample(with_matrix(file, (0, 1, -1, 0)) if matrix else file)


def _varied(form: FilmForm, chance: random.Random) -> CorpusFile:
    """No even rate: as screens and telephones record."""
    wobble = f"setpts='(N+floor(N/{chance.randint(3, 5)})*{chance.randint(2, 9)})/{chance.choice(EVEN)}/TB'"
    return _sample(_file(form, _scene(chance), "-vf", wobble, "-vsync", "vfr"))


def _dropped(form: FilmForm, chance: random.Random) -> CorpusFile:
    """A recorder that could not follow: for a frame that it lost it writes an empty packet, or none."""
    kept = f"select='not(mod(n\\,{chance.randint(2, 4)}))+lt(n\\,3)'"
    return _sample(_file(form, _scene(chance, frames=24), "-vf", kept, "-vsync", "vfr"))


def _colours(form: FilmForm, chance: random.Random) -> CorpusFile:
    """A film with a drawn meaning of the numbers of a pixel."""
    space = chance.choice(["bt709", "smpte170m", "bt2020nc"])
    pixel_format = chance.choice(["yuv420p", "yuv422p", "yuv444p", "yuv420p10le"])
    full = chance.choice(["pc", "tv"])
    how = ("-vf", f"scale=out_color_matrix={space.removesuffix('nc')}:out_range={full}", "-colorspace", space, "-color_range", full)
    return replace(_sample(_file(form, _scene(chance), *how, "-pix_fmt", pixel_format)), alike=1.5 * LIKE)


def _cover(form: FilmForm, chance: random.Random) -> CorpusFile:
    """A picture of the film for shelves, which is no part of it, stands before it."""
    shelf = ("-f", "lavfi", "-i", "testsrc=s=160x120:d=0.1", "-map", "1:v", "-map", "0:v")
    file = _file(
        form,
        _scene(chance),
        *shelf,
        after=("-c:v:0", "mjpeg", "-pix_fmt:v:0", "yuvj420p", "-frames:v:0", "1", "-disposition:v:0", "attached_pic"),
    )
    return _sample(file)


def _several(form: FilmForm, chance: random.Random) -> CorpusFile:
    """Two films, of which the second is the one to be shown."""
    scene = _scene(chance)
    split = ("-filter_complex", "[0:v]split[a][b];[a]hflip[c]", "-map", "[c]", "-map", "[b]")
    return _sample(_file(form, scene, *split, "-disposition:v:0", "0", "-disposition:v:1", "default"))


def _sizes(form: FilmForm, chance: random.Random) -> CorpusFile:
    """The size changes in the middle, as of a call whose line became worse."""
    scene = _scene(chance)
    first = _file(form, scene)
    smaller = f"scale={scene.width // 4 * 2}:{scene.height // 4 * 2}"
    second = _file(form, scene, "-vf", smaller, "-output_ts_offset", f"{scene.seconds:.3f}")
    return replace(_sample(first + second), alike=SCALED)


def _joined(form: FilmForm, chance: random.Random, *, heard: bool) -> CorpusFile:
    """Two recordings in one file; the clock of the second begins anew."""
    one = _scene(chance, frames=20)
    sound = _tones(chance, one.seconds) if heard else ()
    file = b"".join(_file(form, scene, sound=sound) for scene in (one, replace(one, pixels=one.pixels[::-1])))
    return _sample(file, use_audio=heard)


FEATURES: dict[str, tuple[set[str], Callable[[FilmForm, random.Random], CorpusFile]]] = {
    "plain": (set(), _plain),
    "heard": (set(), _heard),
    "live": (set(), _live),
    "cut": (set(), _cut),
    "delayed-sound": (set(), _delayed_sound),
    "delayed-picture": (set(), _delayed_picture),
    "starts-late": ({"late"}, _late),
    "trimmed": ({"edits"}, partial(_trimmed, middle=False, heard=False)),
    "trimmed-middle": ({"edits"}, partial(_trimmed, middle=True, heard=False)),
    "trimmed-heard": ({"edits"}, partial(_trimmed, middle=False, heard=True)),
    "turned": ({"matrix"}, _turned),
    "mirrored": ({"matrix"}, _mirrored),
    "tilted": ({"matrix"}, _tilted),
    "wide-pixels": ({"shape"}, _shape),
    "wide-pixels-turned": ({"shape", "matrix"}, partial(_shape, matrix=True)),
    "varied-rate": ({"varied"}, _varied),
    "dropped-frames": ({"dropped"}, _dropped),
    "colours": ({"colour"}, _colours),
    "several": ({"several"}, _several),
    "sizes": ({"sizes"}, _sizes),
    "joined": ({"joined"}, partial(_joined, heard=False)),
    "joined-heard": ({"joined"}, partial(_joined, heard=True)),
}
AUDIBLE = ("heard", "delayed-sound", "delayed-picture", "trimmed-heard", "joined-heard")
