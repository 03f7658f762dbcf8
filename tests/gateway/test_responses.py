"""Responses over HTTP, as OpenAI's own client sees them."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import openai
import pytest

from helpers.openai_document import document, events_of
from omnistage.models.toy import formulas

WHOLE = formulas.text(5, "Hello", formulas.NATURAL_LENGTH)
SEED = {"seed": 5}
CREATED = ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
DONE = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]


def test_a_whole_response(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="toy", input="Hello", extra_body=SEED)
    assert (answer.output_text, answer.status, answer.error) == (WHOLE, "completed", None)
    assert answer.usage is not None and answer.usage.output_tokens == formulas.NATURAL_LENGTH
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


def test_a_response_that_is_cut_says_so(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="toy", input="Hello", max_output_tokens=3, extra_body=SEED)
    assert (answer.output_text, answer.status) == (formulas.text(5, "Hello", 3), "incomplete")
    assert answer.incomplete_details is not None and answer.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize(("most", "end"), [(None, "completed"), (3, "incomplete")])
def test_a_streamed_response_has_all_events_in_order(client: openai.OpenAI, most: int | None, end: str) -> None:
    events: list[Any] = list(client.responses.create(model="toy", input="Hello", stream=True, max_output_tokens=most, extra_body=SEED))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert kinds == [*CREATED, *["response.output_text.delta"] * len(deltas), *DONE, f"response.{end}"]
    text = formulas.text(5, "Hello", most or formulas.NATURAL_LENGTH)
    assert "".join(event.delta for event in deltas) == text
    assert (events[0].response.status, events[0].response.output) == ("in_progress", [])
    assert (events[-1].response.status, events[-1].response.output_text, events[-1].response.id) == (end, text, events[0].response.id)
    assert {event.item_id for event in deltas} == {events[-1].response.output[0].id}


async def test_the_client_for_asyncio_gets_the_same(url: str) -> None:
    async with (
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="test", max_retries=0) as client,
        client.responses.stream(model="toy", input="Hello", extra_body=SEED) as stream,
    ):
        answer = await stream.get_final_response()
    assert answer.output_text == WHOLE


def test_instructions_and_items_are_turns(client: openai.OpenAI) -> None:
    items: list[Any] = [
        {"role": "user", "content": "Hello"},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Good day.", "annotations": []}],
        },
        {"role": "user", "content": [{"type": "input_text", "text": "And now?"}]},
    ]
    answer = client.responses.create(model="toy", instructions="Be brief.", input=items, extra_body=SEED)
    chat = client.chat.completions.create(
        model="toy",
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Good day."},
            {"role": "user", "content": "And now?"},
        ],
        seed=5,
    )
    assert answer.output_text == chat.choices[0].message.content
    assert answer.instructions == "Be brief."


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "web_search"}]}, "tools", "nothing here does that yet"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing here does that yet"),
    ({"conversation": "conv_1"}, "conversation", "nothing here does that yet"),
    ({"background": True}, "background", "nothing here does that yet"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt", "nothing here does that yet"),
    ({"colour": "red"}, "colour", "Unrecognized request argument supplied: colour"),
    ({"max_output_tokens": 100_000}, "max_output_tokens", "max_output_tokens"),
    ({"text": {"format": {"type": "json_object"}}}, "text.format", "cannot constrain"),
    ({"input": []}, "input", "at least 1"),
    ({"input": [{"type": "function_call_output", "call_id": "1", "output": "18"}]}, "input[0].type", "other than messages"),
    ({"input": [{"role": "tool", "content": "18"}]}, "input[0].role", "'tool'"),
    ({"input": [{"type": "reasoning", "thought": "x"}]}, "input[0].thought", "Unrecognized"),
    ({"input": [{"type": "reasoning", "summary": "x"}]}, "input[0].summary", "must be a list"),
    ({"input": [{"type": "reasoning", "summary": [5]}]}, "input[0].summary[0].type", "must be summary_text"),
    ({"input": [{"type": "reasoning", "content": [{"type": "output_text"}]}]}, "input[0].content[0].type", "must be reasoning_text"),
    ({"input": [{"type": "reasoning", "content": [{"type": "reasoning_text"}]}]}, "input[0].content[0].text", "must be text"),
    ({"input": [{"type": "reasoning", "encrypted_content": 5}]}, "input[0].encrypted_content", "must be text"),
    ({"input": [{"role": "user", "content": "x", "images": ["cat.png"]}]}, "input[0].images", "Unrecognized"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "1"}]}]}, "input[0].content[0].type", "'input_file'"),
    ({"input": [{"role": "user", "content": [{"type": "image", "image": "cat.png"}]}]}, "input[0].content[0].type", "'image'"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "cat.png"}]}]}, "input[0].content[0].image_url", "https"),
    (
        {"instructions": "Look.", "input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]},
        "input[0].content[0].image_url",
        "is empty",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "file-1"}]}]},
        "input[0].content[0].file_id",
        "give image_url",
    ),
]


@pytest.mark.parametrize(("body", "param", "told"), REFUSED, ids=[f"{number}-{param}" for number, (_, param, _) in enumerate(REFUSED)])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_what_cannot_be_done_is_refused_by_name(client: openai.OpenAI, body: dict[str, Any], param: str, told: str, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/responses", cast_to=object, body={"model": "toy", "input": "Hello", "stream": stream, **body})
    assert caught.value.param == param
    assert told in caught.value.message


@pytest.mark.parametrize(
    ("path", "body"),
    [("responses", {"input": "x", "instructions": "\ud800"}), ("chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]})],
    ids=["responses", "chat"],
)
def test_half_of_a_surrogate_pair_is_refused(url: str, path: str, body: dict[str, Any]) -> None:
    """JSON can say it, and UTF-8 cannot."""
    with httpx2.Client(trust_env=False, headers={"Content-Type": "application/json"}) as http:
        answer = http.post(f"{url}/v1/{path}", content=json.dumps({"model": "toy", **body}).encode())
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


BODIES: list[dict[str, Any]] = [
    {},
    {"max_output_tokens": 3, "instructions": "Be brief."},
    {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    {"metadata": {"a": "b"}, "temperature": 0.5, "top_p": 0.9, "store": False, "text": {"format": {"type": "text"}}},
]


@pytest.mark.parametrize("body", BODIES, ids=["plain", "cut", "logprobs", "told"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_the_document_of_openai_has_such_answers(url: str, body: dict[str, Any], stream: bool) -> None:
    with httpx2.Client(trust_env=False) as http:
        answer = http.post(f"{url}/v1/responses", json={"model": "toy", "input": "Hello", "stream": stream, **body})
    assert answer.status_code == 200
    if not stream:
        document().check_answer(answer.json(), "/responses")
        return
    for name, event in events_of(answer.text):
        assert name == event["type"]
        document().check_answer(event, "/responses", media_type="text/event-stream")
