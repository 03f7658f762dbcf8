"""Pictures, sounds and large files that a client sends are what the model sees and hears, also in the form of OpenAI's clients."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import os
import pickle
import random
import resource
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps, ImageSequence

from helpers import picture_files
from helpers.families import PICTURE, SOUND
from helpers.servers import CHAIN, ServerProcesses, all_free, family_logic, local_router, local_stage, omni_stub, stack
from omnistage.client import AsyncOmni, BadRequestError, Done, Omni, Options, TextDelta, Video
from omnistage.client import request as requests
from omnistage.client.media import to_part
from omnistage.client.upload import MIN_BYTES, PORTS, Conversing
from omnistage.models.media.spool import MEDIA_PORTS
from omnistage.models.toy import formulas
from omnistage.models.toy.files import png, wav
from omnistage.router.pipeline import load_pipeline
from omnistage.v1 import stage_pb2

PNG, WAV, MP4 = png(PICTURE), wav(SOUND, formulas.SAMPLE_RATE_HZ), b"\0\0\0\x18ftypmp42"


def text_of(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


@pytest.fixture
async def address() -> AsyncIterator[str]:
    """Address of a router whose pipeline sees pictures and hears sound."""
    async with AsyncExitStack() as house:
        stages = {kind: (await house.enter_async_context(local_stage(family_logic("toy-omni", kind)))).address for kind in CHAIN}
        yield (await house.enter_async_context(local_router(stages, load_pipeline("toy-omni")))).address


def said(*seen: formulas.Seen, seed: int = 3, length: int = formulas.NATURAL_LENGTH) -> str:
    items = formulas.items(["u", *seen])
    return "".join(formulas.word(formulas.omni_token(seed, items, n)) for n in range(length))


async def test_a_picture_and_a_sound_of_a_client_are_in_what_is_said(address: str) -> None:
    async with AsyncOmni(address=address) as omni:
        answer = await omni.generate("What is it?", images=[PNG], audios=[WAV], seed=3)
        assert answer.text == said(PICTURE, SOUND, "What is it?")
        items = formulas.items(["u", PICTURE, SOUND, "What is it?"])
        tokens = [formulas.omni_token(3, items, n) for n in range(formulas.NATURAL_LENGTH)]
        assert answer.audio is not None
        np.testing.assert_array_equal(answer.audio.samples, formulas.samples(formulas.omni_frames(items, tokens))[:, 0])
        with pytest.raises(BadRequestError, match="PNG"):
            await omni.generate("What is it?", images=[PNG[:60]], seed=3)


async def test_media_and_text_are_seen_in_the_order_in_which_they_were_given(address: str) -> None:
    content: list[dict[str, object]] = [
        {"type": "text", "text": "First "},
        {"type": "audio", "audio": (SOUND, formulas.SAMPLE_RATE_HZ)},
        {"type": "text", "text": "then"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text_of(PNG)}"}},
        {"type": "image", "image": io.BytesIO(PNG)},
    ]
    expected = said("First ", SOUND, "then", PICTURE, PICTURE)
    assert expected != said(PICTURE, PICTURE, SOUND, "First then")
    async with AsyncOmni(address=address) as omni:
        assert (await omni.chat([{"role": "user", "content": content}], seed=3))["content"] == expected

    def ask() -> str:
        with Omni(address=address) as sync:
            content[-1]["image"] = PNG
            return sync.chat([{"role": "user", "content": content}], seed=3)["content"]

    assert await asyncio.to_thread(ask) == expected


async def test_pictures_come_before_sounds_and_both_before_the_text(address: str, tmp_path: Path) -> None:
    path = tmp_path / "picture"
    path.write_bytes(PNG)
    turn = {"role": "user", "content": "What?", "audios": [(SOUND, formulas.SAMPLE_RATE_HZ)], "images": [path, str(path)]}
    async with AsyncOmni(address=address) as omni:
        answer = await omni.chat([turn], seed=3)
    assert answer["content"] == said(PICTURE, PICTURE, SOUND, "What?")


async def test_a_film_is_refused_by_a_pipeline_that_takes_none(address: str) -> None:
    async with AsyncOmni(address=address) as omni:
        with pytest.raises(BadRequestError, match=r"takes text, image and audio, not 'video/mp4'"):
            await omni.generate("What?", videos=[bytes(4) + b"ftypisom"])


def played(data: str) -> dict[str, object]:
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


SHOWN = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text_of(PNG)}", "detail": "auto"}}
NOTHING = dict.fromkeys(("refusal", "audio", "function_call", "tool_calls"))
MESSAGES: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "What is in this image?"}, SHOWN]},
    {"role": "assistant", "content": "A cat.", "annotations": [], **NOTHING},
    {"role": "user", "content": [{"type": "text", "text": "Who is it?"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "That "}, {"type": "refusal", "refusal": "I cannot say."}]},
    {"role": "user", "content": [{"type": "text", "text": "And what is said here?"}, played(text_of(WAV))]},
]
"""A conversation with all that the models here take of it."""


def test_each_message_arrives_with_its_role_and_its_parts_in_order() -> None:
    sent = requests.for_conversation(MESSAGES, Options()).complete().thinker.messages
    assert [message.role for message in sent] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert [[_told(part) for part in message.parts] for message in sent] == [
        ["Be brief."],
        ["What is in this image?", ("image/png", PNG)],
        ["A cat."],
        ["Who is it?"],
        ["That ", "I cannot say."],
        ["And what is said here?", ("audio/wav", WAV)],
    ]


def _told(part: stage_pb2.Part) -> str | tuple[str, bytes]:
    return part.text if part.HasField("text") else (part.media.media_type, part.media.data)


async def test_a_model_sees_and_hears_what_was_sent_so(address: str) -> None:
    begin: list[formulas.Seen] = [*("s", "Be brief.", "u", "What is in this image?"), PICTURE, *("a", "A cat.", "u", "Who is it?")]
    items = formulas.items([*begin, *("a", "That ", "I cannot say.", "u", "And what is said here?"), SOUND])
    async with AsyncOmni(address=address) as omni:
        answer = await omni.chat(MESSAGES, seed=3)
    assert answer.text == "".join(formulas.word(formulas.omni_token(3, items, n)) for n in range(formulas.NATURAL_LENGTH))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(items), formulas.NATURAL_LENGTH)


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ({"role": "tool", "tool_call_id": "1", "content": "18"}, ".role: is 'tool'; no pipeline calls tools or functions"),
        ({"role": "function", "content": "18"}, ".role: is 'function'; no pipeline calls tools or functions"),
        ({"role": ["user"], "content": "x"}, ".role: is ['user']"),
        ({"name": "Bob", "content": "x"}, ".name: speakers have no names here"),
        ({"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function"}]}, ".tool_calls: no pipeline calls tools"),
        ({"role": "assistant", "content": None, "audio": {"id": "audio_1"}}, ".audio: sounds go into audios"),
        ({"role": "assistant", "content": None, "refusal": "No."}, ".refusal: is said as text"),
        ({"role": "assistant", "content": None, "refusal": None}, ".content: is None; it must be text, or a list of parts"),
        (
            {"content": [{"type": "image_url", "image_url": {"url": "https://127.0.0.1/cat.png"}}]},
            ".content[0].image_url.url: https://127.0.0.1/cat.png is a URL",
        ),
        ({"content": "x", "weight": 1}, ": has unknown keys weight; known: role, content"),
        ({"content": [{"type": "file", "file": {"file_id": "file-1"}}]}, ".content[0].type: is 'file'; known: text"),
        ({"content": [played("not base64")]}, ".content[0].input_audio.data: "),
        ({"content": [played(text_of(PNG))]}, ".content[0].input_audio.data: "),
    ],
)
def test_what_the_models_here_do_not_take_is_named(message: Mapping[str, Any], told: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        requests.for_conversation([{"role": "user", **message}], Options()).complete()
    assert caught.value.message.startswith("conversation[0]" + told)


ROOT = Path(__file__).resolve().parents[2]
LENGTH = 12


def test_the_ports_of_a_client_are_those_of_the_models() -> None:
    """Neither knows the other: the contract names them."""
    assert PORTS == tuple(port.name for port in MEDIA_PORTS) == tuple(f"media{number}" for number in range(8))
    for page in ("docs/media.md", "protos/omnistage/v1/stage.proto"):
        text = " ".join((ROOT / page).read_text().replace("//", "").replace("`", "").split())
        assert f"has the ports {PORTS[0]} to {PORTS[-1]}" in text, page


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcesses]:
    seeing = {"thinker": {"films": True, "interval_s": 0.01}}
    with stack(tmp_path_factory.mktemp("uploads"), pipeline="toy-omni", family="toy-omni", options_of=seeing) as running:
        yield running


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two of 80 and 20 MiB, and one that fits into a request."""
    folder = tmp_path_factory.mktemp("films")
    made = []
    for size in (80 << 20, 20 << 20, 5000):
        made.append(folder / f"{size}.mp4")
        made[-1].write_bytes(MP4)
        os.truncate(made[-1], size)
    return made


def digest_of(path: Path) -> formulas.Seen:
    with path.open("rb") as file:
        return formulas.film(hashlib.file_digest(file, "sha256").digest())


def test_what_is_streamed_and_what_is_not(films: list[Path]) -> None:
    asked = requests.for_prompt("x", (), (), [films[2], Video(films[0], use_audio=True), films[1].read_bytes()], Options())
    small, large, bytes_, _ = asked.complete().thinker.messages[0].parts
    assert small.HasField("media") and len(small.media.data) == 5000
    assert (large.port, large.media_type, large.use_audio, large.total_bytes) == ("media0", "video/mp4", True, 80 << 20)
    assert (bytes_.port, bytes_.use_audio, bytes_.total_bytes) == ("media1", False, 20 << 20)
    assert [upload.source for upload in asked.uploads.values()] == [films[0], films[1].read_bytes()]
    with pytest.raises(BadRequestError, match=r"videos\[8\]: is one file above 16 MiB too many"):
        requests.for_prompt("x", (), (), [films[0]] * (len(PORTS) + 1), Options()).complete()
    with pytest.raises(BadRequestError, match=r"images\[0\]: .*is video/mp4, not a picture"):
        requests.for_prompt("x", [films[0]], (), (), Options()).complete()


async def test_large_films_are_seen_beside_small_ones(standing: ServerProcesses, films: list[Path]) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with AsyncOmni(address=standing.address) as omni:
        for _ in range(2):
            answer = await omni.generate("?", videos=films, seed=4, max_tokens=LENGTH, outputs=["text"])
            assert answer.text == said(*map(digest_of, films), "?", seed=4, length=LENGTH)
            assert answer.usage.stages[0].input_items["media0"] == 80 << 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MIN_BYTES * 3 >> 10, "they are not read into memory"
    await all_free(list(standing.addresses.values()))


def test_what_is_refused_is_told_as_by_generate(standing: ServerProcesses, films: list[Path], tmp_path: Path) -> None:
    huge = tmp_path / "huge.mp4"
    huge.write_bytes(MP4)
    os.truncate(huge, 1 << 30)
    with Omni(address=standing.address) as omni:
        with pytest.raises(BadRequestError, match="more than 536870912 bytes") as told:
            omni.generate("?", videos=[films[1], huge])
        assert (told.value.fields[0].field, told.value.metadata["port"]) == ("videos[1]", "media1")
        assert told.value.message.startswith(f"videos[1]: {huge}: has more than")
        sound = tmp_path / "long.wav"
        sound.write_bytes(b"RIFF\0\0\0\0WAVE")
        os.truncate(sound, 20 << 20)
        with pytest.raises(BadRequestError, match="more than 1048576 bytes, the most of audio/wav"):
            omni.generate("?", audios=[sound])
        answer = omni.generate("?", videos=[films[1]], seed=4, max_tokens=LENGTH)
        assert answer.text == said(digest_of(films[1]), "?", seed=4, length=LENGTH)


async def test_a_file_that_gets_shorter_or_goes_away_meanwhile_is_told(standing: ServerProcesses, tmp_path: Path) -> None:
    film = tmp_path / "film.mp4"
    for change in (lambda: os.truncate(film, 18 << 20), film.unlink):
        film.write_bytes(MP4)
        os.truncate(film, 20 << 20)
        asked = requests.for_prompt("?", (), (), [film], Options())
        request = asked.complete()
        change()
        async with omni_stub(standing.address) as stub:
            conversing = Conversing(stub.Converse(timeout=30), request, asked.uploads)
            with pytest.raises(BadRequestError, match=r"videos\[0\]: .*film.mp4"):
                async for _ in conversing:
                    pass
            conversing.cancel()
    await all_free(list(standing.addresses.values()))


async def test_a_router_that_is_lost_is_replaced_and_sent_the_file_again(standing: ServerProcesses, films: list[Path]) -> None:
    """In the middle of the answer, which goes on where it stopped."""
    async with AsyncExitStack() as first:
        lost = await first.enter_async_context(local_router(standing.addresses, load_pipeline("toy-omni")))
        async with AsyncOmni(address=f"{lost.address},{standing.address}") as omni:
            text = ""
            async for event in omni.stream("?", videos=[films[1]], seed=4, max_tokens=20, outputs=["text"]):
                if isinstance(event, TextDelta):
                    text += event.text
                    await first.aclose()
            assert isinstance(event, Done) and [failover.stage for failover in event.failovers] == ["router"]
            assert text == said(digest_of(films[1]), "?", seed=4, length=20)
    await all_free(list(standing.addresses.values()))


async def test_who_leaves_in_the_middle_leaves_nothing(standing: ServerProcesses, films: list[Path]) -> None:
    async with AsyncOmni(address=standing.address) as omni:
        stream = omni.stream("?", videos=[films[0]], max_tokens=LENGTH)
        await anext(stream)
        await stream.aclose()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await omni.generate("?", videos=[films[0]], max_tokens=LENGTH)
    await all_free(list(standing.addresses.values()))


PIXELS = np.random.default_rng(5).integers(0, 256, (20, 30, 3), np.uint8)


def test_a_picture_of_pillow_arrives_with_every_pixel_and_the_way_it_is_turned() -> None:
    image = Image.fromarray(PIXELS)
    for mode in ("RGB", "RGBA", "L", "P", "1", "I;16"):
        given = Image.fromarray(PIXELS[..., 0].astype(np.uint16) * 257) if mode == "I;16" else image.convert(mode)
        media = to_part(given, "image", "images[0]").media
        assert media.media_type == "image/png"
        back = Image.open(io.BytesIO(media.data))
        assert np.array_equal(np.asarray(back), np.asarray(given))
    camera = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(camera, "JPEG", exif=exif)
    opened = Image.open(camera)
    back = Image.open(io.BytesIO(to_part(opened, "image", "images[0]").media.data))
    assert (np.array_equal(np.asarray(back), np.asarray(opened)), back.getexif()[0x0112]) == (True, 6)


STATES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "just opened": lambda image: image,
    "loaded": lambda image: (image.load(), image)[1],
    "with its EXIF data read": lambda image: (image.getexif(), image)[1],
    "loaded with its EXIF data read before": lambda image: (image.getexif(), image.load(), image)[2],
    "sent before": lambda image: (to_part(image, "image", "x"), image)[1],
    "a copy": lambda image: image.copy(),
    "at its first frame again": lambda image: next(ImageSequence.Iterator(image)),
    "from another process": lambda image: pickle.loads(pickle.dumps(image)),
}


FORMS: dict[str, dict[str, Any]] = {"TIFF": {}, "PNG": {}, "WEBP": {"lossless": True}, "JPEG": {"quality": 95}, "MPO": {}}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("state", STATES)
def test_an_image_of_pillow_is_seen_as_its_file_is_in_any_state(form: str, state: str, seed: int) -> None:
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = random.Random(seed).randrange(1, 9)
    Image.fromarray(PIXELS).save(file, form, exif=exif, **FORMS[form])
    expected = ImageOps.exif_transpose(Image.open(file))
    given = STATES[state](Image.open(io.BytesIO(file.getvalue())))
    seen = ImageOps.exif_transpose(Image.open(io.BytesIO(to_part(given, "image", "x").media.data)))
    assert np.array_equal(np.asarray(seen), np.asarray(expected)), exif[0x0112]


def test_an_opened_image_is_its_file_until_it_is_changed(tmp_path: Path) -> None:
    path = tmp_path / "cat.jpg"
    Image.fromarray(np.kron(PIXELS, np.ones((8, 8, 1), np.uint8))).save(path, exif=Image.Exif())
    sent = lambda image: to_part(image, "image", "x").media.data  # noqa: E731
    with Image.open(path) as image:
        assert sent(image) == sent(image) == path.read_bytes()
        assert image.size == (240, 160) and np.asarray(image).shape == (160, 240, 3), "it can still be used"
        assert sent(image) != path.read_bytes(), "it was loaded"
    with Image.open(path) as image:
        image.draft("RGB", (120, 80))
        assert Image.open(io.BytesIO(sent(image))).size == image.size != (240, 160)
    with Image.open(path) as image:
        image.getexif()[0x0112] = 6
        assert Image.open(io.BytesIO(sent(image))).getexif()[0x0112] == 6


@pytest.mark.parametrize("name", ["a transparent colour of 16 bits", "white is zero"])
def test_what_pillow_forgets_when_it_loads_is_asked_for_as_a_file(name: str, tmp_path: Path) -> None:
    if name == "white is zero":
        path = tmp_path / "x.tiff"
        Image.fromarray(PIXELS[..., 0].astype(np.uint16) * 257).save(path, tiffinfo={262: 0})
    else:
        path = tmp_path / "x.png"
        data = (PIXELS.astype(">u2") * 257).tobytes()
        path.write_bytes(picture_files.png(30, 20, 16, 2, data, tRNS=np.array((257, 514, 771), ">u2").tobytes()))
    image = Image.open(path)
    assert to_part(image, "image", "x").media.data == path.read_bytes()
    image.load()
    with pytest.raises(BadRequestError, match="give the file itself"):
        to_part(image, "image", "x")


@pytest.mark.parametrize("mode", ["CMYK", "LAB", "YCbCr", "HSV", "RGBa", "La", "PA", "F"])
def test_a_picture_of_pillow_in_other_colours_arrives_as_it_is(mode: str) -> None:
    """Also where PNG has no words for them, and turned as it was."""
    image = Image.fromarray(np.dstack([PIXELS, PIXELS[..., :1]]), "RGBA")
    if mode == "LAB":
        given = Image.frombytes("LAB", image.size, PIXELS.tobytes())
    else:
        given = image.convert({"RGBa": "RGBA", "La": "LA", "PA": "P", "F": "L"}.get(mode, "RGB")).convert(mode)
    given.getexif()[0x0112] = 6
    given.getexif()[0x010F] = "who made it"
    back = Image.open(io.BytesIO(to_part(given, "image", "images[0]").media.data))
    assert 0x010F not in back.getexif()
    plain = {"RGBa": "RGBA", "La": "LA", "PA": "RGBA", "CMYK": "CMYK", "LAB": "LAB", "F": "F"}.get(mode, "RGB")
    assert back.mode == plain
    upright, expected = ImageOps.exif_transpose(back), ImageOps.exif_transpose(given)
    assert upright.size == (20, 30)
    assert np.array_equal(np.asarray(upright), np.asarray(expected if mode == plain else expected.convert(plain)))
