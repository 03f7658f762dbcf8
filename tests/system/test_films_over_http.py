"""Products over HTTP and on the page that only real models show: films of Wan and sound of Stable Audio, how likely tokens were, texts that
follow a constraint."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import av
import httpx2
import numpy as np
import openai
import pytest
import soundfile
from openai.types.chat.chat_completion import Choice
from PIL import Image
from playwright.async_api import expect
from pydantic import BaseModel

from helpers import lengths, servers
from helpers.browser import ask as ask_page
from helpers.browser import browser, needs_chromium, opened
from helpers.drawings import checkpoint
from helpers.gateway import gateway
from helpers.media_files import picture
from helpers.omni_family import OmniFamily
from helpers.servers import ServerProcess
from helpers.videos import by, get, over
from omnistage.client import Omni, TextDelta

SIZE = "64x64"
PIPELINE = """
name: {name}
description: What a small checkpoint makes.
inputs: [text]
may_take: [image]
outputs: [image, video, audio, progress]
outputs_vary: true
may_give: [latents, pixels]
stages: [{{kind: diffusion, family: diffusers}}]
"""
CODECS = {None: ("video/webm", "vp9"), "webm": ("video/webm", "vp9"), "mp4": ("video/mp4", "vp9"), "mp4-h264": ("video/mp4", "h264")}
"""By a format."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One that makes films, with a picture or without, and one that makes sound."""
    folder = tmp_path_factory.mktemp("films")
    with ExitStack() as stack:
        found, files = [], []
        for name, kind in (("wan", "wan2.2-ti2v"), ("stable", "stable-audio")):
            stage = ("--checkpoint", str(checkpoint(kind)))
            made = stack.enter_context(servers.stack(folder, kinds=["diffusion"], family="diffusers", router_args=None, stage_args=stage))
            found.append(f"{name}/diffusion={made.addresses['diffusion']}")
            files.append(folder / f"{name}.yaml")
            files[-1].write_text(PIPELINE.format(name=name))
        flags = ("--pipeline", ",".join(map(str, files)), "--stages", ",".join(found), "--grace", "5")
        router = stack.enter_context(ServerProcess("omnistage.router", *flags, log_folder=folder))
        router.wait_ready()
        yield f"http://{stack.enter_context(gateway(router.address, folder)).address}"


def frames_of(data: bytes) -> list[np.ndarray[Any, Any]]:
    with av.open(io.BytesIO(data), "r") as file:
        return [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]


async def made(url: str, **body: Any) -> dict[str, Any]:
    asked = {"prompt": "a boat", "size": SIZE, "steps": 2, "seed": 3, **body}
    answer = httpx2.post(f"{url}/v1/videos", json=asked, headers=by("ann"))
    assert answer.status_code == 200, answer.text
    shown = await over(url, answer.json()["id"])
    assert shown["status"] == "completed", shown
    return shown


@pytest.mark.parametrize("form", CODECS)
async def test_a_film_is_a_file_of_the_format_that_was_asked_for(form: str | None, url: str) -> None:
    shown = await made(url, frames=9, **({"format": form} if form else {}))
    kind, codec = CODECS[form]
    rate_hz = shown["frames"] / float(shown["seconds"])
    assert (shown["frames"], shown["size"], shown["model"], shown["media_type"].partition(";")[0]) == (9, SIZE, "wan", kind)
    file = get(url, f"/{shown['id']}/content")
    assert file.headers["content-type"].partition(";")[0] == kind and len(file.content) == shown["bytes"]
    with av.open(io.BytesIO(file.content), "r") as opened_file:
        stream = opened_file.streams.video[0]
        assert (stream.codec_context.codec.canonical_name, stream.width, stream.height) == (codec, 64, 64)
        assert float(stream.average_rate or 0) == pytest.approx(rate_hz)
    assert len(frames_of(file.content)) == 9


async def test_its_seconds_and_its_rate_are_those_that_were_asked_for(url: str) -> None:
    shown = await made(url, seconds="1.2", frames_per_second=8)
    assert (shown["frames"], shown["seconds"]) == (9, "1.125")


async def test_it_begins_with_a_picture(url: str) -> None:
    picture = io.BytesIO()
    Image.new("RGB", (128, 64), "#2060c0").save(picture, "PNG")
    data = {"prompt": "a boat", "size": SIZE, "steps": "2", "seed": "3", "frames": "5"}
    answer = httpx2.post(f"{url}/v1/videos", files={"input_reference": picture.getvalue()}, data=data, headers=by("ann"))
    with_picture = await over(url, answer.json()["id"])
    assert with_picture["status"] == "completed", with_picture
    (note,) = with_picture["notes"]
    assert "its middle part of 64x64 is used, in the shape of 64x64" in note
    without = await made(url, frames=5)
    assert without["notes"] == []
    films = [frames_of(get(url, f"/{one['id']}/content").content) for one in (with_picture, without)]
    assert len(films[0]) == len(films[1]) == 5 and not np.array_equal(films[0], films[1])


async def test_it_can_be_seen_before_it_is_whole(url: str) -> None:
    """The part of a film that has come at any moment is a film."""
    asked = {"prompt": "a boat", "size": "256x256", "steps": 1, "frames": 41, "seed": 3}
    name = httpx2.post(f"{url}/v1/videos", json=asked, headers=by("ann")).json()["id"]
    begun, pieces = b"", 0
    with httpx2.stream("GET", f"{url}/v1/videos/{name}/content?stream=true", headers=by("ann"), timeout=90) as answer:
        for piece in answer.iter_bytes():
            if not begun:
                begun = piece
                assert get(url, f"/{name}").json()["status"] == "in_progress"
            pieces += 1
    shown = await over(url, name)
    assert pieces > 1 and 0 < len(frames_of(begun)) < 41 == shown["frames"]


@pytest.mark.parametrize(
    ("asked", "code", "told"),
    [
        ({"frames": 6}, "invalid_value", "frames"),
        ({"size": "72x64", "frames": 5}, "invalid_value", "size"),
        ({"flow_shift": 0.0, "frames": 5, "guidance_scale_2": 2.0}, "invalid_value", "guidance_scale_2"),
    ],
)
async def test_what_the_model_cannot_make_fails_in_the_words_of_the_request(asked: dict[str, Any], code: str, told: str, url: str) -> None:
    body = {"prompt": "a boat", "size": SIZE, "steps": 2, **asked}
    body = {name: value for name, value in body.items() if value}
    shown = await over(url, httpx2.post(f"{url}/v1/videos", json=body, headers=by("ann")).json()["id"])
    assert (shown["status"], shown["error"]["code"]) == ("failed", code) and told in shown["error"]["message"], shown


def test_sound_is_as_long_as_it_was_asked_for(url: str) -> None:
    answer = httpx2.post(f"{url}/v1/audio/generate", json={"prompt": "rain", "seconds": 0.5, "steps": 2, "seed": 3}, timeout=90)
    assert answer.status_code == 200, answer.text
    samples, rate_hz = soundfile.read(io.BytesIO(answer.content))
    assert len(samples) == round(0.5 * rate_hz) and np.abs(samples).max() > 0


@lengths.long_form(
    "gateway/test_videos.py::test_it_is_read_while_it_is_made",
    "models/media/test_film_file.py::test_a_film_plays_while_it_grows",
    unkept="The page itself shows a film that grows.",
)
@needs_chromium
async def test_the_page_shows_a_film_that_grows(url: str) -> None:
    async with browser() as context:
        watched = await opened(context, url)
        page = watched.page
        await page.get_by_text("Film", exact=True).click()
        await page.locator("#size").fill("128x128")
        await page.locator("#steps").fill("2")
        await page.get_by_label("Seconds").fill("1.5")
        await ask_page(page, "A boat", 3)
        video = page.locator(".assistant video")
        await video.wait_for()
        await page.get_by_role("link", name="Save film").wait_for()
        await expect(video).to_have_js_property("readyState", 4)
        shown = await video.evaluate("one => [one.dataset.grows, one.videoWidth, one.videoHeight, one.error]")
        assert shown == ["true", 128, 128, None]
        job = get(url, "?limit=1", "").json()["data"][0]
        await page.wait_for_function(
            "seconds => Math.abs(document.querySelector('video').duration - seconds) < 0.1", arg=float(job["seconds"])
        )
        await watched.check(url)


HELLO: list[Any] = [{"role": "user", "content": "What is a kite?"}]
TOKENS = 12


@pytest.fixture(scope="module")
def model(omni_family: OmniFamily) -> str:
    """The pipeline."""
    return f"{omni_family.name}-text"


@pytest.fixture(scope="module")
def omni(omni_folder: Path, model: str) -> Iterator[Omni]:
    with Omni(model_path=omni_folder, pipeline=model, max_sessions=8) as omni:
        yield omni


@pytest.fixture(scope="module")
def client(omni: Omni, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    with (
        gateway(omni.address, tmp_path_factory.mktemp("gateway")) as server,
        openai.OpenAI(base_url=f"http://{server.address}/v1", api_key="test", max_retries=0) as client,
    ):
        yield client


def likely(choice: Choice) -> list[Any]:
    assert choice.logprobs is not None and choice.logprobs.content is not None
    return list(choice.logprobs.content)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_tokens_are_told_with_their_texts_and_how_likely_they_were(
    client: openai.OpenAI, model: str, omni: Omni, temperature: float
) -> None:
    options: dict[str, Any] = {"seed": 5, "max_tokens": TOKENS, "temperature": temperature, "logprobs": True, "top_logprobs": 3}
    answer = client.chat.completions.create(model=model, messages=HELLO, extra_body={"ignore_eos": True}, **options).choices[0]
    deltas = [event for event in omni.stream_chat(HELLO, ignore_eos=True, outputs=["text"], **options) if isinstance(event, TextDelta)]
    rows = likely(answer)
    assert answer.message.content == "".join(delta.text for delta in deltas)
    assert [row.logprob for row in rows] == [logprob for delta in deltas for logprob in delta.logprobs]
    tops = [[(one.piece, one.logprob) for one in top] for delta in deltas for top in delta.top_logprobs]
    assert [[(bytes(one.bytes), one.logprob) for one in row.top_logprobs] for row in rows] == tops
    assert b"".join(bytes(row.bytes) for row in rows).decode("utf-8", "replace") == answer.message.content
    streamed = client.chat.completions.create(model=model, messages=HELLO, extra_body={"ignore_eos": True}, stream=True, **options)
    pieces = [piece for chunk in streamed for piece in (chunk.choices[0].logprobs and chunk.choices[0].logprobs.content) or ()]
    assert [piece.to_dict() for piece in pieces] == [row.to_dict() for row in rows]


class PersonSchema(BaseModel):
    is_tall: bool
    kind: Literal["child", "adult"]


def test_a_text_keeps_to_a_schema(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.parse(model=model, messages=HELLO, response_format=PersonSchema, temperature=0.9)
    assert isinstance(answer.choices[0].message.parsed, PersonSchema) and answer.choices[0].finish_reason == "stop"
    response = client.responses.parse(model=model, input="Who?", text_format=PersonSchema, temperature=0.9)
    assert isinstance(response.output_parsed, PersonSchema) and response.status == "completed"


def test_ollamas_clients_get_the_same(client: openai.OpenAI, model: str) -> None:
    options: dict[str, Any] = {"seed": 5, "temperature": 1.5}
    completion = client.chat.completions.create(model=model, messages=HELLO, max_tokens=TOKENS, logprobs=True, top_logprobs=3, **options)
    body = {"model": model, "stream": False, "options": {**options, "num_predict": TOKENS}}
    url = f"{str(client.base_url).removesuffix('/v1/')}/api"
    answer = httpx2.post(f"{url}/chat", json={**body, "messages": HELLO, "logprobs": True, "top_logprobs": 3}, timeout=60).json()
    assert answer["message"]["content"] == completion.choices[0].message.content
    assert answer["logprobs"] == [row.to_dict() for row in likely(completion.choices[0])]
    assert completion.usage is not None and answer["prompt_eval_count"] == completion.usage.prompt_tokens
    prompt = {"prompt": "Who?", "options": options}
    person = httpx2.post(f"{url}/generate", json={**body, **prompt, "format": PersonSchema.model_json_schema()}, timeout=60).json()
    assert PersonSchema.model_validate_json(person["response"]) and person["done_reason"] == "stop"
    streamed = httpx2.post(f"{url}/generate", json={**body, **prompt, "format": {"type": ["null"]}, "stream": True}, timeout=60)
    assert "".join(json.loads(line)["response"] for line in streamed.text.splitlines()) == "null"


def test_a_text_keeps_to_a_choice_and_to_json(client: openai.OpenAI, model: str) -> None:
    chosen = client.chat.completions.create(model=model, messages=HELLO, extra_body={"choice": ["yes", "no"]})
    assert chosen.choices[0].message.content in ("yes", "no")
    matched = client.chat.completions.create(model=model, messages=HELLO, extra_body={"regex": "[ab]{3}"})
    assert re.fullmatch("[ab]{3}", matched.choices[0].message.content or "")
    flag: Any = {"type": "json_schema", "json_schema": {"name": "flag", "strict": True, "schema": {"type": "boolean"}}}
    answers = client.chat.completions.create(model=model, messages=HELLO, n=4, temperature=1.5, response_format=flag)
    assert {type(json.loads(choice.message.content or "")) for choice in answers.choices} == {bool}


@pytest.mark.parametrize(
    ("schema", "told"), [({"type": "stringy"}, "response_format"), ({"$ref": "#/nowhere"}, "response_format")], ids=["type", "reference"]
)
def test_a_schema_that_is_none_is_refused(client: openai.OpenAI, model: str, schema: dict[str, Any], told: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=model, messages=HELLO, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        )
    assert caught.value.param == told


def test_pictures_are_seen_and_their_tokens_count(client: openai.OpenAI, model: str) -> None:
    def asked(seed: int) -> Any:
        url = f"data:image/png;base64,{base64.b64encode(picture(seed)).decode()}"
        content: Any = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": url}}]
        return client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": content}], max_tokens=TOKENS, logprobs=True, extra_body={"ignore_eos": True}
        )

    first, same, other = asked(1), asked(1), asked(2)
    assert [row.logprob for row in likely(first.choices[0])] == [row.logprob for row in likely(same.choices[0])]
    assert [row.logprob for row in likely(first.choices[0])] != [row.logprob for row in likely(other.choices[0])]
    plain = client.chat.completions.create(model=model, messages=[{"role": "user", "content": "What is this?"}], max_tokens=1)
    assert first.usage.prompt_tokens > plain.usage.prompt_tokens > 0 if plain.usage else False


def test_what_was_computed_before_is_told(client: openai.OpenAI, model: str) -> None:
    turns: list[Any] = [{"role": "user", "content": "What is a kite? " * 60}]
    first, second = (client.chat.completions.create(model=model, messages=turns, max_tokens=1).usage for _ in range(2))
    assert first is not None and second is not None and first.prompt_tokens_details and second.prompt_tokens_details
    assert (first.prompt_tokens_details.cached_tokens, first.prompt_tokens) == (0, second.prompt_tokens)
    assert 0 < (second.prompt_tokens_details.cached_tokens or 0) < second.prompt_tokens
