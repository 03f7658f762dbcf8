"""Pictures, sounds and films in the forms that people have become a part of a message, byte by byte; an error names each form that
cannot."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import wave
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray
from PIL import Image

from helpers.media_files import film, picture, sound
from helpers.peer import playing
from omnistage.client import AsyncOmni, Audio, BadRequestError, DeadlineError, Video
from omnistage.client import media as client_media
from omnistage.client import request as requests
from omnistage.client.media import media_types, to_part
from omnistage.client.request import Options
from omnistage.v1 import stage_pb2

PNG = b"\x89PNG\r\n\x1a\n" + bytes(8)
WAV = b"RIFF" + bytes(4) + b"WAVEfmt "
MP4 = bytes(4) + b"ftypisom" + bytes(8)
PIXELS = np.random.default_rng(5).integers(0, 256, (20, 30, 3), np.uint8)


def closed() -> Image.Image:
    image = Image.open(io.BytesIO(picture(1)))
    image.close()
    return image


class Tensor:
    """A tensor of another library, which numpy can read, or cannot."""

    def __init__(self, samples: NDArray[Any] | None) -> None:
        self.samples = samples

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if self.samples is None:
            raise RuntimeError("it is on another device")
        return self.samples


def parts(*turns: Any) -> list[stage_pb2.Part]:
    """The parts of the last turn."""
    return list(requests.for_conversation(turns, Options()).complete().thinker.messages[-1].parts)


def shown(part: stage_pb2.Part) -> str:
    return part.media.media_type or part.text


def user(content: Any, **media: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **media}


def test_media_beside_a_text_come_before_it_pictures_sounds_and_films(tmp_path: Path) -> None:
    sound = tmp_path / "question.wav"
    sound.write_bytes(WAV)
    system = {"role": "system", "content": "Be brief."}
    turn = user("What is this?", videos=[MP4], audios=[sound], images=[PNG, str(sound.with_name("b.png"))])
    sound.with_name("b.png").write_bytes(PNG + b"b")
    request = requests.for_conversation([system, turn], Options()).complete()
    assert [message.role for message in request.thinker.messages] == ["system", "user"]
    said = request.thinker.messages[1].parts
    assert [*map(shown, said)] == ["image/png", "image/png", "audio/wav", "video/mp4", "What is this?"]
    assert [part.media.data for part in said] == [PNG, PNG + b"b", WAV, MP4, b""]
    alone = requests.for_prompt("What is this?", turn["images"], turn["audios"], turn["videos"], Options()).complete()
    assert alone.thinker.messages[0] == request.thinker.messages[1]
    assert [*map(shown, parts(user("", audios=[sound])))] == ["audio/wav"]


def test_parts_stay_in_the_order_in_which_they_are_given() -> None:
    url = "data:image/png;base64," + base64.b64encode(PNG).decode()
    content = [
        {"type": "text", "text": "Before:"},
        {"type": "video", "video": MP4, "use_audio": True},
        {"type": "image_url", "image_url": {"url": url, "detail": "high"}},
        {"type": "text", "text": "After:"},
        {"type": "image", "image": PNG},
        {"type": "input_audio", "input_audio": {"data": base64.b64encode(WAV).decode(), "format": "wav"}},
        {"type": "audio_url", "audio_url": "data:audio/wav;base64," + base64.b64encode(WAV).decode()},
        {"type": "audio", "audio": WAV},
    ]
    said = parts(user(content))
    assert [*map(shown, said)] == ["Before:", "video/mp4", "image/png", "After:", "image/png", *["audio/wav"] * 3]
    assert [part.media.data for part in said if part.HasField("media")] == [MP4, PNG, PNG, WAV, WAV, WAV]
    assert [part.media.use_audio for part in said] == [False, True, *[False] * 6]


def test_the_sound_of_a_film_is_heard_where_that_is_said() -> None:
    said = parts(user("x", videos=[MP4, Video(MP4), Video(MP4, use_audio=True)]))
    assert [part.media.use_audio for part in said] == [False, False, True, False]
    url = "data:video/mp4;base64," + base64.b64encode(MP4).decode()
    for part_of_film in (
        {"type": "video", "video": Video(MP4, use_audio=True)},
        {"type": "video_url", "video_url": url, "use_audio": True},
        {"type": "video_url", "video_url": {"url": url, "use_audio": True}},
    ):
        (part,) = parts(user([part_of_film]))
        assert part.media.use_audio and part.media.data == MP4


@pytest.mark.parametrize(
    ("turn", "told"),
    [
        (user([]), ": is empty"),
        (user(None, images=[PNG]), ": is None; it must be text, or a list of parts"),
        (user(3), ": is 3; it must be text, or a list of parts"),
        (user([{"type": "text", "text": "x"}], images=[PNG]), ": is a list of parts: the media belong into it"),
        (user(["x"]), "[0]: is 'x'; it must be a dict with a type"),
        (user([{"type": "text", "text": "x"}, {"type": "file", "file": "x"}]), "[1].type: is 'file'; known: text, image,"),
        (user([{"text": "x"}]), "[0]: has no type; did you mean {'type': 'text', 'text': ...}?"),
        (user([{"type": "text"}]), "[0]: has no text"),
        (user([{"type": "text", "text": 3}]), "[0].text: is 3; it must be text"),
        (user([{"type": "image", "image": PNG, "size": 3}]), "[0]: has unknown keys size; known: type, image"),
        (user([{"type": "video", "video": MP4, "use_audio": 1}]), "[0].use_audio: must be True or False"),
        (user([{"type": "video_url", "video_url": {"url": "data:", "use_audio": 1}}]), "[0].use_audio: must be True"),
        (user([{"type": "image_url", "image_url": {"url": "data:", "use_audio": True}}]), "[0].image_url: has unknown"),
        (user([{"type": "image_url", "image_url": {"url": 3}}]), "[0].image_url.url: must be text"),
        (user([{"type": "image_url", "image_url": "cat.jpg"}]), "[0].image_url: is no URL"),
        (user([{"type": "input_audio", "input_audio": "UklG"}]), "[0].input_audio: must be a dict"),
    ],
)
def test_the_form_of_a_turn_is_checked_before_anything_is_read(turn: Any, told: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        requests.for_conversation([turn], Options())
    assert caught.value.message.startswith("conversation[0].content" + told)


def test_a_file_is_what_it_was_however_it_is_handed_over(tmp_path: Path) -> None:
    path = tmp_path / "a cat.png"
    path.write_bytes(PNG)
    text = base64.b64encode(PNG).decode()
    urls = f"data:image/png;base64,{text}", f"data:;base64,{text.rstrip('=')}", "DATA:,%89PNG%0D%0A%1a%0A" + "%00" * 8
    with path.open("rb") as file:
        for source in (PNG, bytearray(PNG), memoryview(PNG), path, str(path), file, io.BytesIO(PNG), *urls):
            assert to_part(source, "image", "images[0]") == stage_pb2.Part(media=stage_pb2.Media(data=PNG, media_type="image/png"))
        assert not file.closed


def test_all_that_is_seen_lies_on_the_colour_that_is_named(tmp_path: Path) -> None:
    large = tmp_path / "large.png"
    large.write_bytes(PNG + bytes(17 << 20))
    turns = [user("x", images=[PNG, large], audios=[WAV], videos=[MP4]), {"role": "assistant", "content": "y"}, user("z", images=[PNG])]
    asked = requests.for_conversation(turns, Options(background="#1eC85a")).complete()
    said = [part for message in asked.thinker.messages for part in message.parts]
    assert [part.media.background or part.background for part in said] == ["#1eC85a"] * 2 + ["", "#1eC85a", "", "", "#1eC85a", ""]
    drawn = requests.for_drawing("x", [PNG, PNG], Options(background="#000000")).complete().diffusion.images
    assert [image.background for image in drawn] == ["#000000"] * 2


@pytest.mark.parametrize("background", ["white", "#fff", "#ffffff\n", "", 0, (255, 255, 255), b"#ffffff"])
def test_what_is_no_colour_or_lies_under_nothing_is_told(background: Any) -> None:
    with pytest.raises(BadRequestError, match=r"background: is .*; it must be a colour as #rrggbb, such as #ffffff for white"):
        requests.for_prompt("x", [PNG], (), (), Options(background=background))
    for request in (
        requests.for_prompt("x", (), [WAV], (), Options(background="#ffffff")),
        requests.for_drawing("x", (), Options(background="#ffffff")),
    ):
        with pytest.raises(BadRequestError, match="for pictures and films that are sent, and there is none"):
            request.complete()


@pytest.mark.parametrize("shape", [(7,), (7, 1), (7, 2)])
@pytest.mark.parametrize(
    ("kind", "scale"), [("int16", 20_000), (">i2", 9), ("int32", 1e9), *((f"float{bits}", 1) for bits in (16, 32, 64))]
)
def test_samples_arrive_as_they_are(shape: tuple[int, ...], kind: str, scale: float) -> None:
    samples = (np.random.default_rng(1).uniform(-1.2, 1.2, shape) * scale).astype(kind)
    assert to_part((samples, 16_000), "audio", "x").media.media_type == "audio/wav"
    sent = samples.dtype.newbyteorder("=").name if samples.dtype.kind == "i" else "float32"
    heard, rate_hz = played((samples, 16_000), dtype=sent, always_2d=True)
    assert rate_hz == 16_000 and np.array_equal(heard, samples.astype(sent).reshape(7, -1))


def test_samples_of_8_bits_have_their_zero_in_the_middle() -> None:
    assert played((np.array([0, 128, 192, 255], np.uint8), 8000))[0].tolist() == [-1.0, 0.0, 0.5, 127 / 128]


def played(source: Any, **options: Any) -> tuple[NDArray[Any], int]:
    """The samples of a sound as it is sent, and their rate."""
    sound: tuple[NDArray[Any], int] = soundfile.read(io.BytesIO(to_part(source, "audio", "x").media.data), **options)
    return sound


def test_samples_and_their_rate_may_be_of_any_type_that_says_the_same() -> None:
    samples = np.array([0.5, -0.25], np.float32)
    whole = to_part((samples, 16_000), "audio", "x")
    for rate_hz in (16_000.0, np.int64(16_000), np.float32(16_000), np.uint16(16_000)):
        assert to_part((samples, rate_hz), "audio", "x") == whole
    for same in ([0.5, -0.25], Tensor(samples)):
        assert to_part((same, 16_000), "audio", "x") == whole


def test_base64_of_a_sound_may_be_written_as_people_do() -> None:
    data = bytes(range(256))
    sound = WAV + data
    text = base64.b64encode(sound).decode()
    for given in (text, text.encode(), text.rstrip("="), base64.urlsafe_b64encode(sound).decode(), f"data:audio/wav;base64,{text}"):
        (part,) = parts(user([{"type": "input_audio", "input_audio": {"data": given, "format": "wav"}}]))
        assert part.media.data == sound
    (part,) = parts(user([{"type": "audio_url", "audio_url": "data:audio/wav;base64," + text.replace("+", "%2B").replace("=", "%3D")}]))
    assert part.media.data == sound


def test_the_sound_of_an_answer_can_be_asked_about() -> None:
    samples = np.linspace(-1, 1, 50, dtype=np.float32)
    heard, rate_hz = played(Audio(samples, 24_000), dtype="float32")
    assert (np.array_equal(heard, samples), rate_hz) == (True, 24_000)


def test_whole_numbers_are_a_file_that_every_program_reads() -> None:
    samples = np.array([[1, -2], [300, -32768]], np.int16)
    with wave.open(io.BytesIO(to_part((samples, 8000), "audio", "x").media.data)) as file:
        assert file.getparams()[:4] == (2, 2, 8000, 2)
        assert file.readframes(9) == samples.tobytes()


@pytest.mark.parametrize(
    ("source", "kind", "told"),
    [
        (b"", "image", "x: is empty"),
        (WAV, "image", "x: is audio/wav, not a picture"),
        (PNG, "audio", "x: is image/png, not a sound"),
        (PNG, "video", "x: is image/png, not a film"),
        (Video(PNG), "video", "x: is image/png, not a film"),
        (b"hello", "audio", "x: is of no known type; give an encoded file, such as WAV, FLAC or MP3"),
        ("absent.png", "image", "x: cannot read absent.png: No such file or directory"),
        (Path("/"), "image", "x: cannot read /: Is a directory"),
        ("a\0b", "image", "x: cannot read a\0b: embedded null byte"),
        ("https://a.b/cat.jpg", "image", "x: https://a.b/cat.jpg is a URL, and neither client nor servers fetch anything: fetch"),
        ("file:///cat.jpg", "image", "x: file:///cat.jpg is a URL, and neither client nor servers fetch anything: give"),
        ("data:image/png;base64", "image", "x: is a data: URL without a comma"),
        ("data:image/png;base64,%%%", "image", "x: is not base64"),
        ("data:image/png;base64,", "image", "x: is empty"),
        (io.StringIO("hello"), "image", "x: reads str, not bytes; open it with 'rb'"),
        (None, "image", "x: is None; give a path, bytes or an open file, or an image of Pillow"),
        (7, "audio", "x: is int; give a path, bytes or an open file, or (samples, rate_hz)"),
        (7, "video", "x: is int; give a path, bytes or an open file, or a Video of one of these"),
        (Video(MP4), "image", "x: is a film, not a picture"),
        (Audio(np.zeros(3, np.float32), 9), "image", "x: is a sound, not a picture"),
        (closed(), "image", "x: cannot be written as a file: "),
        (np.zeros(3), "audio", "x: is samples without a rate"),
        ((np.zeros(3), 0), "audio", "x: has the rate 0"),
        *(((np.zeros(3), rate), "audio", f"x: has the rate {rate!r}; give samples a second") for rate in (0.5, np.nan, np.inf, True, "9")),
        ((np.zeros(3, np.int64), 9), "audio", "x: is samples of int64; give uint8, int16, int32, or floating point with full scale 1"),
        ((np.array([0, np.nan]), 9), "audio", "x: has samples that are no numbers"),
        ((np.array([0, -np.inf]), 9), "audio", "x: has samples that are no numbers"),
        (([1, 2], 9), "audio", "x: is samples of int64"),
        (([1.0, [2.0]], 9), "audio", "x: is no array of samples: "),
        ((Tensor(None), 9), "audio", "x: is no array of samples: "),
        ((np.array([0, 3e4]), 9), "audio", "x: has a sample of 30000, and full scale is 1: divide all by 32768"),
        ((np.array([0, -3e4]), 9), "audio", "x: has a sample of 30000, and full scale is 1: divide all by 32768"),
        ((np.array([0, -30_000], np.int32), 9), "audio", "x: is at most 30000 of the 2147483648 of int32: give int16"),
        ((np.zeros((2, 900)), 9), "audio", "x: is samples of shape (2, 900); give [n], or [n, channels]"),
        ((np.zeros((0, 2)), 9), "audio", "x: is empty"),
    ],
)
def test_what_is_no_medium_of_its_kind_is_told(source: Any, kind: str, told: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        to_part(source, kind, "x")
    assert caught.value.message.startswith(told)
    assert [violation.field for violation in caught.value.fields] == ["x"]


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    class BrokenFile(io.BytesIO):
        name = "tape.wav"

        def read(self, size: int | None = -1, /) -> bytes:
            raise OSError(5, "Input/output error")

    with pytest.raises(BadRequestError, match=r"audios\[0\]: cannot read tape.wav: Input/output error"):
        to_part(BrokenFile(), "audio", "audios[0]")
    (tmp_path / "cat.png").write_bytes(WAV)
    with pytest.raises(BadRequestError, match=r"images\[1\]: .*/cat.png is audio/wav, not a picture"):
        requests.for_prompt("x", [PNG, tmp_path / "cat.png"], (), (), Options()).complete()


PICTURES = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "AVIF")
SOUNDS = {"WAV": "wav", "RF64": "wav", "FLAC": "flac", "OGG": "ogg", "AIFF": "aiff", "MP3": "mpeg", "AU": "basic", "CAF": "x-caf"}
SOUNDS |= {"W64": "x-w64", "VOC": "x-voc", "NIST": "x-nist"}
SOUNDS_IN = (
    "mp4 aac mp4, ipod aac mp4, mov aac mp4, adts aac aac, mpegts aac mp2t, webm libopus webm, ogg libopus ogg, mp2 mp2 mpeg, ac3 ac3 ac3"
)
"""Containers, codecs, and the names of their types."""
FILMS_IN = (
    "mp4 libx264 mp4, mov libx264 quicktime, matroska libx264 x-matroska, webm libvpx webm, avi mpeg4 x-msvideo, flv flv x-flv, "
    "mpegts libx264 mp2t, mpeg mpeg2video mpeg, asf mpeg4 x-ms-asf, ogg libvpx ogg"
)


@pytest.mark.parametrize(
    ("made", "kind", "name"),
    [
        *[(partial(picture, 1, form=form), "image", form.lower()) for form in PICTURES],
        (partial(picture, 1, form="GIF"), "video", "gif"),
        *[(partial(sound, 1, form=form), "audio", name) for form, name in SOUNDS.items()],
        *[
            (partial(film, 1, form=form, codec="", sound_codec=codec, sound_s=0.2), "audio", name)
            for form, codec, name in map(str.split, SOUNDS_IN.split(","))
        ],
        *[(partial(film, 1, 3, form=form, codec=codec), "video", name) for form, codec, name in map(str.split, FILMS_IN.split(","))],
    ],
)
def test_the_type_of_a_file_is_told_by_its_content(made: Callable[[], bytes], kind: str, name: str) -> None:
    assert to_part(made(), kind, "x").media.media_type == f"{kind}/{name}"


def test_where_the_content_says_nothing_the_name_does(tmp_path: Path) -> None:
    (tmp_path / "old.mp3").write_bytes(b"no frame")
    (tmp_path / "new.jpg").write_bytes(PNG)
    assert to_part(tmp_path / "old.mp3", "audio", "x").media.media_type == "audio/mpeg"
    assert to_part(tmp_path / "new.jpg", "image", "x").media.media_type == "image/png"
    with pytest.raises(BadRequestError, match=r"old.mp3 is audio/mpeg, not a film"):
        to_part(tmp_path / "old.mp3", "video", "x")
    assert media_types(b"") == media_types(b"hello") == media_types("\ufeffhello".encode("utf-16-le")) == ()


def test_what_is_larger_than_a_request_is_told_with_its_size(tmp_path: Path) -> None:
    film = tmp_path / "long.mp4"
    film.write_bytes(MP4)
    os.truncate(film, 70 << 20)

    def prompt(*films: Any) -> Any:
        return requests.for_prompt("x", (), (), [*films], Options()).complete()

    with film.open("rb") as file:
        for ask, told in (
            (lambda: requests.for_drawing("x", [film], Options()).complete(), r"images\[0\]: .*/long.mp4 is 70.0 MiB; a request holds"),
            (lambda: prompt(file), r"videos\[0\]: .*/long.mp4 is more; a request holds"),
            (lambda: to_part("/dev/zero", "image", "x"), r"x: /dev/zero is more; a request holds"),
            (lambda: to_part(film.read_bytes(), "video", "x"), r"x: is 70.0 MiB; a request holds"),
        ):
            with pytest.raises(BadRequestError, match=f"{told} at most 64 MiB"):
                ask()
    os.truncate(film, 16 << 20)
    for count, size in ((5, "80.0"), (4, "64.0")):
        with pytest.raises(BadRequestError, match=rf"request: is {size} MiB with its media; at most 64 MiB are allowed"):
            prompt(*[film] * count)


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


async def test_the_event_loop_goes_on_while_media_are_read(pipe: Path) -> None:
    async with playing() as (peer, _, omni):
        asked = asyncio.create_task(omni.generate("What is this?", images=[pipe]))
        await asyncio.to_thread(pipe.write_bytes, PNG)  # ends only when somebody reads
        assert (await asked).text
    (request,) = peer.requests
    assert [*map(shown, request.thinker.messages[0].parts)] == ["image/png", "What is this?"]


async def test_a_pipe_that_nobody_writes_into_is_given_up(pipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_media, "FIRST_BYTE_LIMIT_S", 0.1)
    with pytest.raises(BadRequestError, match=r"x: cannot read .*pipe: it is a pipe, and for 0.1 s nobody has written into it"):
        await asyncio.to_thread(to_part, pipe, "image", "x")


async def test_reading_media_is_part_of_the_time_limit(pipe: Path) -> None:
    omni = AsyncOmni(address="127.0.0.1:1")
    with pytest.raises(DeadlineError, match=r"not complete within 0.1 s; its media were not read by then"):
        await omni.generate("x", images=[pipe], timeout_s=0.1)
    await asyncio.to_thread(pipe.write_bytes, b"")  # whoever reads comes to an end


def media_of(given: dict[str, Any]) -> list[tuple[str, int]]:
    """The media types and sizes of what a prompt would send."""
    request = requests.for_prompt("What?", given.get("images", ()), given.get("audios", ()), given.get("videos", ()), {}).complete()
    return [(part.media.media_type, len(part.media.data)) for part in request.thinker.messages[0].parts if part.HasField("media")]


@pytest.mark.parametrize("form", ["path", "text", "bytes", "file", "data url", "pillow"])
def test_one_picture_needs_no_list(tmp_path: Path, form: str) -> None:
    (tmp_path / "cat.png").write_bytes(PNG)
    one: dict[str, Callable[[], object]] = {
        "path": lambda: tmp_path / "cat.png",
        "text": lambda: str(tmp_path / "cat.png"),
        "bytes": lambda: PNG,
        "file": lambda: io.BytesIO(PNG),
        "data url": lambda: f"data:image/png;base64,{base64.b64encode(PNG).decode()}",
        "pillow": lambda: Image.new("RGB", (4, 4)),
    }
    alone, listed = media_of({"images": one[form]()}), media_of({"images": [one[form]()]})
    assert alone == listed and len(alone) == 1
    drawn = requests.for_drawing("x", one[form](), Options()).complete().diffusion.images  # type: ignore[arg-type]
    assert [picture.media_type for picture in drawn] == ["image/png"]
    turn: Any = {"role": "user", "content": "What?", "images": one[form]()}
    assert len(parts(turn)) == 2


@pytest.mark.parametrize("rate", [16000, 16000.0, np.int64(16000), np.float32(16000)])
def test_one_sound_needs_no_list(rate: Any) -> None:
    sound = (np.zeros(160, np.int16), rate)
    for sounds, count in ((sound, 1), ([sound], 1), ((sound, sound), 2)):
        assert media_of({"audios": sounds}) == [("audio/wav", 44 + 320)] * count
    assert media_of({"images": None, "audios": []}) == []


def read_before() -> io.BytesIO:
    file = io.BytesIO()
    Image.new("RGB", (2, 2)).save(file, "PNG")
    return file


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"images": "absent.jpg"}, "images: cannot read absent.jpg: No such file"),
        ({"images": 5}, "images: is int; give a path"),
        ({"images": {"url": "x"}}, "images: is dict; give a path"),
        (
            {"images": np.zeros((4, 4, 3), np.uint8)},
            "images: is an array; give a path, bytes or an open file, or an image of Pillow (Image.fro",
        ),
        ({"images": read_before()}, "images: is empty; if it was written or read before, file.seek(0) goes to its beginning"),
        ({"images": Image.new("RGB", (0, 3))}, "images: is a picture of 0 by 3 pixels: it is empty"),
        ({"images": ["absent.jpg"]}, "images[0]: cannot read"),
        ({"images": [None]}, "images[0]: is None; give a path, bytes or an open file"),
        ({"audios": np.zeros(9)}, "audios: is samples without a rate; give both: (samples, 16000)"),
        ({"audios": (np.zeros(9), 16000.5)}, "audios: has the rate 16000.5"),
        ({"audios": (np.zeros(5), "16000")}, "audios: has the rate '16000'; give samples a second"),
        ({"audios": (np.zeros(5), None)}, "audios: has the rate None; give samples a second"),
        ({"audios": (16000, np.zeros(5, np.int16))}, "audios: has the rate first, as SciPy reads it"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_one_that_is_none_is_called_by_its_name(given: dict[str, Any], told: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        media_of(given)
    assert caught.value.message.startswith(told)
