"""A model's thoughts before its answer, over HTTP: told apart, streamed or not, counted, and never spoken."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from playwright.async_api import expect

from helpers import lengths, servers
from helpers.browser import ask, browser, needs_chromium, opened
from helpers.gateway import gateway
from helpers.openai_document import document, events_of
from omnistage.client import Omni, TextDelta, ThoughtDelta
from omnistage.client.files import to_pcm16
from omnistage.models.toy import formulas

THINKS = 5
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
ALL = formulas.text(5, "Hello", formulas.NATURAL_LENGTH)
THOUGHT = formulas.text(5, "Hello", THINKS)
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


def test_a_thought_is_not_spoken(asking: openai.OpenAI) -> None:
    answer = asking.chat.completions.create(**ASKED, modalities=["text", "audio"], audio={"voice": "alloy", "format": "pcm16"})
    sound = answer.choices[0].message.audio
    assert sound is not None and sound.transcript == SAID
    assert base64.b64decode(sound.data) == to_pcm16(SAMPLES)


def test_what_is_allowed_may_end_within_it(asking: openai.OpenAI) -> None:
    choice = asking.chat.completions.create(**ASKED, max_completion_tokens=3).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("", "length")
    assert choice.message.model_extra == {"reasoning_content": formulas.text(5, "Hello", 3)}


def test_a_message_that_was_thought_about_may_be_sent_again(asking: openai.OpenAI) -> None:
    plain, whole = {"role": "assistant", "content": SAID}, {"role": "assistant", "content": SAID, "reasoning_content": THOUGHT}
    told = [
        asking.chat.completions.create(**{**ASKED, "messages": [*HELLO, earlier, {"role": "user", "content": "And?"}]})
        for earlier in (plain, whole)
    ]
    assert told[0].choices[0].message == told[1].choices[0].message
    assert told[0].usage == told[1].usage


def test_a_message_of_a_thought_alone_may_be_sent_again(asking: openai.OpenAI) -> None:
    """As a client of a stream has it: no content came."""
    said: list[dict[str, Any]] = [{"content": ""}, {"content": None, "reasoning_content": THOUGHT}, {"reasoning_content": THOUGHT}]
    messages = [[*HELLO, {"role": "assistant", **earlier}, {"role": "user", "content": "And?"}] for earlier in said]
    told = [asking.chat.completions.create(**{**ASKED, "messages": each}) for each in messages]
    assert told[0].choices == told[1].choices == told[2].choices
    assert told[0].usage == told[1].usage == told[2].usage


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
    "gateway/test_thoughts.py::test_a_streamed_answer_has_it_in_pieces_of_their_own",
    "gateway/test_page.py::test_it_talks_and_stops",
    unkept="the page shows a thought apart",
)
@needs_chromium
async def test_the_page_shows_it_apart_to_who_opens_it(thinking_url: str) -> None:
    url = thinking_url.removesuffix("/v1")
    async with browser() as context:
        watched = await opened(context, url)
        page = watched.page
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
        await watched.check(url)
