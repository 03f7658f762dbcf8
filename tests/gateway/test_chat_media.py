"""Pictures, sounds and films that come with a chat over HTTP: in the request, or from a host that the gateway may ask."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from helpers import servers
from helpers.gateway import gateway
from helpers.web import Web, web
from omnistage.gateway.fetching import REQUESTS
from omnistage.models.toy import formulas
from omnistage.models.toy.files import png, wav

PIPELINE = """
name: toy-omni
description: Sees, hears and speaks.
inputs: [text, image, audio, video]
outputs: [text, audio]
stages:
  - {kind: thinker, family: toy-omni}
  - {kind: talker, family: toy-omni, takes: [prompt, places, hidden]}
  - {kind: code2wav, family: toy-omni, takes: [codes]}
defaults: {thinker: {max_tokens: 256}}
"""
TEXT_ALONE = """
name: text-alone
description: The same without a voice.
inputs: [text, image, audio, video]
outputs: [text]
stages: [{kind: thinker, family: toy-omni}]
defaults: {thinker: {max_tokens: 256}}
"""
PICTURE = (np.add.outer(np.arange(21), 3 * np.arange(34)) % 256).astype(np.uint8)
SOUND = (np.arange(1000) * 37 % 2000 - 1000).astype(np.int16)
FILM = b"\0\0\0\x18ftypisom" + bytes(range(200))
MIB = 1 << 20


def data_url(data: bytes, media_type: str) -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def said(*seen: Any) -> str:
    items = formulas.items(["u", *seen])
    return "".join(formulas.word(formulas.omni_token(3, items, n)) for n in range(formulas.NATURAL_LENGTH))


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.ServerProcesses]:
    """A chain that takes all media, and its Thinker alone as a pipeline without sound."""
    folder = tmp_path_factory.mktemp("seeing")
    for name, text in (("speaking", PIPELINE), ("text", TEXT_ALONE)):
        (folder / f"{name}.yaml").write_text(text)
    pipelines = f"{folder}/speaking.yaml,{folder}/text.yaml"
    with servers.stack(folder, pipeline=pipelines, family="toy-omni", options_of={"thinker": {"films": True}}) as stack:
        yield stack


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Web]:
    with web(tmp_path_factory.mktemp("web")) as one:
        one.lay("/cat.png", png(PICTURE), "image/png")
        one.lay("/large.png", png(PICTURE) + bytes(MIB), "image/png")
        one.lay("/film.mp4", FILM, "video/mp4")
        one.send_on("/moved.png", "/cat.png")
        one.send_on("/elsewhere.png", f"https://localhost:{one.port}/cat.png")
        one.send_on("/plain.png", f"http://127.0.0.1:{one.port}/cat.png")
        one.send_on("/round.png", "/round.png")
        one.places["/endless.png"] = _endless
        yield one


def _endless(handler: BaseHTTPRequestHandler) -> None:
    """More than anybody takes, of no told length."""
    handler.send_response(200)
    handler.end_headers()
    handler.close_connection = True
    for _ in range(64):
        handler.wfile.write(bytes(MIB))


@pytest.fixture(scope="module")
def client(seeing: servers.ServerProcesses, there: Web, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """A client of a gateway that may ask that host by its address, and by a name that leads into this machine."""
    flags = ("--media-hosts", f"127.0.0.1:{there.port},localhost:{there.port}", "--max-message-bytes", str(MIB))
    folder: Path = tmp_path_factory.mktemp("gateway")
    with (
        trusting(there.authority),
        gateway(seeing.address, folder, *flags) as server,
        openai.OpenAI(base_url=f"http://{server.address}/v1", api_key="test", max_retries=0) as one,
    ):
        yield one


@contextmanager
def trusting(authority: Path) -> Iterator[None]:
    """Processes that start inside this block trust this authority alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(authority))
        yield


def asked(client: openai.OpenAI, *parts: Any, model: str = "toy-omni", **options: Any) -> str | None:
    messages: list[Any] = [{"role": "user", "content": list(parts)}]
    answer = client.chat.completions.create(model=model, messages=messages, seed=3, extra_body=options)
    return answer.choices[0].message.content


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def test_media_of_every_kind_are_seen_and_heard(client: openai.OpenAI) -> None:
    parts = [
        text("See "),
        image(data_url(png(PICTURE), "image/png")),
        {"type": "input_audio", "input_audio": {"data": base64.b64encode(wav(SOUND, formulas.SAMPLE_RATE_HZ)).decode(), "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": data_url(wav(SOUND, formulas.SAMPLE_RATE_HZ), "audio/wav")}},
        text("?"),
    ]
    assert asked(client, *parts) == said("See ", PICTURE, SOUND, SOUND, "?")


@pytest.mark.parametrize("place", ["at a data: URL", "at a host"])
def test_a_film_is_seen_and_heard_where_that_is_said(client: openai.OpenAI, there: Web, place: str) -> None:
    url = data_url(FILM, "video/mp4") if place == "at a data: URL" else f"https://127.0.0.1:{there.port}/film.mp4"
    digest = hashlib.sha256(FILM).digest()
    seen, heard = (said(formulas.film(digest, use_audio=use_audio)) for use_audio in (False, True))
    part: dict[str, Any] = {"type": "video_url"}
    for silent in (url, {"url": url}, {"url": url, "use_audio": None}, {"url": url, "use_audio": False}):
        assert asked(client, {**part, "video_url": silent}) == seen
    assert asked(client, {**part, "video_url": url, "use_audio": True}) == heard
    assert asked(client, {**part, "video_url": {"url": url, "use_audio": True}}) == heard
    every_film: dict[str, Any] = {"mm_processor_kwargs": {"use_audio_in_video": True}}
    assert asked(client, {**part, "video_url": {"url": url}}, **every_film) == heard
    assert asked(client, {**part, "video_url": {"url": url, "use_audio": False}}, **every_film) == seen
    both = said(formulas.film(digest), "and", formulas.film(digest, use_audio=True))
    assert asked(client, {**part, "video_url": url, "use_audio": False}, text("and"), {**part, "video_url": url}, **every_film) == both


@pytest.mark.parametrize(
    ("fields", "options", "param"),
    [
        ({"use_audio": 1}, {}, "messages[0].content[0].use_audio"),
        ({"use_audio": "true"}, {"mm_processor_kwargs": {"use_audio_in_video": True}}, "messages[0].content[0].use_audio"),
        ({"video_url": {"url": data_url(FILM, "video/mp4"), "use_audio": True}, "use_audio": True}, {}, "messages[0].content[0].use_audio"),
        ({}, {"mm_processor_kwargs": {"use_audio_in_video": "perhaps"}}, "mm_processor_kwargs.use_audio_in_video"),
        ({}, {"mm_processor_kwargs": {"fps": 3}}, "mm_processor_kwargs.fps"),
    ],
)
def test_what_is_said_wrongly_about_the_sound_of_a_film_is_named(
    client: openai.OpenAI, fields: dict[str, Any], options: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        asked(client, {"type": "video_url", "video_url": data_url(FILM, "video/mp4"), **fields}, **options)
    assert caught.value.param == param


def test_a_response_sees_pictures(client: openai.OpenAI) -> None:
    content: list[Any] = [
        {"type": "input_text", "text": "See "},
        {"type": "input_image", "image_url": data_url(png(PICTURE), "image/png"), "detail": "auto"},
    ]
    answer = client.responses.create(model="toy-omni", input=[{"role": "user", "content": content}], extra_body={"seed": 3})
    assert answer.output_text == said("See ", PICTURE)


def test_a_pipeline_without_sound_is_not_asked_for_it(client: openai.OpenAI) -> None:
    assert asked(client, text("Hello"), model="text-alone") == said("Hello")
    with pytest.raises(openai.BadRequestError, match="gives text, not 'audio'") as caught:
        client.chat.completions.create(
            model="text-alone",
            messages=[{"role": "user", "content": "Hello"}],
            modalities=["text", "audio"],
            audio={"voice": "alloy", "format": "pcm16"},
        )
    assert caught.value.param == "modalities"


def test_what_cannot_be_read_is_named(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        asked(client, text("See"), image(data_url(png(PICTURE)[:60], "image/png")))
    assert caught.value.param == "messages[0].content[1].image_url.url"


def test_a_picture_of_a_host_that_is_named_is_fetched(client: openai.OpenAI, there: Web) -> None:
    url = f"https://127.0.0.1:{there.port}"
    assert asked(client, text("See "), image(f"{url}/cat.png")) == said("See ", PICTURE)
    assert asked(client, text("See "), image(f"{url}/moved.png")) == said("See ", PICTURE)
    content: list[Any] = [{"type": "input_image", "image_url": f"{url}/cat.png", "detail": "auto"}]
    answer = client.responses.create(model="toy-omni", input=[{"role": "user", "content": content}], extra_body={"seed": 3})
    assert answer.output_text == said(PICTURE)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://127.0.0.1:{port}/cat.png", "one of https"),
        ("https://ann:secret@127.0.0.1:{port}/cat.png", "without a name and password"),
        ("https://127.0.0.1/cat.png", "nothing is fetched from 127.0.0.1:443"),
        ("https://a.example.com:{port}/cat.png", "nothing is fetched from a.example.com:"),
        ("https://localhost:{port}/cat.png", "is in a private network"),
        ("https://127.0.0.1:{port}/elsewhere.png", "sends on to another host"),
        ("https://127.0.0.1:{port}/plain.png", "sends on to another host"),
        ("https://127.0.0.1:{port}/round.png", "sends on more than 3 times"),
        ("https://127.0.0.1:{port}/nothing.png", "says 404"),
        ("https://127.0.0.1:{port}/large.png", "more than 1 MiB"),
        ("https://127.0.0.1:{port}/endless.png", "more than 1 MiB"),
        ("https://[::1/cat.png", "is no URL"),
    ],
)
def test_nothing_else_is_fetched(client: openai.OpenAI, there: Web, url: str, told: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        asked(client, text("See"), image(url.format(port=there.port)))
    assert caught.value.param == "messages[0].content[1].image_url.url"
    assert told in caught.value.message


def test_what_does_not_come_is_not_waited_for(client: openai.OpenAI, there: Web) -> None:
    """Also where it is one of several."""

    def silent(handler: BaseHTTPRequestHandler) -> None:
        there.over.wait(60)

    there.places["/silent.png"] = silent
    url = f"https://127.0.0.1:{there.port}"
    with pytest.raises(openai.BadRequestError, match="did not give it in time") as caught:
        asked(client, image(f"{url}/cat.png"), image(f"{url}/silent.png"))
    assert caught.value.param == "messages[0].content[1].image_url.url"


def test_what_was_fetched_counts_no_longer_when_its_answer_has_ended(client: openai.OpenAI, there: Web) -> None:
    """Refused requests are counted too: more is fetched, one after the other, than may be held at once."""
    there.lay("/half.png", png(PICTURE) + bytes(MIB // 2), "image/png")
    half, cat = (image(f"https://127.0.0.1:{there.port}/{name}.png") for name in ("half", "cat"))
    for _ in range(2 * REQUESTS):
        with pytest.raises(openai.BadRequestError, match="more than 1 MiB"):
            asked(client, half, half)
        assert asked(client, cat) == said(PICTURE)


def test_who_does_not_trust_its_authority_fetches_nothing(seeing: servers.ServerProcesses, there: Web, tmp_path: Path) -> None:
    with (
        gateway(seeing.address, tmp_path, "--media-hosts", f"127.0.0.1:{there.port}") as server,
        openai.OpenAI(base_url=f"http://{server.address}/v1", api_key="test", max_retries=0) as client,
        pytest.raises(openai.BadRequestError, match="certificate"),
    ):
        asked(client, image(f"https://127.0.0.1:{there.port}/cat.png"))
