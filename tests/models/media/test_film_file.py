"""Films as files that grow: what they hold, that they can be cut wherever a piece ends, and that Chromium plays them piece by piece."""

from __future__ import annotations

import io
import json
import re
import resource
import shutil
import subprocess
from base64 import b64encode
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray
from playwright.async_api import Page

from helpers import lengths
from helpers.browser import browser, needs_chromium
from omnistage.models.media import film_file
from omnistage.models.media.film_file import H264, KINDS, VP9, VP9_MP4, FilmKind, FilmPiece, FilmWriter, Track, film_kind

Frame = NDArray[np.uint8]
COLOURS = ((255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0), (128, 128, 128), (200, 30, 90), (10, 240, 180), (255, 128, 0))
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.request_type)


def moving(count: int, height: int = 48, width: int = 64) -> Iterator[Frame]:
    y, x = np.mgrid[:height, :width]
    for number in range(count):
        yield np.stack([x * 3 + 5 * number, y * 4 + 3 * number, (x + y) * 2 + number], -1).astype(np.uint8)


def written(kind: FilmKind, frames: Sequence[Frame], rate_hz: float = 16.0, track: Track | None = None) -> list[FilmPiece]:
    writer = FilmWriter(kind, rate_hz, len(frames), track)
    return [piece for frame in frames if (piece := writer.write(frame))]


def joined(pieces: Sequence[FilmPiece]) -> bytes:
    return b"".join(piece.data for piece in pieces)


def shown(data: bytes) -> list[Frame]:
    with av.open(io.BytesIO(data), "r") as container:
        return [np.asarray(frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]


def heard(data: bytes) -> tuple[float, NDArray[np.float32]]:
    """When the sound begins, and its samples."""
    with av.open(io.BytesIO(data), "r") as container:
        parts = [(frame.time or 0.0, frame.to_ndarray()) for frame in container.decode(audio=0)]
    return parts[0][0], np.concatenate([samples for _, samples in parts], 1)


def tone(seconds: float, channels: int = 2, rate_hz: int = 44_100) -> Track:
    time = np.arange(round(seconds * rate_hz)) / rate_hz
    return Track(np.stack([0.4 * np.sin(2 * np.pi * 440 * (1 + n) * time) for n in range(channels)], 1).astype(np.float32), rate_hz)


def probed(data: bytes, folder: Path) -> dict[str, Any]:
    """The facts that FFmpeg's own command tells of a file."""
    path = folder / "film"
    path.write_bytes(data)
    asked = ["-count_frames", "-show_entries", "stream:format=duration", "-of", "json", str(path)]
    ran = subprocess.run(["ffprobe", "-v", "error", *asked], capture_output=True, text=True, check=True)
    assert not ran.stderr
    said: dict[str, Any] = json.loads(ran.stdout)
    return said


@kinds
@lengths.drawn_cells(
    3,
    ("count", "rate_hz", "size"),
    [
        *((1, 16, (48, 64)), (2, 16, (48, 64)), (24, 24_000 / 1001, (48, 64)), (60, 120, (48, 64))),
        *((13, 12.5, (16, 16)), (9, 16, (17, 33)), (2, 0.1, (8, 8))),
    ],
)
@pytest.mark.skipif(not shutil.which("ffprobe"), reason="ffprobe is not here")
def test_ffprobe_reads_frames_rate_length_and_colours(
    kind: FilmKind, count: int, rate_hz: float, size: tuple[int, int], tmp_path: Path
) -> None:
    said = probed(joined(written(kind, list(moving(count, *size)), rate_hz)), tmp_path)
    (stream,) = said["streams"]
    assert stream["codec_name"] == ("h264" if kind is H264 else "vp9")
    assert int(stream["nb_read_frames"]) == count
    assert (stream["height"], stream["width"]) == tuple(side + side % kind.multiple for side in size)
    assert float(said["format"]["duration"]) == pytest.approx(count / rate_hz, abs=1e-3)
    if count > 2:
        numerator, denominator = map(int, stream["avg_frame_rate"].split("/"))
        assert numerator / denominator == pytest.approx(rate_hz, rel=1e-4)
    assert [stream[f"color_{name}"] for name in ("range", "space", "transfer", "primaries")] == ["tv", "bt709", "bt709", "bt709"]


@kinds
@pytest.mark.parametrize("rate_hz", [23.976, 16, 120])
def test_each_frame_is_at_its_time(kind: FilmKind, rate_hz: float) -> None:
    with av.open(io.BytesIO(joined(written(kind, list(moving(40)), rate_hz))), "r") as container:
        times = [frame.time for frame in container.decode(video=0)]
    assert times == pytest.approx([number / rate_hz for number in range(40)], abs=6e-4)


@kinds
def test_a_frame_is_out_as_soon_as_it_is_in_and_the_file_can_be_cut_there(kind: FilmKind) -> None:
    frames = list(moving(40))
    writer, data, told = FilmWriter(kind, 16, len(frames)), b"", 0
    whole = shown(joined(written(kind, frames)))
    for number, frame in enumerate(frames, 1):
        piece = writer.write(frame)
        assert piece is not None
        data, told = data + piece.data, told + piece.frames
        assert told == number
        if number in (1, 2, 3, 16, 17, 18, 39, 40):
            cut = shown(data)
            assert len(cut) == number
            assert all(np.array_equal(one, other) for one, other in zip(cut, whole, strict=False))


@kinds
def test_colours_come_back(kind: FilmKind) -> None:
    frames = [np.full((32, 32, 3), colour, np.uint8) for colour in COLOURS]
    for colour, frame in zip(COLOURS, shown(joined(written(kind, frames))), strict=True):
        assert np.abs(frame.mean((0, 1)) - colour).max() <= 4, colour


@kinds
def test_edges_of_odd_sides_are_there(kind: FilmKind) -> None:
    frames = list(moving(3, 17, 33))
    for frame, expected in zip(shown(joined(written(kind, frames))), frames, strict=True):
        assert np.abs(frame[:17, :33].astype(int).mean((0, 1)) - expected.mean((0, 1))).max() <= 4
        assert frame.shape[:2] in ((17, 33), (18, 34))


@kinds
@pytest.mark.parametrize("track", [None, tone(1.3)], ids=["silent", "heard"])
def test_the_same_frames_make_the_same_pieces(kind: FilmKind, track: Track | None) -> None:
    """A client that goes on with a film elsewhere gets the rest of its own file."""
    frames = list(moving(20))
    assert written(kind, frames, 16, track) == written(kind, frames, 16, track)
    frames[3] = 255 - frames[3]
    assert written(kind, frames) != written(kind, list(moving(20)))


@kinds
@pytest.mark.parametrize(("seconds", "channels"), [(2.5, 2), (1.0, 1), (4.0, 2)])
def test_sound_goes_with_the_frames(kind: FilmKind, seconds: float, channels: int) -> None:
    track = tone(seconds, channels)
    pieces = written(kind, list(moving(40)), 16, track)
    assert [piece.frames for piece in pieces] == [1] * 40
    for end in (8, 40):
        with av.open(io.BytesIO(joined(pieces[:end])), "r") as container:
            codec = container.streams.audio[0].codec_context
            assert (codec.name, codec.channels) in (("opus", channels), ("libopus", channels))
        begin_s, samples = heard(joined(pieces[:end]))
        assert samples.shape[1] / 48_000 == pytest.approx(min(end / 16, seconds) if end < 40 else seconds, abs=0.05)
        assert begin_s == pytest.approx(0, abs=0.008)
        place = np.abs(np.fft.rfft(samples[0][4800:19_200])).argmax() * 48_000 / 14_400
        assert place == pytest.approx(440, abs=5)
    assert len(shown(joined(pieces))) == 40


@kinds
def test_sound_fits_the_frames_that_are_there(kind: FilmKind) -> None:
    """A click in the middle is where it was."""
    samples = np.zeros((96_000, 1), np.float32)
    samples[48_000:48_240] = 0.9
    begin_s, sound = heard(joined(written(kind, list(moving(32)), 16, Track(samples, 48_000))))
    assert begin_s + np.abs(sound[0]).argmax() / 48_000 == pytest.approx(1.0025, abs=0.012)


@lengths.drawn_cells(1, "kind", KINDS, ids=lambda kind: kind.request_type)
def test_a_long_film_takes_no_more_memory(kind: FilmKind) -> None:
    writer, taken = FilmWriter(kind, 16, 400), []
    for number, frame in enumerate(moving(400, 240, 416), 1):
        writer.write(frame)
        if number % 40 == 0:
            taken.append(int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize())
    assert max(taken[1:]) - taken[0] < 40 * 240 * 416 * 3  # The pixels of 40 frames, where 360 more were encoded.


@kinds
def test_an_encoder_makes_no_thread_of_its_own(kind: FilmKind) -> None:
    """No encoder can wait for its own threads, neither when a film ends nor when nobody wants it any more."""
    before = {task.name for task in Path("/proc/self/task").iterdir()}
    writer = FilmWriter(kind, 16, 3)
    for frame in moving(3):
        writer.write(frame)
        assert {task.name for task in Path("/proc/self/task").iterdir()} <= before


@pytest.mark.parametrize(
    ("asked", "kind"),
    [
        ("", VP9),
        ("video/webm", VP9),
        ("video/webm; codecs=vp9", VP9),
        ('video/webm;codecs="vp09.00.10.08, opus"', VP9),
        ("video/mp4", VP9_MP4),
        ('Video/MP4; codecs="vp09.00.30.08"', VP9_MP4),
        ('video/mp4; codecs="avc1"', H264),
        ("video/mp4;codecs=avc1.64001f", H264),
        *[(f"video/mp4; {words}", None) for words in ('codecs="hvc1"', 'codecs="avc1, hvc1"', "codecs=av01", "profile=x")],
        *[(asked, None) for asked in ("video/webm; codecs=av01", "video/quicktime", "image/png")],
    ],
)
def test_a_media_type_says_which_film(asked: str, kind: FilmKind | None) -> None:
    assert film_kind(asked) is kind


@pytest.mark.parametrize(
    ("kind", "track", "said"), [(VP9, None, r"vp9"), (VP9_MP4, tone(1), r"vp09\.00\.30\.08, opus"), (H264, None, r"avc1\.6400[0-9a-f]{2}")]
)
def test_what_a_browser_has_to_know_is_told(kind: FilmKind, track: Track | None, said: str) -> None:
    writer = FilmWriter(kind, 16, 3, track)
    writer.write(next(moving(1, 480, 832)))
    assert re.fullmatch(said, writer.codecs)


def test_an_encoder_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(av, "codecs_available", av.codecs_available - {"libx264"})
    with pytest.raises(ValueError, match=r"no libx264 here, which H\.264 needs"):
        FilmWriter(H264, 16, 1)
    assert "H.264" not in film_file.told_kinds() and "VP9" in film_file.told_kinds()


FRAMES, RATE_HZ = 32, 16
BROWSER_COLOURS = ((255, 0, 0), (0, 255, 0), (0, 0, 255), (200, 30, 90))
"""Each for half a second."""
CLOSE = 12
"""Levels. A browser changes the colours in 8 bits, as fast as it can."""

APPEND = """async ([type, pieces]) => {
  const once = (target, name) => new Promise((done) => target.addEventListener(name, done, {once: true}));
  const film = document.body.appendChild(document.createElement("video"));
  const source = new MediaSource();
  film.src = URL.createObjectURL(source);
  await once(source, "sourceopen");
  const buffer = source.addSourceBuffer(type);
  const failed = once(film, "error").then(() => { throw new Error(film.error.message); });
  const ends = [];
  for (const piece of pieces) {
    buffer.appendBuffer(Uint8Array.from(atob(piece), (letter) => letter.charCodeAt(0)));
    await Promise.race([once(buffer, "updateend"), failed]);
    ends.push(buffer.buffered.length === 1 ? buffer.buffered.end(0) : -1);
  }
  source.endOfStream();
  window.film = film;
  return ends;
}"""

LOOK = """async (time) => {
  const sought = new Promise((done) => film.addEventListener("seeked", done, {once: true}));
  film.currentTime = time;
  await Promise.race([sought, new Promise((done) => setTimeout(done, 1000))]);
  const canvas = document.createElement("canvas").getContext("2d");
  canvas.drawImage(film, 0, 0);
  return [...canvas.getImageData(5, 5, 1, 1).data].slice(0, 3);
}"""
LOOKS = 60
"""At most: a browser may show the frame before for a while, on a machine that is busy."""


@needs_chromium
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@lengths.drawn_cells(1, "is_heard", [False, True], ids=["silent", "heard"])
async def test_a_film_plays_while_it_grows(kind: FilmKind, is_heard: bool) -> None:
    sound = np.sin(np.arange(2 * 44_100)[:, None] / [15, 20]).astype(np.float32) * 0.3
    writer = FilmWriter(kind, RATE_HZ, FRAMES, Track(sound, 44_100) if is_heard else None)
    frames = [np.full((96, 160, 3), BROWSER_COLOURS[number * 2 // RATE_HZ], np.uint8) for number in range(FRAMES)]
    pieces = [piece for frame in frames if (piece := writer.write(frame))]
    async with browser() as context:
        page = await context.new_page()
        said = [f'{kind.media_type}; codecs="{writer.codecs}"', [b64encode(piece.data).decode() for piece in pieces]]
        ends = await page.evaluate(APPEND, said)
        apart = [await _apart(page, 0.25 + 0.5 * number, colour) for number, colour in enumerate(BROWSER_COLOURS)]
        size = await page.evaluate("[film.videoWidth, film.videoHeight]")
    assert size == [160, 96]
    assert ends == pytest.approx([number / RATE_HZ for number in range(1, FRAMES + 1)], abs=0.04 if is_heard else 0.002)
    assert max(apart) <= CLOSE


async def _apart(page: Page, time_s: float, colour: tuple[int, int, int]) -> int:
    """By how many levels the film shows another colour at that time."""
    for _ in range(LOOKS):
        if (apart := int(np.abs(np.subtract(await page.evaluate(LOOK, time_s), colour)).max())) <= CLOSE:
            break
    return apart
