"""Pictures, sounds and films that come with a chat over HTTP, in the request or from a host that may be asked; and a model's thoughts."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
from playwright.async_api import expect

from helpers import lengths, servers
from helpers.browser import ask, needs_chromium, page_at
from helpers.gateway import gateway
from helpers.openai_document import document, events_of
from helpers.web import Web, web
from omnistage.client import Omni, TextDelta, ThoughtDelta
from omnistage.client.files import to_pcm16
from omnistage.gateway.fetching import REQUESTS
from omnistage.models.toy import formulas
from omnistage.models.toy.files import png, wav

PIPELINE = """
name: {name}
description: Sees and hears.
inputs: [text, image, audio, video]
outputs: [{outputs}]
stages: [{stages}]
defaults: {{thinker: {{max_tokens: 256}}}}
"""
THINKER = "{kind: thinker, family: toy-omni}"
VOICE = "{kind: talker, family: toy-omni, takes: [prompt, places, hidden]}, {kind: code2wav, family: toy-omni, takes: [codes]}"
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
    for name, outputs, stages in (("toy-omni", "text, audio", f"{THINKER}, {VOICE}"), ("text-alone", "text", THINKER)):
        (folder / f"{name}.yaml").write_text(PIPELINE.format(name=name, outputs=outputs, stages=stages))
    pipelines = f"{folder}/toy-omni.yaml,{folder}/text-alone.yaml"
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
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(there.authority))  # It trusts this authority alone.
        with (
            gateway(seeing.address, folder, *flags) as server,
            openai.OpenAI(base_url=f"http://{server.address}/v1", api_key="test", max_retries=0) as one,
        ):
            yield one


def asked(client: openai.OpenAI, *parts: Any, model: str = "toy-omni", **options: Any) -> str | None:
    messages: list[Any] = [{"role": "user", "content": list(parts)}]
    answer = client.chat.completions.create(model=model, messages=messages, seed=3, extra_body=options)
    return answer.choices[0].message.content


def responded(client: openai.OpenAI, *parts: Any) -> str:
    return client.responses.create(model="toy-omni", input=[{"role": "user", "content": list(parts)}], extra_body={"seed": 3}).output_text


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


def test_a_pipeline_without_sound_is_not_asked_for_it(client: openai.OpenAI) -> None:
    assert asked(client, text("Hello"), model="text-alone") == said("Hello")
    sound: dict[str, Any] = {"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "pcm16"}}
    with pytest.raises(openai.BadRequestError, match="gives text, not 'audio'") as caught:
        asked(client, text("Hello"), model="text-alone", **sound)
    assert caught.value.param == "modalities"


def test_a_response_sees_pictures(client: openai.OpenAI) -> None:
    parts = [{"type": "input_text", "text": "See "}, {"type": "input_image", "image_url": data_url(png(PICTURE), "image/png")}]
    assert responded(client, *parts) == said("See ", PICTURE)


def test_ollamas_pictures_are_in_base64(client: openai.OpenAI) -> None:
    """They come before the text, and no text among them is a path."""
    url, picture = str(client.base_url).removesuffix("/v1/"), base64.b64encode(png(PICTURE)).decode()
    body: dict[str, Any] = {"model": "toy-omni", "stream": False, "options": {"seed": 3}}
    message = {"role": "user", "content": "What?", "images": [picture]}
    chat = httpx2.post(f"{url}/api/chat", json={**body, "messages": [message]}).json()
    prompt = httpx2.post(f"{url}/api/generate", json={**body, "prompt": "What?", "images": [picture, f"data:;base64,{picture}"]}).json()
    assert (chat["message"]["content"], prompt["response"]) == (said(PICTURE, "What?"), said(PICTURE, PICTURE, "What?"))
    assert httpx2.post(f"{url}/api/show", json={"model": "toy-omni"}).json()["capabilities"] == ["completion", "vision"]


def test_what_cannot_be_read_is_named(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        asked(client, text("See"), image(data_url(png(PICTURE)[:60], "image/png")))
    assert caught.value.param == "messages[0].content[1].image_url.url"


def test_a_picture_of_a_host_that_is_named_is_fetched(client: openai.OpenAI, there: Web) -> None:
    url = f"https://127.0.0.1:{there.port}"
    assert asked(client, text("See "), image(f"{url}/cat.png")) == said("See ", PICTURE)
    assert asked(client, text("See "), image(f"{url}/moved.png")) == said("See ", PICTURE)
    assert responded(client, {"type": "input_image", "image_url": f"{url}/cat.png", "detail": "auto"}) == said(PICTURE)


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
    assert caught.value.param == "messages[0].content[1].image_url.url" and told in caught.value.message


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


# Thoughts, which are told apart, streamed or not, counted, and never spoken


THINKS = 5
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
ALL = formulas.text(5, "Hello", formulas.NATURAL_LENGTH)
THOUGHT = formulas.text(5, "Hello", THINKS)
THOUGHT_ALONE = {"reasoning_content": THOUGHT}
SAID = ALL.removeprefix(THOUGHT)
SAMPLES = formulas.audio(5, "Hello", formulas.NATURAL_LENGTH)[THINKS * formulas.FRAMES_PER_ROW * formulas.SAMPLES_PER_FRAME :, 0]
ASKED: dict[str, Any] = {"model": "toy", "messages": HELLO, "seed": 5}


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.ServerProcesses]:
    """A chain whose Thinker thinks before it answers."""
    with servers.stack(tmp_path_factory.mktemp("thinking"), options_of={"thinker": {"thinks": THINKS}}) as stack:
        yield stack


@pytest.fixture(scope="module")
def thinking_url(thinking: servers.ServerProcesses, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with gateway(thinking.address, tmp_path_factory.mktemp("gateway")) as server:
        yield f"http://{server.address}/v1"


@pytest.fixture
def asking(thinking_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=thinking_url, api_key="test", max_retries=0) as client:
        yield client


def test_a_client_of_ours_gets_thought_and_answer(thinking: servers.ServerProcesses) -> None:
    with Omni(address=thinking.address) as omni:
        answer = omni.chat(HELLO, seed=5)
        events = list(omni.stream_chat(HELLO, seed=5))
    assert (answer.thought, answer.text, answer["content"]) == (THOUGHT, SAID, SAID)
    assert len(answer.token_ids) == formulas.NATURAL_LENGTH - THINKS
    assert (answer.usage.thought_tokens, answer.usage.completion_tokens) == (THINKS, formulas.NATURAL_LENGTH)
    assert answer.audio is not None and to_pcm16(answer.audio.samples) == to_pcm16(SAMPLES)
    told = [event for event in events if isinstance(event, ThoughtDelta | TextDelta)]
    assert "".join(event.text for event in told) == ALL
    assert [isinstance(event, TextDelta) for event in told] == sorted(isinstance(event, TextDelta) for event in told)
    assert sum(len(event.token_ids) for event in told if isinstance(event, ThoughtDelta)) == THINKS


def test_a_whole_answer_has_its_thought_beside_it(asking: openai.OpenAI) -> None:
    answer = asking.chat.completions.create(**ASKED, logprobs=False)
    message = answer.choices[0].message
    assert (message.content, message.model_extra) == (SAID, {"reasoning_content": THOUGHT})
    details = answer.usage and answer.usage.completion_tokens_details
    assert answer.usage is not None and answer.usage.completion_tokens == formulas.NATURAL_LENGTH
    assert details is not None and details.reasoning_tokens == THINKS


def test_a_streamed_answer_has_it_in_pieces_of_their_own(asking: openai.OpenAI) -> None:
    deltas = [chunk.choices[0].delta for chunk in asking.chat.completions.create(**ASKED, stream=True)]
    thought = [(delta.model_extra or {}).get("reasoning_content", "") for delta in deltas]
    assert ("".join(thought), "".join(delta.content or "" for delta in deltas)) == (THOUGHT, SAID)
    assert deltas[0].role == "assistant" and not any(delta.content and one for delta, one in zip(deltas, thought, strict=True))


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_ollamas_answers_have_it_apart_unless_it_shall_be_left_out(thinking_url: str, stream: bool) -> None:
    body = {"model": "toy", "messages": HELLO, "options": {"seed": 5}, "stream": stream}
    for think, thought in ((None, THOUGHT), (True, THOUGHT), ("high", THOUGHT), (False, "")):
        answer = httpx2.post(f"{thinking_url.removesuffix('/v1')}/api/chat", json={**body, "think": think})
        lines = [json.loads(line) for line in answer.text.splitlines()]
        texts = ["".join(line["message"].get(name, "") for line in lines) for name in ("thinking", "content")]
        assert texts == [thought, SAID] and lines[-1]["eval_count"] == formulas.NATURAL_LENGTH


def test_a_thought_is_not_spoken(asking: openai.OpenAI) -> None:
    answer = asking.chat.completions.create(**ASKED, modalities=["text", "audio"], audio={"voice": "alloy", "format": "pcm16"})
    sound = answer.choices[0].message.audio
    assert sound is not None and sound.transcript == SAID
    assert base64.b64decode(sound.data) == to_pcm16(SAMPLES)


def test_what_is_allowed_may_end_within_it(asking: openai.OpenAI) -> None:
    choice = asking.chat.completions.create(**ASKED, max_completion_tokens=3).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("", "length")
    assert choice.message.model_extra == {"reasoning_content": formulas.text(5, "Hello", 3)}


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param([{"content": SAID}, {"content": SAID, **THOUGHT_ALONE}], id="thought about"),
        # As a client of a stream has it: no content came.
        pytest.param([{"content": ""}, {"content": None, **THOUGHT_ALONE}, THOUGHT_ALONE], id="a thought alone"),
    ],
)
def test_a_message_with_a_thought_may_be_sent_again(asking: openai.OpenAI, messages: list[dict[str, Any]]) -> None:
    first, *others = (
        asking.chat.completions.create(
            **{**ASKED, "messages": [*HELLO, {"role": "assistant", **message}, {"role": "user", "content": "And?"}]}
        )
        for message in messages
    )
    assert [(other.choices, other.usage) for other in others] == [(first.choices, first.usage)] * len(others)


def test_a_response_has_an_item_of_it(asking: openai.OpenAI) -> None:
    answer = asking.responses.create(model="toy", input="Hello", extra_body={"seed": 5})
    thought, message = answer.output
    assert thought.type == "reasoning" and [part.text for part in thought.content or ()] == [THOUGHT]
    assert (message.type, answer.output_text, answer.status) == ("message", SAID, "completed")
    assert answer.usage is not None and answer.usage.output_tokens_details.reasoning_tokens == THINKS
    items: Any = [*HELLO, *(item.model_dump(exclude_none=True) for item in answer.output), {"role": "user", "content": "And?"}]
    assert asking.responses.create(model="toy", input=items).status == "completed"


@pytest.mark.parametrize("most", [None, 3], ids=["whole", "cut within it"])
def test_a_streamed_response_has_all_events_in_order(asking: openai.OpenAI, most: int | None) -> None:
    stream = asking.responses.create(model="toy", input="Hello", stream=True, max_output_tokens=most, extra_body={"seed": 5})
    events: list[Any] = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    told = [kind for n, kind in enumerate(kinds) if not kind.endswith("delta") or kinds[n - 1] != kind]
    begin = ["created", "in_progress", "output_item.added", "content_part.added", "reasoning_text.delta"]
    thought = [*begin, "reasoning_text.done", "content_part.done", "output_item.done"]
    said = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done", "output_item.done"]
    assert told == [*thought, "incomplete"] if most else [*thought, *said, "completed"]
    text = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
    assert text == formulas.text(5, "Hello", most or THINKS)
    last = events[-1].response
    assert [item.type for item in last.output] == (["reasoning"] if most else ["reasoning", "message"])
    assert (last.output[0].status, last.output_text) == (("incomplete", "") if most else ("completed", SAID))


def test_a_response_that_ends_behind_its_thought_has_an_empty_message(tmp_path: Path) -> None:
    thinks = {"thinks": formulas.NATURAL_LENGTH}
    with (
        servers.stack(tmp_path, options_of={"thinker": thinks}) as stack,
        gateway(stack.address, tmp_path) as server,
        openai.OpenAI(base_url=f"http://{server.address}/v1", api_key="test", max_retries=0) as client,
    ):
        whole = client.responses.create(model="toy", input="Hello", extra_body={"seed": 5})
        events: list[Any] = list(client.responses.create(model="toy", input="Hello", stream=True, extra_body={"seed": 5}))
        again: Any = [*HELLO, *(item.model_dump(exclude_none=True) for item in whole.output), *HELLO]
        assert client.responses.create(model="toy", input=again).status == "completed"
    for answer in (whole, events[-1].response):
        assert (answer.status, answer.output_text) == ("completed", "")
        output: Any = answer.output
        assert [(item.type, item.status) for item in output] == [("reasoning", "completed"), ("message", "completed")]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [(item.type, item.status) for item in done] == [("reasoning", "completed"), ("message", "completed")]


def test_answers_are_those_of_the_document(thinking_url: str) -> None:
    judge = document()
    chat, response = {**ASKED, "logprobs": True}, {"model": "toy", "input": "Hello", "seed": 5}
    for path, body in (("/chat/completions", chat), ("/responses", response)):
        judge.check_answer(httpx2.post(f"{thinking_url}{path}", json=body).json(), path)
        streamed = httpx2.post(f"{thinking_url}{path}", json={**body, "stream": True}).text
        for _, event in events_of(streamed):
            if event != "[DONE]":
                judge.check_answer(event, path, media_type="text/event-stream")


@lengths.long_form(
    "gateway/test_chat_media.py::test_a_streamed_answer_has_it_in_pieces_of_their_own",
    "gateway/test_page.py::test_it_talks_and_stops",
    unkept="the page shows a thought apart",
)
@needs_chromium
async def test_the_page_shows_it_apart_to_who_opens_it(thinking_url: str) -> None:
    async with page_at(thinking_url.removesuffix("/v1")) as page:
        await ask(page, "Hello", 5)
        answer = page.locator(".assistant:not(.live)")
        await expect(answer.locator(".body")).to_have_text(SAID)
        thought = answer.locator("details")
        await expect(thought).not_to_have_attribute("open", "")
        await thought.get_by_text("Thought").click()
        await expect(thought).to_have_text(f"Thought{THOUGHT}")
        await expect(thought).to_have_attribute("open", "")
        await ask(page, "And?", 5)
        await expect(page.locator(".assistant:not(.live)")).to_have_count(2)
